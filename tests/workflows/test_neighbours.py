# SPDX-License-Identifier: Apache-2.0
"""Tests of each call of each workflow to an external service: refused, silent, or unanswered.

A run without faults yields the calls. With a fault in one call, the action ends, records and hosts
agree, and written disks are kept. The doctor finds only pending cleanups, and these end once the
service has recovered.
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
from tests.workflows.neighbours import ServiceDouble
from tests.workflows.scenarios import KILL, SCENARIOS, Trial, trial_of
from tests.workflows.simulator import Cloud, Time

#: Longer than a timed-out call may take. Its late effect is removed after this time.
LATE_CALL_SECONDS = 120
NEIGHBOURS = ("images", "networks", "shares", "volumes")
#: Calls a service only for a server that boots from a volume. test_volumes.py tests these calls.
WITH_VOLUMES_ALONE = ("rebuild",)
#: Workflows that call an external service.
CALLERS = [
    name
    for name, scenario in SCENARIOS.items()
    if not scenario.brief
    and not scenario.placed
    and name not in WITH_VOLUMES_ALONE
    and any(step.call or step.undo_call for step in WORKFLOWS[name].steps)
]
#: Workflow with calls in its undo -> the verb that fails.
RETURNING = {
    name: SCENARIOS[name].verbs[-1]
    for name in CALLERS
    if any(step.undo_call for step in WORKFLOWS[name].steps)
}
#: In the default set. The others are in a slice, because one function decides the result of a
#: refusal for all workflows.
DEFAULTS = ("create", "delete", "shelve", "resize")
ONE_BY_ONE = [
    name if name in DEFAULTS else pytest.param(name, marks=pytest.mark.slice("moves"))
    for name in CALLERS
]
BACK = [one for one in ONE_BY_ONE if getattr(one, "values", (one,))[0] in RETURNING]
#: Name of the service, and number of the call in the run.
Call = tuple[str, int]


@contextmanager
def create_trial(workflow: str, fails: str = "") -> Iterator[Trial]:
    """Yield a cloud just before the request of the workflow. Its hosts fail the verb ``fails``."""
    time = Time()
    cloud = Cloud(memory_store(time), time)
    trial = trial_of(cloud, workflow)
    cloud.watcher = lambda: None
    for host in cloud.hosts.values():
        host.driver.host.script |= {fails: [Fail("It broke.")] * 9} if fails else {}
    yield trial
    cloud.store.close()


def read_service(cloud: Cloud, name: str) -> ServiceDouble:
    service: ServiceDouble = getattr(cloud, name)
    return service


@cache
def read_calls(workflow: str, fails: str = "") -> tuple[Call, ...]:
    """Return the calls of a run without faults, or the calls after the failure of ``fails``."""
    with create_trial(workflow, fails) as trial:
        cloud = trial.cloud
        before = {name: read_service(cloud, name).calls for name in NEIGHBOURS}
        reached = dict(before)

        def note_failure(verb: str, step: str, where: str) -> None:
            if (verb, where) == (fails, "after"):
                reached.update({name: read_service(cloud, name).calls for name in NEIGHBOURS})

        for host in cloud.hosts.values():
            host.fault_point = note_failure
        trial.begin()
        cloud.settle()
        calls = tuple(
            (name, number - before[name])
            for name in NEIGHBOURS
            for number in range(reached[name] + 1, read_service(cloud, name).calls + 1)
        )
    assert calls, "it makes no call"
    return calls


@contextmanager
def run_with_fault(workflow: str, call: Call, how: Answer, fails: str = "") -> Iterator[Trial]:
    """Run the workflow with this fault in one call, and yield the result."""
    with create_trial(workflow, fails) as trial:
        service = read_service(trial.cloud, call[0])
        number = service.calls + call[1]
        service.script[number] = how
        trial.begin()
        trial.cloud.settle()
        # Shown if the test fails.
        print(f"{workflow}, call {call}, {service.asked[number - 1]}: {how.name}")
        yield trial


def check_whole(trial: Trial) -> None:
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
    was_there = scenario.ask != "create" and "shelveOffload" not in scenario.before
    assert not was_there or any("canary" in disk for disk in disks), disks


def last(trial: Trial) -> Any:
    return trial.cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0]


#: vm_state after a refused image, before the guest is changed.
REFUSED_IMAGE_ENDS = {"rescue": states.ACTIVE}


@pytest.mark.parametrize("workflow", ONE_BY_ONE)
def test_workflow_with_refused_call_leaves_server_whole(workflow: str) -> None:
    for name, number in read_calls(workflow):
        how = (Answer.FORBIDDEN, Answer.CONFLICT)[number % 2]
        with run_with_fault(workflow, (name, number), how) as trial:
            check_whole(trial)
            cloud, scenario, ended = trial.cloud, trial.scenario, last(trial)
            server = cloud.show(trial.server)
            fails_as = scenario.fails_as
            if name == "images":
                fails_as = REFUSED_IMAGE_ENDS.get(workflow, fails_as)
            assert server.vm_state == {"done": scenario.ends, "failed": fails_as}[ended.state]
            read_service(cloud, name).well()
            cloud.clean_up()
            check_whole(trial)
            assert cloud.show(trial.server).vm_state == server.vm_state
            images = scenario.images if ended.state == "done" else scenario.fails_images
            assert len(cloud.images.records) == images


@pytest.mark.parametrize("workflow", BACK)
def test_workflow_with_refused_call_in_undo_restores_server(workflow: str) -> None:
    for call in read_calls(workflow, RETURNING[workflow]):
        with run_with_fault(workflow, call, Answer.CONFLICT, RETURNING[workflow]) as trial:
            assert (last(trial).state, last(trial).message) == ("failed", "It broke.")
            cloud, scenario = trial.cloud, trial.scenario
            for host in cloud.hosts.values():
                host.driver.host.script.clear()
            check_whole(trial)
            assert cloud.show(trial.server).vm_state == scenario.fails_as
            read_service(cloud, call[0]).well()
            cloud.clean_up()
            trial.check_end(scenario.fails_as, scenario.fails_with, scenario.fails_images)


@pytest.mark.slice("guests")  # Tests of single workflows in the default set cover both.
@pytest.mark.parametrize("workflow", CALLERS)
@pytest.mark.parametrize("how", UNKNOWN, ids=lambda how: how.name.lower())
def test_workflow_succeeds_when_call_has_no_answer(workflow: str, how: Answer) -> None:
    for call in read_calls(workflow):
        with run_with_fault(workflow, call, how) as trial:
            cloud = trial.cloud
            cloud.time.pass_by(LATE_CALL_SECONDS / 2)
            read_service(cloud, call[0]).catches_up()
            cloud.time.pass_by(LATE_CALL_SECONDS)
            cloud.round()
            trial.check_expected_end()
            assert cloud.pending() == []


@pytest.mark.slice("guests")
@pytest.mark.parametrize("workflow", CALLERS)
def test_workflow_succeeds_when_other_conductor_works_during_slow_call(workflow: str) -> None:
    for call in read_calls(workflow):
        with create_trial(workflow) as trial:
            cloud, service = trial.cloud, read_service(trial.cloud, call[0])
            engine, times = cloud.engine, [0]

            def run_other_conductor(cloud: Cloud = cloud, times: list[int] = times) -> None:
                times[0] += 1
                cloud.engine = cloud.conductor("c2/1")
                for _ in range(20):
                    cloud.round()

            service.meanwhile = run_other_conductor
            service.script[service.calls + call[1]] = Answer.SLOW
            trial.begin()
            cloud.settle()
            cloud.engine = engine
            print(workflow, call)
            assert times == [1]
            trial.check_expected_end()
