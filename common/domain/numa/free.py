# SPDX-License-Identifier: Apache-2.0
"""What is left of a host's NUMA node, and how one guest NUMA node would be made there.

Pure. Each guest NUMA node has a host NUMA node of its own, so what it gets there does not depend on
the others. Must stay true: memory in small pages is what the NUMA node has beside its huge pages,
and is not overcommitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.domain.hardware import ANY, LARGE, SMALL, Hardware, NumaNodeRequest
from common.domain.models import AssignedNumaNode, HardwareAssignment, NumaNode
from common.domain.numa import pins


@dataclass(frozen=True, slots=True)
class Free:
    """cores: with CPUs that nobody holds. memory_mb: in small pages. pages: size in KiB above small
    -> number."""

    numa_node: NumaNode
    cores: Sequence[pins.Core]
    memory_mb: int
    pages: dict[int, int]

    @property
    def pcpus(self) -> int:
        return sum(len(core.free) for core in self.cores)


def free(numa_nodes: Iterable[NumaNode], held: Sequence[HardwareAssignment]) -> list[Free]:
    """What is left of each NUMA node."""
    parts = [part for assignment in held for part in assignment.numa_nodes]
    taken = {cpu for part in parts for cpu in (*part.pins.values(), *part.idle)}
    return [
        _free(numa_node, taken, [part for part in parts if part.numa_node == numa_node.id])
        for numa_node in sorted(numa_nodes, key=lambda numa_node: numa_node.id)
    ]


def _free(numa_node: NumaNode, taken: set[int], held: Sequence[AssignedNumaNode]) -> Free:
    sizes = {int(size): number for size, number in numa_node.pages.items()}
    pages = {
        size: number - sum(part.memory_mb * 1024 // size for part in held if part.page_kb == size)
        for size, number in sizes.items()
        if size > SMALL
    }
    huge_mb = sum(size * number for size, number in sizes.items() if size > SMALL) // 1024
    small_mb = sizes[SMALL] * SMALL // 1024 if SMALL in sizes else numa_node.memory_mb - huge_mb
    small_mb -= sum(part.memory_mb for part in held if part.page_kb <= SMALL)
    return Free(numa_node, pins.cores(numa_node, set(numa_node.pcpus) - taken), small_mb, pages)


def make(request: NumaNodeRequest, wanted: Hardware, there: Free) -> AssignedNumaNode | None:
    """The guest's NUMA node on this NUMA node of the host; None when there is no place for it."""
    own = [cpu for cpu in request.cpus if cpu in wanted.dedicated]
    if len(request.cpus) - len(own) > len(there.numa_node.cpus):  # they would wait for each other
        return None
    page = _page(request.memory_mb, wanted.page_kb, there)
    chosen = pins.choose(there.cores, len(own), wanted.threads) if page is not None else None
    if page is None or chosen is None:
        return None
    given, idle = chosen
    return AssignedNumaNode(
        there.numa_node.id,
        list(request.cpus),
        {str(guest): host for guest, host in zip(own, given, strict=True)},
        request.memory_mb,
        page,
        idle,
    )


def _page(memory_mb: int, wanted: int, there: Free) -> int | None:
    """The size of the pages that the memory is given in, 0 where nobody asked; the largest of those
    that will do."""
    if wanted in (0, SMALL):
        return wanted if memory_mb <= there.memory_mb else None
    for size in sorted(there.pages, reverse=True):
        fits = memory_mb * 1024 % size == 0 and memory_mb * 1024 // size <= there.pages[size]
        if fits and wanted in (ANY, LARGE, size):
            return size
    return SMALL if wanted == ANY and memory_mb <= there.memory_mb else None
