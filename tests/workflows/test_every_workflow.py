# SPDX-License-Identifier: Apache-2.0
"""Every workflow of the registry: at each fault point of conductor and agent a kill, each message lost or
doubled, each verb failing, a conductor that wakes up late, and a delete at any moment. After each, every
server is in a state that a user would expect, and the oracle finds nothing.

The cases are made from the registry: a workflow without a scenario here fails the first test.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from common import errors, states
from common.models import Command
from common.store import actions
from common.store.engine import Store
from compute_agent.virt.memory import Fail
from conductor import runner
from conductor.saga import Engine
from conductor.workflows import WORKFLOWS
from tests.workflows.simulator import Cloud, Crash, Time


@dataclass
class Scenario:
    """How a workflow is asked for, and how its server ends: (vm_state, number of domains)."""

    ask: tuple[str, str | None]
    ends: str
    domains: int = 1
    before: tuple[tuple[str, str | None], ...] = ()
    fails_as: str = states.ACTIVE
    verb: str = ""


SCENARIOS = {
    "create": Scenario(("create", None), states.ACTIVE, fails_as=states.ERROR, verb="ensure_guest"),
    "stop": Scenario(("os-stop", None), states.STOPPED, verb="ensure_stopped"),
    "start": Scenario(("os-start", None), states.ACTIVE, before=(("os-stop", None),), fails_as=states.STOPPED,
                      verb="ensure_running"),
    "reboot_soft": Scenario(("reboot", "SOFT"), states.ACTIVE, fails_as=states.ERROR, verb="reboot"),
    "reboot_hard": Scenario(("reboot", "HARD"), states.ACTIVE, fails_as=states.ERROR, verb="reboot"),
    "delete": Scenario(("delete", None), states.DELETED, domains=0),
}


@dataclass
class Trial:
    """A cloud just before a workflow is asked for."""

    cloud: Cloud
    scenario: Scenario
    server: str = ""
    hits: list[tuple[str, ...]] = field(default_factory=list)

    def begin(self) -> None:
        if self.scenario.ask[0] == "create":
            self.server = self.cloud.create()[0]
        else:
            self.cloud.ask(self.server, *self.scenario.ask)

    def crash_at(self, number: int) -> None:
        """Kill the process that reaches the fault point with this number; -1: only write the points down."""
        def conductor(workflow: str, step: str, where: str) -> None:
            self._hit(("conductor", workflow, step, where), number)

        def agent(verb: str, step: str, where: str) -> None:
            self._hit(("agent", verb, step, where), number)
        self.cloud.engine.fault_point = conductor
        for host in self.cloud.hosts.values():
            host.fault_point = agent

    def _hit(self, point: tuple[str, ...], number: int) -> None:
        if point[1] == "sweep":
            return
        self.hits.append(point)
        if len(self.hits) - 1 == number:
            raise Crash(point)

    def run_through_crashes(self) -> None:
        """Rounds until nothing is in hand; who crashes is started again."""
        for _ in range(3):
            try:
                self.cloud.settle()
                return
            except Crash as crash:
                if crash.args[0][0] == "agent":
                    for host in self.cloud.hosts.values():
                        host.restart()
                else:
                    self.cloud.restart_conductor()
        raise AssertionError("crashed more than once")

    def is_right(self, ends: str, domains: int) -> None:
        server = self.cloud.show(self.server)
        assert (server.vm_state, server.task_state, server.action) == (ends, None, None), server.fault
        assert len(self.cloud.domains(self.server)) == domains
        assert self.cloud.findings() == []


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    time = Time()
    cloud = Cloud(Store("sqlite://", time=time), time)
    yield cloud
    cloud.store.close()


def trial_of(cloud: Cloud, workflow: str) -> Trial:
    scenario = SCENARIOS[workflow]
    cloud.round()
    trial = Trial(cloud, scenario)
    if scenario.ask[0] != "create":
        trial.server = cloud.create()[0]
        cloud.settle()
        for key, value in scenario.before:
            cloud.ask(trial.server, key, value)
            cloud.settle()
    cloud.sent.clear()
    return trial


def fault_points(workflow: str) -> list[tuple[str, ...]]:
    time = Time()
    cloud = Cloud(Store("sqlite://", time=time), time)
    trial = trial_of(cloud, workflow)
    trial.crash_at(-1)
    trial.begin()
    cloud.settle()
    cloud.store.close()
    return trial.hits


CRASHES = [pytest.param(name, number, id=f"{name}-{number}-{'-'.join(point)}")
           for name in SCENARIOS for number, point in enumerate(fault_points(name))]


def test_every_workflow_has_a_scenario() -> None:
    assert set(SCENARIOS) == set(WORKFLOWS)
    assert all(any(f"{name}-" in case.id for case in CRASHES) for name in SCENARIOS)


@pytest.mark.parametrize("workflow", SCENARIOS)
def test_success(cloud: Cloud, workflow: str) -> None:
    trial = trial_of(cloud, workflow)
    trial.begin()
    cloud.settle()
    trial.is_right(trial.scenario.ends, trial.scenario.domains)


@pytest.mark.parametrize(("workflow", "number"), CRASHES)
def test_killed_at_each_fault_point(cloud: Cloud, workflow: str, number: int) -> None:
    trial = trial_of(cloud, workflow)
    trial.crash_at(number)
    trial.begin()
    trial.run_through_crashes()
    assert len(trial.hits) > number, "the fault point was not reached"
    trial.is_right(trial.scenario.ends, trial.scenario.domains)


@pytest.mark.parametrize("kind", ["select", "do", "sync", "answer"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("workflow", SCENARIOS)
def test_lost_messages_make_it_late_never_lost(cloud: Cloud, workflow: str, kind: str, count: int) -> None:
    trial = trial_of(cloud, workflow)
    left = [count]

    def lose(what: str) -> bool:
        if what != kind or not left[0]:
            return False
        left[0] -= 1
        return True
    cloud.lose = lose
    trial.begin()
    cloud.settle()
    trial.is_right(trial.scenario.ends, trial.scenario.domains)


@pytest.mark.parametrize("workflow", SCENARIOS)
def test_commands_come_twice_and_again_when_all_is_over(cloud: Cloud, workflow: str) -> None:
    trial = trial_of(cloud, workflow)
    deliver = cloud.do

    def twice(host: str, commands: list[Command]) -> None:
        deliver(host, commands)
        deliver(host, commands)
    cloud.do = twice  # type: ignore[method-assign]  # the post is the simulator's to bend
    trial.begin()
    cloud.settle()
    made = {name: len(host.driver.calls) for name, host in cloud.hosts.items()}
    for host, command in list(cloud.sent):
        deliver(host, [command])
    assert all(host.agent.take() is None for host in cloud.hosts.values()), "a command was to be done again"
    cloud.settle()
    verbs_made = {name: [call for call in list(host.driver.calls)[made[name]:] if call[0] != "domains"]
                  for name, host in cloud.hosts.items()}
    assert verbs_made == {name: [] for name in cloud.hosts}
    trial.is_right(trial.scenario.ends, trial.scenario.domains)


@pytest.mark.parametrize("workflow", [name for name, scenario in SCENARIOS.items() if scenario.verb])
def test_a_definite_failure_is_told_and_leaves_nothing(cloud: Cloud, workflow: str) -> None:
    trial = trial_of(cloud, workflow)
    for host in cloud.hosts.values():
        host.driver.script[trial.scenario.verb] = [Fail("It broke.", details="because")]
    trial.begin()
    cloud.settle()
    trial.is_right(trial.scenario.fails_as, 0 if workflow == "create" else 1)
    failed = next(row for row in cloud.store.read(lambda tx: actions.list_for(tx, trial.server)))
    assert (failed.state, failed.message) == ("failed", "It broke.")
    if trial.scenario.fails_as == states.ERROR:
        assert cloud.show(trial.server).fault["message"] == "It broke."


def test_create_goes_to_another_host_when_the_failure_was_the_hosts_own(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    for host in cloud.hosts.values():
        host.driver.script["ensure_guest"] = []
    cloud.hosts["h1"].driver.script["ensure_guest"] = [Fail("Disk full.", retryable=True)] * 2
    trial.begin()
    cloud.settle()
    assert cloud.show(trial.server).host == "h2"
    trial.is_right(states.ACTIVE, 1)


def test_create_gives_up_after_every_host_failed(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    for host in cloud.hosts.values():
        host.driver.script["ensure_guest"] = [Fail("Disk full.", retryable=True)] * 3
    trial.begin()
    cloud.settle()
    trial.is_right(states.ERROR, 0)
    server = cloud.show(trial.server)
    assert "No valid host" in server.fault["message"]
    assert server.created_at < server.fault["created"] <= server.updated_at


@pytest.mark.parametrize("workflow", [name for name in SCENARIOS if name != "delete"])
@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("held_back", [False, True])
def test_delete_wins_at_any_moment(cloud: Cloud, workflow: str, rounds: int, held_back: bool) -> None:
    """``held_back``: the command of the first action arrives when the delete is over."""
    trial = trial_of(cloud, workflow)
    if held_back:
        cloud.lose = lambda kind: kind == "do"
    trial.begin()
    for _ in range(rounds):
        while runner.advance(cloud.engine):
            pass
    old = list(cloud.sent)
    cloud.lose = lambda kind: False
    cloud.ask(trial.server, "delete")
    cloud.settle()
    for host, command in old:
        cloud.do(host, [command])
    cloud.settle()
    trial.is_right(states.DELETED, 0)


@pytest.mark.parametrize("workflow", SCENARIOS)
def test_a_conductor_that_wakes_up_late_changes_nothing(cloud: Cloud, workflow: str) -> None:
    """It has taken the action, sleeps past its lease while another finishes the work, and then goes on."""
    trial = trial_of(cloud, workflow)
    trial.begin()
    late = Engine(cloud.store, cloud.time, cloud, "c2/1", shutdown_timeout=0)

    def sleep(workflow: str, step: str, where: str) -> None:
        late.fault_point = lambda workflow, step, where: None
        cloud.time.pass_by(20)
        for host in cloud.hosts.values():
            cloud.sync(host)
        cloud.settle()
    late.fault_point = sleep
    runner.advance(late)
    cloud.settle()
    trial.is_right(trial.scenario.ends, trial.scenario.domains)
    assert len({command.key for _, command in cloud.sent}) == len(cloud.sent)


def test_a_dead_host_does_not_keep_a_server_from_being_deleted(cloud: Cloud) -> None:
    trial = trial_of(cloud, "delete")
    host = cloud.hosts.pop(cloud.show(trial.server).host)
    for _ in range(70):
        cloud.round()
    trial.begin()
    cloud.round()
    assert cloud.show(trial.server).deleted == 1
    cloud.hosts[host.name] = host
    cloud.settle()
    trial.is_right(states.DELETED, 0)


def test_silence_of_all_hosts_proves_nothing(cloud: Cloud) -> None:
    cloud.round()
    hosts, cloud.hosts = cloud.hosts, {}
    for _ in range(100):
        cloud.round()
    server = cloud.create()[0]
    for _ in range(3):
        cloud.round()
    assert cloud.show(server).vm_state == states.BUILDING
    cloud.hosts = hosts
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE


def test_a_guest_that_stops_itself_is_seen_by_the_full_report(cloud: Cloud) -> None:
    trial = trial_of(cloud, "stop")
    cloud.hosts[cloud.show(trial.server).host].driver.power_off(trial.server)
    for _ in range(65):
        cloud.round()
    trial.is_right(states.STOPPED, 1)


def test_what_should_run_is_started_again_after_its_host_was_booted(cloud: Cloud) -> None:
    trial = trial_of(cloud, "stop")
    host = cloud.hosts[cloud.show(trial.server).host]
    host.driver.power_off(trial.server)
    host.restart()
    host.agent.boot_id = "another"
    cloud.settle()
    trial.is_right(states.ACTIVE, 1)
    assert cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0].name == "reboot"


def test_a_second_action_is_refused_with_the_state(cloud: Cloud) -> None:
    trial = trial_of(cloud, "stop")
    trial.begin()
    with pytest.raises(errors.WrongState, match=f"Cannot 'stop' instance {trial.server} while it is in task_state"):
        trial.begin()
    cloud.settle()
    with pytest.raises(errors.WrongState, match="while it is in vm_state stopped"):
        trial.begin()


def test_many_creates_are_one_round(cloud: Cloud) -> None:
    """Twenty servers at once: one call to the scheduler, one message a host."""
    cloud.round()
    asked: list[int] = []
    select = cloud.select
    messages: list[str] = []
    deliver = cloud.do
    cloud.select = lambda specs, fresh: asked.append(len(specs)) or select(specs, fresh)  # type: ignore
    cloud.do = lambda host, commands: messages.append(host) or deliver(host, commands)  # type: ignore
    servers = cloud.create(20)
    cloud.settle()
    assert asked == [20]
    assert sorted(messages) == ["h1", "h2"]
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}
    assert cloud.findings() == []




@pytest.mark.parametrize("where", ["taken", "proposed", "committed"])
def test_delete_in_the_middle_of_a_burst(cloud: Cloud, where: str) -> None:
    """The delete is accepted while a conductor works on the create; it waits for that burst's lease."""
    trial = trial_of(cloud, "create")
    trial.begin()

    def delete(workflow: str, step: str, at: str) -> None:
        if at == where:
            cloud.engine.fault_point = lambda workflow, step, where: None
            cloud.ask(trial.server, "delete")
            runner.advance(Engine(cloud.store, cloud.time, cloud, "c2/1"))
            assert where == "committed" or cloud.show(trial.server).deleted == 0
    cloud.engine.fault_point = delete
    cloud.settle()
    trial.is_right(states.DELETED, 0)


