# SPDX-License-Identifier: Apache-2.0
"""``kilonova host drain`` on the simulator's cloud: what the operator sees, and what is true
then."""

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
    """Three hosts that have registered."""
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts=3)
    register(cloud)
    yield cloud
    cloud.store.close()


@pytest.fixture
def operator(cloud: Cloud) -> Operator:
    return Operator(cloud)


def five(cloud: Cloud) -> tuple[list[str], str, list[str]]:
    """On h1 three that run, one that is stopped, and one more, whose hard group has a member on
    each other host."""
    ordinary = cloud.create(4, host="h1", forced=True)
    group = cloud.group("anti-affinity")
    bound = cloud.create(host="h1", forced=True, group=group)[0]
    cloud.settle()
    others = cloud.create(2, group=group)
    cloud.settle()
    cloud.ask(ordinary[3], "os-stop")
    cloud.settle()
    assert {cloud.show(server).host for server in [*ordinary, bound]} == {"h1"}
    assert {cloud.show(server).host for server in others} == {"h2", "h3"}
    return ordinary, bound, others


def test_a_drain_moves_all_that_can_go_and_says_why_the_rest_stays(
    cloud: Cloud, operator: Operator
) -> None:
    ordinary, bound, others = five(cloud)
    assert operator.drain() == 1
    assert [cloud.show(server).vm_state for server in ordinary] == [states.ACTIVE] * 3 + [
        states.STOPPED
    ]
    assert "h1" not in {cloud.show(server).host for server in ordinary}
    assert cloud.show(bound).host == "h1"
    assert [kinds(cloud)[server] for server in ordinary] == ["live-migration"] * 3 + ["migration"]
    assert cloud.migration(ordinary[3]).status == "confirmed"
    assert f"{bound} (s, active) stays: no valid host: 3 hosts: " in operator.said[-2]
    assert "1 servers left, 4 moved" in operator.said[-1]
    assert cloud.findings() == []

    cloud.ask(others[0], "delete")
    cloud.settle()
    assert operator.drain() == 0
    assert operator.said[-1] == "host h1 is empty; 1 servers moved"
    assert cloud.show(bound).host not in ("h1", cloud.show(others[1]).host)
    assert cloud.findings() == []


def test_a_drain_that_was_stopped_goes_on_where_it_was(cloud: Cloud, operator: Operator) -> None:
    ordinary, _, _ = five(cloud)
    operator.stops = lambda: "preparing" in operator.text
    assert operator.drain() == 1
    assert operator.said[-1].endswith("stopped; kilonova host drain h1 goes on")
    assert sum(cloud.show(server).host != "h1" for server in ordinary) == 2, (
        "those under way, and no more"
    )
    assert cloud.findings() == []
    again = Operator(cloud)
    assert again.drain() == 1
    assert again.said[0].startswith(
        "host h1 is disabled already: drained by kilonova host drain since 20"
    )
    assert "1 servers left, 2 moved" in again.said[-1]
    assert {cloud.show(server).vm_state for server in ordinary} == {states.ACTIVE, states.STOPPED}
    assert cloud.findings() == []


def test_a_drain_goes_on_without_its_command_and_confirms(cloud: Cloud, operator: Operator) -> None:
    """Nobody watches, and conductors are killed all the time."""
    servers = cloud.create(3, host="h1", forced=True)
    cloud.settle()
    action = operator.begin("h1", Name.DRAIN, Arguments(cold=True))
    for _ in range(30):
        cloud.round()
        cloud.restart_conductor()
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}
    assert {cloud.migration(server).status for server in servers} == {"confirmed"}
    found = cloud.store.read(lambda tx: host_actions.show(tx, action.id))
    assert (found.state, found.message) == (State.DONE, "host h1 is empty; 3 servers moved")
    journal = cloud.store.read(lambda tx: host_actions.events(tx, action.id))
    for event in (EventName.BEGUN, EventName.MOVED):
        assert {one.server_id for one in journal if one.event is event} == set(servers)
        assert len({one.migration for one in journal if one.event is event}) == 3
    assert cloud.findings() == []


