# SPDX-License-Identifier: Apache-2.0
"""The scheduler's queries: hosts with their resources, aggregates, server groups and places.

Only ``scheduler.hosts`` calls this file, which never writes. Each change of a host sets
``changed_at`` of its provider, so that a reader can fetch the changes since a time. Providers
without a host are left out. Providers are read first, so the usage may be newer than the
generation, never older. JSON columns are returned as text, because the scheduler parses equal texts
only once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.service_binaries import Binary
from common.domain.statuses import ActionState, GuestState
from common.domain.verbs import COPYING
from common.store.engine import now
from common.store.schema import (
    actions,
    aggregate_hosts,
    aggregates,
    allocations,
    guests,
    heartbeats,
    hosts,
    inventories,
    provider_traits,
    providers,
    server_group_members,
    server_groups,
    servers,
    services,
)

Rows = Sequence[Any]

#: Limit of the servers in the hints of one request.
MOST_PLACES = 64


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows about hosts.

    providers: id, host, generation, changed_at, failures, failed_at, served, disabled, forced_down,
    up, hypervisor_type, hypervisor_version, cpu_info, facts, numa_nodes, devices (texts), traits
    (text, with commas), guests, fitted (numbers of guests, and of guests with an assignment).
    inventories: provider_id, resource_class, total, reserved, min_unit, max_unit, step_size,
    allocation_ratio, used.
    assignments: provider_id, assignment (text).
    images: provider_id, image_id, number of servers.
    """

    providers: Rows = ()
    inventories: Rows = ()
    assignments: Rows = ()
    images: Rows = ()


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of the latest changes.

    read_at: the database's time. changed: id, generation and changed_at of the providers with a
    host that changed since the given time. Each change modifies generation or changed_at. number,
    total, newest: number of aggregates, sum of their ids, and time of the latest change. A deleted
    aggregate modifies number and total.
    """

    read_at: int
    number: int
    total: int
    newest: int
    changed: Rows = ()


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A server group.

    ``most`` is the maximum of servers per host. ``members`` is the number of the group's servers by
    host.
    """

    policy: str
    most: int
    members: dict[str, int] = field(default_factory=dict)


def marks(tx: Connection, since: int) -> Marks:
    """Return the database's time, the changed providers, and marks of all aggregates.

    These are the providers with a host that changed at ``since`` (µs) or later. The caller passes
    ``read_at`` as ``since`` in its next call. This is one statement.
    """
    rows = tx.execute(_marks(), {"since": since}).all()
    head = rows[0]
    return Marks(
        int(head.read_at),
        int(head.number),
        int(head.total),
        int(head.newest),
        rows if head.id is not None else (),
    )


@cache
def _marks() -> sa.Select[Any]:
    """Return the statement of ``marks``. Cached, because every request runs it."""
    moved = sa.func.coalesce(aggregates.c.updated_at, aggregates.c.created_at)
    one = (
        sa.select(
            now().label("read_at"),
            sa.func.count().label("number"),
            sa.func.coalesce(sa.func.sum(aggregates.c.id), 0).label("total"),
            sa.func.coalesce(sa.func.max(moved), 0).label("newest"),
        )
        .select_from(aggregates)
        .subquery()
    )
    since = sa.bindparam("since", type_=sa.BigInteger)
    return sa.select(
        providers.c.id, providers.c.generation, providers.c.changed_at, one
    ).select_from(
        one.outerjoin(
            providers, sa.and_(providers.c.host.is_not(None), providers.c.changed_at >= since)
        )
    )


def ids(tx: Connection) -> list[int]:
    """Return the ids of all providers with a host."""
    return list(tx.scalars(sa.select(providers.c.id).where(providers.c.host.is_not(None))))


def count(tx: Connection) -> int:
    """Return the number of providers with a host."""
    return tx.scalar(_COUNT) or 0


_COUNT = sa.select(sa.func.count(providers.c.host))


