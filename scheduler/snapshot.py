# SPDX-License-Identifier: Apache-2.0
"""The data about all hosts that filters and weighers read.

The data are numpy columns. Each host has one row, with the same number in every column.
``scheduler.hosts`` fills the columns from the store. This module does no I/O.

Data that many hosts share, for example facts and metadata of aggregates, are stored once beside a
column of numbers or a mask of hosts. A filter therefore evaluates each distinct value once, for any
number of hosts.
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
    """Return an empty mask, for a snapshot without hosts."""
    return np.zeros(0, np.bool_)


def no_numbers() -> Numbers:
    """Return an empty column, for a snapshot without hosts."""
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Stock:
    """One resource class on every host.

    Attributes:
        free: Unallocated units. This may be negative.
        least: Smallest amount for one consumer.
        most: Largest amount for one consumer. 0 if the host has no inventory of the class.
        step: Each amount must be a multiple of this.
    """

    free: Numbers
    least: Numbers
    most: Numbers
    step: Numbers


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A host aggregate with its metadata. ``members`` is the mask of its hosts."""

    id: int
    name: str
    meta: Mapping[str, str]
    members: Mask


@dataclass(slots=True)
class Group:
    """A server group of a request.

    Attributes:
        policy: Nova's name of the policy.
        most: Largest number of servers per host under anti-affinity.
        members: Number of the group's servers by row of their host.
    """

    policy: str
    most: int = 1
    members: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parts:
    """The NUMA nodes and devices of a host, and the hardware that its guests hold.

    Hosts with equal hardware, of which no guest holds a part, share one object.
    """

    numa_nodes: Sequence[NumaNode]
    devices: Sequence[Device]
    held: Sequence[HardwareAssignment]


@dataclass(frozen=True, slots=True)
class ImageOnHosts:
    """The hosts with servers of one image.

    Attributes:
        properties: The image's properties.
        rows: The hosts, without duplicates.
        counts: Number of servers of the image on each of these hosts.
    """

    properties: Mapping[str, str]
    rows: Numbers
    counts: Numbers


class TraitMasks(Mapping[str, Mask]):
    """The mask of hosts for each trait. A trait that no set contains raises KeyError.

    Because many hosts share few sets of traits, a mask is computed from the sets at its first use.
    """

    def __init__(self, sets: Sequence[frozenset[str]], numbers: Numbers) -> None:
        self._sets, self._numbers = sets, numbers
        self._masks: dict[str, Mask] = {}

    def __getitem__(self, trait: str) -> Mask:
        if trait not in self._masks:
            has = np.array([trait in traits for traits in self._sets], np.bool_)
            if not has.any():
                raise KeyError(trait)
            self._masks[trait] = has[self._numbers]
        return self._masks[trait]

    def __iter__(self) -> Iterator[str]:
        return iter(frozenset().union(*self._sets))

    def __len__(self) -> int:
        return len(frozenset().union(*self._sets))


@dataclass(slots=True)
class Snapshot:
    """All hosts, in columns with one row per host.

    ``scheduler.columns`` fills the base snapshot. A copy is changed only by ``take``, and by
    ``scheduler.selection.examine``, which sets ``places``.
    """

    #: Host name of each row, and row of each host name.
    names: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    #: Random bits from the host's name, which break near ties.
    seeds: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    #: The host has a compute service.
    served: Mask = field(default_factory=no_mask)
    disabled: Mask = field(default_factory=no_mask)
    forced_down: Mask = field(default_factory=no_mask)
    up: Mask = field(default_factory=no_mask)
    #: Number of the availability zone, and the number of each zone by name.
    zones: Numbers = field(default_factory=no_numbers)
    zone_numbers: dict[str, int] = field(default_factory=dict)
    #: By resource class.
    stock: dict[str, Stock] = field(default_factory=dict)
    traits: Mapping[str, Mask] = field(default_factory=dict)
    #: Guests on the host, in any state.
    servers: Numbers = field(default_factory=no_numbers)
    #: Running commands that copy whole disks, and servers that ``take`` has placed.
    working: Numbers = field(default_factory=no_numbers)
    #: Consecutive failed builds.
    failures: Numbers = field(default_factory=no_numbers)
    #: Seconds until a failing host is tried again. 0 means at once.
    waits: Numbers = field(default_factory=no_numbers)
    #: Version of the hypervisor.
    versions: Numbers = field(default_factory=no_numbers)
    #: Index into ``facts``.
    kinds: Numbers = field(default_factory=no_numbers)
    #: For example hypervisor_type, hypervisor_version, cpu_info and supported_instances. Facts that
    #: differ for each host are left out.
    facts: list[JsonMapping] = field(default_factory=list)
    #: By name. NaN if the host does not report the metric.
    metrics: dict[str, Floats] = field(default_factory=dict)
    aggregates: list[Aggregate] = field(default_factory=list)
    #: By row, only for hosts with NUMA nodes or devices.
    parts: MutableMapping[int, Parts] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    #: Server id -> host, for servers of the request's project that the hints of the request name.
    places: Mapping[str, str] = field(default_factory=dict)
    #: The same for all requests of the call, by project.
    places_by_project: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: Free PCI devices.
    devices: Numbers = field(default_factory=no_numbers)
    #: Empty unless a weigher needs the images.
    images: list[ImageOnHosts] = field(default_factory=list)
    #: Seconds between two tries of a failing host.
    pause: int = 300

    def copy(self) -> Snapshot:
        """Return a copy for ``take``. Data that ``take`` does not change are shared."""
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
        """Count a server as placed on the host. An unknown host is ignored.

        A host with failed builds is paused, because this server is its next try.

        Args:
            host: Name of the host.
            resources: Amount by resource class.
            group: Id of the server's group.
            assignment: The hardware that only this server uses.
        """
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
                # This server is the try. The next one waits until its result is known.
                self.waits[row] = self.pause
        if group in self.groups:
            members = self.groups[group].members
            members[row] = members.get(row, 0) + 1
        if assignment is not None and row in self.parts:
            self.parts[row] = replace(self.parts[row], held=[*self.parts[row].held, assignment])
            self.devices[row] -= len(assignment.devices)
