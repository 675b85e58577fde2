# SPDX-License-Identifier: Apache-2.0
"""Faults of an undo: a later step fails, and the undo is killed, refused or repeated."""

from __future__ import annotations

from collections.abc import Callable

from common.domain.command_key import UNDO
from compute_agent.virt.memory.state.script import Fail
from conductor.engine.step import AnyStep
from conductor.workflows import WORKFLOWS
from tests.answers import Answer
from tests.fault_matrix import at_services
from tests.fault_matrix.aim import (
    CONDUCTOR,
    Fault,
    inject_once,
    kill_at_point,
    match_commit,
    match_journal,
    match_part,
)
from tests.fault_matrix.at_database import GONE, kill_at_next_point, make_error
from tests.fault_matrix.at_hosts import INSIDE
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.fault_matrix.stage import CIRCUMSTANCES

#: (workflow, step) -> the later step that must fail so that this step is undone.
FAILING = {("live_migrate", "return"): "arrive", ("evacuate", "revive"): "build"}


class Broken(Exception):
    """An unexpected error."""


def find_step(cell: Cell) -> AnyStep:
    workflow = WORKFLOWS[cell.workflow]
    return workflow.steps[workflow.index(cell.step)]


def find_failing_step(cell: Cell) -> AnyStep:
    """Return the first step whose failure leads to the undo of the cell's step.

    The step has a command or a call, so that a host or a service can make the step fail.
    """
    workflow = WORKFLOWS[cell.workflow]
    at = workflow.index(cell.step)
    if name := FAILING.get((cell.workflow, cell.step)):
        return workflow.steps[workflow.index(name)]
    pivot = next(
        (number for number, step in enumerate(workflow.steps) if step.pivot), len(workflow.steps)
    )
    later = workflow.steps[at + 1 : pivot + 1]
    circumstances = ("", CIRCUMSTANCES.get((cell.workflow, cell.step), ""))
    return next(
        step
        for step in (*later, workflow.steps[at])
        if (step.command or step.call)
        and CIRCUMSTANCES.get((cell.workflow, step.name), "") in circumstances
    )


def _provoke_undo(bench: Bench, cell: Cell) -> None:
    """Let every attempt of the failing step fail."""
    failing = find_failing_step(cell)

    def look(point: Point) -> None:
        if point[0] == "agent" and point[3:] == (failing.name, "before") and failing.command:
            if cell.step == "revive":
                _return_source(bench)
            bench.cloud.hosts[point[1]].driver.host.script[point[2]] = [Fail("It broke.")]
        elif failing.call and point == ("part", cell.workflow, failing.name, "call", "begins"):
            service = at_services.find_service(bench, _make_service_cell(cell, failing))
            service.script[service.calls + 1] = Answer.CONFLICT
        elif point == ("journal", failing.name, "failed") and failing.call:
            at_services.find_service(bench, _make_service_cell(cell, failing)).refusing.clear()

    bench.watchers.append(look)


def _make_service_cell(cell: Cell, step: AnyStep) -> Cell:
    return Cell(cell.workflow, step.name, cell.kind, cell.fault)


def _return_source(bench: Bench) -> None:
    """Start the source host while the evacuation builds the server elsewhere."""
    for host in bench.cloud.hosts.values():
        if not host.is_on:
            host.power_on()
            bench.pass_time(3)


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _provoke_undo(bench, cell)
    step = find_step(cell)
    if step.undo_command:
        inject_once(bench, _match_undo(cell, *INSIDE), lambda point: kill_at_point(point[1])(point))
    elif step.undo_call:
        inject_once(
            bench,
            match_part(cell, "undo_call", "begins"),
            lambda point: at_services.kill_conductor_at_answer(bench, cell),
        )
    else:
        inject_once(
            bench, match_journal(cell, "undone"), lambda point: kill_at_next_point(bench, "written")
        )
    return Verdict.ENDED


def refuse_undo(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _provoke_undo(bench, cell)
    step = find_step(cell)
    if step.undo_command:

        def refuse(point: Point) -> None:
            host = bench.cloud.hosts[point[1]].driver.host
            host.script[point[2]] = [Fail("Nor can it be undone.")]

        inject_once(bench, _match_undo(cell, "before"), refuse)
    elif step.undo_call:
        inject_once(
            bench,
            match_part(cell, "undo_call", "begins"),
            lambda point: at_services.script_next_call(bench, cell, Answer.CONFLICT),
        )
    else:

        def raise_unexpected(point: Point) -> None:
            raise Broken("unexpected error")

        inject_once(bench, match_part(cell, "undo", "begins"), raise_unexpected)
    return Verdict.ENDED


def repeat_undo(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Let the undo take effect, but lose the result."""
    _provoke_undo(bench, cell)
    step = find_step(cell)
    if step.undo_command:
        inject_once(bench, _match_undo(cell, "after"), lambda point: kill_at_point(point[1])(point))
    elif step.undo_call:
        inject_once(
            bench,
            match_part(cell, "undo_call", "begins"),
            lambda point: at_services.script_next_call(bench, cell, Answer.LOST),
        )
    else:

        def lose_commit(point: Point) -> None:
            raise make_error(GONE)

        inject_once(bench, match_commit(cell, "before", "undone"), lose_commit)
    return Verdict.ENDED


def _match_undo(cell: Cell, *where: str) -> Callable[[Point], bool]:
    return lambda point: point[0] == "agent" and point[3] == UNDO + cell.step and point[4] in where


FAULTS: dict[str, Fault] = {
    "undo-kill-mid": kill_mid,
    "undo-refused": refuse_undo,
    "undo-repeated": repeat_undo,
}
__all__ = ["CONDUCTOR", "FAULTS"]
