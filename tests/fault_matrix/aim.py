# SPDX-License-Identifier: Apache-2.0
"""How a fault finds its point: what a fault of this matrix is, and the points that come before a
transaction, by a trace of the same action without any fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tests.fault_matrix import bench as benches
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows.simulator import Crash

#: Watches for its point before the workflow is asked for; returns what may become of it. ``turn``:
#: of a fault that has several points in one cell, which of them.
Fault = Callable[[Bench, Cell, int], Verdict]
CONDUCTOR = "conductor"
#: Points at which a conductor holds no transaction.
OUTSIDE = ("taken", "proposed", "called")


def once(bench: Bench, matches: Callable[[Point], bool], then: Callable[[Point], object]) -> None:
    """The first such point is where the fault is injected."""

    def look(point: Point) -> None:
        if matches(point):
            bench.watchers.remove(look)
            bench.hit()
            then(point)

    bench.watchers.append(look)


def dies(who: str) -> Callable[[Point], object]:
    """Whoever is there is killed."""

    def die(point: Point) -> None:
        raise Crash(who)

    return die


def journals(cell: Cell, event: str = "succeeded") -> Callable[[Point], bool]:
    """Within the transaction that says that the step has succeeded."""
    return lambda point: point == ("journal", cell.step, event)


def commits(cell: Cell, when: str, event: str = "succeeded") -> Callable[[Point], bool]:
    """Its COMMIT."""
    return lambda point: point[:2] == ("commit", when) and (cell.step, event) in point[2]


def part(cell: Cell, what: str, where: str) -> Callable[[Point], bool]:
    """A part of the step begins, or ends."""
    return lambda point: point == ("part", cell.workflow, cell.step, what, where)


def agent(cell: Cell, *where: str) -> Callable[[Point], bool]:
    """A host carries the step's command out."""
    return lambda point: point[0] == "agent" and point[3] == cell.step and point[4] in where


def before(cell: Cell, scenario: str) -> Callable[[Point], bool]:
    """The last point before the step's transaction, at which nobody holds one."""
    found = point_before(scenario, cell.step)
    if found[0] == "result":
        return lambda point: point[0] == "result" and point[2] == found[2]
    return lambda point: point == found


@cache
def point_before(scenario: str, step: str) -> Point:
    """The same, as the trace has it."""
    for point in reversed(_until(scenario, step)):
        if point[0] == "result" or (point[0] == CONDUCTOR and point[3] in OUTSIDE):
            return point
    raise LookupError(f"nothing comes before {step}")


def _until(scenario: str, step: str) -> list[Point]:
    """What is reached until the step has succeeded."""
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
