# SPDX-License-Identifier: Apache-2.0
"""What the scheduler reads of the database: providers with inventories and usage, services, zones.

Called by ``scheduler.hosts`` only, and only ever reads. Providers are read first: the usage may then be
newer than the generation that was read beside it, never older.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.engine import now
from common.store.schema import aggregate_hosts, aggregates, allocations, heartbeats, inventories, providers, services

Rows = Sequence[Any]


@dataclass(frozen=True, slots=True)
class HostRows:
    """``read_at`` is the database's clock before the first row was read.

    providers: id, host, generation · inventories: provider_id, resource_class, total, reserved, min_unit,
    max_unit, step_size, allocation_ratio, used · services: host, disabled, forced_down, up · zones: host ->
    availability zone, for hosts in an aggregate that has one.
    """

    read_at: int
    providers: Rows
    inventories: Rows
    services: Rows
    zones: dict[str, str]


def read(tx: Connection, since: int | None = None) -> HostRows:
    """Everything, or of providers (with inventories and usage) only those changed at ``since`` or later, in
    microseconds; services and zones are narrow and always whole."""
    flags = tx.execute(_services()).all()           # first: it brings the time at which reading began
    read_at = min((int(row.read_at) for row in flags), default=0)
    found = sa.select(providers.c.id, providers.c.host, providers.c.generation).order_by(providers.c.id)
    usage = sa.select(allocations.c.provider_id, allocations.c.resource_class,
                      sa.func.sum(allocations.c.used).label("used")).group_by(
                          allocations.c.provider_id, allocations.c.resource_class)
    if since is not None:
        wanted = sa.select(providers.c.id).where(providers.c.changed_at >= since)
        found = found.where(providers.c.changed_at >= since)
        usage = usage.where(allocations.c.provider_id.in_(wanted))
    sums = usage.subquery()
    stock = sa.select(inventories, sa.func.coalesce(sums.c.used, 0).label("used")).select_from(inventories.outerjoin(
        sums, sa.and_(sums.c.provider_id == inventories.c.provider_id,
                      sums.c.resource_class == inventories.c.resource_class)))
    if since is not None:
        stock = stock.where(inventories.c.provider_id.in_(wanted))
    return HostRows(read_at, tx.execute(found).all(), tx.execute(stock).all(), flags, _zones(tx))


def _services() -> sa.Select[Any]:
    beats = sa.and_(heartbeats.c.host == services.c.host, heartbeats.c.binary == services.c.binary)
    return sa.select(services.c.host, services.c.disabled, services.c.forced_down, now().label("read_at"),
                     sa.func.coalesce(heartbeats.c.up, sa.false()).label("up")).select_from(
                         services.outerjoin(heartbeats, beats)).where(services.c.binary == "nova-compute")


def _zones(tx: Connection) -> dict[str, str]:
    found = tx.execute(sa.select(aggregates.c.id, aggregates.c.meta)).all()
    names = {row.id: row.meta["availability_zone"] for row in found if row.meta.get("availability_zone")}
    if not names:
        return {}
    members = tx.execute(sa.select(aggregate_hosts).where(aggregate_hosts.c.aggregate_id.in_(sorted(names))))
    return {row.host: names[row.aggregate_id] for row in members}
