# SPDX-License-Identifier: Apache-2.0
"""The guest's hardware as far as a flavor and an image ask for it: what ``common.hardware`` answers.

Read by the API, the scheduler, the claim and the agent. The defaults ask for nothing.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: What ``Hardware.page_kb`` says beside a size in KiB.
NOT_ASKED, LARGE, ANY, SMALL = 0, -1, -2, 4


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
    """What the guest shall have.

    sockets, cores, threads_per_core: all three, or 0 when nobody asked. cells: with one or more the guest has a place
    on its host's cells. dedicated: guest CPUs that have a host CPU each for themselves. threads: "", prefer, isolate
    or require. page_kb: 0 nothing asked, -1 any larger than the smallest, -2 any, else that size. options: see
    docs/flavors.md.
    """

    sockets: int = 0
    cores: int = 0
    threads_per_core: int = 0
    cells: tuple[CellWish, ...] = ()
    dedicated: frozenset[int] = frozenset()
    threads: str = ""
    page_kb: int = NOT_ASKED
    devices: tuple[DeviceWish, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_fitting(self) -> bool:
        """Does the guest hold particular parts of its host?"""
        return bool(self.cells or self.dedicated or self.devices)
