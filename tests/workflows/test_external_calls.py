# SPDX-License-Identifier: Apache-2.0
"""Tests of each call of each workflow to an external service: refused, slow, or without an answer.

A run without faults yields the calls. With a fault in one call, the action ends, records and hosts
agree, and written disks are kept. Only pending cleanups remain, and these end once the service has
recovered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from common.domain import states
from common.store.servers import actions, guests
from compute_agent.virt.memory.state.script import Fail
from conductor.workflows import WORKFLOWS
from tests.answers import UNKNOWN, Answer
from tests.schemas import memory_store
from tests.workflows.scenarios import KILL, SCENARIOS, Trial, trial_of
from tests.workflows.service_doubles import ServiceDouble
from tests.workflows.simulator import Cloud, Time

#: After this time a timed-out call has no further effect, and a pending cleanup removes its result.
LATE_CALL_SECONDS = 120
SERVICES = ("images", "networks", "shares", "volumes")
#: Workflows that call a service only for a server with a boot volume. See test_volumes.py.
VOLUME_ONLY = ("rebuild",)
#: Workflows that call an external service.
CALLERS = [
    name
    for name, scenario in SCENARIOS.items()
    if not scenario.brief
    and not scenario.placed
    and name not in VOLUME_ONLY
    and any(step.call or step.undo_call for step in WORKFLOWS[name].steps)
]
#: Workflow with calls in its undo -> the verb that fails.
FAILING_VERBS = {
    name: SCENARIOS[name].verbs[-1]
    for name in CALLERS
    if any(step.undo_call for step in WORKFLOWS[name].steps)
}
#: Workflows in the default set. The others are in a slice, because one function decides the result
#: of a refusal for all workflows.
DEFAULTS = ("create", "delete", "shelve", "resize")
CASES = [
    name if name in DEFAULTS else pytest.param(name, marks=pytest.mark.slice("moves"))
    for name in CALLERS
]
UNDO_CASES = [case for case in CASES if getattr(case, "values", (case,))[0] in FAILING_VERBS]
#: Name of the service, and number of the call in the run.
Call = tuple[str, int]


@contextmanager
def create_trial(workflow: str, failing_verb: str = "") -> Iterator[Trial]:
    """Yield a cloud just before the request of the workflow, with hosts that fail a verb."""
    time = Time()
    cloud = Cloud(memory_store(time), time)
    trial = trial_of(cloud, workflow)
    cloud.watcher = lambda: None
    for host in cloud.hosts.values():
        host.driver.host.script |= {failing_verb: [Fail("It broke.")] * 9} if failing_verb else {}
    yield trial
    cloud.store.close()


def get_service(cloud: Cloud, name: str) -> ServiceDouble:
    service: ServiceDouble = getattr(cloud, name)
    return service


@cache
def read_calls(workflow: str, failing_verb: str = "") -> tuple[Call, ...]:
    """Return the calls of a run without faults, or those after the failure of the verb."""
    with create_trial(workflow, failing_verb) as trial:
        cloud = trial.cloud
        before = {name: get_service(cloud, name).calls for name in SERVICES}
        calls_at_failure = dict(before)

        def note_failure(verb: str, step: str, where: str) -> None:
            if (verb, where) == (failing_verb, "after"):
                calls_at_failure.update({name: get_service(cloud, name).calls for name in SERVICES})

        for host in cloud.hosts.values():
            host.fault_point = note_failure
        trial.begin()
        cloud.settle()
        calls = tuple(
            (name, number - before[name])
            for name in SERVICES
            for number in range(calls_at_failure[name] + 1, get_service(cloud, name).calls + 1)
        )
    assert calls, f"{workflow} calls no service"
    return calls


@contextmanager
def run_with_fault(
    workflow: str, call: Call, answer: Answer, failing_verb: str = ""
) -> Iterator[Trial]:
    """Run the workflow with this answer to one call, and yield the cloud after its end."""
    with create_trial(workflow, failing_verb) as trial:
        service = get_service(trial.cloud, call[0])
        number = service.calls + call[1]
        service.script[number] = answer
        trial.begin()
        trial.cloud.settle()
        # Shown if the test fails.
        print(f"{workflow}, call {call}, {service.asked[number - 1]}: {answer.name}")
        yield trial


def check_consistent(trial: Trial) -> None:
    """Check that records and hosts agree, no action is open, and written data still exists."""
    cloud, server, scenario = trial.cloud, trial.cloud.show(trial.server), trial.scenario
    assert (server.task_state, server.action) == (None, None)
    assert cloud.findings() == []
    recorded = {row.host for row in cloud.store.read(lambda tx: guests.places(tx, trial.server))}
    assert {
        host for host in recorded ^ set(cloud.domains(trial.server)) if cloud.hosts[host].is_on
    } == set()
    image = cloud.images.records.get(server.shelved_image_id or "", {})
    if server.vm_state in (states.SHELVED, states.SHELVED_OFFLOADED):
        assert image.get("data") is not None
    if server.host is None or server.deleted:
        assert cloud.domains(trial.server) == []
        assert (
            server.vm_state in (states.DELETED, states.SHELVED_OFFLOADED)
            or scenario.ask == "create"
        )
        return
    assert server.host in cloud.domains(trial.server) or KILL in scenario.before
    disks = [
        host.driver.host.guests[trial.server].disk
        for host in cloud.hosts.values()
        if trial.server in host.driver.host.guests
    ]
    has_written_disk = scenario.ask != "create" and "shelveOffload" not in scenario.before
    assert not has_written_disk or any("canary" in disk for disk in disks), disks


def read_last_action(trial: Trial) -> Any:
    return trial.cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0]


#: Workflow -> vm_state after a refusal of the image service. The guest is still unchanged then.
STATES_AFTER_REFUSED_IMAGE = {"rescue": states.ACTIVE}


@pytest.mark.parametrize("workflow", CASES)
def test_workflow_with_refused_service_call_leaves_server_consistent(workflow: str) -> None:
    for name, number in read_calls(workflow):
        answer = (Answer.FORBIDDEN, Answer.CONFLICT)[number % 2]
        with run_with_fault(workflow, (name, number), answer) as trial:
            check_consistent(trial)
            cloud, scenario, action = trial.cloud, trial.scenario, read_last_action(trial)
            server = cloud.show(trial.server)
            fails_as = scenario.fails_as
            if name == "images":
                fails_as = STATES_AFTER_REFUSED_IMAGE.get(workflow, fails_as)
            assert server.vm_state == {"done": scenario.ends, "failed": fails_as}[action.state]
            get_service(cloud, name).well()
            cloud.clean_up()
            check_consistent(trial)
            assert cloud.show(trial.server).vm_state == server.vm_state
            images = scenario.images if action.state == "done" else scenario.fails_images
            assert len(cloud.images.records) == images


@pytest.mark.parametrize("workflow", UNDO_CASES)
def test_workflow_with_refused_service_call_in_undo_restores_server(workflow: str) -> None:
    for call in read_calls(workflow, FAILING_VERBS[workflow]):
        with run_with_fault(workflow, call, Answer.CONFLICT, FAILING_VERBS[workflow]) as trial:
            action = read_last_action(trial)
            assert (action.state, action.message) == ("failed", "It broke.")
            cloud, scenario = trial.cloud, trial.scenario
            for host in cloud.hosts.values():
                host.driver.host.script.clear()
            check_consistent(trial)
            assert cloud.show(trial.server).vm_state == scenario.fails_as
            get_service(cloud, call[0]).well()
            cloud.clean_up()
            trial.check_end(scenario.fails_as, scenario.fails_with, scenario.fails_images)


# In the default set, tests of single workflows cover this and the next test.
@pytest.mark.slice("guests")
@pytest.mark.parametrize("workflow", CALLERS)
@pytest.mark.parametrize("answer", UNKNOWN, ids=lambda answer: answer.name.lower())
def test_workflow_succeeds_when_service_call_has_no_answer(workflow: str, answer: Answer) -> None:
    for call in read_calls(workflow):
        with run_with_fault(workflow, call, answer) as trial:
            cloud = trial.cloud
            cloud.time.pass_by(LATE_CALL_SECONDS / 2)
            get_service(cloud, call[0]).catches_up()
            cloud.time.pass_by(LATE_CALL_SECONDS)
            cloud.round()
            trial.check_expected_end()
            assert cloud.pending() == []


@pytest.mark.slice("guests")
@pytest.mark.parametrize("workflow", CALLERS)
def test_workflow_succeeds_when_other_conductor_runs_during_slow_call(workflow: str) -> None:
    for call in read_calls(workflow):
        with create_trial(workflow) as trial:
            cloud, service = trial.cloud, get_service(trial.cloud, call[0])
            engine, runs = cloud.engine, [0]

            def run_other_conductor(cloud: Cloud = cloud, runs: list[int] = runs) -> None:
                runs[0] += 1
                cloud.engine = cloud.conductor("c2/1")
                for _ in range(20):
                    cloud.round()

            service.meanwhile = run_other_conductor
            service.script[service.calls + call[1]] = Answer.SLOW
            trial.begin()
            cloud.settle()
            cloud.engine = engine
            print(workflow, call)
            assert runs == [1]
            trial.check_expected_end()
