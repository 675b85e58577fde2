# SPDX-License-Identifier: Apache-2.0
"""The run of one cell: inject the fault once, and check the outcome."""

from __future__ import annotations

import traceback
import zlib
from dataclasses import dataclass

from tests.fault_matrix import (
    at_accept,
    at_cleanups,
    at_database,
    at_hosts,
    at_removals,
    at_scheduler,
    at_services,
    at_undo,
    outcome,
    pairs,
    second,
    stage,
)
from tests.fault_matrix.aim import Fault
from tests.fault_matrix.bench import Bench
from tests.fault_matrix.cells import REQUESTS, Cell, Kind
from tests.fault_matrix.outcome import Verdict
from tests.workflows.simulator import Crash

BY_KIND: dict[Kind, dict[str, Fault]] = {
    Kind.TRANSACTION: at_database.FAULTS,
    Kind.SCHEDULE: at_scheduler.FAULTS,
    Kind.COMMAND: at_hosts.FAULTS,
    Kind.EXTERNAL: at_services.FAULTS,
    Kind.UNDO: at_undo.FAULTS,
    Kind.CLEANUP: at_cleanups.FAULTS,
    Kind.REMOVAL: at_removals.FAULTS,
    Kind.PAIR: dict.fromkeys(REQUESTS, pairs.inject_pair),
    Kind.ACCEPT: dict.fromkeys(at_accept.ACCEPTS, at_accept.inject_nothing),
}
MOST_TURNS = 12
#: Faults that have several points in one cell. Each point is a separate run.
TURNS = ("agent-kill-mid", "remover-kill-mid")


class NotInjected(AssertionError):
    """The fault of a cell was not injected, or not exactly once, or had no effect."""


@dataclass(frozen=True)
class Outcome:
    """The result of a cell.

    Attributes:
        problem: Empty if the cell passed.
        story: The traceback of the problem.
        second: The fault that should follow the cell's own.
        followed: True if the second fault was injected.
    """

    cell: Cell
    problem: str = ""
    story: str = ""
    second: Cell | None = None
    followed: bool = False


def run(cell: Cell, seed: int = 0, twice: bool = False) -> Outcome:
    """Run a cell, and return exceptions as an outcome.

    Args:
        cell: The cell.
        seed: Changes the order in which the parts of the cloud run.
        twice: Draw a second fault, which follows the first.
    """
    other = second.draw(cell, seed) if twice else None
    try:
        followed = _check_once_or_twice(cell, other, seed)
    except (Exception, Crash) as problem:  # noqa: BLE001  # every exception is a result
        return Outcome(cell, outcome.describe_problem(problem), traceback.format_exc(), other)
    return Outcome(cell, second=other, followed=followed)


def _check_once_or_twice(cell: Cell, other: Cell | None, seed: int) -> bool:
    if other is not None:
        return check_twice(cell, other, seed)
    check(cell, seed)
    return False


def check_twice(cell: Cell, other: Cell, seed: int = 0) -> bool:
    """Run a cell with a second fault, and return True if the second fault was injected, too.

    Raises:
        NotInjected: The first fault was not injected.
        AssertionError: A check failed.
    """
    bench = Bench(_find_scenario(cell), zlib.crc32(cell.id.encode()) + seed)
    try:
        verdicts = second.follow(bench, other, BY_KIND)
        _inject(bench, cell, 0, verdicts)
        if not bench.hits:
            raise NotInjected("no action reached the point of the fault")
        outcome.delete_and_check(bench)
        return bench.hits > 1
    finally:
        bench.close()


def check(cell: Cell, seed: int = 0) -> None:
    """Run a cell.

    Raises:
        NotInjected: The fault was not injected.
        AssertionError: A check failed.
    """
    fault = BY_KIND.get(cell.kind, {}).get(cell.fault)
    if fault is None:
        raise NotInjected("the fault has no implementation")
    for turn in range(MOST_TURNS if cell.fault in TURNS else 1):
        if not _run_turn(cell, fault, seed, turn):
            if not turn:
                raise NotInjected("no action reached the point of the fault")
            return


def _find_scenario(cell: Cell) -> str:
    if cell.kind is Kind.CLEANUP:
        return at_cleanups.ORIGINS[cell.step].scenario
    if cell.kind is Kind.REMOVAL:
        return at_removals.find_scenario(cell)
    return stage.name_scenario(cell.workflow, cell.step)


def _run_turn(cell: Cell, fault: Fault, seed: int, turn: int) -> bool:
    """Run a cell once, and return False if its fault has no point with this number."""
    bench = Bench(_find_scenario(cell), zlib.crc32(cell.id.encode()) + seed + turn)
    try:
        if cell.kind is Kind.CLEANUP:
            at_cleanups.check(bench, cell, fault)
        elif cell.kind is Kind.REMOVAL:
            at_removals.check(bench, cell, fault, turn)
        else:
            _inject(bench, cell, turn, [])
        if not bench.hits:
            return False
        if bench.hits != 1 or not all(proof() for proof in bench.proofs):
            raise NotInjected(f"injected {bench.hits} times, or without effect")
        outcome.delete_and_check(bench)
        return True
    finally:
        bench.close()


def _inject(bench: Bench, cell: Cell, turn: int, others: list[Verdict]) -> None:
    """Prepare the fault, begin the action, and judge its end.

    ``turn`` is the number of the point. The verdicts of following faults are in ``others``.
    """
    others.insert(0, BY_KIND[cell.kind][cell.fault](bench, cell, turn))
    if cell.kind is Kind.ACCEPT:
        at_accept.begin(bench, cell)
    else:
        bench.begin()
    outcome.judge(bench, others)
