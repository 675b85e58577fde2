# SPDX-License-Identifier: Apache-2.0
"""Tests of single safeguards. Other tests pass without them, because a second safeguard exists.

``tests/mutations`` removes each safeguard in turn, and a test of this file must then fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.models import Result
from common.domain.statuses import GuestState
from common.store import schema
from common.store.engine import now
from common.store.servers import actions, guests, servers
from compute_agent.virt.memory.state.script import Fail
from deploy.operator.store import stuck_actions
from tests.workflows.frozen import register
from tests.workflows.moves import boot_server, check_rests, create_cloud, last, read_disk
from tests.workflows.poison import change
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud, Crash

SECOND = 1_000_000


def boot_idle_server(cloud: Cloud) -> str:
    """Return a running server without networks."""
    cloud.round()
    [server] = cloud.create(networks=[])
    cloud.settle()
    return server


def update_server(cloud: Cloud, server: str, **values: Any) -> None:
    row = schema.servers.c.id == server
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.servers).where(row).values(**values)))


def call_once_at(cloud: Cloud, at: tuple[str, str], act: Callable[[], object]) -> None:
    """Call ``act`` the first time that a conductor reaches the fault point (step, place)."""
    calls: list[str] = []

    def act_at_point(workflow: str, step: str, where: str) -> None:
        if (step, where) == at and not calls:
            calls.append(step)
            act()

    cloud.engine.fault_point = act_at_point


# --- actions ---
def test_store_hides_server_from_other_project(cloud: Cloud) -> None:
    """The store checks the project itself and does not rely on the checks of the API."""
    server = boot_idle_server(cloud)
    own, other = (servers.ServerFilters(project_id=name) for name in ("project", "another"))
    assert [row.id for row in cloud.store.read(lambda tx: servers.page(tx, own))] == [server]
    assert cloud.store.read(lambda tx: servers.page(tx, other)) == []
    with pytest.raises(errors.NotFound):
        cloud.store.write(lambda tx: actions.take_lock(tx, server, "another"))


def test_new_action_raises_fence_of_server(cloud: Cloud) -> None:
    server = boot_idle_server(cloud)
    fence = cloud.show(server).fence
    cloud.ask(server, "os-stop")
    assert cloud.show(server).fence == last(cloud, server).fence == fence + 1


def test_result_with_lower_fence_does_not_end_action(cloud: Cloud) -> None:
    server = boot_idle_server(cloud)
    action = cloud.ask(server, "os-stop")
    cloud.advance()
    update_server(cloud, server, fence=cloud.show(server).fence + 1)
    for host in cloud.hosts.values():
        host.work()
        cloud.sync(host)
    row = last(cloud, server)
    assert (row.id, row.state, cloud.show(server).action) == (action, "waiting", action)


def test_conductor_without_lease_writes_no_change_of_action(cloud: Cloud) -> None:
    server = boot_idle_server(cloud)
    action = cloud.ask(server, "os-stop")
    call_once_at(
        cloud,
        ("stop", "taken"),
        lambda: change(cloud, action, owner="c2/1", lease_until=now() + 15 * SECOND),
    )
    cloud.advance()
    row = last(cloud, server)
    assert (row.state, row.owner, cloud.sent[-1][1].key.owner == action) == ("due", "c2/1", False)


@pytest.mark.parametrize("field", ["step", "attempt"])
def test_result_of_other_command_does_not_end_action(cloud: Cloud, field: str) -> None:
    server = boot_idle_server(cloud)
    action = cloud.ask(server, "os-stop")
    cloud.lose = lambda kind: kind == "do"
    cloud.advance()
    host, command = cloud.sent[-1]
    key = replace(command.key, **{field: 7 if field == "attempt" else "another"})
    other = replace(command, key=key)
    agent = cloud.hosts[host].agent
    result = Result(str(other.key), server, other.fence, "done", {"power_state": states.SHUTDOWN})
    agent._results[result.key] = result
    cloud.sync(cloud.hosts[host])
    assert (last(cloud, server).state, cloud.show(server).action) == ("waiting", action)


def test_delete_waits_for_lease_of_superseded_action(cloud: Cloud) -> None:
    """Otherwise the delete could miss the last effects of the superseded action."""
    server = boot_idle_server(cloud)
    action = cloud.ask(server, "os-stop")
    change(cloud, action, owner="c2/1", lease_until=now() + 15 * SECOND)
    cloud.ask(server, "delete")
    cloud.round()
    [guest] = cloud.store.read(lambda tx: guests.places(tx, server))
    assert guest.wanted == GuestState.RUNNING
    cloud.time.pass_by(16)
    cloud.settle()
    assert (cloud.show(server).deleted, cloud.domains(server), cloud.findings()) == (1, [], [])


def make_stuck_action(cloud: Cloud) -> tuple[str, str]:
    """Return a server and the id of a stuck stop of the server."""
    server = boot_idle_server(cloud)
    action = cloud.ask(server, "os-stop")
    change(cloud, action, state="stuck", due_at=None, cause="odd")
    return server, action


@pytest.mark.parametrize("operation", [stuck_actions.retry, stuck_actions.fail])
def test_action_retry_and_fail_conflict_when_server_has_other_action(
    cloud: Cloud, operation: Any
) -> None:
    server, action = make_stuck_action(cloud)
    update_server(cloud, server, action=ids.new())
    reason = ["by hand"] if operation is stuck_actions.fail else []
    with pytest.raises(errors.Conflict, match="does not hold"):
        cloud.store.write(lambda tx: operation(tx, action, *reason))


def test_action_fail_of_stuck_action_raises_fence_of_server(cloud: Cloud) -> None:
    server, action = make_stuck_action(cloud)
    fence = cloud.show(server).fence
    cloud.store.write(lambda tx: stuck_actions.fail(tx, action, "by hand"))
    assert (cloud.show(server).fence, cloud.show(server).vm_state) == (fence + 1, states.ERROR)


def test_create_reuses_ports_after_conductor_crash(cloud: Cloud) -> None:
    register(cloud)

    def die() -> None:
        raise Crash

    call_once_at(cloud, ("networks", "called"), die)
    [server] = cloud.create()
    with pytest.raises(Crash):
        cloud.settle()
    ports = [port["id"] for port in cloud.networks.held.values()]
    cloud.restart_conductor()
    cloud.settle()
    assert len(ports) == 1
    assert [port["id"] for port in cloud.networks.held.values()] == ports
    assert (cloud.show(server).vm_state, cloud.findings()) == (states.ACTIVE, [])


def test_discard_of_guest_conflicts_while_server_has_action(cloud: Cloud) -> None:
    server = boot_idle_server(cloud)
    host_of_server = cloud.show(server).host
    other = next(host for host in cloud.hosts if host != host_of_server)
    cloud.ask(server, "os-stop")
    with pytest.raises(errors.Conflict, match="Delete or move the server"):
        cloud.store.write(lambda tx: guests.discard(tx, server, other, elsewhere=host_of_server))


# --- moves ---
def read_last_fences(cloud: Cloud, host: str) -> dict[str, int]:
    """Return verb -> fence of the last command with this verb that was sent to the host."""
    return {command.verb: command.fence for at, command in cloud.sent if at == host}


def test_migrate_raises_fence_for_destination_after_switch() -> None:
    cloud = create_cloud(2)
    server = boot_server(cloud)
    del cloud.sent[:]
    ask(cloud, server, "migrate")
    cloud.settle()
    destination = cloud.show(server).host
    last_at_source = max(read_last_fences(cloud, "h1").values())
    assert destination == "h2"
    assert read_last_fences(cloud, "h2")[cloud.sent[-1][1].verb] > last_at_source
    [guest] = [
        row
        for row in cloud.store.read(lambda tx: guests.places(tx, server))
        if row.host == destination
    ]
    assert guest.fence > last_at_source
    cloud.store.close()


def test_migrate_undo_sends_higher_fence_to_failed_destination() -> None:
    cloud = create_cloud(2)
    server = boot_server(cloud)
    del cloud.sent[:]
    cloud.hosts["h2"].driver.host.script["receive"] = Fail("no", retryable=False)
    ask(cloud, server, "migrate")
    cloud.settle()
    fences = [command.fence for host, command in cloud.sent if host == "h2"]
    action_fences = [
        command.fence for host, command in cloud.sent if host == "h2" and command.key.is_of_action
    ]
    assert action_fences and max(fences) > max(action_fences)
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert read_disk(cloud, server)
    cloud.store.close()


@pytest.mark.parametrize("event", ["a new session", "not dead any more"])
def test_evacuate_fails_when_host_returns_before_claim(event: str) -> None:
    """The host is forced down when the evacuation begins.

    After the proposal it has a new session or is no longer forced down.
    """
    cloud = create_cloud(2)
    server = boot_server(cloud)
    cloud.kill("h1")

    def return_host() -> None:
        if event == "a new session":
            row = schema.hosts.c.name == "h1"
            cloud.store.write(
                lambda tx: tx.execute(sa.update(schema.hosts).where(row).values(session=77))
            )
        else:
            cloud.force_down("h1", False)

    call_once_at(cloud, ("place", "proposed"), return_host)
    cloud.move(server, "evacuate")
    cloud.settle()
    row = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    assert (row.state, cloud.show(server).host, cloud.domains(server)) == ("failed", "h1", ["h1"])
    cloud.store.close()
