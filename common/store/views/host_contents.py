# SPDX-License-Identifier: Apache-2.0
"""The contents of a host: its servers, its open moves and its pending cleanups.

The drain, the automatic evacuation and the operator's commands (``kilonova host ...``) read them
anew in every round and keep no copy. Call ``look`` and ``removals`` in a ``Store.snapshot``: each
runs several statements, and a move that begins between two of them would be in neither result.
``begin`` starts a move of a server that is on this host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, states
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.domain.hardware import on_host
from common.domain.models import Flavor, ImageRef
from common.domain.statuses import (
    OPEN_MIGRATIONS,
    ActionState,
    GuestState,
    MigrationStatus,
    MigrationType,
    StepEvent,
)
from common.domain.wire import from_wire
from common.store.engine import moment
from common.store.hosts.host_status import HostState, host_state, host_states
from common.store.rows import Values
from common.store.schema import actions as actions_table
from common.store.schema import allocations, events, guests, hosts, providers, servers
from common.store.schema import migrations as moves_table
from common.store.servers import actions, migrations


@dataclass(frozen=True, slots=True)
class Resident:
    """A server on the host. ``busy`` is the name of the running action, or ""."""

    id: str
    name: str
    project_id: str
    vm_state: str
    #: Without root disk if the server boots from a volume.
    flavor: Flavor
    image: ImageRef | None = None
    hints: Values = field(default_factory=dict)
    zone: str | None = None
    busy: str = ""
    task_state: str | None = None
    shares: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """A server's move.

    ``by`` is the argument ``by`` of the move's action, or "". ``idle`` is True if the server has no
    running action, and ``gone`` if the server is deleted. ``failed`` is True if the move failed,
    for the reason ``message``, at ``step`` (only from ``moves``, else ""). ``stuck`` is why the
    running action is stuck, or "". Numbers of ``progress`` are in bytes, times in µs.
    """

    uuid: str
    server: str
    name: str
    kind: MigrationType
    status: MigrationStatus
    source: str
    dest: str | None
    begun: int
    changed: int
    by: str = ""
    vm_state: str = ""
    idle: bool = False
    gone: bool = False
    failed: bool = False
    progress: dict[str, int] = field(default_factory=dict)
    message: str = ""
    step: str = ""
    stuck: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """The contents of a host at the time ``at`` (µs).

    ``leaving`` and ``coming`` are the open moves from and to the host. A move within the host is in
    both. ``guests`` is the number of guest records by wanted state.
    """

    at: int
    host: HostState
    servers: list[Resident]
    leaving: list[Move]
    coming: list[Move]
    guests: dict[str, int]


@dataclass(frozen=True, slots=True)
class PendingRemoval:
    """A pending cleanup of a guest since the time ``since`` (µs).

    ``name`` is "" if the server has no row. ``holds``: resource class -> amount that is allocated
    until the cleanup is done.
    """

    server: str
    name: str
    host: HostState
    since: int
    holds: dict[str, int]
    keeps_files: bool = False


def look(tx: Connection, name: str) -> Look:
    """Return the contents of a host, in five statements.

    Raises:
        NotFound: The host does not exist.
    """
    state = host_state(tx, name)
    found = _moves(
        tx,
        moves_table.c.status.in_(OPEN_MIGRATIONS),
        sa.or_(moves_table.c.source_host == name, moves_table.c.dest_host == name),
    )
    number = {
        row.wanted: row.number
        for row in tx.execute(
            sa.select(guests.c.wanted, sa.func.count().label("number"))
            .where(guests.c.host == name)
            .group_by(guests.c.wanted)
        )
    }
    return Look(
        moment(tx),
        state,
        _residents(tx, name),
        [one for one in found if one.source == name],
        [one for one in found if one.dest == name],
        number,
    )


_OF_RESIDENTS = (
    "id",
    "name",
    "project_id",
    "vm_state",
    "task_state",
    "flavor",
    "image",
    "scheduler_hints",
    "pinned_availability_zone",
    "shares",
)


def _residents(tx: Connection, name: str) -> list[Resident]:
    """Return the servers on a host: largest first, then by name.

    Why: few destinations have room for large servers.
    """
    query = (
        sa.select(*(servers.c[one] for one in _OF_RESIDENTS), actions_table.c.name.label("doing"))
        .select_from(servers.outerjoin(actions_table, actions_table.c.id == servers.c.action))
        .where(servers.c.host == name, servers.c.deleted == 0)
        .order_by(
            servers.c.memory_mb.desc(), servers.c.disk_gb.desc(), servers.c.name, servers.c.id
        )
    )
    return [
        Resident(
            row.id,
            row.name,
            row.project_id,
            row.vm_state,
            on_host(from_wire(Flavor, row.flavor), row.image),
            from_wire(ImageRef, row.image) if row.image else None,
            row.scheduler_hints,
            row.pinned_availability_zone,
            row.doing or "",
            row.task_state,
            row.shares,
        )
        for row in tx.execute(query)
    ]


def _moves(tx: Connection, *where: sa.ColumnElement[bool]) -> list[Move]:
    current = actions_table.alias()
    query = (
        sa.select(
            moves_table,
            actions_table.c.args,
            actions_table.c.state,
            actions_table.c.message,
            servers.c.name,
            servers.c.vm_state,
            servers.c.action,
            servers.c.deleted,
            current.c.cause.label("stuck"),
        )
        .select_from(
            moves_table.join(servers, servers.c.id == moves_table.c.server_id)
            .outerjoin(actions_table, actions_table.c.id == moves_table.c.action_id)
            .outerjoin(
                current,
                sa.and_(current.c.id == servers.c.action, current.c.state == ActionState.STUCK),
            )
        )
        .where(*where)
        .order_by(moves_table.c.id)
    )
    return [
        Move(
            row.uuid,
            row.server_id,
            row.name,
            row.type,
            row.status,
            row.source_host,
            row.dest_host,
            row.created_at,
            row.updated_at,
            (row.args or {}).get("by", ""),
            row.vm_state,
            row.action is None,
            bool(row.deleted),
            row.state == ActionState.FAILED,
            row.progress or {},
            row.message or "",
            stuck=row.stuck or "",
        )
        for row in tx.execute(query)
    ]


def moves(tx: Connection, uuids: Iterable[str]) -> list[Move]:
    """Return the moves with these uuids in any state, with the step that failed last, or "".

    Unknown uuids are left out.
    """
    found = _moves(tx, moves_table.c.uuid.in_(sorted(set(uuids))))
    query = (
        sa.select(moves_table.c.uuid, events.c.step)
        .select_from(events.join(moves_table, moves_table.c.action_id == events.c.action_id))
        .where(
            moves_table.c.uuid.in_([one.uuid for one in found]), events.c.event == StepEvent.FAILED
        )
        .order_by(events.c.seq)
    )
    steps = {row.uuid: row.step for row in tx.execute(query)}
    return [replace(one, step=steps.get(one.uuid, "")) for one in found]


def begin(
    tx: Connection,
    host: str,
    key: str,
    server_id: str,
    kind: MigrationType,
    *,
    vm_state: str,
    context: RequestContext,
    args: Values,
) -> Move:
    """Begin a move of a server on this host, and return the move.

    Args:
        tx: The transaction.
        host: The host on which the move was planned.
        key: Key of the action in ``states.ACTIONS``.
        server_id: Id of the server.
        kind: Type of the migration.
        vm_state: The server's state for which the move was planned.
        context: The caller's request.
        args: Arguments of the action.

    Raises:
        NotFound, Locked, WrongState, Busy: As in ``migrations.begin``.
        Conflict: As in ``migrations.begin``. Also, the server has another host or another vm_state
            by now.
    """
    found = actions.take_lock(tx, server_id, None)
    if tx.scalar(sa.select(servers.c.host).where(servers.c.id == server_id)) != host:
        raise errors.Conflict(f"Instance {server_id} is not on host {host} any more.")
    if found.vm_state != vm_state:
        raise errors.Conflict(
            f"Instance {server_id} is {found.vm_state} now, but its move was planned for the state "
            f"{vm_state}. The move is planned again."
        )
    action = migrations.begin(tx, states.row(key), server_id, kind, context=context, args=args)
    [move] = _moves(tx, moves_table.c.action_id == action)
    return move


def live_migration_capable(tx: Connection) -> set[str]:
    """Return the hosts that report an address at which they accept live migrations."""
    return {
        row.name
        for row in tx.execute(sa.select(hosts.c.name, hosts.c.facts))
        if ((row.facts or {}).get("migration") or {}).get("uri")
    }


def removals(tx: Connection, host: str | None = None) -> list[PendingRemoval]:
    """Return the pending cleanups of guests on all hosts, or on this host, oldest first.

    A host that is up removes the guests within seconds.
    """
    query = (
        sa.select(guests, servers.c.name)
        .select_from(guests.outerjoin(servers, servers.c.id == guests.c.server_id))
        .where(guests.c.wanted == GuestState.ABSENT)
    )
    if host is not None:
        query = query.where(guests.c.host == host)
    rows = list(tx.execute(query.order_by(guests.c.changed_at, guests.c.server_id)))
    known, held = (
        host_states(tx, host),
        _read_allocations(
            tx, {row.host for row in rows}, {row.holder or row.server_id for row in rows}
        ),
    )
    return [
        PendingRemoval(
            row.server_id,
            row.name or "",
            known.get(row.host) or HostState(row.host, "", False),
            row.changed_at,
            held.get((row.holder or row.server_id, row.host), {}),
            bool(row.keeps_files),
        )
        for row in rows
    ]


def _read_allocations(
    tx: Connection, names: set[str], consumers: set[str]
) -> dict[tuple[str, str], dict[str, int]]:
    """Return the allocations of these consumers on these hosts, by (consumer, host)."""
    query = (
        sa.select(allocations, providers.c.host)
        .select_from(allocations.join(providers, providers.c.id == allocations.c.provider_id))
        .where(
            providers.c.host.in_(sorted(names)), allocations.c.consumer_id.in_(sorted(consumers))
        )
    )
    held: dict[tuple[str, str], dict[str, int]] = {}
    for row in tx.execute(query):
        held.setdefault((row.consumer_id, row.host), {})[row.resource_class] = row.used
    return held


def read_durations(tx: Connection, host: str, kind: MigrationType, limit: int = 10) -> list[float]:
    """Return the durations in seconds of the last ``limit`` successful moves, newest first.

    These are moves of this kind from this host.
    """
    query = (
        sa.select(actions_table.c.created_at, actions_table.c.finished_at)
        .select_from(moves_table.join(actions_table, actions_table.c.id == moves_table.c.action_id))
        .where(
            moves_table.c.source_host == host,
            moves_table.c.type == kind,
            actions_table.c.state == ActionState.DONE,
        )
        .order_by(moves_table.c.id.desc())
        .limit(limit)
    )
    return [(row.finished_at - row.created_at) / SECOND for row in tx.execute(query)]
