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
    stage,
)
from tests.fault_matrix.aim import Fault
from tests.fault_matrix.bench import Bench
from tests.fault_matrix.cells import ASKED, Cell, Kind

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
    """What became of a cell; ``problem`` empty: it passed."""

    cell: Cell
    problem: str = ""
    story: str = ""


def run(cell: Cell, seed: int = 0) -> Outcome:
    """Run it, and catch what went wrong."""
    try:
        check(cell, seed)
    except Exception as problem:  # noqa: BLE001  # it is what the cell is about
        said = " ".join(str(problem).split()) or "no words"
        return Outcome(cell, f"{type(problem).__name__}: {said[:300]}", traceback.format_exc())
    return Outcome(cell)


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
            verdict = fault(bench, cell, turn)
            if cell.kind is Kind.ACCEPT:
                at_accept.begin(bench, cell)
            else:
                bench.begin()
            outcome.judge(bench, verdict)
        if not bench.hits:
            return False
        if bench.hits != 1 or not all(proof() for proof in bench.proofs):
            raise NotInjected(f"injected {bench.hits} times, or without effect")
        outcome.empty(bench)
        return True
    finally:
        bench.close()
