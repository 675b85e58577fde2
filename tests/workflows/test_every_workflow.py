# SPDX-License-Identifier: Apache-2.0
"""Every workflow of the registry: at each fault point of conductor and agent a kill, each message
lost or doubled, each verb failing, a conductor that wakes up late, and a delete at any moment.
After each, every server is in a state that a user would expect, and the oracle finds nothing.

The cases are made from the registry: a workflow without a scenario here fails the first test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.domain import states
from common.domain.models import Command
from common.service.notification_options import NotificationSettings
from common.store.servers import actions
from compute_agent.virt.memory.state.script import Fail
from conductor.engine import runner
from conductor.workflows import WORKFLOWS
from deploy.testing.plan import Slice
from tests.schemas import memory_store
from tests.selection import runs_slice
from tests.workflows.expected_notifications import check_failure, check_success
from tests.workflows.scenarios import SCENARIOS, trial_of
from tests.workflows.simulator import Cloud, Time


def fault_points(workflow: str) -> list[tuple[str, ...]]:
    time = Time()
    cloud = Cloud(memory_store(time), time)
    trial = trial_of(cloud, workflow)
    trial.crash_at(-1)
    trial.begin()
    cloud.settle()
    cloud.store.close()
    return trial.hits


HALVES = (Slice.GUESTS, Slice.MOVES)
WHOLE = [name for name, scenario in SCENARIOS.items() if not scenario.brief]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Number the fault points of each workflow.

    Which of two hosts comes first is by chance, so the numbers alone are the same in each process.
    Only processes that run these slices look for all fault points. The default set has cells of the
    fault matrix in their place.
    """
    if metafunc.function is not test_killed_at_each_fault_point:
        return
    looks = runs_slice(metafunc.config, *HALVES)
    cases = [
        pytest.param(name, n, id=f"{name}-{n}", marks=pytest.mark.slice(HALVES[n % 2]))
        for name in WHOLE
        for n in range(max(1, len(fault_points(name))) if looks else 1)
    ]
    metafunc.parametrize(("workflow", "number"), cases)


def test_every_workflow_has_a_scenario() -> None:
    assert {name.partition(":")[0] for name in SCENARIOS} == set(WORKFLOWS)
    assert {name.partition(":")[0] for name, scenario in SCENARIOS.items() if scenario.brief} - set(
        WHOLE
    ) == {"migrate"}, "it is resize by another name"


@pytest.mark.parametrize(
    "workflow",
    [
        # The others do the same in test_repeated_commands_change_nothing.
        name if scenario.brief else pytest.param(name, marks=pytest.mark.slice("operations"))
        for name, scenario in SCENARIOS.items()
    ],
)
def test_workflow_succeeds_and_notifies_from_start_to_end(cloud: Cloud, workflow: str) -> None:
    trial = trial_of(cloud, workflow)
    cloud.store.notify_with(NotificationSettings("api"))
    trial.begin()
    cloud.settle()
    check_success(cloud.store, trial.server, workflow, trial.scenario.ends)
    trial.has_ended()


def test_killed_at_each_fault_point(cloud: Cloud, workflow: str, number: int) -> None:
    trial = trial_of(cloud, workflow)
    trial.crash_at(number)
    trial.begin()
    trial.run_through_crashes()
    assert len(trial.hits) > number, "the fault point was not reached"
    trial.has_ended()


@pytest.mark.parametrize("kind", ["select", "do", "sync", "answer"])
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.slice("guests")),
        pytest.param(3, marks=pytest.mark.slice("moves")),
    ],
)
@pytest.mark.parametrize("workflow", WHOLE)
def test_lost_messages_make_it_late_never_lost(
    cloud: Cloud, workflow: str, kind: str, count: int
) -> None:
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
    trial.has_ended()


@pytest.mark.parametrize("workflow", WHOLE)
def test_repeated_commands_change_nothing(cloud: Cloud, workflow: str) -> None:
    """Each command arrives twice at once, and again when the action has ended."""
    trial = trial_of(cloud, workflow)
    cloud.store.notify_with(NotificationSettings("api"))
    deliver = cloud.do

    def twice(host: str, commands: list[Command]) -> None:
        deliver(host, commands)
        deliver(host, commands)

    cloud.do = twice  # type: ignore[method-assign]  # the post is the simulator's to bend
    trial.begin()
    cloud.settle()
    made = {name: len(host.driver.host.calls) for name, host in cloud.hosts.items()}
    for host, command in list(cloud.sent):
        deliver(host, [command])
    assert all(host.agent.take() is None for host in cloud.hosts.values()), (
        "a command was to be done again"
    )
    cloud.settle()
    verbs_made = {
        name: [call for call in list(host.driver.host.calls)[made[name] :] if call[0] != "domains"]
        for name, host in cloud.hosts.items()
    }
    assert verbs_made == {name: [] for name in cloud.hosts}
    check_success(cloud.store, trial.server, workflow, trial.scenario.ends)
    trial.has_ended()


