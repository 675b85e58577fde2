# SPDX-License-Identifier: Apache-2.0
"""Tests of each workflow of the registry under each fault of conductor, agents and messages.

Processes are killed at each fault point, messages are lost or doubled, verbs fail, a conductor
wakes up after the end of a lease, or a delete supersedes the workflow. Afterwards each server is in
an expected state, and the doctor reports no finding. Each workflow must have a scenario.
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
    """Parametrize the kill test with the number of each fault point of each workflow.

    Numbers are the same in each process. Names of fault points are not, because the order of two
    hosts is random. Only processes that run these slices count the fault points, because the
    default set has cells of the fault matrix instead.
    """
    if metafunc.function is not test_workflow_completes_after_process_kill_at_fault_point:
        return
    counts_points = runs_slice(metafunc.config, *HALVES)
    cases = [
        pytest.param(name, n, id=f"{name}-{n}", marks=pytest.mark.slice(HALVES[n % 2]))
        for name in WHOLE
        for n in range(max(1, len(read_fault_points(name))) if counts_points else 1)
    ]
    metafunc.parametrize(("workflow", "number"), cases)


def test_scenarios_cover_every_workflow_of_registry() -> None:
    assert {name.partition(":")[0] for name in SCENARIOS} == set(WORKFLOWS)
    assert {name.partition(":")[0] for name, scenario in SCENARIOS.items() if scenario.brief} - set(
        WHOLE
    ) == {"migrate"}, "it is resize by another name"


@pytest.mark.parametrize(
    "workflow",
    [
        # The others: test_workflow_succeeds_with_doubled_commands_and_ignores_later_copies.
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


def test_workflow_completes_after_process_kill_at_fault_point(
    cloud: Cloud, workflow: str, number: int
) -> None:
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
def test_workflow_succeeds_with_doubled_commands_and_ignores_later_copies(
    cloud: Cloud, workflow: str
) -> None:
    """Each command arrives twice at first, and once more after the end of the action."""
    trial = trial_of(cloud, workflow)
    cloud.store.notify_with(NotificationSettings("api"))
    deliver = cloud.do

    def deliver_twice(host: str, commands: list[Command]) -> None:
        deliver(host, commands)
        deliver(host, commands)

    cloud.do = deliver_twice  # type: ignore[method-assign]
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


def generate_failing_verbs() -> Iterator[Any]:
    """Yield each verb of each scenario.

    Of a brief scenario, only the last verb is in the default set, because the full scenario of the
    same workflow has the others.
    """
    for name, scenario in SCENARIOS.items():
        for verb in scenario.verbs:
            is_default = not scenario.brief or verb == scenario.verbs[-1]
            marks = () if is_default else pytest.mark.slice("guests")
            yield pytest.param(name, verb, marks=marks)


@pytest.mark.parametrize(("workflow", "verb"), list(generate_failing_verbs()))
def test_workflow_with_failed_verb_notifies_failure_and_leaves_no_leftover(
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
def test_delete_supersedes_workflow_after_zero_or_one_conductor_rounds(
    cloud: Cloud, workflow: str, rounds: int, held_back: bool
) -> None:
    """If ``held_back``, the commands of the workflow arrive after the delete."""
    trial = trial_of(cloud, workflow)
    if held_back:
        cloud.lose = lambda kind: kind == "do"
    trial.begin()
    for _ in range(rounds):
        cloud.advance()
    old_commands = list(cloud.sent)
    cloud.lose = lambda kind: False
    cloud.ask(trial.server, "delete")
    cloud.settle()
    for host, command in old_commands:
        cloud.do(host, [command])
    cloud.settle()
    trial.check_end(states.DELETED, 0)


@pytest.mark.slice("moves")
@pytest.mark.parametrize("workflow", WHOLE)
def test_workflow_ignores_conductor_waking_up_after_lease_expired(
    cloud: Cloud, workflow: str
) -> None:
    """Another conductor completes the action while the first conductor sleeps past the lease."""
    trial = trial_of(cloud, workflow)
    trial.begin()
    sleeper = cloud.conductor("c2/1")

    def sleep(workflow: str, step: str, where: str) -> None:
        sleeper.fault_point = lambda workflow, step, where: None
        cloud.time.pass_by(20)
        for host in cloud.hosts.values():
            cloud.sync(host)
        cloud.settle()

    sleeper.fault_point = sleep
    runner.advance(sleeper)
    cloud.settle()
    trial.check_expected_end()
    assert len({command.key for _, command in cloud.sent}) == len(cloud.sent)


def test_revert_resize_succeeds_after_failed_revert_left_guest_off(cloud: Cloud) -> None:
    """The first revert fails on the host, and the undo of this revert fails too."""
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