# --- hosts ---
def read(tx: Connection, provider_ids: Collection[int], images: bool = False) -> HostRows:
    """Return all rows about the hosts of these providers, in one to four statements.

    Providers without a host are left out. Assignments are read only if a guest has one, and the
    servers' images only with ``images``.
    """
    which = {"ids": list(provider_ids)}
    found = tx.execute(_select_providers(), which).all()
    if not found:
        return HostRows()
    has_assignments = any(row.fitted for row in found)
    return HostRows(
        found,
        tx.execute(_select_inventories(), which).all(),
        tx.execute(_select_assignments(), which).all() if has_assignments else (),
        tx.execute(_select_images(), which).all() if images else (),
    )


_WHICH = sa.and_(
    providers.c.id.in_(sa.bindparam("ids", expanding=True)), providers.c.host.is_not(None)
)


def _text(column: sa.Column[Any]) -> sa.ColumnElement[str]:
    return sa.type_coerce(column, sa.Text).label(column.name)


@cache
def _select_providers() -> sa.Select[Any]:
    ours = sa.and_(services.c.host == providers.c.host, services.c.binary == Binary.COMPUTE)
    beats = sa.and_(heartbeats.c.host == providers.c.host, heartbeats.c.binary == Binary.COMPUTE)
    traits = (
        sa.select(sa.func.aggregate_strings(provider_traits.c.trait, ","))
        .where(provider_traits.c.provider_id == providers.c.id)
        .scalar_subquery()
    )
    there = sa.select(sa.func.count()).where(guests.c.host == providers.c.host).scalar_subquery()
    fitted = (
        sa.select(sa.func.count(guests.c.assignment))
        .where(guests.c.host == providers.c.host)
        .scalar_subquery()
    )
    return (
        sa.select(
            providers.c.id,
            providers.c.host,
            providers.c.generation,
            providers.c.changed_at,
            providers.c.failures,
            sa.func.coalesce(providers.c.failed_at, 0).label("failed_at"),
            services.c.id.is_not(None).label("served"),
            *(
                sa.func.coalesce(flag, sa.false()).label(flag.name)
                for flag in (services.c.disabled, services.c.forced_down, heartbeats.c.up)
            ),
            sa.func.coalesce(hosts.c.hypervisor_type, "").label("hypervisor_type"),
            sa.func.coalesce(hosts.c.hypervisor_version, 0).label("hypervisor_version"),
            *(
                _text(column)
                for column in (hosts.c.cpu_info, hosts.c.facts, hosts.c.numa_nodes, hosts.c.devices)
            ),
            traits.label("traits"),
            there.label("guests"),
            fitted.label("fitted"),
        )
        .select_from(
            providers.outerjoin(services, ours)
            .outerjoin(heartbeats, beats)
            .outerjoin(hosts, hosts.c.name == providers.c.host)
        )
        .where(_WHICH)
        .order_by(providers.c.id)
    )


@cache
def _select_inventories() -> sa.Select[Any]:
    used = (
        sa.select(sa.func.coalesce(sa.func.sum(allocations.c.used), 0))
        .where(
            allocations.c.provider_id == inventories.c.provider_id,
            allocations.c.resource_class == inventories.c.resource_class,
        )
        .scalar_subquery()
    )
    return (
        sa.select(
            inventories.c.provider_id,
            inventories.c.resource_class,
            inventories.c.total,
            inventories.c.reserved,
            inventories.c.min_unit,
            inventories.c.max_unit,
            inventories.c.step_size,
            inventories.c.allocation_ratio,
            used.label("used"),
        )
        .select_from(inventories.join(providers, providers.c.id == inventories.c.provider_id))
        .where(_WHICH)
    )


@cache
def _select_assignments() -> sa.Select[Any]:
    return (
        sa.select(providers.c.id, _text(guests.c.assignment))
        .select_from(providers.join(guests, guests.c.host == providers.c.host))
        .where(_WHICH, guests.c.assignment.is_not(None))
    )


@cache
def _select_images() -> sa.Select[Any]:
    return (
        sa.select(providers.c.id, servers.c.image_id, sa.func.count())
        .select_from(providers.join(servers, servers.c.host == providers.c.host))
        .where(_WHICH, servers.c.deleted == 0, servers.c.image_id.is_not(None))
        .group_by(providers.c.id, servers.c.image_id)
    )


