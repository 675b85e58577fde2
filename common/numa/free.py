# SPDX-License-Identifier: Apache-2.0
"""What is left of a host's NUMA cell, and how one guest cell would be made there.

Pure. Each guest cell has a host cell of its own, so what it gets there does not depend on the others.
Must stay true: memory in small pages is what the cell has beside its huge pages, and is not overcommitted.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.hardware import ANY, LARGE, SMALL, CellWish, Hardware
from common.models import Cell, FittedCell, Fitting
from common.numa import pins


@dataclass(frozen=True, slots=True)
class Free:
    """cores: with CPUs that nobody holds. memory_mb: in small pages. pages: size in KiB above small -> number."""

    cell: Cell
    cores: Sequence[pins.Core]
    memory_mb: int
    pages: dict[int, int]

    @property
    def pcpus(self) -> int:
        return sum(len(core.free) for core in self.cores)


def free(cells: Iterable[Cell], held: Sequence[Fitting]) -> list[Free]:
    """What is left of each cell."""
    parts = [part for fitting in held for part in fitting.cells]
    taken = {cpu for part in parts for cpu in (*part.pins.values(), *part.idle)}
    return [_free(cell, taken, [part for part in parts if part.cell == cell.id])
            for cell in sorted(cells, key=lambda cell: cell.id)]


def _free(cell: Cell, taken: set[int], held: Sequence[FittedCell]) -> Free:
    sizes = {int(size): number for size, number in cell.pages.items()}
    pages = {size: number - sum(part.memory_mb * 1024 // size for part in held if part.page_kb == size)
             for size, number in sizes.items() if size > SMALL}
    huge_mb = sum(size * number for size, number in sizes.items() if size > SMALL) // 1024
    small_mb = sizes[SMALL] * SMALL // 1024 if SMALL in sizes else cell.memory_mb - huge_mb
    small_mb -= sum(part.memory_mb for part in held if part.page_kb <= SMALL)
    return Free(cell, pins.cores(cell, set(cell.pcpus) - taken), small_mb, pages)


def make(wish: CellWish, wanted: Hardware, there: Free) -> FittedCell | None:
    """The guest's cell on this cell of the host; None when there is no place for it."""
    own = [cpu for cpu in wish.cpus if cpu in wanted.dedicated]
    if len(wish.cpus) - len(own) > len(there.cell.cpus):          # they would wait for each other
        return None
    page = _page(wish.memory_mb, wanted.page_kb, there)
    chosen = pins.choose(there.cores, len(own), wanted.threads) if page is not None else None
    if page is None or chosen is None:
        return None
    given, idle = chosen
    return FittedCell(there.cell.id, list(wish.cpus),
                      {str(guest): host for guest, host in zip(own, given, strict=True)}, wish.memory_mb, page, idle)


def _page(memory_mb: int, wanted: int, there: Free) -> int | None:
    """The size of the pages that the memory is given in, 0 where nobody asked; the largest of those that will do."""
    if wanted in (0, SMALL):
        return wanted if memory_mb <= there.memory_mb else None
    for size in sorted(there.pages, reverse=True):
        fits = memory_mb * 1024 % size == 0 and memory_mb * 1024 // size <= there.pages[size]
        if fits and wanted in (ANY, LARGE, size):
            return size
    return SMALL if wanted == ANY and memory_mb <= there.memory_mb else None
