# SPDX-License-Identifier: Apache-2.0
"""Chooses PCI devices by their distance to the guest's memory and CPUs. Pure.

Policies: "legacy" (the default) takes devices on the guest's NUMA nodes or with an unknown NUMA
node. "required" takes only devices on the guest's NUMA nodes. "preferred" takes these if possible,
else any. A guest without NUMA nodes is near all devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.domain.hardware import DeviceRequest
from common.domain.models import Device, HardwareAssignment
from common.domain.numa.matching import match

#: The NUMA node of a device without a known NUMA node.
UNKNOWN = -1


def unheld(devices: Sequence[Device], held: Sequence[HardwareAssignment]) -> list[Device]:
    """Return the devices that no assignment in ``held`` contains, sorted by address."""
    taken = {address for assignment in held for address in assignment.devices}
    return sorted(
        (device for device in devices if device.address not in taken),
        key=lambda device: device.address,
    )


def is_wanted(device: Device, requests: Sequence[DeviceRequest]) -> bool:
    """Return True if the device is of a requested kind."""
    return any((device.vendor, device.product) in request.kinds for request in requests)


def choose(
    devices: Sequence[Device],
    requests: Sequence[DeviceRequest],
    numa_nodes: Collection[int],
    policy: str,
) -> list[str] | None:
    """Return the addresses of the devices for a guest. Devices near the guest are preferred.

    Return None if too few devices are of the requested kinds and suit the policy.

    Args:
        devices: The unassigned devices of the host.
        requests: The devices that the guest requests.
        numa_nodes: The host NUMA nodes of the guest. Empty: the guest has no NUMA nodes, and all
            devices suit every policy.
        policy: "required" permits only devices on ``numa_nodes``, "legacy" also devices without a
            known NUMA node, "preferred" all devices.
    """

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
