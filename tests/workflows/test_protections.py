# SPDX-License-Identifier: Apache-2.0
"""Protections that stand one behind another: each is needed by itself, although what would slip
past it might be caught later. tests/mutations takes them away one by one."""

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
from tests.workflows.moves import clouds, disk, last, server_on, stands
from tests.workflows.poison import change
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud, Crash

SECOND = 1_000_000


def idle(cloud: Cloud) -> str:
    """A server that runs, of no network."""
    cloud.round()
    [server] = cloud.create(networks=[])
    cloud.settle()
    return server


def write(cloud: Cloud, server: str, **values: Any) -> None:
    row = schema.servers.c.id == server
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.servers).where(row).values(**values)))


def once(cloud: Cloud, at: tuple[str, str], act: Callable[[], object]) -> None:
    """When a conductor comes to this step and place for the first time."""
    done: list[str] = []

    def hit(workflow: str, step: str, where: str) -> None:
        if (step, where) == at and not done:
            done.append(step)
            act()

    cloud.engine.fault_point = hit


# --- actions ---
def test_another_project_lists_and_takes_nothing(cloud: Cloud) -> None:
    """In the store itself, whatever looked before."""
    server = idle(cloud)
    own, other = (servers.ServerFilters(project_id=name) for name in ("project", "another"))
    assert [row.id for row in cloud.store.read(lambda tx: servers.page(tx, own))] == [server]
    assert cloud.store.read(lambda tx: servers.page(tx, other)) == []
    with pytest.raises(errors.NotFound):
        cloud.store.write(lambda tx: actions.take_lock(tx, server, "another"))


def test_each_action_raises_the_fence(cloud: Cloud) -> None:
    server = idle(cloud)
    fence = cloud.show(server).fence
    cloud.ask(server, "os-stop")
    assert cloud.show(server).fence == last(cloud, server).fence == fence + 1


def test_a_result_under_a_fence_that_is_over_ends_nothing(cloud: Cloud) -> None:
    server = idle(cloud)
    action = cloud.ask(server, "os-stop")
    cloud.advance()
    write(cloud, server, fence=cloud.show(server).fence + 1)
    for host in cloud.hosts.values():
        host.work()
        cloud.sync(host)
    row = last(cloud, server)
    assert (row.id, row.state, cloud.show(server).action) == (action, "waiting", action)


def test_a_burst_whose_lease_is_anothers_writes_nothing(cloud: Cloud) -> None:
    server = idle(cloud)
    action = cloud.ask(server, "os-stop")
    once(
        cloud,
        ("stop", "taken"),
        lambda: change(cloud, action, owner="c2/1", lease_until=now() + 15 * SECOND),
    )
    cloud.advance()
    row = last(cloud, server)
    assert (row.state, row.owner, cloud.sent[-1][1].key.owner == action) == ("due", "c2/1", False)


@pytest.mark.parametrize("field", ["step", "attempt"])
def test_a_result_of_another_command_ends_nothing(cloud: Cloud, field: str) -> None:
    server = idle(cloud)
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


def test_a_delete_waits_for_the_burst_that_it_overtook(cloud: Cloud) -> None:
    """What that one still leaves must be found by what makes debts."""
    server = idle(cloud)
    action = cloud.ask(server, "os-stop")
    change(cloud, action, owner="c2/1", lease_until=now() + 15 * SECOND)
    cloud.ask(server, "delete")
    cloud.round()
    [guest] = cloud.store.read(lambda tx: guests.places(tx, server))
    assert guest.wanted == GuestState.RUNNING
    cloud.time.pass_by(16)
    cloud.settle()
    assert (cloud.show(server).deleted, cloud.domains(server), cloud.findings()) == (1, [], [])


def stuck(cloud: Cloud) -> tuple[str, str]:
    server = idle(cloud)
    action = cloud.ask(server, "os-stop")
    change(cloud, action, state="stuck", due_at=None, cause="odd")
    return server, action


