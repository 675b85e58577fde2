# SPDX-License-Identifier: Apache-2.0
"""The choice, the order and the database of the cells that run with processes.

The first cells together cover every step and every fault of each workflow, so that a run without
time for all cells covers as much as possible.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from tests.fault_matrix.cells import Cell, Kind
from tests.fault_matrix.default_set import select_covering, sort_by_hash
from tests.fault_matrix.processes.faults import PLANS, explain_exclusion
from tests.fault_matrix.processes.world import KINDS


def select_runnable(every: Iterable[Cell]) -> list[Cell]:
    """Return the cells that can run with processes."""
    return [cell for cell in every if not explain_exclusion(cell)]


def _yield_places(cell: Cell) -> Iterator[Hashable]:
    """Yield the workflow with the step, and the workflow with the fault.

    For a pair, yield the first and the second workflow.
    """
    if cell.kind is Kind.PAIR:
        yield from ((cell.workflow, "first"), (cell.fault, "second"))
    else:
        yield from ((cell.workflow, cell.step, cell.kind), (cell.workflow, cell.fault))


def _yield_steps_with_faults(cell: Cell) -> Iterator[Hashable]:
    """Yield the step with the fault, for all workflows in common. Pairs have neither."""
    if cell.kind is not Kind.PAIR:
        yield cell.step, cell.kind, cell.fault


def order_cells(every: Iterable[Cell]) -> list[Cell]:
    """Return the cells by coverage: first all places, then all steps with faults, then the rest."""
    remaining = sort_by_hash(every)
    cells_in_order: list[Cell] = []
    for keys in (_yield_places, _yield_steps_with_faults):
        next_cells = select_covering(remaining, keys)
        cells_in_order += next_cells
        chosen = set(next_cells)
        remaining = [cell for cell in remaining if cell not in chosen]
    return [*cells_in_order, *remaining]


def assign_to_worlds(
    every: Iterable[Cell], kinds: tuple[str, ...] = KINDS
) -> dict[str, list[Cell]]:
    """Assign each cell to a kind of database.

    The databases get equal shares. Cells that need a database server do not run with SQLite.
    """
    shares: dict[str, list[Cell]] = {kind: [] for kind in kinds}
    for cell in every:
        plan = PLANS[cell.kind](cell)
        possible_kinds = [
            kind for kind in kinds if kind != "sqlite" or not (plan and plan.on_servers)
        ]
        if possible_kinds:
            shares[min(possible_kinds, key=lambda kind: len(shares[kind]))].append(cell)
    return shares
