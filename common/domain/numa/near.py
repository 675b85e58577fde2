# SPDX-License-Identifier: Apache-2.0
"""Which PCI devices the guest gets, and how near they must be to its memory and CPUs.

Pure. legacy, which holds when nobody says otherwise: a device is on one of the guest's NUMA nodes,
or its NUMA node is not known. required: on one of them. preferred: there when it can be, else
anywhere. A guest without NUMA nodes is near everything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.domain.hardware import DeviceRequest
from common.domain.models import Device, HardwareAssignment
from common.domain.numa.matching import match

UNKNOWN = -1  #: the NUMA node of a device that is near to none


def unheld(devices: Sequence[Device], held: Sequence[HardwareAssignment]) -> list[Device]:
    """The devices that nobody has, by address."""
    taken = {address for assignment in held for address in assignment.devices}
    return sorted(
        (device for device in devices if device.address not in taken),
        key=lambda device: device.address,
    )


def is_wanted(device: Device, requests: Sequence[DeviceRequest]) -> bool:
    """Is it of a kind that is asked for?"""
    return any((device.vendor, device.product) in request.kinds for request in requests)


def choose(
    devices: Sequence[Device],
    requests: Sequence[DeviceRequest],
    numa_nodes: Collection[int],
    policy: str,
) -> list[str] | None:
    """The addresses of the devices that the guest gets on these NUMA nodes; none: it has no NUMA
    nodes. None: too few."""

    def rank(device: Device) -> int:
        return 0 if device.numa_node in numa_nodes else 1 if device.numa_node == UNKNOWN else 2

    farthest = {"required": 0, "legacy": 1}.get(policy, 2) if numa_nodes else 2
    pool = [device for device in sorted(devices, key=rank) if rank(device) <= farthest]
    options = [
        [
            place
            for place, device in enumerate(pool)
            if (device.vendor, device.product) in request.kinds
        ]
        for request in requests
        for _ in range(request.count)
    ]
    chosen = match(options)
    return None if chosen is None else [pool[place].address for place in chosen]
