# SPDX-License-Identifier: Apache-2.0
"""The hosts as columns: read from the store, kept fresh, less what was just proposed.

``scheduler.service`` asks ``Hosts`` for a ``Snapshot`` and hands it to ``scheduler.select``. A read happens
only when asked and at most every 50 ms: providers changed since the last read less 5 s (a change may commit
later than another one with a younger time), everything once a minute. A proposal is taken off its host until
that provider's generation moves or 5 s pass; it spreads parallel requests and is never a reason to refuse.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.clock import SECOND, Clock
from common.models import RequestSpec
from common.store import host_states
from common.store.engine import Store
from scheduler.snapshot import Snapshot, Stock

PAUSE = 0.05            # seconds between two reads
WHOLE = 60.0            # seconds between two reads of everything
OVERLAP = 5 * SECOND    # how much later than its time a change may become visible
PROPOSAL = 5.0          # seconds that a proposal counts


@dataclass(frozen=True, slots=True)
class _Proposal:
    host: str
    generation: int
    resources: dict[str, int]
    at: float


class Hosts:
    """The scheduler's memory of the hosts. One thread uses it."""

    def __init__(self, store: Store, clock: Clock, default_zone: str) -> None:
        self._store = store
        self._clock = clock
        self._default_zone = default_zone
        self._base = Snapshot()
        self._providers: dict[int, int] = {}        # provider id -> row
        self._generations: list[int] = []
        self._proposals: dict[str, _Proposal] = {}  # by server
        self._read_at = 0                           # the database's clock
        self._refreshed = self._whole = float("-inf")

    def refresh(self, at_once: bool = False) -> bool:
        """Read what changed, unless the last read is younger than 50 ms and ``at_once`` is false.

        Returns:
            whether it read.
        Raises:
            Unavailable: the database does not answer.
        """
        moment = self._clock.monotonic()
        if not at_once and moment - self._refreshed < PAUSE:
            return False
        whole = moment - self._whole >= WHOLE
        rows = self._store.read(lambda tx: host_states.read(tx, None if whole else self._read_at - OVERLAP))
        if not whole and any(row.id not in self._providers for row in rows.providers):
            whole = True
            rows = self._store.read(host_states.read)
        if whole:
            self._start_over(rows.providers)
            self._whole = moment
        self._fill_stock(rows)
        self._fill_flags(rows)
        self._read_at, self._refreshed = rows.read_at, moment
        self._forget_old(moment)
        return True

    def snapshot(self, proposals: bool = True) -> Snapshot:
        """The hosts as last read, less the proposals in flight when asked so; the caller's own to change."""
        base = self._base
        stock = {name: Stock(column.free.copy(), column.least, column.most, column.step)
                 for name, column in base.stock.items()}
        copy = Snapshot(base.names, base.rows, base.seeds, base.served, base.disabled, base.forced_down, base.up,
                        base.zones, base.zone_numbers, stock)
        for proposal in self._proposals.values() if proposals else ():
            copy.take(proposal.host, proposal.resources)
        return copy

    def propose(self, spec: RequestSpec, host: str) -> None:
        """Remember that the server was proposed for the host."""
        generation = self._generations[self._base.rows[host]]
        self._proposals[spec.server] = _Proposal(host, generation, spec.resources, self._clock.monotonic())

    def withdraw(self, servers: Iterable[str]) -> None:
        """Forget the proposals for servers that are asked for again: they came to nothing."""
        for server in servers:
            self._proposals.pop(server, None)

    def _forget_old(self, moment: float) -> None:
        for server, proposal in list(self._proposals.items()):
            row = self._base.rows.get(proposal.host)
            moved = row is None or self._generations[row] != proposal.generation
            if moved or moment - proposal.at > PROPOSAL:
                del self._proposals[server]

    def _start_over(self, providers: host_states.Rows) -> None:
        names = [row.host for row in providers]
        size = len(names)
        self._providers = {row.id: number for number, row in enumerate(providers)}
        self._generations = [0] * size
        self._base = Snapshot(names, {name: number for number, name in enumerate(names)}, _seeds(names))

    def _fill_stock(self, rows: host_states.HostRows) -> None:
        stock, size = self._base.stock, len(self._base.names)
        read = {row.id: self._providers[row.id] for row in rows.providers}
        for provider in rows.providers:
            number = read[provider.id]
            self._generations[number] = provider.generation
            for column in stock.values():           # a class may have gone from the provider
                column.free[number] = column.most[number] = 0
        for row in rows.inventories:
            if row.provider_id in read:             # else it changed since the first query: next time
                if row.resource_class not in stock:
                    stock[row.resource_class] = _empty_stock(size)
                column, number = stock[row.resource_class], read[row.provider_id]
                column.free[number] = int((row.total - row.reserved) * row.allocation_ratio) - int(row.used)
                column.least[number], column.most[number] = row.min_unit, row.max_unit
                column.step[number] = max(1, row.step_size)

    def _fill_flags(self, rows: host_states.HostRows) -> None:
        base = self._base
        size = len(base.names)
        base.served, base.disabled, base.forced_down, base.up = (np.zeros(size, np.bool_) for _ in range(4))
        for service in rows.services:
            number = base.rows.get(service.host)
            if number is not None:
                base.served[number] = True
                base.disabled[number], base.forced_down[number] = service.disabled, service.forced_down
                base.up[number] = service.up
        base.zone_numbers = {name: number for number, name in
                             enumerate(sorted({self._default_zone, *rows.zones.values()}))}
        default = base.zone_numbers[self._default_zone]
        base.zones = np.full(size, default, np.int64)
        for host, zone in rows.zones.items():
            if host in base.rows:
                base.zones[base.rows[host]] = base.zone_numbers[zone]


def _empty_stock(size: int) -> Stock:
    free, least, most = (np.zeros(size, np.int64) for _ in range(3))
    return Stock(free, least, most, np.ones(size, np.int64))


def _seeds(names: list[str]) -> NDArray[np.uint64]:
    """A number a host that depends on its name alone, for breaking near-ties."""
    return np.array([seed(name) for name in names], np.uint64)


def seed(text: str) -> int:
    """64 bits that spread evenly; the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
