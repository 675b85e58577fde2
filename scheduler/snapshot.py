# SPDX-License-Identifier: Apache-2.0
"""The hosts as columns: one row a host, in every column the same.

``scheduler.hosts`` fills it from the store; filters and weighers read it. Nothing here does I/O. What many hosts have
in common (facts, metadata of aggregates) is kept once, with a column of numbers or a mask of hosts beside it, so that
a filter looks at each distinct value once, however many hosts there are.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.models import Cell, Device, Fitting

Mask = NDArray[np.bool_]
Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]


def no_mask() -> Mask:
    """A mask of no hosts."""
    return np.zeros(0, np.bool_)


def no_numbers() -> Numbers:
    """A column of no hosts."""
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Stock:
    """One resource class, a number a host: free units, and which amounts one consumer may take.

    A host without an inventory of the class has ``most`` 0.
    """

    free: Numbers
    least: Numbers
    most: Numbers
    step: Numbers


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregate of hosts: its metadata, and which hosts are in it."""

    id: int
    name: str
    meta: Mapping[str, str]
    members: Mask


@dataclass(slots=True)
class Group:
    """A server group that some request names. members: row of a host -> how many servers of the group are there.
    most: servers a host under anti-affinity."""

    policy: str
    most: int = 1
    members: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a host is given out piece by piece: its cells and devices, and what its guests hold of them."""

    cells: list[Cell]
    devices: list[Device]
    held: list[Fitting]


@dataclass(slots=True)
class Snapshot:
    """All hosts. ``take`` is the only method that changes it.

    servers: guests on the host, in any state. working: actions that weigh on the host's disk and network now.
    failures: builds that failed there in a row. waits: seconds until a host that was left out for them is tried again
    (0: at once). facts[kinds[row]] are the facts of a host: hypervisor_type, hypervisor_version, hypervisor_hostname
    excepted what differs for each host, cpu_info, supported_instances ... parts: only of hosts with cells or devices.
    places: where the servers are that hints of this request name (server id -> host), of the request's own project.
    """

    names: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    seeds: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    served: Mask = field(default_factory=no_mask)
    disabled: Mask = field(default_factory=no_mask)
    forced_down: Mask = field(default_factory=no_mask)
    up: Mask = field(default_factory=no_mask)
    zones: Numbers = field(default_factory=no_numbers)
    zone_numbers: dict[str, int] = field(default_factory=dict)
    stock: dict[str, Stock] = field(default_factory=dict)
    traits: dict[str, Mask] = field(default_factory=dict)
    servers: Numbers = field(default_factory=no_numbers)
    working: Numbers = field(default_factory=no_numbers)
    failures: Numbers = field(default_factory=no_numbers)
    waits: Numbers = field(default_factory=no_numbers)
    versions: Numbers = field(default_factory=no_numbers)
    kinds: Numbers = field(default_factory=no_numbers)
    facts: list[Mapping[str, Any]] = field(default_factory=list)
    metrics: dict[str, Floats] = field(default_factory=dict)       # NaN where a host does not tell
    aggregates: list[Aggregate] = field(default_factory=list)
    parts: dict[int, Parts] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def take(self, host: str, resources: Mapping[str, int], group: str | None = None) -> None:
        """Count a server as placed on the host, if the host is known."""
        row = self.rows.get(host)
        if row is None:
            return
        for resource_class, amount in resources.items():
            if resource_class in self.stock:
                self.stock[resource_class].free[row] -= amount
        if row < self.servers.size:
            self.servers[row] += 1
            self.working[row] += 1
        if group in self.groups:
            members = self.groups[group].members
            members[row] = members.get(row, 0) + 1
