# SPDX-License-Identifier: Apache-2.0
"""Availability zones: read from the metadata of aggregates.

A zone has no row of its own. ``aggregates`` ensures that a host is in at most one zone. Claims read
zones under the locks that every change of a host's zone takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.service_binaries import Binary
from common.store.schema import aggregate_hosts, aggregates, services

#: The key of an aggregate's metadata that makes it a zone.
KEY = "availability_zone"


def hosts(
    tx: Connection, names: Iterable[str] | None = None, but: int | None = None
) -> dict[str, str]:
    """Return host -> zone. Hosts without a zone are left out.

    Args:
        tx: The transaction.
        names: Only these hosts. None: all hosts.
        but: Id of an aggregate to ignore. None: ignore none.
    """
    member = aggregate_hosts.c
    query = sa.select(member.host, aggregates.c.meta).join(
        aggregates, aggregates.c.id == member.aggregate_id
    )
    if names is not None:
        query = query.where(member.host.in_(sorted(set(names))))
    if but is not None:
        query = query.where(aggregates.c.id != but)
    return {row.host: row.meta[KEY] for row in tx.execute(query) if row.meta.get(KEY)}


def is_open(tx: Connection, zone: str, default: str) -> bool:
    """Return True if the zone has an enabled host.

    Two statements, the second of which stops at the first such host.

    Args:
        tx: The transaction.
        zone: Name of the zone.
        default: The zone of hosts in no aggregate with a zone.
    """
    by_zone: dict[str, list[int]] = {}
    for row in tx.execute(sa.select(aggregates.c.id, aggregates.c.meta)):
        by_zone.setdefault(row.meta.get(KEY) or "", []).append(row.id)
    by_zone.pop("", None)

    def in_any(numbers: Iterable[int]) -> sa.ColumnElement[bool]:
        member = sa.select(aggregate_hosts.c.host).where(
            aggregate_hosts.c.host == services.c.host,
            aggregate_hosts.c.aggregate_id.in_(sorted(numbers)),
        )
        return member.exists()

    there = in_any(by_zone.get(zone, ()))
    if zone == default:
        there |= ~in_any(number for numbers in by_zone.values() for number in numbers)
    return (
        tx.execute(
            sa.select(services.c.id)
            .where(services.c.binary == Binary.COMPUTE, services.c.disabled.is_(False), there)
            .limit(1)
        ).first()
        is not None
    )
