# SPDX-License-Identifier: Apache-2.0
"""Which parts of a host a guest gets: NUMA cells, CPUs of its own, huge pages, PCI devices.

Pure. The scheduler asks it whether a guest would fit, the claim where it goes: the same function on the same facts, so
that what is proposed can be claimed.
Must stay true: no CPU, page or device is given twice; the same facts give the same answer; what fits is found, whatever
is asked, in time that grows with cells and devices, not with their arrangements.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from common.hardware import Hardware
from common.models import Cell, Device, FittedCell, Fitting
from common.numa import near
from common.numa.free import Free, free, make
from common.numa.matching import match

#: Sets of host cells that are tried where devices must be near: all of them up to 14 cells.
MOST_SETS = 4096
Plans = Sequence[dict[int, FittedCell]]


def fit(cells: Sequence[Cell], devices: Sequence[Device], held: Sequence[Fitting], wanted: Hardware) -> Fitting | None:
    """The parts that the guest gets on a host with these cells and devices, of which others hold some already.

    Returns:
        None when it does not fit; an empty Fitting when it needs no parts of its own.
    """
    if not wanted.needs_fitting:
        return Fitting()
    left = free(cells, held)
    unheld = [device for device in near.unheld(devices, held) if near.is_wanted(device, wanted.devices)]
    if not wanted.cells:
        addresses = near.choose(unheld, wanted.devices, (), "preferred")
        return None if addresses is None else Fitting([], addresses)
    plans = [{there.cell.id: made for there in left if (made := make(wish, wanted, there)) is not None}
             for wish in wanted.cells]
    order = _order(left, near.unheld(devices, held), wanted)
    policy = wanted.options.get("pci_policy", "legacy")
    known: dict[frozenset[int], list[str] | None] = {}          # cells with devices -> these; other cells do not count
    for chosen in _sets(order, plans, unheld, wanted):
        having = frozenset(chosen) & {device.cell for device in unheld}
        if having not in known:
            known[having] = near.choose(unheld, wanted.devices, chosen, "legacy" if policy == "preferred" else policy)
        addresses = known[having]
        if addresses is not None and (placed := _placed(chosen, plans)) is not None:
            return Fitting(placed, addresses)
    if policy == "preferred" and (placed := _placed(order, plans)) is not None:
        addresses = near.choose(unheld, wanted.devices, {part.cell for part in placed}, policy)
        return None if addresses is None else Fitting(placed, addresses)
    return None


def _order(left: Sequence[Free], devices: Sequence[Device], wanted: Hardware) -> list[int]:
    """The host cells, best first: with the devices that are asked for and without others; the fullest that will do for
    CPUs of one's own, so that large places stay; else the emptiest, so that shared CPUs are spread."""
    def rank(there: Free) -> tuple[int, ...]:
        here = [near.is_wanted(device, wanted.devices) for device in devices if device.cell == there.cell.id]
        room = there.pcpus if wanted.dedicated else -there.memory_mb
        return -sum(here), len(here) - sum(here), room, there.cell.id
    return [there.cell.id for there in sorted(left, key=rank)]


def _sets(order: Sequence[int], plans: Plans, devices: Sequence[Device], wanted: Hardware) -> Iterator[Sequence[int]]:
    """Sets of host cells that might do: all at once when no device has to be near, else each of the guest's number."""
    if not wanted.devices:
        yield order
        return
    usable = [cell for cell in order if any(cell in plan for plan in plans)]
    yield from itertools.islice(itertools.combinations(usable, len(plans)), MOST_SETS)


def _placed(cells: Sequence[int], plans: Plans) -> list[FittedCell] | None:
    """Each guest cell on one of these host cells, no two on the same; None when that cannot be."""
    chosen = match([[cell for cell in cells if cell in plan] for plan in plans])
    return None if chosen is None else [plan[cell] for cell, plan in zip(chosen, plans, strict=True)]