def test_another_conductor_goes_on_with_a_drain(cloud: Cloud, operator: Operator) -> None:
    """The first is silent from the middle on; nobody else takes the drain before its lease is
    over."""
    servers = cloud.create(3, host="h1", forced=True)
    cloud.settle()
    action = operator.begin("h1", Name.DRAIN)
    cloud.round()
    silent, cloud.host_actions = cloud.host_actions, HostActions(cloud.conductor("c2/1"))
    for _ in range(10):
        cloud.round()
    assert cloud.store.read(lambda tx: host_actions.show(tx, action.id)).is_open
    for _ in range(40):
        cloud.round()
    assert cloud.store.read(lambda tx: host_actions.show(tx, action.id)).state is State.DONE
    assert "h1" not in {cloud.show(server).host for server in servers}
    journal = cloud.store.read(lambda tx: host_actions.events(tx, action.id))
    silent.advance()
    assert cloud.store.read(lambda tx: host_actions.events(tx, action.id)) == journal
    assert cloud.findings() == []


def test_a_command_given_again_watches_the_open_drain(cloud: Cloud, operator: Operator) -> None:
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


def test_a_drain_whose_host_is_removed_has_failed(cloud: Cloud, operator: Operator) -> None:
    action = operator.begin("h1", Name.DRAIN, Arguments(wait=True))
    cloud.store.write(
        lambda tx: tx.execute(sa.delete(schema.services).where(schema.services.c.host == "h1"))
    )
    cloud.host_actions.advance()
    found = cloud.store.read(lambda tx: host_actions.show(tx, action.id))
    assert (found.state, found.message) == (
        State.FAILED,
        "There is no host h1; kilonova hosts lists them.",
    )


def test_an_idle_round_is_one_statement(cloud: Cloud) -> None:
    statements: list[str] = []
    sa.event.listen(
        cloud.store.engine, "before_cursor_execute", lambda *given: statements.append(given[2])
    )
    cloud.host_actions.advance()
    assert len(statements) == 1


def test_what_a_user_moved_is_the_users_to_confirm(cloud: Cloud, operator: Operator) -> None:
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


def test_a_dry_run_changes_nothing(cloud: Cloud, operator: Operator) -> None:
    ordinary, bound, _ = five(cloud)
    before = cloud.store.read(lambda tx: services.list_all(tx, "h1"))
    assert operator.drain(dry_run=True) == 1
    assert operator.said[-1] == "4 of 5 would go; nothing was changed"
    assert f"{bound} (s, active) stays: no valid host" in operator.text
    assert all(server in operator.text for server in ordinary)
    assert (
        [row.disabled for row in cloud.store.read(lambda tx: services.list_all(tx, "h1"))]
        == [row.disabled for row in before]
        == [False]
    )
    assert kinds(cloud) == {}


def test_a_plan_counts_the_room_of_those_before(cloud: Cloud, operator: Operator) -> None:
    """Two hosts with room for one each, and three servers."""
    large = replace(FLAVOR, id="9", name="large", memory_mb=4096)
    cloud.create(flavor=large, host="h2", forced=True)
    cloud.create(flavor=large, host="h3", forced=True)
    small = cloud.create(2, flavor=replace(large, memory_mb=3000), host="h1", forced=True)
    more = cloud.create(flavor=replace(large, memory_mb=2000), host="h1", forced=True)
    cloud.settle()
    assert operator.drain() == 1
    assert {cloud.show(server).host for server in small} == {"h2", "h3"}
    assert cloud.show(more[0]).host == "h1", "the large ones go first"
    assert cloud.findings() == []


