# SPDX-License-Identifier: Apache-2.0
"""Every call that a workflow makes to a neighbour, refused, silent, or done without an answer.

Generated: an undisturbed run tells the calls. Whatever becomes of one of them, the action ends,
records and hosts agree, a disk that was written to is nowhere lost, the doctor finds nothing but
pending cleanups; and when the neighbour is well again nothing is left there.
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
from tests.workflows.neighbours import Neighbour
from tests.workflows.scenarios import KILL, SCENARIOS, Trial, trial_of
from tests.workflows.simulator import Cloud, Time

#: Longer than a call that was given up may take; what it made late is removed by then.
LATE_CALL_SECONDS = 120
NEIGHBOURS = ("images", "networks", "shares", "volumes")
#: Calls one only for a server that boots from a volume, whose calls test_volumes.py disturbs.
WITH_VOLUMES_ALONE = ("rebuild",)
#: Workflows that call a neighbour.
CALLERS = [
    name
    for name, scenario in SCENARIOS.items()
    if not scenario.brief
    and not scenario.placed
    and name not in WITH_VOLUMES_ALONE
    and any(step.call or step.undo_call for step in WORKFLOWS[name].steps)
]
#: Those that call one on the way back, with the host's verb that fails.
RETURNING = {
    name: SCENARIOS[name].verbs[-1]
    for name in CALLERS
    if any(step.undo_call for step in WORKFLOWS[name].steps)
}
#: In the default set. The others are in a slice: what a refusal comes to is decided in one place
#: for all.
DEFAULTS = ("create", "delete", "shelve", "resize")
ONE_BY_ONE = [
    name if name in DEFAULTS else pytest.param(name, marks=pytest.mark.slice("moves"))
    for name in CALLERS
]
BACK = [one for one in ONE_BY_ONE if getattr(one, "values", (one,))[0] in RETURNING]
Call = tuple[str, int]  # a neighbour, and the number of the call in the run


@contextmanager
def trial(workflow: str, fails: str = "") -> Iterator[Trial]:
    """A cloud just before the workflow is asked for; ``fails``: a verb that its hosts cannot do."""
    time = Time()
    cloud = Cloud(memory_store(time), time)
    made = trial_of(cloud, workflow)
    cloud.watcher = lambda: None
    for host in cloud.hosts.values():
        host.driver.host.script |= {fails: [Fail("It broke.")] * 9} if fails else {}
    yield made
    cloud.store.close()


def neighbour(cloud: Cloud, name: str) -> Neighbour:
    found: Neighbour = getattr(cloud, name)
    return found


@cache
def calls_of(workflow: str, fails: str = "") -> tuple[Call, ...]:
    """The calls of an undisturbed run; of one whose host fails, those that were made afterwards."""
    with trial(workflow, fails) as made:
        cloud = made.cloud
        before = {name: neighbour(cloud, name).calls for name in NEIGHBOURS}
        reached = dict(before)

        def failed(verb: str, step: str, where: str) -> None:
            if (verb, where) == (fails, "after"):
                reached.update({name: neighbour(cloud, name).calls for name in NEIGHBOURS})

        for host in cloud.hosts.values():
            host.fault_point = failed
        made.begin()
        cloud.settle()
        found = tuple(
            (name, number - before[name])
            for name in NEIGHBOURS
            for number in range(reached[name] + 1, neighbour(cloud, name).calls + 1)
        )
    assert found, "it makes no call"
    return found


@contextmanager
def disturbed(workflow: str, call: Call, how: Answer, fails: str = "") -> Iterator[Trial]:
    """The workflow has run, and that call came to this."""
    with trial(workflow, fails) as made:
        found = neighbour(made.cloud, call[0])
        number = found.calls + call[1]
        found.script[number] = how
        made.begin()
        made.cloud.settle()
        # for one that fails
        print(f"{workflow}, call {call}, {found.asked[number - 1]}: {how.name}")
        yield made


def is_whole(trial: Trial) -> None:
    """Records and hosts agree, nothing is in hand, and what the server has written is there or in
    its image."""
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


#: The state of a server whose image cannot be used: nothing was done to its guest yet.
REFUSED_IMAGE_ENDS = {"rescue": states.ACTIVE}


@pytest.mark.parametrize("workflow", ONE_BY_ONE)
def test_a_refusal_leaves_a_server_whole(workflow: str) -> None:
    for name, number in calls_of(workflow):
        how = (Answer.FORBIDDEN, Answer.CONFLICT)[number % 2]
        with disturbed(workflow, (name, number), how) as trial:
            is_whole(trial)
            cloud, scenario, ended = trial.cloud, trial.scenario, last(trial)
            server = cloud.show(trial.server)
            fails_as = scenario.fails_as
            if name == "images":
                fails_as = REFUSED_IMAGE_ENDS.get(workflow, fails_as)
            assert server.vm_state == {"done": scenario.ends, "failed": fails_as}[ended.state]
            neighbour(cloud, name).well()
            cloud.clean_up()
            is_whole(trial)
            assert cloud.show(trial.server).vm_state == server.vm_state
            images = scenario.images if ended.state == "done" else scenario.fails_images
            assert len(cloud.images.records) == images


@pytest.mark.parametrize("workflow", BACK)
def test_a_refusal_on_the_way_back_changes_nothing(workflow: str) -> None:
    for call in calls_of(workflow, RETURNING[workflow]):
        with disturbed(workflow, call, Answer.CONFLICT, RETURNING[workflow]) as trial:
            assert (last(trial).state, last(trial).message) == ("failed", "It broke.")
            cloud, scenario = trial.cloud, trial.scenario
            for host in cloud.hosts.values():
                host.driver.host.script.clear()
            is_whole(trial)
            assert cloud.show(trial.server).vm_state == scenario.fails_as
            neighbour(cloud, call[0]).well()
            cloud.clean_up()
            trial.is_right(scenario.fails_as, scenario.fails_with, scenario.fails_images)


@pytest.mark.slice("guests")  # stories of single workflows in the default set have both
@pytest.mark.parametrize("workflow", CALLERS)
@pytest.mark.parametrize("how", UNKNOWN, ids=lambda how: how.name.lower())
def test_silence_makes_it_late(workflow: str, how: Answer) -> None:
    for call in calls_of(workflow):
        with disturbed(workflow, call, how) as trial:
            cloud = trial.cloud
            cloud.time.pass_by(LATE_CALL_SECONDS / 2)
            neighbour(cloud, call[0]).catches_up()
            cloud.time.pass_by(LATE_CALL_SECONDS)
            cloud.round()
            trial.has_ended()
            assert cloud.pending() == []


@pytest.mark.slice("guests")
@pytest.mark.parametrize("workflow", CALLERS)
def test_others_go_on_while_one_waits_for_an_answer(workflow: str) -> None:
    for call in calls_of(workflow):
        with trial(workflow) as made:
            cloud, found = made.cloud, neighbour(made.cloud, call[0])
            engine, times = cloud.engine, [0]

            def others(cloud: Cloud = cloud, times: list[int] = times) -> None:
                times[0] += 1
                cloud.engine = cloud.conductor("c2/1")
                for _ in range(20):
                    cloud.round()

            found.meanwhile = others
            found.script[found.calls + call[1]] = Answer.SLOW
            made.begin()
            cloud.settle()
            cloud.engine = engine
            print(workflow, call)
            assert times == [1]
            made.has_ended()
