# SPDX-License-Identifier: Apache-2.0
"""Tests of ``kilonova host drain``: the output of the command, and the servers afterwards.

The simulated cloud has three hosts, and runs one round per second of the command.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.domain.statuses import MigrationType
from common.store import schema
from common.store.hosts import host_actions, services
from common.store.hosts.host_actions import Arguments, EventName, Name, State
from compute_agent.virt.memory.state.script import Fail
from conductor.hosts.host_actions import HostActions
from deploy.operator.hosts import actions as commands
from deploy.operator.hosts import restore as host_restore
from deploy.operator.store import stuck_actions as stuck_actions
from tests.schemas import memory_store
from tests.workflows.frozen import register
from tests.workflows.operators import Operator, kinds, silence
from tests.workflows.poison import change
from tests.workflows.simulator import FLAVOR, Cloud, Time


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    """Yield a cloud of three registered hosts."""
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts=3)
    register(cloud)
    yield cloud
    cloud.store.close()


@pytest.fixture
def operator(cloud: Cloud) -> Operator:
    return Operator(cloud)


def boot_five_servers(cloud: Cloud) -> tuple[list[str], str, list[str]]:
    """Create five servers on h1: three running, one stopped, and one in an anti-affinity group.

    Both other hosts have a server of the group.

    Returns:
        The first four servers, the grouped server on h1, and the other servers of the group.
    """
    ordinary = cloud.create(4, host="h1", forced=True)
    group = cloud.group("anti-affinity")
    grouped = cloud.create(host="h1", forced=True, group=group)[0]
    cloud.settle()
    others = cloud.create(2, group=group)
    cloud.settle()
    cloud.ask(ordinary[3], "os-stop")
    cloud.settle()
    assert {cloud.show(server).host for server in [*ordinary, grouped]} == {"h1"}
    assert {cloud.show(server).host for server in others} == {"h2", "h3"}
    return ordinary, grouped, others


def test_drain_moves_servers_and_reports_reason_of_remaining_server(
    cloud: Cloud, operator: Operator
) -> None:
    ordinary, grouped, others = boot_five_servers(cloud)
    assert operator.drain() == 1
    assert [cloud.show(server).vm_state for server in ordinary] == [states.ACTIVE] * 3 + [
        states.STOPPED
    ]
    assert "h1" not in {cloud.show(server).host for server in ordinary}
    assert cloud.show(grouped).host == "h1"
    assert [kinds(cloud)[server] for server in ordinary] == ["live-migration"] * 3 + ["migration"]
    assert cloud.migration(ordinary[3]).status == "confirmed"
    assert f"{grouped} (s, active) stays: no valid host: 3 hosts: " in operator.said[-2]
    assert "1 servers left, 4 moved" in operator.said[-1]
    assert cloud.findings() == []

    cloud.ask(others[0], "delete")
    cloud.settle()
    assert operator.drain() == 0
    assert operator.said[-1] == "host h1 is empty; 1 servers moved"
    assert cloud.show(grouped).host not in ("h1", cloud.show(others[1]).host)
    assert cloud.findings() == []


def test_second_drain_after_stopped_drain_moves_remaining_movable_servers(
    cloud: Cloud, operator: Operator
) -> None:
    ordinary, _, _ = boot_five_servers(cloud)
    operator.stops = lambda: "preparing" in operator.text
    assert operator.drain() == 1
    assert operator.said[-1].endswith("stopped; to continue: kilonova host drain h1")
    assert sum(cloud.show(server).host != "h1" for server in ordinary) == 2, (
        "those under way, and no more"
    )
    assert cloud.findings() == []
    second_operator = Operator(cloud)
    assert second_operator.drain() == 1
    assert second_operator.said[0].startswith(
        "host h1 is disabled already: drained by kilonova host drain since 20"
    )
    assert "1 servers left, 2 moved" in second_operator.said[-1]
    assert {cloud.show(server).vm_state for server in ordinary} == {states.ACTIVE, states.STOPPED}
    assert cloud.findings() == []


def test_drain_completes_without_cli_command_despite_conductor_kills(
    cloud: Cloud, operator: Operator
) -> None:
    """Conductors also confirm the cold migrations of the drain."""
    servers = cloud.create(3, host="h1", forced=True)
    cloud.settle()
    action = operator.begin("h1", Name.DRAIN, Arguments(cold=True))
    for _ in range(30):
        cloud.round()
        cloud.restart_conductor()
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}
    assert {cloud.migration(server).status for server in servers} == {"confirmed"}
    row = cloud.store.read(lambda tx: host_actions.show(tx, action.id))
    assert (row.state, row.message) == (State.DONE, "host h1 is empty; 3 servers moved")
    journal = cloud.store.read(lambda tx: host_actions.events(tx, action.id))
    for event in (EventName.BEGUN, EventName.MOVED):
        assert {entry.server_id for entry in journal if entry.event is event} == set(servers)
        assert len({entry.migration for entry in journal if entry.event is event}) == 3
    assert cloud.findings() == []


def test_drain_continues_on_other_conductor_after_lease_expires(
    cloud: Cloud, operator: Operator
) -> None:
    """The first conductor stops working during the drain."""
    servers = cloud.create(3, host="h1", forced=True)
    cloud.settle()
    action = operator.begin("h1", Name.DRAIN)
    cloud.round()
    silent_conductor, cloud.host_actions = cloud.host_actions, HostActions(cloud.conductor("c2/1"))
    for _ in range(10):
        cloud.round()
    assert cloud.store.read(lambda tx: host_actions.show(tx, action.id)).is_open
    for _ in range(40):
        cloud.round()
    assert cloud.store.read(lambda tx: host_actions.show(tx, action.id)).state is State.DONE
    assert "h1" not in {cloud.show(server).host for server in servers}
    journal = cloud.store.read(lambda tx: host_actions.events(tx, action.id))
    silent_conductor.advance()
    assert cloud.store.read(lambda tx: host_actions.events(tx, action.id)) == journal
    assert cloud.findings() == []


def test_second_drain_follows_open_drain_and_host_evacuate_conflicts(
    cloud: Cloud, operator: Operator
) -> None:
    cloud.create(host="h1", forced=True)
    cloud.settle()
    action = operator.begin("h1", Name.DRAIN)
    with pytest.raises(
        errors.Conflict, match=f"Host h1 has an open drain since 20.*action {action.id}"
    ):
        operator.evacuate()
    assert operator.drain() == 0
    assert f"host h1 has an open drain already, action {action.id}:" in operator.said
    assert operator.said[-1] == "host h1 is empty; 1 servers moved"
    with pytest.raises(errors.Conflict, match="has ended already: it is done"):
        cloud.store.write(lambda tx: host_actions.stop(tx, action.id))
    assert commands.stop(cloud.store, "h1", Name.DRAIN, operator.said.append) == 1


def test_drain_fails_when_host_is_removed(cloud: Cloud, operator: Operator) -> None:
    action = operator.begin("h1", Name.DRAIN, Arguments(wait=True))
    cloud.store.write(
        lambda tx: tx.execute(sa.delete(schema.services).where(schema.services.c.host == "h1"))
    )
    cloud.host_actions.advance()
    row = cloud.store.read(lambda tx: host_actions.show(tx, action.id))
    assert (row.state, row.message) == (
        State.FAILED,
        "There is no host h1. To list the hosts, run: kilonova hosts",
    )


def test_host_actions_advance_executes_one_statement_without_host_actions(cloud: Cloud) -> None:
    statements: list[str] = []
    sa.event.listen(
        cloud.store.engine, "before_cursor_execute", lambda *event: statements.append(event[2])
    )
    cloud.host_actions.advance()
    assert len(statements) == 1


def test_drain_leaves_resize_of_user_unconfirmed(cloud: Cloud, operator: Operator) -> None:
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.move(server, "migrate")
    cloud.settle()
    assert operator.drain() == 1
    assert cloud.show(server).vm_state == states.RESIZED
    assert f"openstack server resize confirm {server}" in operator.said[-2]
    assert "0 servers left" in operator.said[-1]
    cloud.close(server, "confirmResize")
    assert operator.drain() == 0


def test_drain_dry_run_makes_no_changes(cloud: Cloud, operator: Operator) -> None:
    ordinary, grouped, _ = boot_five_servers(cloud)
    before = cloud.store.read(lambda tx: services.list_all(tx, "h1"))
    assert operator.drain(dry_run=True) == 1
    assert operator.said[-1] == "4 of 5 servers would move; nothing was changed"
    assert f"{grouped} (s, active) stays: no valid host" in operator.text
    assert all(server in operator.text for server in ordinary)
    assert (
        [row.disabled for row in cloud.store.read(lambda tx: services.list_all(tx, "h1"))]
        == [row.disabled for row in before]
        == [False]
    )
    assert kinds(cloud) == {}


def test_drain_plan_counts_resources_of_earlier_moves(cloud: Cloud, operator: Operator) -> None:
    """Three servers must move, and the two other hosts have room for one server each."""
    large = replace(FLAVOR, id="9", name="large", memory_mb=4096)
    cloud.create(flavor=large, host="h2", forced=True)
    cloud.create(flavor=large, host="h3", forced=True)
    medium_servers = cloud.create(2, flavor=replace(large, memory_mb=3000), host="h1", forced=True)
    small_servers = cloud.create(flavor=replace(large, memory_mb=2000), host="h1", forced=True)
    cloud.settle()
    assert operator.drain() == 1
    assert {cloud.show(server).host for server in medium_servers} == {"h2", "h3"}
    assert cloud.show(small_servers[0]).host == "h1", "the large ones go first"
    assert cloud.findings() == []


def test_drain_moves_waiting_server_live_or_cold_by_its_changed_state(
    cloud: Cloud, operator: Operator
) -> None:
    """The user starts the stopped server, stops a running server and resumes the suspended server.

    All three wait for their moves then.
    """
    _, running, stopped, suspended = servers = sorted(cloud.create(4, host="h1", forced=True))
    cloud.settle()
    cloud.ask(stopped, "os-stop")
    cloud.ask(suspended, "suspend")
    cloud.settle()

    def change_states() -> None:
        if operator.seconds_left == 599:
            cloud.ask(stopped, "os-start")
            cloud.ask(running, "os-stop")
            cloud.ask(suspended, "resume")

    cloud.watcher = change_states
    assert operator.drain(parallel=1) == 0
    assert kinds(cloud) == dict.fromkeys(servers, MigrationType.LIVE) | {
        running: MigrationType.COLD
    }
    assert cloud.findings() == []


def test_drain_moves_server_live_when_started_after_planning(
    cloud: Cloud, operator: Operator
) -> None:
    """The server starts between the read of the state and the lock of the row."""
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.ask(server, "os-stop")
    cloud.settle()

    def start_server(kind: str) -> bool:
        if kind == "select" and cloud.show(server).vm_state == states.STOPPED:
            cloud.ask(server, "os-start")
            for _ in range(3):
                cloud.advance()
                cloud.hosts["h1"].work()
                cloud.sync(cloud.hosts["h1"])
        return False

    cloud.lose = start_server
    assert operator.drain() == 0
    assert (
        f"Instance {server} is active now, but its move was planned for the state stopped"
        in operator.text
    )
    assert kinds(cloud) == {server: MigrationType.LIVE}
    assert cloud.findings() == []


def test_drain_with_cold_option_migrates_cold_and_leaves_paused_server(
    cloud: Cloud, operator: Operator
) -> None:
    servers = cloud.create(2, host="h1", forced=True)
    cloud.settle()
    cloud.ask(servers[1], "pause")
    cloud.settle()
    assert operator.drain(cold=True) == 1
    assert kinds(cloud) == {servers[0]: "migration"}
    assert "drain without --cold" in operator.text
    assert operator.drain() == 0
    assert cloud.show(servers[1]).vm_state == states.PAUSED
    assert cloud.findings() == []


def test_drain_reports_reason_of_failed_move(cloud: Cloud, operator: Operator) -> None:
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.hosts["h1"].driver.host.script["live_migrate"] = [Fail("The memory changes too fast.")]
    assert operator.drain() == 1
    assert "its move ended error: The memory changes too fast." in operator.text
    assert "repair the cause, then: kilonova host drain h1" in operator.said[-2]
    assert (cloud.show(server).host, cloud.show(server).vm_state) == ("h1", states.ACTIVE)
    assert operator.drain() == 0
    assert cloud.findings() == []


def test_drain_with_wait_continues_until_host_is_empty(cloud: Cloud, operator: Operator) -> None:
    ordinary, grouped, others = boot_five_servers(cloud)
    cloud.hosts["h1"].driver.host.script["live_migrate"] = [Fail("The memory changes too fast.")]

    def delete_member() -> bool:
        """After 30 seconds, delete the server of the group on another host."""
        if operator.seconds_left == 570:
            cloud.ask(others[0], "delete")
        return False

    operator.stops = delete_member
    assert operator.drain(wait=True) == 0
    assert {cloud.show(server).host for server in [*ordinary, grouped]} <= {"h2", "h3"}
    assert cloud.findings() == []


def test_drain_with_cold_reverts_move_when_destination_cannot_start_guest(
    cloud: Cloud, operator: Operator
) -> None:
    """The destination wires the interfaces, and then fails to start the guest."""
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.networks.wires_after = 2
    for name in ("h2", "h3"):
        cloud.hosts[name].driver.host.script["ensure_running"] = [Fail("No power.")]
    assert operator.drain(cold=True) == 1
    assert "its move ended reverted: No power." in operator.text
    assert (cloud.show(server).host, cloud.show(server).vm_state) == ("h1", states.ACTIVE)
    assert cloud.findings() == []


def test_drain_stops_when_host_is_enabled_meanwhile(cloud: Cloud, operator: Operator) -> None:
    servers = cloud.create(4, host="h1", forced=True)
    cloud.settle()

    def enable_host() -> bool:
        if operator.seconds_left == 598:
            assert host_restore.give_back(cloud.store, "h1", operator.said.append) == 0
        return False

    operator.stops = enable_host
    assert operator.drain(cold=True) == 1
    assert operator.said[-1].endswith("host h1 was enabled during the drain")
    assert sum(cloud.show(server).host == "h1" for server in servers) == 2
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}, (
        "what was under way is confirmed"
    )


def test_drain_of_silent_host_fails_at_once(cloud: Cloud, operator: Operator) -> None:
    cloud.create(2, host="h1", forced=True)
    cloud.settle()
    silence(cloud, "h1")
    assert operator.drain() == 1
    assert "If it is dead: kilonova host evacuate h1" in operator.said[-1]
    assert kinds(cloud) == {} and operator.seconds_left == 599, "it says so at once"


def test_drain_waits_for_silent_scheduler_and_dry_run_raises_no_answer(
    cloud: Cloud, operator: Operator
) -> None:
    cloud.create(host="h1", forced=True)
    cloud.settle()
    cloud.lose = lambda kind: kind == "select" and operator.seconds_left > 590
    with pytest.raises(errors.NoAnswer):
        operator.drain(dry_run=True)
    assert operator.drain() == 0
    assert operator.said.count("lost Trying again.") == 1


def test_drain_waits_for_build_on_host_and_moves_server(cloud: Cloud, operator: Operator) -> None:
    server = cloud.create(host="h1", forced=True)[0]
    cloud.advance()
    assert cloud.show(server).host == "h1" and cloud.show(server).vm_state == states.BUILDING
    assert operator.drain() == 0
    assert cloud.show(server).host in ("h2", "h3")


def test_create_does_not_use_drained_host_proposed_before_the_drain(
    cloud: Cloud, operator: Operator
) -> None:
    """The scheduler proposes h1 to two creates, and then a drain disables h1.

    One of the creates requests h1.
    """
    for name in ("h2", "h3"):
        cloud.create(flavor=replace(FLAVOR, memory_mb=4096), host=name, forced=True)
    cloud.settle()
    h1_server, free_server = cloud.create(host="h1")[0], cloud.create()[0]
    statuses: list[int] = []

    def drain_host(workflow: str, step: str, point: str) -> None:
        if (workflow, step, point) == ("create", "place", "proposed") and not statuses:
            statuses.append(operator.drain())

    cloud.engine.fault_point = drain_host
    cloud.settle()
    assert statuses == [0] and operator.said[-1] == "host h1 is empty; 0 servers moved"
    assert (
        cloud.show(free_server).host in ("h2", "h3")
        and cloud.show(free_server).vm_state == states.ACTIVE
    )
    assert cloud.show(h1_server).host is None and cloud.show(h1_server).vm_state == states.ERROR
    assert (
        cloud.show(h1_server)
        .fault["message"]
        .endswith("3 hosts: 2 not the requested host, 1 disabled")
    )
    assert cloud.findings() == []


def test_drain_and_host_evacuate_of_unknown_host_raise_not_found(operator: Operator) -> None:
    for command in (operator.drain, operator.evacuate):
        with pytest.raises(errors.NotFound, match="There is no host h9"):
            command("h9")


def test_drain_reports_stuck_move_and_moves_other_servers(cloud: Cloud, operator: Operator) -> None:
    stuck, *others = cloud.create(3, host="h1", forced=True)
    cloud.settle()
    action = cloud.move(stuck, "os-migrateLive")
    change(cloud, action, step="renamed_since")
    assert operator.drain(parallel=1) == 1
    assert {cloud.show(server).host for server in others} <= {"h2", "h3"} and cloud.show(
        stuck
    ).host == "h1"
    assert (
        "stuck: an unexpected error" in operator.text
        and "See: kilonova action list --stuck" in operator.text
    )
    assert any(
        line.startswith(f"{stuck} (s, active) stays: its move is stuck: ")
        for line in operator.said[-3:]
    )
    assert "1 servers left, 2 moved" in operator.said[-1]
    change(cloud, action, step=None)
    cloud.store.write(lambda tx: stuck_actions.retry(tx, action))
    assert operator.drain() == 0 and cloud.show(stuck).host in ("h2", "h3")
