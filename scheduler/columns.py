# SPDX-License-Identifier: Apache-2.0
"""Convert database rows about hosts to the columns of a snapshot.

``scheduler.hosts`` decides which database rows are read, and passes them to ``Columns``. The rows
of a snapshot are ordered by the providers' ids, so that a host is found by binary search. Adding or
removing hosts moves the rows of other hosts.

Facts, trait sets, NUMA nodes and devices are texts. Each distinct text is parsed once and replaced
by a number in a column.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import Device, HardwareAssignment, NumaNode
from common.domain.wire import from_wire
from common.service.log import get_logger
from common.store.placement.host_states import HostRows, Rows
from common.store.placement.inventories import MOST
from scheduler.snapshot import Aggregate, ImageOnHosts, Numbers, Parts, Snapshot, Stock, TraitMasks

log = get_logger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
#: Hypervisor, version of the hypervisor, and the texts of cpu_info and facts.
HostKind = tuple[str, int, str | None, str | None]
FLAGS = ("served", "disabled", "forced_down", "up")
NUMBERS = ("zones", "servers", "working", "failures", "waits", "versions", "kinds", "devices")


class Shared(Generic[K, T]):
    """Numbered values that many hosts have in common.

    Each value is created once per key. Number 0 is the empty value.
    """

    def __init__(self, make: Callable[[K], T], empty: T) -> None:
        self._make = make
        self._empty = empty
        self._numbers: dict[K, int] = {}
        self.values: list[T] = [empty]

    def number(self, key: K) -> int:
        """Return the number of this key's value, and create the value if the key is new."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(self._make(key))
        return number

    def forget(self, column: Numbers) -> Numbers:
        """Drop the values whose numbers are not in the column, and renumber the others.

        An empty column changes nothing.

        Args:
            column: The number of each host's value.

        Returns:
            A column with the new numbers.
        """
        if not column.size:
            return column
        used, renumbered = np.unique(column, return_inverse=True)
        places = {int(old): new for new, old in enumerate(used[used > 0], start=1)}
        self.values = [self._empty, *(self.values[old] for old in places)]
        self._numbers = {
            key: places[number] for key, number in self._numbers.items() if number in places
        }
        return renumbered.astype(np.int64) + int(used[0] != 0)