def test_a_guest_that_stops_itself_after_a_failed_action_is_seen_too(cloud: Cloud) -> None:
    """The failed reboot raised the server's fence, which the domain never got to carry."""
    trial = trial_of(cloud, "stop")
    host = cloud.hosts[cloud.show(trial.server).host]
    host.driver.script["ensure_stopped"] = [Fail("no")]
    trial.begin()
    cloud.settle()
    assert cloud.show(trial.server).vm_state == states.ACTIVE
    host.driver.power_off(trial.server)
    for _ in range(65):
        cloud.round()
    trial.is_right(states.STOPPED, 1)


def test_a_guest_that_stops_itself_before_its_start_was_acknowledged_is_seen_at_once(cloud: Cloud) -> None:
    trial = trial_of(cloud, "start")
    trial.begin()
    while runner.advance(cloud.engine):
        pass
    host = cloud.hosts[cloud.show(trial.server).host]
    host.work()
    host.driver.power_off(trial.server)
    host.agent.changed(host.driver.domains())
    for _ in range(2):
        assert host.agent.has_news()
        cloud.sync(host, ask=False)
    trial.is_right(states.STOPPED, 1)


def test_no_scheduler_is_waiting(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    cloud.lose = lambda kind: kind == "select"
    trial.begin()
    for _ in range(100):
        cloud.round()
    assert cloud.show(trial.server).vm_state == states.BUILDING
    cloud.lose = lambda kind: False
    for _ in range(6):
        cloud.round()
    trial.is_right(states.ACTIVE, 1)
