# SPDX-License-Identifier: Apache-2.0
"""Functions that inject a fault at a point of a cell's action.

The point before a step's transaction comes from the trace of the same action without a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tests.fault_matrix import bench as benches
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows.simulator import Crash

#: Prepares a fault before the workflow is requested, and returns the permitted ends of the action.
#: The last argument, ``turn``, selects the point of a fault with several points in one cell.
Fault = Callable[[Bench, Cell, int], Verdict]
CONDUCTOR = "conductor"
#: Points at which a conductor holds no transaction.
OUTSIDE = ("taken", "proposed", "called")


def inject_once(
    bench: Bench, matches: Callable[[Point], bool], inject: Callable[[Point], object]
) -> None:
    """Inject a fault at the first point that matches."""

    def look(point: Point) -> None:
        if matches(point):
            bench.watchers.remove(look)
            bench.record_hit()
            inject(point)

    bench.watchers.append(look)


def kill_at_point(process: str) -> Callable[[Point], object]:
    """Return a callback that kills a process.

    Args:
        process: ``CONDUCTOR``, "api", or the name of an agent's host.
    """

    def die(point: Point) -> None:
        raise Crash(process)

    return die


def match_journal(cell: Cell, event: str = "succeeded") -> Callable[[Point], bool]:
    """Return a predicate for the journal entry of an event of the cell's step.

    The transaction with the entry is still open at this point.
    """
    return lambda point: point == ("journal", cell.step, event)


def match_commit(cell: Cell, side: str, event: str = "succeeded") -> Callable[[Point], bool]:
    """Return a predicate for the COMMIT, "before" or "after", of an event of the cell's step."""
    return lambda point: point[:2] == ("commit", side) and (cell.step, event) in point[2]


def match_part(cell: Cell, function: str, where: str) -> Callable[[Point], bool]:
    """Return a predicate for the begin or the end of a function of the cell's step.

    The function is a field of ``Step``, for example "call". ``where`` is "begins" or "ends".
    """
    return lambda point: point == ("part", cell.workflow, cell.step, function, where)


def match_agent(cell: Cell, *where: str) -> Callable[[Point], bool]:
    """Return a predicate for points at which an agent executes the command of the cell's step."""
    return lambda point: point[0] == "agent" and point[3] == cell.step and point[4] in where


def match_point_before(cell: Cell, scenario: str) -> Callable[[Point], bool]:
    """Return a predicate for the last point before the step at which no transaction is open."""
    expected = find_point_before(scenario, cell.step)
    if expected[0] == "result":
        return lambda point: point[0] == "result" and point[2] == expected[2]
    return lambda point: point == expected


@cache
def find_point_before(scenario: str, step: str) -> Point:
    """Return the last point without an open transaction before the step succeeds, from a trace.

    Raises:
        LookupError: The trace has no such point.
    """
    for point in reversed(_trace_until_success(scenario, step)):
        if point[0] == "result" or (point[0] == CONDUCTOR and point[3] in OUTSIDE):
            return point
    raise LookupError(f"nothing comes before {step}")


def _trace_until_success(scenario: str, step: str) -> list[Point]:
    """Run the scenario without a fault, and return all points before the step's success."""
    nested, benches.NESTED = benches.NESTED, 0.0
    bench = Bench(scenario, 0)
    try:
        bench.begin()
        bench.settle(300)
        at = bench.trace.index(("journal", step, "succeeded"))
        return bench.trace[:at]
    finally:
        benches.NESTED = nested
        bench.close()