class HostParts(Mapping[int, Parts]):
    """The parts of each host with NUMA nodes or devices, by row.

    Hosts with equal hardware, of which no guest holds a part, share one object. Repeated access
    returns the same object, so that results can be cached by identity.
    """

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
    """The base snapshot, which the scheduler copies for each call.

    Attributes:
        base: The snapshot.
        ids: Provider id of each row.
        own: Columns that only this module and ``scheduler.hosts`` read: generations, changed_at,
            failed_at, and the numbers of traits, NUMA nodes and devices (``gear``).
        held: Hardware that the guests of a host hold, by host name.
        images: Number of servers by provider id and image id.
        images_moved: True if ``images`` may have changed since the last ``fill_images``.
    """

    def __init__(self) -> None:
        self.base = Snapshot()
        self.ids: Numbers = np.zeros(0, np.int64)
        self.own = {
            name: np.zeros(0, np.int64)
            for name in ("generations", "changed_at", "failed_at", "traits", "numa_nodes", "gear")
        }
        self.facts: Shared[HostKind, JsonMapping] = Shared(_parse_facts, {})
        self.traits: Shared[str, frozenset[str]] = Shared(_parse_names, frozenset())
        self.numa_nodes: Shared[str, Sequence[NumaNode]] = Shared(
            partial(_parse_records, NumaNode), ()
        )
        self.gear: Shared[str, Sequence[Device]] = Shared(partial(_parse_records, Device), ())
        self.held: dict[str, list[HardwareAssignment]] = {}
        self.images: dict[int, dict[str, int]] = {}
        self.images_moved = True

    def positions(self, ids: Sequence[int] | Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
        """Return the row of each provider, and a mask of the providers that have a row.

        The row of a provider outside the mask is arbitrary.
        """
        provider_ids = np.asarray(ids, np.int64)
        if not self.ids.size:
            return np.zeros(provider_ids.size, np.int64), np.zeros(provider_ids.size, np.bool_)
        rows = np.minimum(np.searchsorted(self.ids, provider_ids), self.ids.size - 1)
        return rows, self.ids[rows] == provider_ids

    def find_outdated(self, changed: Rows, read_at: int) -> list[int]:
        """Return the ids in ``changed`` of the providers whose rows are missing or outdated.

        A row is outdated if its generation or time differs. A provider that changed when the last
        read began or later is outdated even if both are equal, because two changes may have the
        same microsecond.

        Args:
            changed: Rows that begin with id, generation and changed_at.
            read_at: Time at which the last read began, in microseconds.
        """
        if not changed:
            return []
        ids, generations, times = np.array([row[:3] for row in changed], np.int64).T
        rows, is_current = self.positions(ids)
        if is_current.any():
            is_current &= (self.own["generations"][rows] == generations) & (
                self.own["changed_at"][rows] == times
            )
            is_current &= times < read_at
        return ids[~is_current].tolist()  # type: ignore[no-any-return]

    def update_hosts(self, rows: HostRows) -> bool:
        """Replace the data of the hosts in ``rows``, and add new hosts.

        Returns:
            True if there were new hosts. Then the rows of other hosts may have moved, and the
            caller must call ``fill_aggregates`` with all aggregates.
        """
        if not rows.providers:
            return False
        ids = np.array([row.id for row in rows.providers], np.int64)
        at, has_row = self.positions(ids)
        if not has_row.all():
            self._arrange_rows(
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
        return not has_row.all()

    def drop(self, removed_ids: Sequence[int]) -> None:
        """Remove the hosts of these providers, which moves the rows of other hosts.

        The caller must then call ``fill_aggregates`` with all aggregates.
        """
        remaining = dict(zip(self.ids.tolist(), self.base.names, strict=True))
        for provider in removed_ids:
            self.held.pop(remaining.pop(provider, ""), None)
            self.images.pop(provider, None)
        self.images_moved = True
        self._arrange_rows(remaining)

    def _arrange_rows(self, names: dict[int, str]) -> None:
        """Resize the columns to exactly these hosts (provider id -> host).

        Known hosts keep their data. New hosts get empty data. The masks of aggregates and traits
        are not changed.
        """
        ids = np.array(sorted(names), np.int64)
        is_kept = np.isin(self.ids, ids)
        places = np.searchsorted(ids, self.ids[is_kept])

        def move(column: NDArray[Any], fill: float = 0) -> NDArray[Any]:
            new_column = np.full(ids.size, fill, column.dtype)
            new_column[places] = column[is_kept]
            return new_column

        base = self.base
        base.names = [names[provider] for provider in ids.tolist()]
        base.rows = {name: row for row, name in enumerate(base.names)}
        for flag in (*FLAGS, *NUMBERS):
            column = getattr(base, flag)
            setattr(
                base, flag, move(column if column.size else np.zeros(self.ids.size, column.dtype))
            )
        seeds = move(base.seeds)
        for row in np.flatnonzero(seeds == 0).tolist():
            seeds[row] = seed(base.names[row])
        base.seeds = seeds
        base.stock = {
            name: Stock(move(stock.free), move(stock.least), move(stock.most), move(stock.step, 1))
            for name, stock in base.stock.items()
        }
        base.metrics = {name: move(column, np.nan) for name, column in base.metrics.items()}
        self.own = {name: move(column) for name, column in self.own.items()}
        self.ids = ids
        self._index_rows()

    def _index_rows(self) -> None:
        """Replace what the snapshot has by row number: the masks of traits, and the parts."""
        self.base.traits = TraitMasks(self.traits.values, self.own["traits"])
        self.base.parts = cast("dict[int, Parts]", HostParts(self))

    def _fill_hosts(self, rows: Rows, at: Numbers) -> None:
        base, values = self.base, dict(zip(rows[0]._fields, zip(*rows, strict=True), strict=True))
        for flag in FLAGS:
            getattr(base, flag)[at] = np.array(values[flag], np.bool_)
        base.servers[at], base.failures[at] = values["guests"], values["failures"]
        base.versions[at] = values["hypervisor_version"]
        base.kinds[at] = [
            self.facts.number(key)
            for key in zip(
                values["hypervisor_type"],
                values["hypervisor_version"],
                values["cpu_info"],
                values["facts"],
                strict=True,
            )
        ]
        base.facts = self.facts.values
        for name, column in (
            ("generations", "generation"),
            ("changed_at", "changed_at"),
            ("failed_at", "failed_at"),
        ):
            self.own[name][at] = values[column]
        for name, shared, texts in (
            ("traits", self.traits, values["traits"]),
            ("numa_nodes", self.numa_nodes, values["numa_nodes"]),
            ("gear", self.gear, values["devices"]),
        ):
            numbers: Shared[str, Any] = shared
            self.own[name][at] = [
                numbers.number(text) if text and text != "[]" else 0 for text in texts
            ]

    def _fill_stock(self, rows: Rows, at: Numbers) -> None:
        stock = self.base.stock
        # A provider may have lost an inventory.
        for column in stock.values():
            column.free[at] = column.most[at] = 0
        by_class: dict[str, list[Any]] = {}
        for row in rows:
            by_class.setdefault(row.resource_class, []).append(row)
        for name, inventories in by_class.items():
            if name not in stock:
                stock[name] = _create_stock(self.ids.size)
            ids, _, total, reserved, least, most, step, ratio, used = (
                np.array(part) for part in zip(*inventories, strict=True)
            )
            places, has_row = self.positions(ids)
            # A provider without a row appeared during this read. The next read includes it.
            places, column = places[has_row], stock[name]
            room = np.minimum((total - reserved) * ratio, MOST).astype(np.int64)
            column.free[places] = (room - used.astype(np.int64))[has_row]
            column.least[places], column.most[places] = least[has_row], most[has_row]
            column.step[places] = np.maximum(1, step)[has_row]

    def _fill_parts(self, rows: HostRows, at: Numbers) -> None:
        base = self.base
        for row in at.tolist() if self.held else ():
            self.held.pop(base.names[row], None)
        damaged = set()
        for provider, text in rows.assignments:
            (place,), (has_row,) = self.positions([provider])
            if has_row:
                try:
                    assignment = from_wire(HardwareAssignment, json.loads(text))
                except (ValueError, TypeError):
                    log.exception(
                        "the record of a guest's CPUs and devices is damaged, so the NUMA nodes "
                        "and devices of its host are not used",
                        host=base.names[place],
                        value=str(text)[:200],
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
        self._index_rows()

    def fill_aggregates(
        self, rows: Rows, members: Mapping[int, list[str]], default_zone: str
    ) -> None:
        """Replace all aggregates and recompute the zones.

        Args:
            rows: All aggregates.
            members: Hosts of the new and changed aggregates, by id. The others keep their mask.
                If rows have moved, this must contain all aggregates.
            default_zone: Zone of hosts that are in no aggregate with a zone.
        """
        base, size = self.base, len(self.base.names)
        old_aggregates = {aggregate.id: aggregate for aggregate in base.aggregates}
        base.aggregates = []
        for row in rows:
            if row.id in members:
                mask = np.zeros(size, np.bool_)
                mask[[base.rows[host] for host in members[row.id] if host in base.rows]] = True
            else:
                mask = old_aggregates[row.id].members
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

    def fill_working(self, numbers: Mapping[str, int]) -> None:
        """Replace ``Snapshot.working``, the number of running disk copies on each host.

        ``numbers`` contains the new number by host name. Other hosts get 0.
        """
        base = self.base
        base.working = np.zeros(len(base.names), np.int64)
        for host, number in numbers.items():
            if host in base.rows:
                base.working[base.rows[host]] = number

    def fill_metrics(self, rows: Rows) -> None:
        """Update metrics from rows of (host, {name: value}).

        Unknown hosts and values that are not numbers are ignored. Metrics that are missing in a row
        keep their value.
        """
        base = self.base
        for host, metrics in rows:
            for name, value in (
                metrics.items() if host in base.rows and isinstance(metrics, dict) else ()
            ):
                if isinstance(value, (int, float)):
                    column = base.metrics.setdefault(name, np.full(len(base.names), np.nan))
                    column[base.rows[host]] = value

    def fill_images(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """Rebuild ``Snapshot.images`` from ``images``, and set ``images_moved`` to False.

        Args:
            properties: Properties of each image, by image id. Other images get no properties.
        """
        rows: dict[str, dict[int, int]] = {}
        for row, provider in enumerate(self.ids.tolist()):
            for image, number in self.images.get(provider, {}).items():
                rows.setdefault(image, {})[row] = number
        self.images_moved = False
        self.base.images = [
            ImageOnHosts(
                properties.get(image, {}),
                np.array(list(counts), np.int64),
                np.array(list(counts.values()), np.int64),
            )
            for image, counts in rows.items()
        ]

    def tidy(self) -> None:
        """Drop shared values that no host uses any more."""
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
        self._index_rows()


def _parse_facts(key: HostKind) -> JsonMapping:
    kind, version, cpu_info, facts = key
    return {
        **_parse_object(facts),
        "hypervisor_type": kind,
        "hypervisor_version": version,
        "cpu_info": _parse_object(cpu_info),
    }


def _parse_names(text: str) -> frozenset[str]:
    return frozenset(text.split(","))


def _parse_object(text: str | None) -> JsonObject:
    try:
        document = json.loads(text) if text else {}
    except ValueError:
        log.exception(
            "a JSON document about a host is damaged and counts as empty", value=str(text)[:200]
        )
        return {}
    return document if isinstance(document, dict) else {}


def _parse_records(kind: type[T], text: str) -> list[T]:
    """Parse a JSON list of records, for example the NUMA nodes of a host.

    If any record is damaged, the exception is logged and the result is empty, so that other hosts
    stay usable.
    """
    try:
        return [from_wire(kind, record) for record in json.loads(text)]
    except (ValueError, TypeError):
        log.exception(
            "a JSON document about a host is damaged and counts as empty", value=str(text)[:200]
        )
        return []


def _create_stock(size: int) -> Stock:
    free, least, most = (np.zeros(size, np.int64) for _ in range(3))
    return Stock(free, least, most, np.ones(size, np.int64))


def seed(text: str) -> int:
    """Return a 64-bit hash of the text as an integer with evenly distributed bits.

    The weighers break near ties with these bits. Every process computes the same bits.
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