def test_a_plan_is_of_the_state_that_each_has(cloud: Cloud, operator: Operator) -> None:
    """Two wait for their turn, one is to stay: the stopped one is started meanwhile, the other one
    stopped, the suspended one resumed."""
    _, runs, stopped, suspended = servers = sorted(cloud.create(4, host="h1", forced=True))
    cloud.settle()
    cloud.ask(stopped, "os-stop")
    cloud.ask(suspended, "suspend")
    cloud.settle()

    def users() -> None:
        if operator.seconds_left == 599:
            cloud.ask(stopped, "os-start")
            cloud.ask(runs, "os-stop")
            cloud.ask(suspended, "resume")

    cloud.watcher = users
    assert operator.drain(parallel=1) == 0
    assert kinds(cloud) == dict.fromkeys(servers, MigrationType.LIVE) | {runs: MigrationType.COLD}
    assert cloud.findings() == []


def test_a_server_that_is_started_as_its_move_begins_goes_live(
    cloud: Cloud, operator: Operator
) -> None:
    """Between the look and the lock."""
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.ask(server, "os-stop")
    cloud.settle()

    def starts(kind: str) -> bool:
        if kind == "select" and cloud.show(server).vm_state == states.STOPPED:
            cloud.ask(server, "os-start")
            for _ in range(3):
                cloud.advance()
                cloud.hosts["h1"].work()
                cloud.sync(cloud.hosts["h1"])
        return False

    cloud.lose = starts
    assert operator.drain() == 0
    assert (
        f"Instance {server} is active by now, and its move was planned when it was stopped"
        in operator.text
    )
    assert kinds(cloud) == {server: MigrationType.LIVE}
    assert cloud.findings() == []


def test_cold_by_wish_and_what_is_paused_stays(cloud: Cloud, operator: Operator) -> None:
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


def test_a_move_that_fails_is_told_with_its_reason(cloud: Cloud, operator: Operator) -> None:
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.hosts["h1"].driver.host.script["live_migrate"] = [Fail("The memory changes too fast.")]
    assert operator.drain() == 1
    assert "its move ended error: The memory changes too fast." in operator.text
    assert "mend that, then: kilonova host drain h1" in operator.said[-2]
    assert (cloud.show(server).host, cloud.show(server).vm_state) == ("h1", states.ACTIVE)
    assert operator.drain() == 0
    assert cloud.findings() == []


def test_with_wait_it_stays_until_all_have_gone(cloud: Cloud, operator: Operator) -> None:
    ordinary, bound, others = five(cloud)
    cloud.hosts["h1"].driver.host.script["live_migrate"] = [Fail("The memory changes too fast.")]

    def deletes() -> bool:
        """After a while somebody deletes the member of the group that is in the way."""
        if operator.seconds_left == 570:
            cloud.ask(others[0], "delete")
        return False

    operator.stops = deletes
    assert operator.drain(wait=True) == 0
    assert {cloud.show(server).host for server in [*ordinary, bound]} <= {"h2", "h3"}
    assert cloud.findings() == []


def test_what_does_not_work_where_it_arrived_goes_back(cloud: Cloud, operator: Operator) -> None:
    """Its interfaces are wired there, and then it cannot go on."""
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.networks.wires_after = 2
    for name in ("h2", "h3"):
        cloud.hosts[name].driver.host.script["ensure_running"] = [Fail("No power.")]
    assert operator.drain(cold=True) == 1
    assert "its move ended reverted: No power." in operator.text
    assert (cloud.show(server).host, cloud.show(server).vm_state) == ("h1", states.ACTIVE)
    assert cloud.findings() == []


def test_a_host_that_is_enabled_meanwhile_is_left_alone(cloud: Cloud, operator: Operator) -> None:
    servers = cloud.create(4, host="h1", forced=True)
    cloud.settle()

    def restores() -> bool:
        if operator.seconds_left == 598:
            assert host_restore.give_back(cloud.store, "h1", operator.said.append) == 0
        return False

    operator.stops = restores
    assert operator.drain(cold=True) == 1
    assert operator.said[-1].endswith("somebody has enabled host h1 again")
    assert sum(cloud.show(server).host == "h1" for server in servers) == 2
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}, (
        "what was under way is confirmed"
    )