@pytest.mark.parametrize("way", [stuck_actions.retry, stuck_actions.settle])
def test_a_way_out_is_not_for_an_action_that_lost_its_server(cloud: Cloud, way: Any) -> None:
    server, action = stuck(cloud)
    write(cloud, server, action=ids.new())
    words = ["by hand"] if way is stuck_actions.settle else []
    with pytest.raises(errors.Conflict, match="does not hold"):
        cloud.store.write(lambda tx: way(tx, action, *words))


def test_a_settled_action_leaves_a_higher_fence(cloud: Cloud) -> None:
    server, action = stuck(cloud)
    fence = cloud.show(server).fence
    cloud.store.write(lambda tx: stuck_actions.settle(tx, action, "by hand"))
    assert (cloud.show(server).fence, cloud.show(server).vm_state) == (fence + 1, states.ERROR)


def test_ports_that_a_conductor_made_before_it_died_are_found_again(cloud: Cloud) -> None:
    register(cloud)

    def die() -> None:
        raise Crash

    once(cloud, ("networks", "called"), die)
    [server] = cloud.create()
    with pytest.raises(Crash):
        cloud.settle()
    made = [port["id"] for port in cloud.networks.held.values()]
    cloud.restart_conductor()
    cloud.settle()
    assert len(made) == 1
    assert [port["id"] for port in cloud.networks.held.values()] == made
    assert (cloud.show(server).vm_state, cloud.findings()) == (states.ACTIVE, [])


def test_a_guest_is_not_discarded_while_an_action_has_its_server(cloud: Cloud) -> None:
    server = idle(cloud)
    home = cloud.show(server).host
    other = next(host for host in cloud.hosts if host != home)
    cloud.ask(server, "os-stop")
    with pytest.raises(errors.Conflict, match="delete it, or move it"):
        cloud.store.write(lambda tx: guests.discard(tx, server, other, elsewhere=home))


# --- moves ---
def fences(cloud: Cloud, host: str) -> dict[str, int]:
    """Verb -> the fence of the last such command to this host."""
    return {command.verb: command.fence for at, command in cloud.sent if at == host}


def test_what_follows_a_switch_is_under_a_new_fence() -> None:
    cloud = clouds(2)
    server = server_on(cloud)
    del cloud.sent[:]
    ask(cloud, server, "migrate")
    cloud.settle()
    moved = cloud.show(server).host
    last_at_source = max(fences(cloud, "h1").values())
    assert moved == "h2"
    assert fences(cloud, "h2")[cloud.sent[-1][1].verb] > last_at_source
    [here] = [
        row for row in cloud.store.read(lambda tx: guests.places(tx, server)) if row.host == moved
    ]
    assert here.fence > last_at_source
    cloud.store.close()


def test_a_destination_that_is_given_up_hears_of_a_higher_fence() -> None:
    cloud = clouds(2)
    server = server_on(cloud)
    del cloud.sent[:]
    cloud.hosts["h2"].driver.host.script["receive"] = Fail("no", retryable=False)
    ask(cloud, server, "migrate")
    cloud.settle()
    given_up = [command.fence for host, command in cloud.sent if host == "h2"]
    asked = [
        command.fence for host, command in cloud.sent if host == "h2" and command.key.is_of_action
    ]
    assert asked and max(given_up) > max(asked)
    stands(cloud, server, states.ACTIVE, "h1")
    assert disk(cloud, server)
    cloud.store.close()


@pytest.mark.parametrize("what", ["a new session", "not dead any more"])
def test_a_host_that_is_back_is_not_evacuated(what: str) -> None:
    """It was seen dead, and is back before a place is claimed."""
    cloud = clouds(2)
    server = server_on(cloud)
    cloud.kill("h1")

    def back() -> None:
        if what == "a new session":
            row = schema.hosts.c.name == "h1"
            cloud.store.write(
                lambda tx: tx.execute(sa.update(schema.hosts).where(row).values(session=77))
            )
        else:
            cloud.force_down("h1", False)

    once(cloud, ("place", "proposed"), back)
    cloud.move(server, "evacuate")
    cloud.settle()
    row = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    assert (row.state, cloud.show(server).host, cloud.domains(server)) == ("failed", "h1", ["h1"])
    cloud.store.close()
