# SPDX-License-Identifier: Apache-2.0
"""What is read of hosts becomes columns: where each host stands, and what many of them share kept
once.

``scheduler.hosts`` decides what is read and when, and hands it to ``Columns``. Rows are in the
order of the providers' ids, so that a host is found by bisection; hosts that come or go move the
others. Facts, sets of traits, NUMA nodes and devices come as text: each text is parsed once, and a
column of numbers stands in its place, so that a filter looks at each once however many hosts have
it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import Device, HardwareAssignment, NumaNode
from common.domain.wire import from_wire
from common.store.placement.host_states import HostRows, Rows
from common.store.placement.inventories import MOST
from scheduler.snapshot import Aggregate, ImageOnHosts, Numbers, Parts, Snapshot, Stock, TraitMasks

log = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
#: Hypervisor and its version, and the texts of cpu_info and facts.
HostKind = tuple[str, int, str | None, str | None]
FLAGS = ("served", "disabled", "forced_down", "up")
NUMBERS = ("zones", "servers", "working", "failures", "waits", "versions", "kinds", "devices")


class Shared(Generic[K, T]):
    """Values that many hosts have in common, each made once and known by its number; 0 is what
    nobody has yet."""

    def __init__(self, make: Callable[[K], T], nothing: T) -> None:
        self._make = make
        self._nothing = nothing
        self._numbers: dict[K, int] = {}
        self.values: list[T] = [nothing]

    def number(self, key: K) -> int:
        """The number of what is made of the key."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(self._make(key))
        return number

    def forget(self, column: Numbers) -> Numbers:
        """The column renumbered, values that it does not have let go."""
        if not column.size:
            return column
        used, renumbered = np.unique(column, return_inverse=True)
        places = {int(old): new for new, old in enumerate(used[used > 0], start=1)}
        self.values = [self._nothing, *(self.values[old] for old in places)]
        self._numbers = {
            key: places[number] for key, number in self._numbers.items() if number in places
        }
        return renumbered.astype(np.int64) + int(used[0] != 0)


