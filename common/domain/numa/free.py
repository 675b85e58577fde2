# SPDX-License-Identifier: Apache-2.0
"""The free resources of a host's NUMA node, and the place of one guest NUMA node there. Pure.

Each guest NUMA node is on its own host NUMA node, so its resources do not depend on the others.

Invariant: memory in small pages is the memory of the NUMA node without its huge pages, and is not
overcommitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.domain.hardware import ANY, LARGE, SMALL, Hardware, NumaNodeRequest
from common.domain.models import AssignedNumaNode, HardwareAssignment, NumaNode
from common.domain.numa import pins


@dataclass(frozen=True, slots=True)
class Free:
    """The free resources of a NUMA node."""

    numa_node: NumaNode
    #: Cores with free CPUs.
    cores: Sequence[pins.Core]
    #: Memory in small pages.
    memory_mb: int
    #: Size in KiB -> number of free huge pages.
    pages: dict[int, int]

    @property
    def pcpus(self) -> int:
        return sum(len(core.free) for core in self.cores)


def free(numa_nodes: Iterable[NumaNode], held: Sequence[HardwareAssignment]) -> list[Free]:
    """Return the free CPUs, memory and huge pages of each NUMA node, in the order of the ids.

    ``held`` are the assignments that occupy the host.
    """
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


def make(request: NumaNodeRequest, wanted: Hardware, node: Free) -> AssignedNumaNode | None:
    """Return the place of a guest NUMA node on this host NUMA node, or None if it does not fit.

    ``wanted`` is the hardware of the whole guest, with page size, dedicated CPUs and thread policy.
    """
    dedicated = [cpu for cpu in request.cpus if cpu in wanted.dedicated]
    if len(request.cpus) - len(dedicated) > len(
        node.numa_node.cpus
    ):  # More shared guest CPUs than host CPUs would block each other.
        return None
    page = _page(request.memory_mb, wanted.page_kb, node)
    chosen = pins.choose(node.cores, len(dedicated), wanted.threads) if page is not None else None
    if page is None or chosen is None:
        return None
    host_cpus, idle = chosen
    return AssignedNumaNode(
        node.numa_node.id,
        list(request.cpus),
        {str(guest): host for guest, host in zip(dedicated, host_cpus, strict=True)},
        request.memory_mb,
        page,
        idle,
    )


def _page(memory_mb: int, wanted: int, node: Free) -> int | None:
    """Return the page size in KiB, or 0 if no size is requested.

    Of several permitted sizes, this is the largest that fits. Huge pages fit if enough are free and
    the memory is a multiple of their size. None if the memory does not fit. ``wanted`` is
    ``Hardware.page_kb``.
    """
    if wanted in (0, SMALL):
        return wanted if memory_mb <= node.memory_mb else None
    for size in sorted(node.pages, reverse=True):
        fits = memory_mb * 1024 % size == 0 and memory_mb * 1024 // size <= node.pages[size]
        if fits and wanted in (ANY, LARGE, size):
            return size
    return SMALL if wanted == ANY and memory_mb <= node.memory_mb else None
