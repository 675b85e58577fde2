# SPDX-License-Identifier: Apache-2.0
"""A second fault comes while the first is being got over: which one, a seed draws."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

from tests.fault_matrix.aim import Fault
from tests.fault_matrix.bench import Bench
from tests.fault_matrix.cells import Cell, Kind, cells
from tests.fault_matrix.outcome import Verdict

#: What can be injected wherever an action is.
KINDS = (Kind.TRANSACTION, Kind.SCHEDULE, Kind.COMMAND, Kind.EXTERNAL, Kind.UNDO)
#: Cells whose own action is not watched: what is left to remove is.
ALONE = (Kind.CLEANUP, Kind.DEBT)
Faults = Mapping[Kind, Mapping[str, Fault]]
#: Of a command that is interrupted at one of several points, up to which.
MOST_TURNS = 4


def drawn(cell: Cell, seed: int) -> Cell | None:
    """The second fault of this cell; None: it has none. Of two actions it strikes the second; of
    one that a delete ends, the delete."""
    if cell.kind in ALONE:
        return None
    workflow = cell.workflow
    if cell.kind is Kind.PAIR:
        workflow = cell.fault
    elif cell.fault.startswith("delete-"):
        workflow = "delete"
    others = _others(workflow)
    return random.Random(f"{cell.id} {seed}").choice(others) if others else None


@cache
def _others(workflow: str) -> tuple[Cell, ...]:
    return tuple(cell for cell in cells() if cell.workflow == workflow and cell.kind in KINDS)


def follow(bench: Bench, cell: Cell, faults: Faults) -> list[Verdict]:
    """It is injected after the first, where its point is reached then; what that allows, as soon as
    it has been."""
    allowed: list[Verdict] = []

    def aim() -> None:
        turn = bench.chance.randrange(MOST_TURNS)
        verdict = faults[cell.kind][cell.fault](bench, cell, turn)
        if cell.kind is Kind.UNDO:  # what leads to the way back comes all the same
            allowed.append(verdict)
        bench.at_hit.append(lambda: allowed.append(verdict))

    bench.at_hit.append(aim)
    return allowed
