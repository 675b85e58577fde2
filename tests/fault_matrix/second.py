# SPDX-License-Identifier: Apache-2.0
"""A second fault during the recovery from the first, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

from tests.fault_matrix.aim import Fault
from tests.fault_matrix.bench import Bench
from tests.fault_matrix.cells import Cell, Kind, cells
from tests.fault_matrix.outcome import Verdict

#: Kinds of faults that can follow another fault.
KINDS = (Kind.TRANSACTION, Kind.SCHEDULE, Kind.COMMAND, Kind.EXTERNAL, Kind.UNDO)
#: Kinds whose cells watch a pending cleanup instead of an action.
ALONE = (Kind.CLEANUP, Kind.REMOVAL)
Faults = Mapping[Kind, Mapping[str, Fault]]
#: Upper bound of the drawn point, for faults with several points.
MOST_TURNS = 4


def draw(cell: Cell, seed: int) -> Cell | None:
    """Return the second fault of a cell, or None.

    The fault belongs to the cell's own action, or to the second action of a pair, or to the delete
    that ends the action.
    """
    if cell.kind in ALONE:
        return None
    workflow = cell.workflow
    if cell.kind is Kind.PAIR:
        workflow = cell.fault
    elif cell.fault.startswith("delete-"):
        workflow = "delete"
    candidates = _list_candidates(workflow)
    return random.Random(f"{cell.id} {seed}").choice(candidates) if candidates else None


@cache
def _list_candidates(workflow: str) -> tuple[Cell, ...]:
    return tuple(cell for cell in cells() if cell.workflow == workflow and cell.kind in KINDS)


def follow(bench: Bench, cell: Cell, faults: Faults) -> list[Verdict]:
    """Prepare the second fault, to be injected after the first.

    The verdict of an undo is added directly after the first fault, because the failure that leads
    to the undo happens in any case.

    Returns:
        A list to which the verdict is added when the fault is injected.
    """
    verdicts: list[Verdict] = []

    def aim() -> None:
        turn = bench.rng.randrange(MOST_TURNS)
        verdict = faults[cell.kind][cell.fault](bench, cell, turn)
        if cell.kind is Kind.UNDO:
            verdicts.append(verdict)
        bench.at_hit.append(lambda: verdicts.append(verdict))

    bench.at_hit.append(aim)
    return verdicts
