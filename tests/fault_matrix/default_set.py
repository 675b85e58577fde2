# SPDX-License-Identifier: Apache-2.0
"""The cells of the fault matrix that run in the default set.

The registry alone decides which cells these are. A new step, fault or action adds a cell of its
own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator

from tests.fault_matrix.cells import Cell
from tests.fault_matrix.known import FOUND, KNOWN, find_waiver


def default_cells(every: Iterable[Cell]) -> list[Cell]:
    """Return the cells that found a defect, and cells that complete them to a representative part.

    Together they have every workflow, every fault of each kind, and every action as the second of a
    pair. tests/workflows/test_every_workflow.py fails and repeats every step.
    """
    ordered = sort_by_hash(
        cell for cell in every if cell.id not in KNOWN and not find_waiver(cell.id)
    )
    with_defect = [cell for cell in ordered if cell.id in FOUND]
    others = select_covering([*with_defect, *ordered], list_coverage)
    return list(dict.fromkeys([*with_defect, *others]))


def sort_by_hash(every: Iterable[Cell]) -> list[Cell]:
    """Sort cells by a hash of their ids.

    A new cell leaves the order of the other cells unchanged.
    """
    return sorted(every, key=lambda cell: zlib.crc32(cell.id.encode()))


def select_covering(
    every: Iterable[Cell], keys: Callable[[Cell], Iterable[Hashable]]
) -> list[Cell]:
    """Return each cell that has a key which no earlier cell has."""
    seen: set[Hashable] = set()
    chosen = []
    for cell in every:
        new = set(keys(cell)) - seen
        if new:
            seen |= new
            chosen.append(cell)
    return chosen


def list_coverage(cell: Cell) -> Iterator[Hashable]:
    """Yield the workflow and the fault that a cell tries. A pair has its second action as fault."""
    yield from (cell.workflow, (cell.kind, cell.fault))
