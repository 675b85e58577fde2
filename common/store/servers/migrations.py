# SPDX-License-Identifier: Apache-2.0
"""Migrations: the record of each move of a server, with source, destination and progress.

The transaction that begins a move also opens the migration. Until the end of the move, the
migration is the consumer of the server's resources at the source. The API, the CLI and the sweep
call ``begin`` and ``close``. The conductor's runner calls ``update``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, ids, states
from common.domain.context import RequestContext
from common.domain.models import Control, Flavor
from common.domain.service_binaries import Binary
from common.domain.statuses import (
    MIGRATIONS_IN_PROGRESS,
    OPEN_MIGRATIONS,
    ActionPhase,
    ActionState,
    GuestState,
    MigrationStatus,
    MigrationType,
)
from common.domain.wire import to_wire
from common.store import cleanups
from common.store.engine import insert_many, now, update_grouped
from common.store.hosts.services import is_up
from common.store.placement import allocations
from common.store.rows import (
    MigrationRow,
    ReadingActionRow,
    RequestedControl,
    ServerKey,
    ShownMigrationRow,
    Values,
)
from common.store.schema import actions as actions_table
from common.store.schema import guests as guests_table
from common.store.schema import heartbeats, hosts, migrations, servers, services
from common.store.servers import actions, guests

#: Statuses in which a live migration can be aborted.
ABORTABLE = (MigrationStatus.RUNNING,)
QUEUED = (MigrationStatus.QUEUED, MigrationStatus.PREPARING)


# --- beginning and ending ---
def begin(
    tx: Connection,
    row: states.Action,
    server_id: str,
    kind: MigrationType,
    *,
    context: RequestContext,
    args: Values | None = None,
    project_id: str | None = None,
    new_flavor: Flavor | None = None,
    secrets: str | None = None,
    changes: Values | None = None,
) -> str:
    """Let an action that moves the server take it, open the migration, and return the action's id.

    The action's arguments get ``migration`` (the uuid), ``source``, ``was`` (the vm_state),
    ``old_flavor`` and ``new_flavor``. If the server has an open migration, that migration ends with
    the status error, and the new action must undo the remains. ``new_flavor`` None: the flavor
    stays. The other parameters are as in ``actions.begin``.

    Raises:
        NotFound, Locked, WrongState, Busy: As in ``actions.begin``.
        Conflict: As in ``actions.begin``. Also, the server has no host, or an evacuation is
            requested while the server is being evacuated to its present host, which is up.
    """
    actions.take_lock(tx, server_id, project_id)
    server = tx.execute(_MOVED, {"server": server_id}).one()
    if kind == MigrationType.EVACUATION:
        _check_destination(tx, server_id, server.host)
    migration, flavor = ids.new(), to_wire(new_flavor) if new_flavor is not None else server.flavor
    action = actions.begin(
        tx,
        row,
        server_id,
        context=context,
        project_id=project_id,
        secrets=secrets,
        changes=changes,
        args={
            **(args or {}),
            "migration": migration,
            "source": server.host,
            "old_flavor": server.flavor,
            "new_flavor": flavor,
        },
    )
    if server.host is None:
        raise errors.Conflict(f"Instance {server_id} is on no host; there is nothing to move.")
    end_open(tx, [server_id], MigrationStatus.ERROR)
    insert_many(
        tx,
        migrations,
        [
            {
                "uuid": migration,
                "server_id": server_id,
                "action_id": action,
                "project_id": server.project_id,
                "user_id": context.user_id,
                "type": kind,
                "status": MigrationStatus.ACCEPTED,
                "source_host": server.host,
                "old_flavor": server.flavor,
                "new_flavor": flavor,
                "was": server.vm_state,
            }
        ],
        "created_at",
        "updated_at",
    )
    return action


_MOVED = sa.select(
    servers.c.host, servers.c.vm_state, servers.c.flavor, servers.c.project_id
).where(servers.c.id == sa.bindparam("server"))


def _check_destination(tx: Connection, server_id: str, host: str | None) -> None:
    """Raise Conflict if the server is being evacuated to this host already, and the host is up."""
    move = open_of(tx, [server_id]).get(server_id)
    if (
        host is None
        or move is None
        or (move.type, move.dest_host) != (MigrationType.EVACUATION, host)
    ):
        return
    if is_up(tx, host):
        raise errors.Conflict(
            f"Server {server_id} is being evacuated to host {host}, which is up. Wait for the end of this "
            "evacuation."
        )


def close(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    project_id: str | None = None,
) -> str:
    """Begin the action that confirms or reverts a finished move, and return the action's id.

    The action's arguments get ``migration``, ``source``, ``dest``, ``old_flavor``, ``new_flavor``,
    ``before`` (the vm_state before the move) and ``resized`` (the fence of the move).

    Raises:
        NotFound, Locked, WrongState, Busy, Conflict: As in ``actions.begin``.
        BadRequest: The server has no finished move.
    """
    server = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, server, context, tx)
    move = tx.execute(_FINISHED, {"server": server_id}).first()
    if move is None:
        raise errors.BadRequest("Instance has not been resized.")
    return actions.begin(
        tx,
        row,
        server_id,
        context=context,
        project_id=project_id,
        args={
            "migration": move.uuid,
            "source": move.source_host,
            "dest": move.dest_host,
            "old_flavor": move.old_flavor,
            "new_flavor": move.new_flavor,
            "before": move.was,
            "resized": move.fence,
        },
    )


_FINISHED = (
    sa.select(migrations, actions_table.c.fence)
    .select_from(migrations.join(actions_table, actions_table.c.id == migrations.c.action_id))
    .where(
        migrations.c.server_id == sa.bindparam("server"),
        migrations.c.status == MigrationStatus.FINISHED,
    )
    .order_by(migrations.c.id.desc())
    .limit(1)
)


def abandon(tx: Connection, server_id: str, fence: int) -> None:
    """End the open migration of a server, for example because an admin resets the server's state.

    A finished migration gets the status confirmed, any other the status error. The server keeps
    host and flavor. Guests on other hosts become pending cleanups with this ``fence``. Files on
    storage that these hosts share with the server's host are kept. Port bindings to the other host
    of a live migration become pending cleanups too. Without an open migration, nothing changes.
    """
    for move in open_of(tx, [server_id]).values():
        server = tx.execute(
            sa.select(servers.c.host, servers.c.flavor).where(servers.c.id == server_id)
        ).one()
        tx.execute(
            sa.update(servers)
            .where(servers.c.id == server_id)
            .values(vcpus=server.flavor["vcpus"], memory_mb=server.flavor["memory_mb"])
        )
        if move.source_host is not None and move.dest_host == move.source_host:
            allocations.stay(tx, move.uuid, server_id, move.source_host)
        for row in guests.places(tx, server_id):
            if row.wanted in (GuestState.KEPT, GuestState.ARRIVING):
                guests.add_removal(
                    tx,
                    server_id,
                    fence,
                    host=row.host,
                    may_run=False,
                    keeps_files=share_files(tx, row.host, server.host),
                )
            elif row.wanted in guests.HERE and row.holder is not None:
                guests.hold(tx, server_id, row.host, None)
                allocations.hand_back(tx, row.holder, server_id, row.host)
        if move.type == MigrationType.LIVE:
            _unbind_elsewhere(tx, move, server_id)
        status = (
            MigrationStatus.CONFIRMED
            if move.status == MigrationStatus.FINISHED
            else MigrationStatus.ERROR
        )
        update(tx, {move.uuid: {"status": status}})


def share_files(tx: Connection, first: str, second: str) -> bool:
    """Return True if both hosts report the same shared storage."""
    storages = {
        row.name: (row.facts or {}).get("storage")
        for row in tx.execute(
            sa.select(hosts.c.name, hosts.c.facts).where(hosts.c.name.in_((first, second)))
        )
    }
    return bool(storages.get(first)) and storages.get(first) == storages.get(second)


def _unbind_elsewhere(tx: Connection, move: MigrationRow, server_id: str) -> None:
    """Add pending cleanups for the port bindings to the other host of a live migration."""
    server = tx.execute(
        sa.select(servers.c.host, servers.c.interfaces, servers.c.project_id).where(
            servers.c.id == server_id
        )
    ).one()
    other = move.source_host if server.host == move.dest_host else move.dest_host
    if other is not None:
        cleanups.add(
            tx,
            [
                {
                    "kind": cleanups.BINDING,
                    "target": interface["port"],
                    "place": other,
                    "args": {},
                    "server_id": server_id,
                    "project_id": server.project_id,
                    "why": "An admin reset the server's state during a live migration.",
                }
                for interface in server.interfaces or ()
            ],
        )


def end_open(tx: Connection, server_ids: Sequence[str], status: MigrationStatus) -> None:
    """Set this status for the open migrations of these servers, because another action took them.

    Of a move within one host, the allocations that the migration holds are released.
    """
    for move in open_of(tx, server_ids).values():
        if move.source_host is not None and move.dest_host == move.source_host:
            allocations.stay(tx, move.uuid, move.server_id, move.source_host)
    tx.execute(_END_OPEN, {"servers": list(server_ids), "status": status})


_SERVERS: sa.BindParameter[Any] = sa.bindparam("servers", expanding=True)
_IS_OPEN = sa.and_(migrations.c.server_id.in_(_SERVERS), migrations.c.status.in_(OPEN_MIGRATIONS))
_END_OPEN = sa.update(migrations).where(_IS_OPEN).values(updated_at=now())


def update(tx: Connection, changes: Mapping[str, Mapping[str, object]]) -> None:
    """Write columns of migrations: uuid -> column values. ``updated_at`` becomes now."""
    update_grouped(
        tx,
        migrations,
        migrations.c.uuid,
        {uuid: {**values, "updated_at": now()} for uuid, values in changes.items()},
    )


def store_progress(tx: Connection, numbers: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
    """Store the progress of live migrations: (source host, action id) -> numbers in bytes.

    ``updated_at`` stays unchanged.
    """
    for (host, action), reported in numbers.items():
        tx.execute(
            sa.update(migrations)
            .where(migrations.c.action_id == action, migrations.c.source_host == host)
            .values(progress=dict(reported))
        )


def request_control(
    tx: Connection, uuid: str, control: Control, statuses: Iterable[MigrationStatus]
) -> bool:
    """Store the request to abort or complete a live migration, and return True.

    The source gets the request with each exchange until the migration ends. A later request
    replaces an earlier request. If the status of the migration is not in ``statuses``, nothing is
    stored, and the result is False.
    """
    return bool(
        tx.execute(
            sa.update(migrations)
            .where(migrations.c.uuid == uuid, migrations.c.status.in_(sorted(statuses)))
            .values(requested_control=control, updated_at=now())
        ).rowcount
    )


def requested_controls(tx: Connection, host: str) -> list[RequestedControl]:
    """Return the requested aborts and completions of live migrations in progress from this host."""
    return list(tx.execute(_REQUESTED, {"source": host}))


_REQUESTED = sa.select(migrations.c.action_id, migrations.c.requested_control).where(
    migrations.c.status.in_(MIGRATIONS_IN_PROGRESS),
    migrations.c.source_host == sa.bindparam("source"),
    migrations.c.requested_control.is_not(None),
)


def complete_evacuations(tx: Connection, server_ids: Iterable[str]) -> None:
    """Set evacuations of these servers from DONE to COMPLETED if the source has no guest record.

    The record exists while the source still has to remove the guest.
    """
    tx.execute(_COMPLETE, {"servers": sorted(set(server_ids))})


_COMPLETE = (
    sa.update(migrations)
    .where(
        migrations.c.server_id.in_(_SERVERS),
        migrations.c.status == MigrationStatus.DONE,
        ~sa.select(guests_table.c.server_id)
        .where(
            guests_table.c.server_id == migrations.c.server_id,
            guests_table.c.host == migrations.c.source_host,
        )
        .exists(),
    )
    .values(status=MigrationStatus.COMPLETED, updated_at=now())
)


# --- reading ---
def reading_from_the_dead(
    tx: Connection, steps: Sequence[tuple[str, str]], limit: int
) -> list[ReadingActionRow]:
    """Return up to ``limit`` actions whose command reads files from a source that is forced down.

    These are actions of moves that wait for a command at one of these steps (workflow, step), and
    are not being undone. The rows have the action's columns and ``source``, the host's name.
    """
    return list(tx.execute(_reading(tuple(steps)), {"most": limit}))


@cache
def _reading(steps: tuple[tuple[str, str], ...]) -> sa.Select[Any]:
    at = sa.tuple_(actions_table.c.workflow, actions_table.c.step).in_(steps)
    query = sa.select(actions_table, migrations.c.source_host.label("source")).select_from(
        actions_table.join(migrations, migrations.c.action_id == actions_table.c.id).join(
            services,
            sa.and_(
                services.c.host == migrations.c.source_host, services.c.binary == Binary.COMPUTE
            ),
        )
    )
    return query.where(
        actions_table.c.state == ActionState.WAITING,
        actions_table.c.phase == ActionPhase.FORWARD,
        at,
        services.c.forced_down.is_(True),
    ).limit(sa.bindparam("most", type_=sa.Integer))


def find_unconfirmed(tx: Connection, older_than: int, limit: int) -> list[ServerKey]:
    """Return servers with a finished resize or cold migration that waits for a confirmation.

    These are up to ``limit`` servers without an action whose migration finished ``older_than`` µs
    ago or earlier, oldest first. Servers on hosts that are down are left out, because the kept
    guest at the source may be the only guest left.
    """
    query = sa.select(servers.c.id, servers.c.project_id).select_from(
        servers.join(migrations, migrations.c.server_id == servers.c.id)
        .join(
            services,
            sa.and_(services.c.host == servers.c.host, services.c.binary == Binary.COMPUTE),
        )
        .join(
            heartbeats,
            sa.and_(heartbeats.c.host == servers.c.host, heartbeats.c.binary == Binary.COMPUTE),
        )
    )
    return list(
        tx.execute(
            query.where(
                services.c.forced_down.is_(False),
                heartbeats.c.up.is_(True),
                migrations.c.status == MigrationStatus.FINISHED,
                migrations.c.updated_at <= now() - older_than,
                servers.c.action.is_(None),
                servers.c.vm_state == states.RESIZED,
                servers.c.deleted == 0,
            )
            .order_by(migrations.c.updated_at)
            .limit(limit)
        )
    )


def _select_migrations() -> sa.Select[Any]:
    """Return the query of migrations with source_node, dest_node and dest_ip from their hosts."""
    source, dest = hosts.alias("source"), hosts.alias("dest")
    return sa.select(
        migrations,
        source.c.hypervisor_hostname.label("source_node"),
        dest.c.hypervisor_hostname.label("dest_node"),
        dest.c.host_ip.label("dest_ip"),
    ).select_from(
        migrations.outerjoin(source, source.c.name == migrations.c.source_host).outerjoin(
            dest, dest.c.name == migrations.c.dest_host
        )
    )


def page(
    tx: Connection,
    *,
    limit: int | None = None,
    marker: str | None = None,
    changed_since: int | None = None,
    changed_before: int | None = None,
    host: str | None = None,
    source: str | None = None,
    dest: str | None = None,
    **equal: str,
) -> list[ShownMigrationRow]:
    """Return migrations, newest first, in one statement, or two with a marker.

    Args:
        tx: The transaction.
        limit: Most migrations to return. None: all.
        marker: Uuid of the last migration of the previous page.
        changed_since: Only migrations that changed at this time or later, in µs.
        changed_before: Only migrations that changed at this time or earlier, in µs.
        host: Only migrations from or to this host.
        source: Only migrations from this host.
        dest: Only migrations to this host.
        equal: Values of the columns status, type, server_id, user_id or project_id.

    Raises:
        BadRequest: The marker is not the uuid of a migration.
    """
    query = _select_migrations()
    for column, value in equal.items():
        query = query.where(migrations.c[column] == value)
    if host is not None:
        query = query.where(
            sa.or_(migrations.c.source_host == host, migrations.c.dest_host == host)
        )
    if source is not None:
        query = query.where(migrations.c.source_host == source)
    if dest is not None:
        query = query.where(migrations.c.dest_host == dest)
    if changed_since is not None:
        query = query.where(migrations.c.updated_at >= changed_since)
    if changed_before is not None:
        query = query.where(migrations.c.updated_at <= changed_before)
    if marker is not None:
        last = tx.execute(
            sa.select(migrations.c.created_at, migrations.c.id).where(migrations.c.uuid == marker)
        ).first()
        if last is None:
            raise errors.BadRequest(f"Marker {marker} could not be found.")
        query = query.where(
            sa.or_(
                migrations.c.created_at < last.created_at,
                sa.and_(migrations.c.created_at == last.created_at, migrations.c.id < last.id),
            )
        )
    return list(
        tx.execute(
            query.order_by(migrations.c.created_at.desc(), migrations.c.id.desc()).limit(limit)
        )
    )


def in_progress(tx: Connection, server_id: str) -> list[ShownMigrationRow]:
    """Return the live migrations and evacuations of a server that are in progress, oldest first.

    GET /servers/{id}/migrations shows these.
    """
    return list(
        tx.execute(
            _select_migrations()
            .where(
                migrations.c.server_id == server_id,
                migrations.c.type.in_((MigrationType.LIVE, MigrationType.EVACUATION)),
                migrations.c.status.in_(MIGRATIONS_IN_PROGRESS),
            )
            .order_by(migrations.c.id)
        )
    )


def show(tx: Connection, server_id: str, number: int) -> ShownMigrationRow | None:
    """Return a migration of a server by its numeric id in the API, or None."""
    return tx.execute(
        _select_migrations().where(migrations.c.server_id == server_id, migrations.c.id == number)
    ).first()


def open_of(tx: Connection, server_ids: Iterable[str]) -> dict[str, MigrationRow]:
    """Return server id -> open migration: in progress, or finished and not confirmed or reverted.

    Servers without an open migration are left out.
    """
    return {
        row.server_id: row for row in tx.execute(_SELECT_OPEN, {"servers": sorted(set(server_ids))})
    }


_SELECT_OPEN = sa.select(migrations).where(_IS_OPEN)
