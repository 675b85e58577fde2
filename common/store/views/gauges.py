# SPDX-License-Identifier: Apache-2.0
"""Gauges about the state of the cloud, for metrics.

One reading takes about ten statements, each by an index or over open rows. Ages are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.clock import SECOND
from common.domain.statuses import GuestState
from common.store.engine import moment
from common.store.hosts import hosts
from common.store.schema import (
    actions,
    allocations,
    cleanups,
    guests,
    heartbeats,
    inventories,
    leases,
    notifications,
    providers,
)
from common.store.servers.actions import LIVE

#: Name of a gauge, values of the labels, and the gauge's value.
Sample = tuple[str, tuple[str, ...], float]
#: Name -> help text, names of the labels.
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "actions": ("Actions that have not ended.", ("workflow", "step", "state")),
    "actions_oldest_seconds": (
        "Age of the oldest action that has not ended.",
        ("workflow", "step", "state"),
    ),
    "actions_due_late_seconds": (
        "Time for which the longest due action has waited for a conductor.",
        (),
    ),
    "outbox": ("Notifications that are not sent yet.", ()),
    "outbox_oldest_seconds": ("Age of the oldest notification that is not sent yet.", ()),
    "cleanups": ("Pending cleanups at external services.", ("kind",)),
    "cleanups_oldest_seconds": (
        "Age of the oldest pending cleanup at an external service.",
        ("kind",),
    ),
    "guests_without_record": ("Guests on hosts without a guest record.", ()),
    "pending_removals": ("Guests that hosts still have to remove.", ()),
    "pending_removals_oldest_seconds": (
        "Time since the oldest removal of a guest was requested.",
        (),
    ),
    "lease_left_seconds": (
        "Time until the lease of a duty expires. Below 0: no process has the duty.",
        ("duty",),
    ),
    "service_up": ("1 if the conductors count the service as up, else 0.", ("host", "binary")),
    "service_silence_seconds": (
        "Time since the last heartbeat of the service.",
        ("host", "binary"),
    ),
    "host_capacity": (
        "Capacity of a host: total less reserved, times the allocation ratio.",
        ("host", "resource_class"),
    ),
    "host_used": ("Allocated amount of a host's capacity.", ("host", "resource_class")),
}


def read(tx: Connection) -> Iterator[Sample]:
    """Yield the current samples of all gauges: name, values of the labels, value."""
    at = moment(tx)

    def age(since: int | None) -> float:
        return 0.0 if since is None else max(0.0, (at - since) / SECOND)

    for row in tx.execute(_ACTIONS):
        which = (row.workflow, row.step or "begin", row.state)
        yield "actions", which, row.number
        yield "actions_oldest_seconds", which, age(row.oldest)
    yield "actions_due_late_seconds", (), age(tx.execute(_DUE).scalar())
    for name, query in (("outbox", _OUTBOX), ("pending_removals", _REMOVALS)):
        number, oldest = tx.execute(query).one()
        yield name, (), number
        yield f"{name}_oldest_seconds", (), age(oldest)
    yield "guests_without_record", (), len(hosts.read_unclaimed(tx))
    for row in tx.execute(_CLEANUPS):
        yield "cleanups", (row.kind,), row.number
        yield "cleanups_oldest_seconds", (row.kind,), age(row.oldest)
    for row in tx.execute(sa.select(leases.c.name, leases.c.until)):
        yield "lease_left_seconds", (row.name,), (row.until - at) / SECOND
    for row in tx.execute(sa.select(heartbeats)):
        yield "service_up", (row.host, row.binary), float(row.up)
        yield "service_silence_seconds", (row.host, row.binary), age(row.seen_at)
    for row in tx.execute(_HOSTS):
        labels = (row.host, row.resource_class)
        yield "host_capacity", labels, (row.total - row.reserved) * row.allocation_ratio
        yield "host_used", labels, float(row.used)


def _count_query(since: sa.Column[Any], *by: sa.Column[Any]) -> sa.Select[Any]:
    number, oldest = sa.func.count().label("number"), sa.func.min(since).label("oldest")
    query: sa.Select[Any] = sa.select(*by, number, oldest)
    return query.group_by(*by) if by else query


_ACTIONS = _count_query(
    actions.c.created_at, actions.c.workflow, actions.c.step, actions.c.state
).where(actions.c.state.in_(LIVE))
_DUE = sa.select(sa.func.min(actions.c.due_at))
_OUTBOX = _count_query(notifications.c.created_at).select_from(notifications)
_REMOVALS = _count_query(guests.c.changed_at).where(guests.c.wanted == GuestState.ABSENT)
_CLEANUPS = _count_query(cleanups.c.created_at, cleanups.c.kind)
_USED = (
    sa.select(sa.func.coalesce(sa.func.sum(allocations.c.used), 0))
    .where(
        allocations.c.provider_id == inventories.c.provider_id,
        allocations.c.resource_class == inventories.c.resource_class,
    )
    .scalar_subquery()
)
_HOSTS = (
    sa.select(
        providers.c.host,
        inventories.c.resource_class,
        inventories.c.total,
        inventories.c.reserved,
        inventories.c.allocation_ratio,
        _USED.label("used"),
    )
    .select_from(inventories.join(providers, providers.c.id == inventories.c.provider_id))
    .where(providers.c.host.is_not(None))
)
