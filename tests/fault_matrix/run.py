# SPDX-License-Identifier: Apache-2.0
"""One cell is run: its fault is injected once, exactly there, and what must hold is looked at."""

from __future__ import annotations

import traceback
import zlib
from dataclasses import dataclass

from tests.fault_matrix import (
    at_accept,
    at_cleanups,
    at_database,
    at_debts,
    at_hosts,
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
from tests.fault_matrix.cells import ASKED, Cell, Kind
from tests.fault_matrix.outcome import Verdict
from tests.workflows.simulator import Crash

BY_KIND: dict[Kind, dict[str, Fault]] = {
    Kind.TRANSACTION: at_database.FAULTS,
    Kind.SCHEDULE: at_scheduler.FAULTS,
    Kind.COMMAND: at_hosts.FAULTS,
    Kind.EXTERNAL: at_services.FAULTS,
    Kind.UNDO: at_undo.FAULTS,
    Kind.CLEANUP: at_cleanups.FAULTS,
    Kind.DEBT: at_debts.FAULTS,
    Kind.PAIR: dict.fromkeys(ASKED, pairs.pair),
    Kind.ACCEPT: dict.fromkeys(at_accept.ACCEPTS, at_accept.nothing),
}
MOST_TURNS = 12
#: Faults that have several points in one cell; each is tried.
TURNS = ("agent-kill-mid", "remover-kill-mid")


class NotInjected(AssertionError):
    """The fault was not injected as it was meant."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell; ``problem`` empty: it passed. ``second``: the fault that came after
    its own, or should have, and ``followed``: did it?"""

    cell: Cell
    problem: str = ""
    story: str = ""
    second: Cell | None = None
    followed: bool = False


def run(cell: Cell, seed: int = 0, twice: bool = False) -> Outcome:
    """Run it, and catch what went wrong; ``twice``: a second fault follows."""
    other = second.drawn(cell, seed) if twice else None
    try:
        followed = _check(cell, other, seed)
    except (Exception, Crash) as problem:  # noqa: BLE001  # it is what the cell is about
        return Outcome(cell, outcome.worded(problem), traceback.format_exc(), other)
    return Outcome(cell, second=other, followed=followed)


def _check(cell: Cell, other: Cell | None, seed: int) -> bool:
    if other is not None:
        return check_twice(cell, other, seed)
    check(cell, seed)
    return False


def check_twice(cell: Cell, other: Cell, seed: int = 0) -> bool:
    """Run it, and have this second fault follow; was that one injected, too?

    Raises:
        NotInjected: the first could not be. AssertionError: something does not hold.
    """
    bench = Bench(_scenario(cell), zlib.crc32(cell.id.encode()) + seed)
    try:
        verdicts = second.follow(bench, other, BY_KIND)
        _inject(bench, cell, 0, verdicts)
        if not bench.hits:
            raise NotInjected("its point was not reached")
        outcome.empty(bench)
        return bench.hits > 1
    finally:
        bench.close()


def check(cell: Cell, seed: int = 0) -> None:
    """Run it.

    Raises:
        NotInjected: its fault could not be. AssertionError: something does not hold.
    """
    fault = BY_KIND.get(cell.kind, {}).get(cell.fault)
    if fault is None:
        raise NotInjected("nobody has written how")
    for turn in range(MOST_TURNS if cell.fault in TURNS else 1):
        if not _turn(cell, fault, seed, turn):
            if not turn:
                raise NotInjected("its point was not reached")
            return


def _scenario(cell: Cell) -> str:
    if cell.kind is Kind.CLEANUP:
        return at_cleanups.LEFT[cell.step].scenario
    if cell.kind is Kind.DEBT:
        return at_debts.scenario(cell)
    return stage.scenario_of(cell.workflow, cell.step)


def _turn(cell: Cell, fault: Fault, seed: int, turn: int) -> bool:
    """One run; False: there is no such point any more."""
    bench = Bench(_scenario(cell), zlib.crc32(cell.id.encode()) + seed + turn)
    try:
        if cell.kind is Kind.CLEANUP:
            at_cleanups.check(bench, cell, fault)
        elif cell.kind is Kind.DEBT:
            at_debts.check(bench, cell, fault, turn)
        else:
            _inject(bench, cell, turn, [])
        if not bench.hits:
            return False
        if bench.hits != 1 or not all(proof() for proof in bench.proofs):
            raise NotInjected(f"injected {bench.hits} times, or without effect")
        outcome.empty(bench)
        return True
    finally:
        bench.close()


def _inject(bench: Bench, cell: Cell, turn: int, others: list[Verdict]) -> None:
    """The action begins, its fault happens, and what must hold is looked at; ``others``: what
    faults that follow allow, as they happen."""
    others.insert(0, BY_KIND[cell.kind][cell.fault](bench, cell, turn))
    if cell.kind is Kind.ACCEPT:
        at_accept.begin(bench, cell)
    else:
        bench.begin()
    outcome.judge(bench, others)
