# SPDX-License-Identifier: Apache-2.0
"""Aggregates: named groups of hosts with metadata; the key ``availability_zone`` makes one a zone.

Called by the API; the scheduler reads the tables itself.
"""
from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from common import errors
from common.store.schema import aggregate_hosts, aggregates


def list_all(tx: Connection) -> tuple[list[Row[Any]], dict[int, list[str]]]:
    """All aggregates, and the hosts of each by its number; two queries."""
    rows = list(tx.execute(sa.select(aggregates).order_by(aggregates.c.id)))
    hosts: dict[int, list[str]] = {row.id: [] for row in rows}
    for number, host in tx.execute(sa.select(aggregate_hosts).order_by(aggregate_hosts.c.host)):
        hosts.setdefault(number, []).append(host)
    return rows, hosts


def show(tx: Connection, number: int) -> tuple[Row[Any], list[str]]:
    """One aggregate and its hosts. Raises NotFound."""
    row = tx.execute(sa.select(aggregates).where(aggregates.c.id == number)).first()
    if row is None:
        raise errors.NotFound(f"Aggregate {number} could not be found.")
    hosts = tx.scalars(sa.select(aggregate_hosts.c.host).where(aggregate_hosts.c.aggregate_id == number)
                       .order_by(aggregate_hosts.c.host))
    return row, list(hosts)


def zones(tx: Connection, default: str) -> dict[str, str]:
    """Host to availability zone, for hosts in an aggregate that is one; others are in ``default``."""
    rows, hosts = list_all(tx)
    found: dict[str, str] = {}
    for row in rows:
        zone = row.meta.get("availability_zone")
        if zone:
            found.update(dict.fromkeys(hosts[row.id], zone))
    return _Zones(found, default)


class _Zones(dict[str, str]):
    """A mapping that knows a zone for every host."""

    def __init__(self, found: dict[str, str], default: str) -> None:
        super().__init__(found)
        self.default = default

    def __missing__(self, host: str) -> str:
        return self.default
