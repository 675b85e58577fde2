# SPDX-License-Identifier: Apache-2.0
"""The way back of a step: a later step fails, and then the undo is killed, refused or repeated."""

from __future__ import annotations

from collections.abc import Callable

from common.domain.command_key import UNDO
from compute_agent.virt.memory.state.script import Fail
from conductor.engine.step import AnyStep
from conductor.workflows import WORKFLOWS
from tests.answers import Answer
from tests.fault_matrix import at_services
from tests.fault_matrix.aim import CONDUCTOR, Fault, commits, dies, journals, once, part
from tests.fault_matrix.at_database import GONE, dies_next, error
from tests.fault_matrix.at_hosts import INSIDE
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.fault_matrix.stage import CIRCUMSTANCES

#: Steps whose undo is a part of an action that a certain step fails.
FAILING = {("live_migrate", "return"): "arrive", ("evacuate", "revive"): "build"}


class Broken(Exception):
    """What nobody foresaw."""


def step_of(cell: Cell) -> AnyStep:
    story = WORKFLOWS[cell.workflow]
    return story.steps[story.index(cell.step)]


def failing_of(cell: Cell) -> AnyStep:
    """The first step from which the way back leads over the cell's, and that can fail outside."""
    story = WORKFLOWS[cell.workflow]
    at = story.index(cell.step)
    if name := FAILING.get((cell.workflow, cell.step)):
        return story.steps[story.index(name)]
    pivot = next(
        (number for number, step in enumerate(story.steps) if step.pivot), len(story.steps)
    )
    later = story.steps[at + 1 : pivot + 1]
    circumstances = ("", CIRCUMSTANCES.get((cell.workflow, cell.step), ""))
    return next(
        step
        for step in (*later, story.steps[at])
        if (step.command or step.call)
        and CIRCUMSTANCES.get((cell.workflow, step.name), "") in circumstances
    )


def _provoke(bench: Bench, cell: Cell) -> None:
    """That step fails for good, whenever it is tried."""
    failing = failing_of(cell)

    def look(point: Point) -> None:
        if point[0] == "agent" and point[3:] == (failing.name, "before") and failing.command:
            if cell.step == "revive":
                _source_returns(bench)
            bench.cloud.hosts[point[1]].driver.host.script[point[2]] = [Fail("It broke.")]
        elif failing.call and point == ("part", cell.workflow, failing.name, "call", "begins"):
            service = at_services.service_of(bench, _at(cell, failing))
            service.script[service.calls + 1] = Answer.CONFLICT
        elif point == ("journal", failing.name, "failed") and failing.call:
            at_services.service_of(bench, _at(cell, failing)).refusing.clear()

    bench.watchers.append(look)


def _at(cell: Cell, step: AnyStep) -> Cell:
    return Cell(cell.workflow, step.name, cell.kind, cell.fault)


def _source_returns(bench: Bench) -> None:
    """The host that the server leaves comes back while it is made elsewhere."""
    for host in bench.cloud.hosts.values():
        if not host.is_on:
            host.power_on()
            bench.pass_time(3)


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _provoke(bench, cell)
    step = step_of(cell)
    if step.undo_command:
        once(bench, _undoes(cell, *INSIDE), lambda point: dies(point[1])(point))
    elif step.undo_call:
        once(
            bench,
            part(cell, "undo_call", "begins"),
            lambda point: at_services.dies_when_answered(bench, cell),
        )
    else:
        once(bench, journals(cell, "undone"), lambda point: dies_next(bench, "written"))
    return Verdict.ENDED


def refused(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _provoke(bench, cell)
    step = step_of(cell)
    if step.undo_command:

        def refuse(point: Point) -> None:
            host = bench.cloud.hosts[point[1]].driver.host
            host.script[point[2]] = [Fail("Nor can it be undone.")]

        once(bench, _undoes(cell, "before"), refuse)
    elif step.undo_call:
        once(
            bench,
            part(cell, "undo_call", "begins"),
            lambda point: at_services.script(bench, cell, Answer.CONFLICT),
        )
    else:

        def broken(point: Point) -> None:
            raise Broken("nobody foresaw it")

        once(bench, part(cell, "undo", "begins"), broken)
    return Verdict.ENDED


def repeated(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """It was done, and nobody heard of it."""
    _provoke(bench, cell)
    step = step_of(cell)
    if step.undo_command:
        once(bench, _undoes(cell, "after"), lambda point: dies(point[1])(point))
    elif step.undo_call:
        once(
            bench,
            part(cell, "undo_call", "begins"),
            lambda point: at_services.script(bench, cell, Answer.LOST),
        )
    else:

        def unanswered(point: Point) -> None:
            raise error(GONE)

        once(bench, commits(cell, "before", "undone"), unanswered)
    return Verdict.ENDED


def _undoes(cell: Cell, *where: str) -> Callable[[Point], bool]:
    return lambda point: point[0] == "agent" and point[3] == UNDO + cell.step and point[4] in where


FAULTS: dict[str, Fault] = {
    "undo-kill-mid": kill_mid,
    "undo-refused": refused,
    "undo-repeated": repeated,
}
__all__ = ["CONDUCTOR", "FAULTS"]
