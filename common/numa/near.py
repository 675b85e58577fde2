# SPDX-License-Identifier: Apache-2.0
"""Which PCI devices the guest gets, and how near they must be to its memory and CPUs.

Pure. legacy, which holds when nobody says otherwise: a device is on one of the guest's cells, or its cell is not known.
required: on one of them. preferred: there when it can be, else anywhere. A guest without cells is near everything.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence

from common.hardware import DeviceWish
from common.models import Device, Fitting
from common.numa.matching import match

UNKNOWN = -1          #: the cell of a device that is near to none


def unheld(devices: Sequence[Device], held: Sequence[Fitting]) -> list[Device]:
    """The devices that nobody has, by address."""
    taken = {address for fitting in held for address in fitting.devices}
    return sorted((device for device in devices if device.address not in taken), key=lambda device: device.address)


def is_wanted(device: Device, wishes: Sequence[DeviceWish]) -> bool:
    """Is it of a kind that is asked for?"""
    return any((device.vendor, device.product) in wish.kinds for wish in wishes)


def choose(devices: Sequence[Device], wishes: Sequence[DeviceWish], cells: Collection[int], policy: str,
           ) -> list[str] | None:
    """The addresses of the devices that the guest gets on these cells; none: it has no cells. None: too few."""
    def rank(device: Device) -> int:
        return 0 if device.cell in cells else 1 if device.cell == UNKNOWN else 2
    farthest = {"required": 0, "legacy": 1}.get(policy, 2) if cells else 2
    pool = [device for device in sorted(devices, key=rank) if rank(device) <= farthest]
    options = [[place for place, device in enumerate(pool) if (device.vendor, device.product) in wish.kinds]
               for wish in wishes for _ in range(wish.count)]
    chosen = match(options)
    return None if chosen is None else [pool[place].address for place in chosen]
