# SPDX-License-Identifier: Apache-2.0
"""Fits a guest on a host: NUMA nodes, dedicated CPUs, huge pages, PCI devices. Pure.

The scheduler calls this to test whether a guest fits, the claim to assign the parts. Both use the
same function on the same facts, so a proposed host can be claimed.

Invariant: no CPU, page or device is assigned twice. The same facts give the same answer. A fit is
found if there is one, on hosts with up to 14 NUMA nodes (``MOST_SETS``). The time grows with the
number of NUMA nodes and devices, not with their arrangements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from common.domain.hardware import Hardware
from common.domain.models import AssignedNumaNode, Device, HardwareAssignment, NumaNode
from common.domain.numa import near
from common.domain.numa.free import Free, free, make
from common.domain.numa.matching import match

#: The limit of sets of host NUMA nodes tried for near devices: all sets of up to 14 NUMA nodes.
MOST_SETS = 4096
Plans = Sequence[dict[int, AssignedNumaNode]]


def fit(
    numa_nodes: Sequence[NumaNode],
    devices: Sequence[Device],
    held: Sequence[HardwareAssignment],
    wanted: Hardware,
) -> HardwareAssignment | None:
    """Choose the NUMA nodes, CPUs, pages and devices of a host for a guest. No record changes.

    Args:
        numa_nodes: The NUMA nodes of the host.
        devices: The PCI devices of the host.
        held: The assignments of other guests on the host.
        wanted: The hardware that the guest requests.

    Returns:
        The assignment, or None if no fit is found. An empty assignment if the guest needs no
        assigned parts.
    """
    if not wanted.needs_assignment:
        return HardwareAssignment()
    free_nodes = free(numa_nodes, held)
    unheld = [
        device for device in near.unheld(devices, held) if near.is_wanted(device, wanted.devices)
    ]
    if not wanted.numa_nodes:
        addresses = near.choose(unheld, wanted.devices, (), "preferred")
        return None if addresses is None else HardwareAssignment([], addresses)
    plans = [
        {
            node.numa_node.id: assigned
            for node in free_nodes
            if (assigned := make(request, wanted, node)) is not None
        }
        for request in wanted.numa_nodes
    ]
    order = _order(free_nodes, near.unheld(devices, held), wanted)
    policy = wanted.options.get("pci_policy", "legacy")
    # NUMA nodes with devices -> the chosen devices. Other NUMA nodes do not matter.
    devices_by_nodes: dict[frozenset[int], list[str] | None] = {}
    for chosen in _sets(order, plans, unheld, wanted):
        nodes_with_devices = frozenset(chosen) & {device.numa_node for device in unheld}
        if nodes_with_devices not in devices_by_nodes:
            devices_by_nodes[nodes_with_devices] = near.choose(
                unheld, wanted.devices, chosen, "legacy" if policy == "preferred" else policy
            )
        addresses = devices_by_nodes[nodes_with_devices]
        if addresses is not None and (placed := _place(chosen, plans)) is not None:
            return HardwareAssignment(placed, addresses)
    if policy == "preferred" and (placed := _place(order, plans)) is not None:
        addresses = near.choose(unheld, wanted.devices, {part.numa_node for part in placed}, policy)
        return None if addresses is None else HardwareAssignment(placed, addresses)
    return None


def _order(free_nodes: Sequence[Free], devices: Sequence[Device], wanted: Hardware) -> list[int]:
    """Return the ids of the host's NUMA nodes, best first.

    ``devices`` are the unassigned devices of the host. NUMA nodes with most requested devices come
    first, and among these the nodes with fewest other devices. Of equal nodes, for dedicated CPUs
    the node with fewest free CPUs comes first, so that large places stay free. Otherwise the node
    with most free memory comes first, so that shared CPUs are spread.
    """

    def rank(node: Free) -> tuple[int, ...]:
        here = [
            near.is_wanted(device, wanted.devices)
            for device in devices
            if device.numa_node == node.numa_node.id
        ]
        room = node.pcpus if wanted.dedicated else -node.memory_mb
        return -sum(here), len(here) - sum(here), room, node.numa_node.id

    return [node.numa_node.id for node in sorted(free_nodes, key=rank)]


def _sets(
    order: Sequence[int], plans: Plans, devices: Sequence[Device], wanted: Hardware
) -> Iterator[Sequence[int]]:
    """Yield candidate sets of host NUMA nodes, best first.

    If the guest requests no devices, this is one set of all NUMA nodes. Otherwise each set has as
    many NUMA nodes as the guest, and each of these can hold at least one guest NUMA node. At most
    ``MOST_SETS`` sets are yielded.

    Args:
        order: The ids of the host's NUMA nodes, best first.
        plans: For each guest NUMA node, id of a host NUMA node -> possible place there.
        devices: Not used.
        wanted: The hardware that the guest requests.
    """
    if not wanted.devices:
        yield order
        return
    usable = [numa_node for numa_node in order if any(numa_node in plan for plan in plans)]
    yield from itertools.islice(itertools.combinations(usable, len(plans)), MOST_SETS)


def _place(numa_nodes: Sequence[int], plans: Plans) -> list[AssignedNumaNode] | None:
    """Return a place for each guest NUMA node, each on another of these host NUMA nodes.

    ``plans`` contains, for each guest NUMA node, id of a host NUMA node -> possible place there.
    Return None if the guest NUMA nodes cannot all be placed.
    """
    chosen = match([[numa_node for numa_node in numa_nodes if numa_node in plan] for plan in plans])
    return (
        None
        if chosen is None
        else [plan[numa_node] for numa_node, plan in zip(chosen, plans, strict=True)]
    )
