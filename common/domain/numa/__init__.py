# SPDX-License-Identifier: Apache-2.0
"""Which parts of a host a guest gets: NUMA nodes, CPUs of its own, huge pages, PCI devices.

Pure. The scheduler asks it whether a guest would fit, the claim where it goes: the same function on
the same facts, so that what is proposed can be claimed. Must stay true: no CPU, page or device is
given twice; the same facts give the same answer; what fits is found, whatever is asked, in time
that grows with NUMA nodes and devices, not with their arrangements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from common.domain.hardware import Hardware
from common.domain.models import AssignedNumaNode, Device, HardwareAssignment, NumaNode
from common.domain.numa import near
from common.domain.numa.free import Free, free, make
from common.domain.numa.matching import match

#: Sets of host NUMA nodes that are tried where devices must be near: all of them up to 14 NUMA
#: nodes.
MOST_SETS = 4096
Plans = Sequence[dict[int, AssignedNumaNode]]


def fit(
    numa_nodes: Sequence[NumaNode],
    devices: Sequence[Device],
    held: Sequence[HardwareAssignment],
    wanted: Hardware,
) -> HardwareAssignment | None:
    """The parts that the guest gets on a host with these NUMA nodes and devices, of which others
    hold some already.

    Returns:
        None when it does not fit; an empty Fitting when it needs no parts of its own.
    """
    if not wanted.needs_assignment:
        return HardwareAssignment()
    left = free(numa_nodes, held)
    unheld = [
        device for device in near.unheld(devices, held) if near.is_wanted(device, wanted.devices)
    ]
    if not wanted.numa_nodes:
        addresses = near.choose(unheld, wanted.devices, (), "preferred")
        return None if addresses is None else HardwareAssignment([], addresses)
    plans = [
        {
            there.numa_node.id: made
            for there in left
            if (made := make(request, wanted, there)) is not None
        }
        for request in wanted.numa_nodes
    ]
    order = _order(left, near.unheld(devices, held), wanted)
    policy = wanted.options.get("pci_policy", "legacy")
    known: dict[
        frozenset[int], list[str] | None
    ] = {}  # NUMA nodes with devices -> these; other NUMA nodes do not count
    for chosen in _sets(order, plans, unheld, wanted):
        having = frozenset(chosen) & {device.numa_node for device in unheld}
        if having not in known:
            known[having] = near.choose(
                unheld, wanted.devices, chosen, "legacy" if policy == "preferred" else policy
            )
        addresses = known[having]
        if addresses is not None and (placed := _placed(chosen, plans)) is not None:
            return HardwareAssignment(placed, addresses)
    if policy == "preferred" and (placed := _placed(order, plans)) is not None:
        addresses = near.choose(unheld, wanted.devices, {part.numa_node for part in placed}, policy)
        return None if addresses is None else HardwareAssignment(placed, addresses)
    return None


def _order(left: Sequence[Free], devices: Sequence[Device], wanted: Hardware) -> list[int]:
    """The host NUMA nodes, best first: with the devices that are asked for and without others; the
    fullest that will do for CPUs of one's own, so that large places stay; else the emptiest, so
    that shared CPUs are spread."""

    def rank(there: Free) -> tuple[int, ...]:
        here = [
            near.is_wanted(device, wanted.devices)
            for device in devices
            if device.numa_node == there.numa_node.id
        ]
        room = there.pcpus if wanted.dedicated else -there.memory_mb
        return -sum(here), len(here) - sum(here), room, there.numa_node.id

    return [there.numa_node.id for there in sorted(left, key=rank)]


def _sets(
    order: Sequence[int], plans: Plans, devices: Sequence[Device], wanted: Hardware
) -> Iterator[Sequence[int]]:
    """Sets of host NUMA nodes that might do: all at once when no device has to be near, else each
    of the guest's number."""
    if not wanted.devices:
        yield order
        return
    usable = [numa_node for numa_node in order if any(numa_node in plan for plan in plans)]
    yield from itertools.islice(itertools.combinations(usable, len(plans)), MOST_SETS)


def _placed(numa_nodes: Sequence[int], plans: Plans) -> list[AssignedNumaNode] | None:
    """Each guest NUMA node on one of these host NUMA nodes, no two on the same; None when that
    cannot be."""
    chosen = match([[numa_node for numa_node in numa_nodes if numa_node in plan] for plan in plans])
    return (
        None
        if chosen is None
        else [plan[numa_node] for numa_node, plan in zip(chosen, plans, strict=True)]
    )