class HostParts(Mapping[int, Parts]):
    """Row -> the parts of the host, for those that have any; hosts that are alike and empty share
    one object, and each is the same object whenever it is asked for."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._empty: dict[tuple[int, int], Parts] = {}
        self._used: dict[int, Parts] = {}

    def __getitem__(self, row: int) -> Parts:
        columns = self._columns
        kind = int(columns.own["numa_nodes"][row]), int(columns.own["gear"][row])
        if kind == (0, 0):
            raise KeyError(row)
        if kind not in self._empty:
            self._empty[kind] = Parts(
                columns.numa_nodes.values[kind[0]], columns.gear.values[kind[1]], ()
            )
        empty, held = self._empty[kind], columns.held.get(columns.base.names[row])
        if not held:
            return empty
        if row not in self._used:
            self._used[row] = Parts(empty.numa_nodes, empty.devices, held)
        return self._used[row]

    def __contains__(self, row: object) -> bool:
        own, number = self._columns.own, cast(int, row)
        return bool(own["numa_nodes"][number] or own["gear"][number])

    def __iter__(self) -> Iterator[int]:
        return iter(
            np.flatnonzero(self._columns.own["numa_nodes"] + self._columns.own["gear"]).tolist()
        )

    def __len__(self) -> int:
        return int(np.count_nonzero(self._columns.own["numa_nodes"] + self._columns.own["gear"]))


class Columns:
    """The snapshot that others are copied from. ids: the provider of each row. own: columns that
    only this module and ``scheduler.hosts`` read: generations, changed_at, failed_at, traits, NUMA
    nodes and gear (numbers of what is shared). held: host -> what its guests hold of its parts."""

    def __init__(self) -> None:
        self.base = Snapshot()
        self.ids: Numbers = np.zeros(0, np.int64)
        self.own = {
            name: np.zeros(0, np.int64)
            for name in ("generations", "changed_at", "failed_at", "traits", "numa_nodes", "gear")
        }
        self.facts: Shared[HostKind, JsonMapping] = Shared(_facts, {})
        self.traits: Shared[str, frozenset[str]] = Shared(_names, frozenset())
        self.numa_nodes: Shared[str, Sequence[NumaNode]] = Shared(partial(_records, NumaNode), ())
        self.gear: Shared[str, Sequence[Device]] = Shared(partial(_records, Device), ())
        self.held: dict[str, list[HardwareAssignment]] = {}
        self.images: dict[int, dict[str, int]] = {}  # provider -> image -> servers
        self.images_moved = True  # since fill_images

    def positions(self, ids: Sequence[int] | Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
        """The row of each provider, and whether it is known at all."""
        wanted = np.asarray(ids, np.int64)
        if not self.ids.size:
            return np.zeros(wanted.size, np.int64), np.zeros(wanted.size, np.bool_)
        rows = np.minimum(np.searchsorted(self.ids, wanted), self.ids.size - 1)
        return rows, self.ids[rows] == wanted

    def outdated(self, changed: Rows, read_at: int) -> list[int]:
        """Of providers (id, generation, changed_at) those that are not known as they are there, and
        all that changed since the last read began: two changes in one microsecond look alike."""
        if not changed:
            return []
        ids, generations, times = np.array([row[:3] for row in changed], np.int64).T
        rows, known = self.positions(ids)
        if known.any():
            known &= (self.own["generations"][rows] == generations) & (
                self.own["changed_at"][rows] == times
            )
            known &= times < read_at
        return ids[~known].tolist()  # type: ignore[no-any-return]

    def take_in(self, rows: HostRows) -> bool:
        """What was read of some hosts replaces what was known of them; returns whether rows
        moved."""
        if not rows.providers:
            return False
        ids = np.array([row.id for row in rows.providers], np.int64)
        at, known = self.positions(ids)
        if not known.all():
            self._arrange(
                {
                    **dict(zip(self.ids.tolist(), self.base.names, strict=True)),
                    **{row.id: row.host for row in rows.providers},
                }
            )
            at, _ = self.positions(ids)
        self._fill_hosts(rows.providers, at)
        self._fill_stock(rows.inventories, at)
        self._fill_parts(rows, at)
        for row in rows.providers if self.images else ():
            self.images.pop(row.id, None)
        self.images_moved = True
        for provider, image, number in rows.images:
            self.images.setdefault(provider, {})[image] = number
        return not known.all()

    def drop(self, gone: Sequence[int]) -> None:
        """Forget the hosts of these providers."""
        left = dict(zip(self.ids.tolist(), self.base.names, strict=True))
        for provider in gone:
            self.held.pop(left.pop(provider, ""), None)
            self.images.pop(provider, None)
        self.images_moved = True
        self._arrange(left)

    def _arrange(self, names: dict[int, str]) -> None:
        """Make room for exactly these hosts, provider id -> host, and move what is known of
        them."""
        ids = np.array(sorted(names), np.int64)
        kept = np.isin(self.ids, ids)
        places = np.searchsorted(ids, self.ids[kept])

        def moved(column: NDArray[Any], fill: float = 0) -> NDArray[Any]:
            fresh = np.full(ids.size, fill, column.dtype)
            fresh[places] = column[kept]
            return fresh

        base = self.base
        base.names = [names[provider] for provider in ids.tolist()]
        base.rows = {name: row for row, name in enumerate(base.names)}
        for flag in (*FLAGS, *NUMBERS):
            column = getattr(base, flag)
            setattr(
                base, flag, moved(column if column.size else np.zeros(self.ids.size, column.dtype))
            )
        seeds = moved(base.seeds)
        for row in np.flatnonzero(seeds == 0).tolist():
            seeds[row] = seed(base.names[row])
        base.seeds = seeds
        base.stock = {
            name: Stock(
                moved(stock.free), moved(stock.least), moved(stock.most), moved(stock.step, 1)
            )
            for name, stock in base.stock.items()
        }
        base.metrics = {name: moved(column, np.nan) for name, column in base.metrics.items()}
        self.own = {name: moved(column) for name, column in self.own.items()}
        self.ids = ids

    def _fill_hosts(self, rows: Rows, at: Numbers) -> None:
        base, read = self.base, dict(zip(rows[0]._fields, zip(*rows, strict=True), strict=True))
        for flag in FLAGS:
            getattr(base, flag)[at] = np.array(read[flag], np.bool_)
        base.servers[at], base.failures[at] = read["guests"], read["failures"]
        base.versions[at] = read["hypervisor_version"]
        base.kinds[at] = [
            self.facts.number(key)
            for key in zip(
                read["hypervisor_type"],
                read["hypervisor_version"],
                read["cpu_info"],
                read["facts"],
                strict=True,
            )
        ]
        base.facts = self.facts.values
        for name, column in (
            ("generations", "generation"),
            ("changed_at", "changed_at"),
            ("failed_at", "failed_at"),
        ):
            self.own[name][at] = read[column]
        for name, shared, texts in (
            ("traits", self.traits, read["traits"]),
            ("numa_nodes", self.numa_nodes, read["numa_nodes"]),
            ("gear", self.gear, read["devices"]),
        ):
            numbers: Shared[str, Any] = shared
            self.own[name][at] = [
                numbers.number(text) if text and text != "[]" else 0 for text in texts
            ]
        base.traits = TraitMasks(self.traits.values, self.own["traits"])

    def _fill_stock(self, rows: Rows, at: Numbers) -> None:
        stock = self.base.stock
        for column in stock.values():  # a class may have gone from the provider
            column.free[at] = column.most[at] = 0
        by_class: dict[str, list[Any]] = {}
        for row in rows:
            by_class.setdefault(row.resource_class, []).append(row)
        for name, found in by_class.items():
            if name not in stock:
                stock[name] = _empty_stock(self.ids.size)
            ids, _, total, reserved, least, most, step, ratio, used = (
                np.array(part) for part in zip(*found, strict=True)
            )
            places, known = self.positions(ids)
            places, column = places[known], stock[name]  # what is not known came since: next time
            room = np.minimum((total - reserved) * ratio, MOST).astype(np.int64)
            column.free[places] = (room - used.astype(np.int64))[known]
            column.least[places], column.most[places] = least[known], most[known]
            column.step[places] = np.maximum(1, step)[known]

    def _fill_parts(self, rows: HostRows, at: Numbers) -> None:
        base = self.base
        for row in at.tolist() if self.held else ():
            self.held.pop(base.names[row], None)
        damaged = set()
        for provider, text in rows.assignments:
            (place,), (known,) = self.positions([provider])
            if known:
                try:
                    assignment = from_wire(HardwareAssignment, json.loads(text))
                except (ValueError, TypeError):
                    log.exception(
                        "the record of a guest's CPUs and devices on host %s is damaged; the host gives "
                        "none of them to other guests: %.200s",
                        base.names[place],
                        text,
                    )
                    damaged.add(place)
                    continue
                self.held.setdefault(base.names[place], []).append(assignment)
        for place in damaged:
            self.held.pop(base.names[place], None)
            self.own["numa_nodes"][place] = self.own["gear"][place] = 0
        sizes = np.array([len(gear) for gear in self.gear.values], np.int64)
        base.devices[at] = sizes[self.own["gear"][at]]
        for row in at.tolist() if self.held else ():
            base.devices[row] -= sum(
                len(assignment.devices) for assignment in self.held.get(base.names[row], ())
            )
        base.parts = cast("dict[int, Parts]", HostParts(self))

    def fill_aggregates(
        self, rows: Rows, members: Mapping[int, list[str]], default_zone: str
    ) -> None:
        """All aggregates, of which ``members`` has the hosts of those that changed; zones
        follow."""
        base, size = self.base, len(self.base.names)
        before = {aggregate.id: aggregate for aggregate in base.aggregates}
        base.aggregates = []
        for row in rows:
            if row.id in members:
                mask = np.zeros(size, np.bool_)
                mask[[base.rows[host] for host in members[row.id] if host in base.rows]] = True
            else:
                mask = before[row.id].members
            base.aggregates.append(Aggregate(row.id, row.name, row.meta, mask))
        zoned = [
            (aggregate, aggregate.meta["availability_zone"])
            for aggregate in base.aggregates
            if aggregate.meta.get("availability_zone")
        ]
        names = sorted({default_zone, *(zone for _, zone in zoned)})
        base.zone_numbers = {name: number for number, name in enumerate(names)}
        base.zones = np.full(size, base.zone_numbers[default_zone], np.int64)
        for aggregate, zone in zoned:
            base.zones[aggregate.members] = base.zone_numbers[zone]

    def fill_working(self, found: Mapping[str, int]) -> None:
        """Host -> actions in hand there."""
        base = self.base
        base.working = np.zeros(len(base.names), np.int64)
        for host, number in found.items():
            if host in base.rows:
                base.working[base.rows[host]] = number

    def fill_metrics(self, rows: Rows) -> None:
        """host, {name: number} as agents measured them; what is no number counts as not told."""
        base = self.base
        for host, metrics in rows:
            for name, value in (
                metrics.items() if host in base.rows and isinstance(metrics, dict) else ()
            ):
                if isinstance(value, (int, float)):
                    column = base.metrics.setdefault(name, np.full(len(base.names), np.nan))
                    column[base.rows[host]] = value

    def fill_images(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """Turn round what is known of the images of each host's servers. properties: image -> its
        properties."""
        rows: dict[str, dict[int, int]] = {}
        for row, provider in enumerate(self.ids.tolist()):
            for image, number in self.images.get(provider, {}).items():
                rows.setdefault(image, {})[row] = number
        self.images_moved = False
        self.base.images = [
            ImageOnHosts(
                properties.get(image, {}),
                np.array(list(found), np.int64),
                np.array(list(found.values()), np.int64),
            )
            for image, found in rows.items()
        ]

    def tidy(self) -> None:
        """Let go of what no host has any more."""
        base = self.base
        base.kinds = self.facts.forget(base.kinds)
        for name, shared in (
            ("traits", self.traits),
            ("numa_nodes", self.numa_nodes),
            ("gear", self.gear),
        ):
            numbers: Shared[str, Any] = cast("Shared[str, Any]", shared)
            self.own[name] = numbers.forget(self.own[name])
        base.facts = self.facts.values
        base.traits = TraitMasks(self.traits.values, self.own["traits"])
        base.parts = cast("dict[int, Parts]", HostParts(self))


def _facts(key: HostKind) -> JsonMapping:
    kind, version, cpu_info, facts = key
    return {
        **_mapping(facts),
        "hypervisor_type": kind,
        "hypervisor_version": version,
        "cpu_info": _mapping(cpu_info),
    }


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split(","))


def _mapping(text: str | None) -> JsonObject:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        log.exception("a document of a host is damaged and counts as empty: %.200s", text)
        return {}
    return found if isinstance(found, dict) else {}


def _records(kind: type[T], text: str) -> list[T]:
    """Return the records of a host's column. Of a damaged one there are none: no other host waits
    for it."""
    try:
        return [from_wire(kind, one) for one in json.loads(text)]
    except (ValueError, TypeError):
        log.exception("a document of a host is damaged and counts as empty: %.200s", text)
        return []


def _empty_stock(size: int) -> Stock:
    free, least, most = (np.zeros(size, np.int64) for _ in range(3))
    return Stock(free, least, most, np.ones(size, np.int64))


def seed(text: str) -> int:
    """64 bits that spread evenly, from the text alone, for breaking near-ties; the same in every
    process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
