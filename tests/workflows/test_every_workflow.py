# SPDX-License-Identifier: Apache-2.0
"""Tests of each workflow of the registry under each fault of conductor, agents and messages.

A process is killed at each fault point, messages are lost or doubled, verbs fail, a conductor
wakes up after its lease, or a delete comes meanwhile. Afterwards each server is in an expected
state, and the doctor finds no fault. A workflow without a scenario fails the first test.
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


def read_fault_points(workflow: str) -> list[tuple[str, ...]]:
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

    The order of two hosts is random, so only the numbers are the same in each process. Only
    processes
    that run these slices read all fault points. The default set has cells of the fault matrix
    instead.
    """
    if metafunc.function is not test_workflow_ends_after_kill_at_fault_point:
        return
    looks = runs_slice(metafunc.config, *HALVES)
    cases = [
        pytest.param(name, n, id=f"{name}-{n}", marks=pytest.mark.slice(HALVES[n % 2]))
        for name in WHOLE
        for n in range(max(1, len(read_fault_points(name))) if looks else 1)
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
        # The others do the same in test_workflow_with_repeated_commands_calls_each_verb_once.
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
    trial.check_expected_end()


def test_workflow_ends_after_kill_at_fault_point(cloud: Cloud, workflow: str, number: int) -> None:
    trial = trial_of(cloud, workflow)
    trial.crash_at(number)
    trial.begin()
    trial.run_through_crashes()
    assert len(trial.hits) > number, "the fault point was not reached"
    trial.check_expected_end()


@pytest.mark.parametrize("kind", ["select", "do", "sync", "answer"])
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.slice("guests")),
        pytest.param(3, marks=pytest.mark.slice("moves")),
    ],
)
@pytest.mark.parametrize("workflow", WHOLE)
def test_workflow_succeeds_when_messages_are_lost(
    cloud: Cloud, workflow: str, kind: str, count: int
) -> None:
    trial = trial_of(cloud, workflow)
    losses = [count]

    def lose(message: str) -> bool:
        if message != kind or not losses[0]:
            return False
        losses[0] -= 1
        return True

    cloud.lose = lose
    trial.begin()
    cloud.settle()
    trial.check_expected_end()


@pytest.mark.parametrize("workflow", WHOLE)
def test_workflow_with_repeated_commands_calls_each_verb_once(cloud: Cloud, workflow: str) -> None:
    """Each command arrives twice at once, and again when the action has ended."""
    trial = trial_of(cloud, workflow)
    cloud.store.notify_with(NotificationSettings("api"))
    deliver = cloud.do

    def twice(host: str, commands: list[Command]) -> None:
        deliver(host, commands)
        deliver(host, commands)

    cloud.do = twice  # type: ignore[method-assign]
    trial.begin()
    cloud.settle()
    counts = {name: len(host.driver.host.calls) for name, host in cloud.hosts.items()}
    for host, command in list(cloud.sent):
        deliver(host, [command])
    assert all(host.agent.take() is None for host in cloud.hosts.values()), (
        "a command was to be done again"
    )
    cloud.settle()
    repeated_calls = {
        name: [
            call for call in list(host.driver.host.calls)[counts[name] :] if call[0] != "domains"
        ]
        for name, host in cloud.hosts.items()
    }
    assert repeated_calls == {name: [] for name in cloud.hosts}
    check_success(cloud.store, trial.server, workflow, trial.scenario.ends)
    trial.check_expected_end()


def verbs_that_fail() -> Iterator[Any]:
    """Yield each verb of each workflow.

    Of a variant, only the last verb is in the default set. The set has the other verbs with the
    workflow itself.
    """
    for name, scenario in SCENARIOS.items():
        for verb in scenario.verbs:
            is_default = not scenario.brief or verb == scenario.verbs[-1]
            marks = () if is_default else pytest.mark.slice("guests")
            yield pytest.param(name, verb, marks=marks)


@pytest.mark.parametrize(("workflow", "verb"), list(verbs_that_fail()))
def test_workflow_with_failed_verb_reports_notifies_and_leaves_no_rest(
    cloud: Cloud, workflow: str, verb: str
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.store.notify_with(NotificationSettings("api"))
    for host in cloud.hosts.values():
        host.driver.host.script[verb] = [Fail("It broke.", details="because")]
    trial.begin()
    cloud.settle()
    action = cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0]
    assert (action.state, action.message) == ("failed", "It broke.")
    fault = {"message": "It broke.", "details": "because"}
    check_failure(cloud.store, trial.server, workflow, fault)
    vm_state = trial.scenario.fails_as
    if trial.scenario.keeps is not None and vm_state == trial.was.vm_state:
        trial.check_unchanged()
    for host in cloud.hosts.values():
        host.driver.host.script.clear()
    trial.check_end(vm_state, trial.scenario.fails_with, trial.scenario.fails_images)
    if vm_state == states.ERROR:
        assert cloud.show(trial.server).fault["message"] == "It broke."


def test_create_retries_on_other_host_after_retryable_failure(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    for host in cloud.hosts.values():
        host.driver.host.script["ensure_guest"] = []
    cloud.hosts["h1"].driver.host.script["ensure_guest"] = [Fail("Disk full.", retryable=True)] * 2
    trial.begin()
    cloud.settle()
    assert cloud.show(trial.server).host == "h2"
    trial.check_end(states.ACTIVE, 1)


def test_create_fails_with_no_valid_host_when_every_host_fails(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    for host in cloud.hosts.values():
        host.driver.host.script["ensure_guest"] = [Fail("Disk full.", retryable=True)] * 3
    trial.begin()
    cloud.settle()
    trial.check_end(states.ERROR, 0)
    server = cloud.show(trial.server)
    assert "No valid host" in server.fault["message"]
    assert server.created_at < server.fault["created"] <= server.updated_at


@pytest.mark.slice("guests")
@pytest.mark.parametrize("workflow", [name for name in WHOLE if name != "delete"])
@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("held_back", [False, True])
def test_delete_supersedes_workflow_after_any_round(
    cloud: Cloud, workflow: str, rounds: int, held_back: bool
) -> None:
    """If ``held_back``, the command of the first action arrives after the delete."""
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
    trial.check_end(states.DELETED, 0)


@pytest.mark.slice("moves")
@pytest.mark.parametrize("workflow", WHOLE)
def test_workflow_ignores_conductor_that_wakes_up_after_its_lease(
    cloud: Cloud, workflow: str
) -> None:
    """The conductor sleeps past its lease, and another conductor finishes the work meanwhile."""
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
    trial.check_expected_end()
    assert len({command.key for _, command in cloud.sent}) == len(cloud.sent)


def test_revert_resize_succeeds_after_failed_revert_left_guest_off(cloud: Cloud) -> None:
    """The first revert failed on its host, and so did its undo."""
    trial = trial_of(cloud, "revert_here")
    [host] = cloud.hosts.values()
    script = host.driver.host.script
    script["settle_resize"], script["ensure_running"] = [Fail("It broke.")], [Fail("No memory.")]
    trial.begin()
    cloud.settle()
    row = cloud.show(trial.server)
    assert (row.vm_state, row.power_state) == (states.RESIZED, states.SHUTDOWN)
    assert cloud.findings() == []
    trial.begin()
    cloud.settle()
    assert cloud.show(trial.server).vm_state == states.ACTIVE
    assert cloud.findings() == []
