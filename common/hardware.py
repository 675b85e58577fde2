# SPDX-License-Identifier: Apache-2.0
"""What a flavor and an image say of a guest's hardware, understood once.

Pure. The API asks it to refuse what no host can carry out, placement what a server needs, the agent how the domain
looks: all three from the same frozen flavor and image properties, so they cannot disagree.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.models import Flavor

#: Resource classes that a flavor's own fields speak of.
OWN = ("VCPU", "MEMORY_MB", "DISK_GB")


@dataclass(frozen=True, slots=True)
class CellWish:
    """A NUMA cell that the guest shall have: its CPUs (guest numbers) and memory."""

    cpus: tuple[int, ...]
    memory_mb: int


@dataclass(frozen=True, slots=True)
class DeviceWish:
    """``count`` PCI devices, each any of these (vendor, product)."""

    name: str
    count: int
    kinds: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Hardware:
    """The guest's hardware as far as flavor and image ask for it; the defaults ask for nothing.

    cells: with one or more the guest has a place on its host's cells. dedicated: guest CPUs that have a host CPU each
    for themselves. threads: "", prefer, isolate or require. page_kb: 0 nothing asked, -1 any large, else that size.
    """

    sockets: int = 0
    cores: int = 0
    threads_per_core: int = 0
    cells: tuple[CellWish, ...] = ()
    dedicated: frozenset[int] = frozenset()
    threads: str = ""
    page_kb: int = 0
    devices: tuple[DeviceWish, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_fitting(self) -> bool:
        """Does the guest hold particular parts of its host?"""
        return bool(self.cells or self.dedicated or self.devices)


def hardware(flavor: Flavor, properties: Mapping[str, str]) -> Hardware:
    """What this flavor and these image properties ask for.

    Raises:
        BadRequest: a value that makes no sense, or something that hosts cannot carry out; it names the extra spec or
            the property.
    """
    return Hardware()


def resources(flavor: Flavor, properties: Mapping[str, str]) -> dict[str, int]:
    """Resource class -> amount that a server of this flavor and image holds of its host; no zeros."""
    amounts = dict(zip(OWN, (flavor.vcpus, flavor.memory_mb, flavor.disk_gb), strict=True))
    return {name: amount for name, amount in amounts.items() if amount}


def traits(flavor: Flavor, properties: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The traits that a host must have, and those that it must not have, sorted."""
    return [], []