def test_a_silent_host_is_not_drained(cloud: Cloud, operator: Operator) -> None:
    cloud.create(2, host="h1", forced=True)
    cloud.settle()
    silence(cloud, "h1")
    assert operator.drain() == 1
    assert "If it is dead: kilonova host evacuate h1" in operator.said[-1]
    assert kinds(cloud) == {} and operator.seconds_left == 599, "it says so at once"


def test_that_no_scheduler_answers_is_waiting(cloud: Cloud, operator: Operator) -> None:
    cloud.create(host="h1", forced=True)
    cloud.settle()
    cloud.lose = lambda kind: kind == "select" and operator.seconds_left > 590
    with pytest.raises(errors.NoAnswer):
        operator.drain(dry_run=True)
    assert operator.drain() == 0
    assert operator.said.count("lost Trying again.") == 1


def test_a_server_that_is_being_built_there_is_waited_for(cloud: Cloud, operator: Operator) -> None:
    server = cloud.create(host="h1", forced=True)[0]
    cloud.advance()
    assert cloud.show(server).host == "h1" and cloud.show(server).vm_state == states.BUILDING
    assert operator.drain() == 0
    assert cloud.show(server).host in ("h2", "h3")


def test_what_was_proposed_before_does_not_come_after(cloud: Cloud, operator: Operator) -> None:
    """The host is empty and said to be; two creates had been offered it before it was disabled, one
    nothing else."""
    for name in ("h2", "h3"):
        cloud.create(flavor=replace(FLAVOR, memory_mb=4096), host=name, forced=True)
    cloud.settle()
    fixed, free = cloud.create(host="h1")[0], cloud.create()[0]
    ended: list[int] = []

    def drained(workflow: str, step: str, point: str) -> None:
        if (workflow, step, point) == ("create", "place", "proposed") and not ended:
            ended.append(operator.drain())

    cloud.engine.fault_point = drained
    cloud.settle()
    assert ended == [0] and operator.said[-1] == "host h1 is empty; 0 servers moved"
    assert cloud.show(free).host in ("h2", "h3") and cloud.show(free).vm_state == states.ACTIVE
    assert cloud.show(fixed).host is None and cloud.show(fixed).vm_state == states.ERROR
    assert (
        cloud.show(fixed).fault["message"].endswith("3 hosts: 2 not the requested host, 1 disabled")
    )
    assert cloud.findings() == []


def test_a_host_that_is_none(operator: Operator) -> None:
    for command in (operator.drain, operator.evacuate):
        with pytest.raises(errors.NotFound, match="There is no host h9"):
            command("h9")


def test_a_move_that_is_stuck_holds_nobody_up_and_says_why(
    cloud: Cloud, operator: Operator
) -> None:
    stuck, *others = cloud.create(3, host="h1", forced=True)
    cloud.settle()
    action = cloud.move(stuck, "os-migrateLive")
    change(cloud, action, step="renamed_since")
    assert operator.drain(parallel=1) == 1
    assert {cloud.show(server).host for server in others} <= {"h2", "h3"} and cloud.show(
        stuck
    ).host == "h1"
    assert (
        "stuck: an unforeseen failure" in operator.text
        and "See: kilonova action list --stuck" in operator.text
    )
    assert any(
        said.startswith(f"{stuck} (s, active) stays: its move is stuck: ")
        for said in operator.said[-3:]
    )
    assert "1 servers left, 2 moved" in operator.said[-1]
    change(cloud, action, step=None)
    cloud.store.write(lambda tx: stuck_actions.retry(tx, action))
    assert operator.drain() == 0 and cloud.show(stuck).host in ("h2", "h3")
