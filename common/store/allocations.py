# SPDX-License-Identifier: Apache-2.0
"""Allocations: who holds how much of which host. Placement's semantics; written by the conductor alone.

``claim`` is the one door in and ``release`` the one door out. Providers are locked first, in ascending
order; usage is always the sum of the rows, never a counter.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.engine import for_update, insert_many, now
from common.store.schema import allocations, consumers, inventories, providers


@dataclass
class Wish:
    """One consumer that wants resources of the first of ``hosts`` that still fits; ``host`` is set then."""

    consumer: str
    project_id: str
    user_id: str
    resources: dict[str, int]
    hosts: list[str]
    host: str | None = field(default=None)


@dataclass
class _Room:
    """What a locked provider has left of one resource class."""

    free: float
    min_unit: int
    max_unit: int
    step_size: int

    def fits(self, amount: int) -> bool:
        return amount <= self.free and self.min_unit <= amount <= self.max_unit and amount % self.step_size == 0


def claim(tx: Connection, wishes: Sequence[Wish]) -> None:
    """Give each wish the first of its hosts that still fits; those that fit nowhere keep ``host`` None.

    Only the hosts named first by some wish are locked; a later alternate counts when it is among them.
    The caller asks again with fresh proposals for those left over.
    """
    wanted = sorted({wish.hosts[0] for wish in wishes if wish.hosts})
    if not wanted:
        return
    ids = lock(tx, wanted)
    rooms = _rooms(tx, list(ids.values()))
    rows, holders = [], []
    for wish in wishes:
        amounts = {name: amount for name, amount in wish.resources.items() if amount}
        wish.host = next((host for host in wish.hosts if host in ids and _fits(rooms[ids[host]], amounts)), None)
        if wish.host is None:
            continue
        provider = ids[wish.host]
        for name, amount in amounts.items():
            rooms[provider][name].free -= amount
            rows.append({"provider_id": provider, "consumer_id": wish.consumer, "resource_class": name, "used": amount})
        holders.append({"id": wish.consumer, "type": "server", "project_id": wish.project_id, "user_id": wish.user_id})
    if holders:
        _add_consumers(tx, holders)
        tx.execute(sa.insert(allocations), rows)


def lock(tx: Connection, hosts: Sequence[str]) -> dict[str, int]:
    """Lock the providers of these hosts in ascending order, and say that they changed; host -> provider."""
    ids = {row.host: row.id for row in tx.execute(for_update(
        sa.select(providers.c.id, providers.c.host).where(providers.c.host.in_(hosts)).order_by(providers.c.id)))}
    touch(tx, ids.values())
    return ids


def touch(tx: Connection, provider_ids: Iterable[int]) -> None:
    """Say that providers, which are locked, changed."""
    tx.execute(sa.update(providers).where(providers.c.id.in_(sorted(set(provider_ids)))).values(
        generation=providers.c.generation + 1, changed_at=now()))


def _fits(room: dict[str, _Room], amounts: dict[str, int]) -> bool:
    return all(name in room and room[name].fits(amount) for name, amount in amounts.items())


def _rooms(tx: Connection, provider_ids: list[int]) -> dict[int, dict[str, _Room]]:
    """What the locked providers have left, by one statement over inventories and sums."""
    used = (sa.select(allocations.c.provider_id, allocations.c.resource_class,
                      sa.func.sum(allocations.c.used).label("used"))
            .where(allocations.c.provider_id.in_(provider_ids))
            .group_by(allocations.c.provider_id, allocations.c.resource_class).subquery())
    query = sa.select(inventories, sa.func.coalesce(used.c.used, 0).label("used")).select_from(inventories.outerjoin(
        used, sa.and_(used.c.provider_id == inventories.c.provider_id,
                      used.c.resource_class == inventories.c.resource_class)))
    rooms: dict[int, dict[str, _Room]] = {provider: {} for provider in provider_ids}
    for row in tx.execute(query.where(inventories.c.provider_id.in_(provider_ids))):
        capacity = (row.total - row.reserved) * row.allocation_ratio
        rooms[row.provider_id][row.resource_class] = _Room(capacity - int(row.used), row.min_unit, row.max_unit,
                                                           row.step_size)
    return rooms


def _add_consumers(tx: Connection, holders: list[dict[str, str]]) -> None:
    """Consumers of new allocations; one that still owes on another host exists already."""
    insert_many(tx, consumers, [{"generation": 0, **row} for row in holders], "created_at", ignore=True)


def release(tx: Connection, placements: Sequence[tuple[str, str]]) -> None:
    """Give back what these (server, host) pairs hold."""
    ids = lock(tx, sorted({host for _, host in placements}))
    held = [(ids[host], server) for server, host in placements if host in ids]
    tx.execute(sa.delete(allocations).where(
        allocations.c.consumer_id.in_([server for _, server in held]),
        sa.tuple_(allocations.c.provider_id, allocations.c.consumer_id).in_(held)))
    gone = sorted({server for server, _ in placements})
    still = sa.select(allocations.c.consumer_id).where(allocations.c.consumer_id.in_(gone))
    tx.execute(sa.delete(consumers).where(consumers.c.id.in_(gone), consumers.c.id.not_in(still)))