def image_properties(tx: Connection, image_ids: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the properties of images by id, as stored with an existing server of each image.

    An image without a server, or with a damaged record, has no properties ({}).
    """
    found: dict[str, dict[str, str]] = {}
    for image in image_ids:
        frozen = tx.scalar(
            sa.select(servers.c.image)
            .where(servers.c.image_id == image, servers.c.deleted == 0)
            .limit(1)
        )
        document = frozen if isinstance(frozen, dict) else {}  # it may be damaged
        found[image] = dict(document.get("properties") or {})
    return found


def metrics(tx: Connection, since: int) -> Rows:
    """Return name and metrics of the hosts that reported metrics at ``since`` (µs) or later."""
    return tx.execute(
        sa.select(hosts.c.name, hosts.c.metrics).where(
            hosts.c.metrics_at >= since, hosts.c.metrics.is_not(None)
        )
    ).all()


def working(tx: Connection) -> dict[str, int]:
    """Return host -> number of running commands that copy disks. Other hosts are left out."""
    return {row[0]: row[1] for row in tx.execute(_WORKING)}


_WORKING = (
    sa.select(actions.c.host, sa.func.count())
    .where(
        actions.c.state == ActionState.WAITING,
        actions.c.host.is_not(None),
        actions.c.verb.in_(COPYING),
    )
    .group_by(actions.c.host)
)


def aggregates_with(
    tx: Connection, known: Collection[int], since: int
) -> tuple[Rows, dict[int, list[str]]]:
    """Return all aggregates (id, name, meta, changed_at), and id -> hosts of new or changed ones.

    Args:
        tx: The transaction.
        known: Ids of aggregates that the caller has read already.
        since: Time of that read in µs.
    """
    changed_at = sa.func.coalesce(aggregates.c.updated_at, aggregates.c.created_at).label(
        "changed_at"
    )
    rows = list(
        tx.execute(
            sa.select(aggregates.c.id, aggregates.c.name, aggregates.c.meta, changed_at).order_by(
                aggregates.c.id
            )
        )
    )
    members: dict[int, list[str]] = {
        row.id: [] for row in rows if row.id not in known or row.changed_at >= since
    }
    if members:
        for aggregate, host in tx.execute(
            sa.select(aggregate_hosts.c.aggregate_id, aggregate_hosts.c.host).where(
                aggregate_hosts.c.aggregate_id.in_(sorted(members))
            )
        ):
            members[aggregate].append(host)
    return rows, members


# --- groups and places ---
def groups(
    tx: Connection, group_ids: Collection[str], without: Collection[str] = ()
) -> dict[str, GroupRow]:
    """Return server groups by id, with their numbers of servers by host.

    A server counts on each host with a guest record of the server, except pending cleanups. The
    servers ``without`` do not count. Unknown groups are left out.
    """
    there = server_group_members.join(
        guests,
        sa.and_(
            guests.c.server_id == server_group_members.c.server_id,
            guests.c.wanted != GuestState.ABSENT,
            guests.c.server_id.not_in(sorted(without)),
        ),
    )
    rows = tx.execute(
        sa.select(server_groups.c.id, server_groups.c.policy, server_groups.c.rules, guests.c.host)
        .select_from(
            server_groups.outerjoin(there, server_group_members.c.group_id == server_groups.c.id)
        )
        .where(server_groups.c.id.in_(sorted(group_ids)))
    )
    found: dict[str, GroupRow] = {}
    for row in rows:
        group = found.setdefault(
            row.id, GroupRow(row.policy, int(row.rules.get("max_server_per_host", 1)))
        )
        if row.host is not None:
            group.members[row.host] = group.members.get(row.host, 0) + 1
    return found


def places(tx: Connection, server_ids: Collection[str], project_id: str) -> dict[str, str]:
    """Return server -> host of these servers, if they are in the project and on a host.

    Deleted servers are left out. Only the first ``MOST_PLACES`` of the sorted ids are read.
    """
    wanted = sorted(server_ids)[:MOST_PLACES]
    rows = tx.execute(
        sa.select(servers.c.id, servers.c.host).where(
            servers.c.id.in_(wanted),
            servers.c.project_id == project_id,
            servers.c.deleted == 0,
            servers.c.host.is_not(None),
        )
    )
    return {row.id: row.host for row in rows}
