# SPDX-License-Identifier: Apache-2.0
"""The hosts as columns: one row a host, in every column the same.

``scheduler.hosts`` fills it from the store; filters and weighers read it. Nothing here does I/O.
What many hosts have in common (facts, metadata of aggregates) is kept once, with a column of
numbers or a mask of hosts beside it, so that a filter looks at each distinct value once, however
many hosts there are.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from common.domain.json_types import JsonMapping
from common.domain.models import Device, HardwareAssignment, NumaNode

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
    """A server group that some request names. members: row of a host -> how many servers of the
    group are there.
    most: servers a host under anti-affinity."""

    policy: str
    most: int = 1
    members: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a host is given out piece by piece: its NUMA nodes and devices, and what its guests
    hold of them. Hosts that are alike and hold nothing share one object."""

    numa_nodes: Sequence[NumaNode]
    devices: Sequence[Device]
    held: Sequence[HardwareAssignment]


@dataclass(frozen=True, slots=True)
class ImageOnHosts:
    """Servers of one image: how many (``counts``) are on the hosts in these ``rows``; each host
    stands there once."""

    properties: Mapping[str, str]
    rows: Numbers
    counts: Numbers


class TraitMasks(Mapping[str, Mask]):
    """Trait -> the hosts that have it, made when it is asked for: many hosts share few sets of
    traits."""

    def __init__(self, sets: Sequence[frozenset[str]], numbers: Numbers) -> None:
        self._sets, self._numbers = sets, numbers
        self._made: dict[str, Mask] = {}

    def __getitem__(self, trait: str) -> Mask:
        if trait not in self._made:
            has = np.array([trait in one for one in self._sets], np.bool_)
            if not has.any():
                raise KeyError(trait)
            self._made[trait] = has[self._numbers]
        return self._made[trait]

    def __iter__(self) -> Iterator[str]:
        return iter(frozenset().union(*self._sets))

    def __len__(self) -> int:
        return len(frozenset().union(*self._sets))


@dataclass(slots=True)
class Snapshot:
    """All hosts. ``take`` is the only method that changes it."""

    names: list[str] = field(default_factory=list)  #: of each row
    rows: dict[str, int] = field(default_factory=dict)  #: name -> row
    #: break near ties
    seeds: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    served: Mask = field(default_factory=no_mask)  #: has a compute service
    disabled: Mask = field(default_factory=no_mask)
    forced_down: Mask = field(default_factory=no_mask)
    up: Mask = field(default_factory=no_mask)
    zones: Numbers = field(default_factory=no_numbers)  #: number of the availability zone
    zone_numbers: dict[str, int] = field(default_factory=dict)
    stock: dict[str, Stock] = field(default_factory=dict)  #: by resource class
    traits: Mapping[str, Mask] = field(default_factory=dict)
    servers: Numbers = field(default_factory=no_numbers)  #: guests there, in any state
    #: actions that weigh on disk and network now
    working: Numbers = field(default_factory=no_numbers)
    failures: Numbers = field(default_factory=no_numbers)  #: builds that failed there in a row
    waits: Numbers = field(default_factory=no_numbers)  #: seconds until one is tried; 0: at once
    versions: Numbers = field(default_factory=no_numbers)  #: of the hypervisor
    kinds: Numbers = field(default_factory=no_numbers)  #: facts[kinds[row]] are those of a host
    #: hypervisor_type, hypervisor_version, cpu_info, supported_instances ..., without what differs
    #: for each host.
    facts: list[JsonMapping] = field(default_factory=list)
    metrics: dict[str, Floats] = field(default_factory=dict)  #: NaN where a host does not say
    aggregates: list[Aggregate] = field(default_factory=list)
    #: only of hosts with NUMA nodes or devices
    parts: MutableMapping[int, Parts] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    #: Where the servers are that hints of the request name (server id -> host), of its own project.
    places: Mapping[str, str] = field(default_factory=dict)
    #: of all requests in hand
    places_by_project: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    devices: Numbers = field(default_factory=no_numbers)  #: PCI devices that nobody holds
    #: read when some weigher asks for them
    images: list[ImageOnHosts] = field(default_factory=list)
    pause: int = 300  #: seconds from one try to the next

    def copy(self) -> Snapshot:
        """One that can be taken from; what ``take`` does not change is shared."""
        return replace(
            self,
            stock={
                name: replace(column, free=column.free.copy())
                for name, column in self.stock.items()
            },
            servers=self.servers.copy(),
            working=self.working.copy(),
            waits=self.waits.copy(),
            devices=self.devices.copy(),
            parts=ChainMap({}, cast("dict[int, Parts]", self.parts)),
            groups={
                name: replace(group, members=dict(group.members))
                for name, group in self.groups.items()
            },
        )

    def take(
        self,
        host: str,
        resources: Mapping[str, int],
        group: str | None = None,
        assignment: HardwareAssignment | None = None,
    ) -> None:
        """Count a server as placed on the host, if the host is known."""
        row = self.rows.get(host)
        if row is None:
            return
        for resource_class, amount in resources.items():
            if resource_class in self.stock:
                self.stock[resource_class].free[row] -= amount
        if self.servers.size:
            self.servers[row] += 1
            self.working[row] += 1
            if self.failures[row]:
                self.waits[row] = self.pause  # this one is the try
        if group in self.groups:
            members = self.groups[group].members
            members[row] = members.get(row, 0) + 1
        if assignment is not None and row in self.parts:
            self.parts[row] = replace(self.parts[row], held=[*self.parts[row].held, assignment])
            self.devices[row] -= len(assignment.devices)