def verbs_that_fail() -> Iterator[Any]:
    """Yield each verb of each workflow. Of a variant only the last verb is in the default set,
    because the workflow itself has the others there."""
    for name, scenario in SCENARIOS.items():
        for verb in scenario.verbs:
            is_default = not scenario.brief or verb == scenario.verbs[-1]
            marks = () if is_default else pytest.mark.slice("guests")
            yield pytest.param(name, verb, marks=marks)


@pytest.mark.parametrize(("workflow", "verb"), list(verbs_that_fail()))
def test_failed_verb_is_reported_and_notified_and_leaves_nothing(
    cloud: Cloud, workflow: str, verb: str
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.store.notify_with(NotificationSettings("api"))
    for host in cloud.hosts.values():
        host.driver.host.script[verb] = [Fail("It broke.", details="because")]
    trial.begin()
    cloud.settle()
    failed = cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0]
    assert (failed.state, failed.message) == ("failed", "It broke.")
    fault = {"message": "It broke.", "details": "because"}
    check_failure(cloud.store, trial.server, workflow, fault)
    vm_state = trial.scenario.fails_as
    if trial.scenario.keeps is not None and vm_state == trial.was.vm_state:
        trial.is_as_before()
    for host in cloud.hosts.values():
        host.driver.host.script.clear()
    trial.is_right(vm_state, trial.scenario.fails_with, trial.scenario.fails_images)
    if vm_state == states.ERROR:
        assert cloud.show(trial.server).fault["message"] == "It broke."


def test_create_goes_to_another_host_when_the_failure_was_the_hosts_own(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    for host in cloud.hosts.values():
        host.driver.host.script["ensure_guest"] = []
    cloud.hosts["h1"].driver.host.script["ensure_guest"] = [Fail("Disk full.", retryable=True)] * 2
    trial.begin()
    cloud.settle()
    assert cloud.show(trial.server).host == "h2"
    trial.is_right(states.ACTIVE, 1)


def test_create_gives_up_after_every_host_failed(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    for host in cloud.hosts.values():
        host.driver.host.script["ensure_guest"] = [Fail("Disk full.", retryable=True)] * 3
    trial.begin()
    cloud.settle()
    trial.is_right(states.ERROR, 0)
    server = cloud.show(trial.server)
    assert "No valid host" in server.fault["message"]
    assert server.created_at < server.fault["created"] <= server.updated_at


@pytest.mark.slice("guests")
@pytest.mark.parametrize("workflow", [name for name in WHOLE if name != "delete"])
@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("held_back", [False, True])
def test_delete_wins_at_any_moment(
    cloud: Cloud, workflow: str, rounds: int, held_back: bool
) -> None:
    """``held_back``: the command of the first action arrives when the delete is over."""
    trial = trial_of(cloud, workflow)
    if held_back:
        cloud.lose = lambda kind: kind == "do"
    trial.begin()
    for _ in range(rounds):
        cloud.advance()
    old = list(cloud.sent)
    cloud.lose = lambda kind: False
    cloud.ask(trial.server, "delete")
    cloud.settle()
    for host, command in old:
        cloud.do(host, [command])
    cloud.settle()
    trial.is_right(states.DELETED, 0)


@pytest.mark.slice("moves")
@pytest.mark.parametrize("workflow", WHOLE)
def test_a_conductor_that_wakes_up_late_changes_nothing(cloud: Cloud, workflow: str) -> None:
    """It has taken the action, sleeps past its lease while another finishes the work, and then goes
    on."""
    trial = trial_of(cloud, workflow)
    trial.begin()
    late = cloud.conductor("c2/1")

    def sleep(workflow: str, step: str, where: str) -> None:
        late.fault_point = lambda workflow, step, where: None
        cloud.time.pass_by(20)
        for host in cloud.hosts.values():
            cloud.sync(host)
        cloud.settle()

    late.fault_point = sleep
    runner.advance(late)
    cloud.settle()
    trial.has_ended()
    assert len({command.key for _, command in cloud.sent}) == len(cloud.sent)


def test_a_resized_guest_that_cannot_be_started_again_can_be_reverted(cloud: Cloud) -> None:
    """Its revert failed on its host, and so did the way back."""
    trial = trial_of(cloud, "revert_here")
    [host] = cloud.hosts.values()
    script = host.driver.host.script
    script["settle_resize"], script["ensure_running"] = [Fail("It broke.")], [Fail("No memory.")]
    trial.begin()
    cloud.settle()
    found = cloud.show(trial.server)
    assert (found.vm_state, found.power_state) == (states.RESIZED, states.SHUTDOWN)
    assert cloud.findings() == []
    trial.begin()
    cloud.settle()
    assert cloud.show(trial.server).vm_state == states.ACTIVE
    assert cloud.findings() == []
