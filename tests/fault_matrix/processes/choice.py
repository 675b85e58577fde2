# SPDX-License-Identifier: Apache-2.0
"""Which cells are run with processes, in which order, and where: each workflow's every step and
every fault first, so that a run that has not time for all has tried something of each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from tests.fault_matrix.cells import Cell, Kind
from tests.fault_matrix.default_set import by_hash, covering
from tests.fault_matrix.processes.faults import PLANS, unfit
from tests.fault_matrix.processes.world import KINDS


def fitting(every: Iterable[Cell]) -> list[Cell]:
    """Those that can be run."""
    return [cell for cell in every if not unfit(cell)]


def _places(cell: Cell) -> Iterator[Hashable]:
    """Each workflow with each of its steps, and with each fault."""
    if cell.kind is Kind.PAIR:
        yield from ((cell.workflow, "first"), (cell.fault, "second"))
    else:
        yield from ((cell.workflow, cell.step, cell.kind), (cell.workflow, cell.fault))


def _pairs(cell: Cell) -> Iterator[Hashable]:
    """Each step, by its name, with each fault."""
    if cell.kind is not Kind.PAIR:
        yield cell.step, cell.kind, cell.fault


def ordered(every: Iterable[Cell]) -> list[Cell]:
    """All of them: what covers the places, what covers the pairs, the rest."""
    left = by_hash(every)
    found: list[Cell] = []
    for keys in (_places, _pairs):
        taken = covering(left, keys)
        found += taken
        chosen = set(taken)
        left = [cell for cell in left if cell not in chosen]
    return [*found, *left]


def by_world(every: Iterable[Cell], kinds: tuple[str, ...] = KINDS) -> dict[str, list[Cell]]:
    """Where each is run: with the databases in turn, and one that needs a server of its database
    not with SQLite."""
    found: dict[str, list[Cell]] = {kind: [] for kind in kinds}
    for cell in every:
        plan = PLANS[cell.kind](cell)
        fit = [kind for kind in kinds if kind != "sqlite" or not (plan and plan.on_servers)]
        if fit:
            found[min(fit, key=lambda kind: len(found[kind]))].append(cell)
    return found
