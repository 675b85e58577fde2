# SPDX-License-Identifier: Apache-2.0
"""Guests: the hosts on which a domain of a server exists or may exist, and its wanted state.

A row with the state ``absent`` is a pending cleanup: it stays until the host has confirmed the
removal. Only such a row permits a host to delete a domain. A guest that is ``kept`` is stopped, on
a host to which the server may return. A guest that is ``arriving`` is being created at the
destination of a move.

Invariant: a guest's allocations exist as long as its row. Only this file and the doctor's repairs
call ``allocations.release``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, states
from common.domain.service_binaries import Binary
from common.domain.statuses import GuestState
from common.store.engine import for_update, insert_many, now
from common.store.placement import allocations
from common.store.rows import GuestRow, RemovalRow, ServerKey, Values
from common.store.schema import guests, heartbeats, servers, services

#: States of the guest on the server's own host.
HERE = (GuestState.RUNNING, GuestState.STOPPED)


class RemovedGuest(NamedTuple):
    """A guest that its host has removed, and the fence of the command that removed the guest."""

    server: str
    host: str
    fence: int


def add(tx: Connection, rows: Sequence[Values]) -> None:
    """Insert guest records.

    Each row has server_id, host and fence, and ``assignment`` if the guest uses particular CPUs,
    memory or devices. Unless the row says otherwise, the guest should run.
    """
    base = {
        "wanted": GuestState.RUNNING,
        "may_run": True,
        "assignment": None,
        "holder": None,
        "keeps_files": False,
    }
    insert_many(tx, guests, [{**base, **row} for row in rows], "changed_at")


def want(tx: Connection, server_ids: Iterable[str], wanted: GuestState, may_run: bool) -> None:
    """Store ``wanted`` and ``may_run`` for the servers' guests on the servers' own hosts.

    These are the guests whose present wanted state is in ``HERE``. Other guests, for example
    pending removals, stay unchanged. ``may_run``: True if a domain of the guest may be running.
    """
    tx.execute(_WANT, {"servers": list(server_ids), "wanted": wanted, "may_run": may_run})


_SERVERS: sa.BindParameter[Any] = sa.bindparam("servers", expanding=True)
#: The parameters name further columns to write. ``owner`` and ``place`` are server and host.
_CHANGE = sa.update(guests).values(changed_at=now())
_WANT = _CHANGE.where(guests.c.server_id.in_(_SERVERS), guests.c.wanted.in_(HERE))
_OF_OWNER = guests.c.server_id == sa.bindparam("owner")
_AT_PLACE = guests.c.host == sa.bindparam("place")
_HOLD = _CHANGE.where(_OF_OWNER, _AT_PLACE)
_REMOVE = _CHANGE.where(_OF_OWNER, guests.c.wanted != GuestState.ABSENT)
_BECOME = _REMOVE.where(_AT_PLACE)


def become(
    tx: Connection, server_id: str, host: str, wanted: GuestState, **changes: object
) -> None:
    """Set the wanted state of the guest on one host, unless the guest is a pending cleanup.

    ``changes`` can contain may_run, holder, fence, sent_at and keeps_files.
    """
    tx.execute(_BECOME, {"owner": server_id, "place": host, "wanted": wanted, **changes})


def hold(tx: Connection, server_id: str, host: str, migration: str | None) -> None:
    """Record the consumer of a guest's allocation: a migration, or None for the server.

    The caller moves the allocation itself (``allocations.claim``, ``allocations.hand_back``).
    """
    tx.execute(_HOLD, {"owner": server_id, "place": host, "holder": migration})


def add_removal(
    tx: Connection,
    server_id: str,
    fence: int,
    *,
    host: str | None = None,
    may_run: bool = True,
    keeps_files: bool = False,
) -> None:
    """Turn the guests of a server into pending cleanups. Existing cleanups stay unchanged.

    Args:
        tx: The transaction.
        server_id: Id of the server.
        fence: The fence of the pending cleanups.
        host: Only the guest on this host. None: all guests.
        may_run: False if no domain of these guests runs. True: keep the stored value.
        keeps_files: True if the host must keep the files, because another guest uses them on shared
            storage. This is ignored without ``host``.
    """
    changes: Values = {"fence": fence, "sent_at": None, **({} if may_run else {"may_run": False})}
    if host is not None:
        become(tx, server_id, host, GuestState.ABSENT, keeps_files=keeps_files, **changes)
    else:
        tx.execute(_REMOVE, {"owner": server_id, "wanted": GuestState.ABSENT, **changes})


def home(tx: Connection, server_id: str) -> str | None:
    """Return the server's host, or None if the server does not exist or has no host."""
    host: str | None = tx.scalar(
        sa.select(servers.c.host).where(servers.c.id == server_id, servers.c.deleted == 0)
    )
    return host


def discard(
    tx: Connection,
    server_id: str,
    host: str,
    *,
    elsewhere: str | None = None,
    keeps_files: bool = False,
) -> None:
    """Create a pending cleanup for a guest without a record, so that the host removes the guest.

    The cleanup's fence is that of the existing server, or else 1. If the host knows a higher fence,
    the host reports that fence, and the cleanup's fence is raised.

    Args:
        tx: The transaction.
        server_id: Id of the server.
        host: The host of the guest.
        elsewhere: The host of the server, another than ``host``. None: the server must not exist.
        keeps_files: True if the guest on ``elsewhere`` uses the same files.

    Raises:
        Conflict: As ``check_discard``.
    """
    fence = check_discard(tx, server_id, host, elsewhere)
    removal = {"server_id": server_id, "host": host, "fence": fence, "wanted": GuestState.ABSENT}
    add(tx, [{**removal, "keeps_files": keeps_files}])


def check_discard(tx: Connection, server_id: str, host: str, elsewhere: str | None = None) -> int:
    """Check that a host may remove a guest without a record, and return the cleanup's fence.

    The arguments are those of ``discard``. The server's row is locked.

    Raises:
        Conflict: The server exists, and is not on ``elsewhere`` or has an action. Or the server has
            another guest record than one on ``elsewhere`` in a state of ``HERE``.
    """
    query = sa.select(servers).where(servers.c.id == server_id, servers.c.deleted == 0)
    row = tx.execute(for_update(query)).one_or_none()
    if row is not None and (elsewhere is None or row.host != elsewhere or row.action is not None):
        raise errors.Conflict(
            f"Server {server_id} exists. Delete or move the server, which removes its guest on host {host}."
        )
    places = tx.execute(sa.select(guests).where(guests.c.server_id == server_id)).all()
    if any(
        guest.host == host or guest.host != elsewhere or guest.wanted not in HERE
        for guest in places
    ):
        raise errors.Conflict(
            f"Server {server_id} has a guest record, so its guest on host {host} cannot be discarded. To list "
            f"the guests that hosts still have to remove, run: kilonova host removals"
        )
    return int(row.fence) if row is not None else 1


def confirm_removals(tx: Connection, confirmed: Iterable[RemovedGuest]) -> set[str]:
    """Delete the pending cleanups that hosts have confirmed, and release their allocations.

    A confirmation with a lower fence than the cleanup's is ignored.

    Returns:
        The ids of the servers of the deleted cleanups.
    """
    fences = {(server, host): fence for server, host, fence in confirmed}
    if not fences:
        return set()
    rows = tx.execute(_PENDING_LOCKED, {"servers": sorted({server for server, _ in fences})})
    removed = [
        row
        for row in rows
        if (row.server_id, row.host) in fences and row.fence <= fences[row.server_id, row.host]
    ]
    keys = [(row.server_id, row.host) for row in removed]
    if keys:
        allocations.release(tx, [(row.holder or row.server_id, row.host) for row in removed])
        tx.execute(_DELETE, {"servers": [server for server, _ in keys], "keys": keys})
    return {server for server, _ in keys}


_PENDING_LOCKED = for_update(
    sa.select(guests).where(guests.c.server_id.in_(_SERVERS), guests.c.wanted == GuestState.ABSENT)
)
_DELETE = sa.delete(guests).where(
    guests.c.server_id.in_(_SERVERS),
    sa.tuple_(guests.c.server_id, guests.c.host).in_(sa.bindparam("keys", expanding=True)),
)


def removals(
    tx: Connection, host: str, older_than: int, limit: int, known: Collection[tuple[str, int]] = ()
) -> list[GuestRow]:
    """Lock and return up to ``limit`` pending cleanups of a host, oldest change first.

    Rows locked by another transaction are left out.

    Args:
        tx: The transaction.
        host: Name of the host.
        older_than: Leave out cleanups whose command was sent within the last ``older_than`` µs.
        limit: Most cleanups to return.
        known: Leave out these cleanups, whose commands the host has: (server, fence).
    """
    values = {"at": host, "older_than": older_than, "most": limit}
    if known:
        return list(tx.execute(_REMOVALS_UNKNOWN, {**values, "known": sorted(known)}))
    return list(tx.execute(_REMOVALS, values))


_REMOVALS = (
    sa.select(guests)
    .where(
        guests.c.host == sa.bindparam("at"),
        guests.c.wanted == GuestState.ABSENT,
        sa.or_(
            guests.c.sent_at.is_(None),
            guests.c.sent_at <= now() - sa.bindparam("older_than", type_=sa.BigInteger),
        ),
    )
    .order_by(guests.c.changed_at)
    .limit(sa.bindparam("most", type_=sa.Integer))
    .with_for_update(skip_locked=True)
)
_REMOVALS_UNKNOWN = _REMOVALS.where(
    sa.tuple_(guests.c.server_id, guests.c.fence).not_in(sa.bindparam("known", expanding=True))
)


def removals_of(tx: Connection, server_ids: Iterable[str]) -> list[RemovalRow]:
    """Return the pending cleanups of these servers. ``up`` is True if the host can be reached."""
    return list(tx.execute(_REMOVALS_OF, {"servers": list(server_ids)}))


_REMOVALS_OF = (
    sa.select(
        guests,
        sa.and_(
            sa.func.coalesce(heartbeats.c.up, sa.false()),
            sa.not_(sa.func.coalesce(services.c.forced_down, sa.false())),
        ).label("up"),
    )
    .select_from(
        guests.outerjoin(
            services, sa.and_(services.c.host == guests.c.host, services.c.binary == Binary.COMPUTE)
        ).outerjoin(
            heartbeats,
            sa.and_(heartbeats.c.host == guests.c.host, heartbeats.c.binary == Binary.COMPUTE),
        )
    )
    .where(
        guests.c.server_id.in_(_SERVERS),
        guests.c.wanted == GuestState.ABSENT,
    )
)


def mark_sent(tx: Connection, host: str, server_ids: Sequence[str]) -> None:
    """Record that the commands to remove these servers' guests were sent to the host now."""
    tx.execute(_MARK_SENT, {"place": host, "servers": server_ids})


_MARK_SENT = (
    sa.update(guests).where(_AT_PLACE, guests.c.server_id.in_(_SERVERS)).values(sent_at=now())
)


def fences_on(tx: Connection, host: str) -> dict[str, int]:
    """Return server -> fence of all guest records of a host, for the response to a registration."""
    return {
        row.server_id: row.fence
        for row in tx.execute(
            sa.select(guests.c.server_id, guests.c.fence).where(guests.c.host == host)
        )
    }


def places(tx: Connection, server_id: str) -> list[GuestRow]:
    """Return all guest records of a server, sorted by host, pending cleanups too.

    The caller has locked the server.
    """
    return list(
        tx.execute(sa.select(guests).where(guests.c.server_id == server_id).order_by(guests.c.host))
    )


def off_on(tx: Connection, host: str, reported: Iterable[str]) -> list[str]:
    """Return the ids of servers whose domain on this host must be stopped, sorted.

    Why: the server is or may be elsewhere. The result contains the servers whose guest here is in
    the state ``KEPT``. It also contains servers in ``reported`` (the servers of the host's domains)
    without a guest record here, if the server is not deleted and has another host or no host. For
    example, an operator removed the host's record while the host was off.
    """
    kept_guests = sa.select(guests.c.server_id).where(
        guests.c.host == host, guests.c.wanted == GuestState.KEPT
    )
    server_ids = set(tx.scalars(kept_guests))
    if names := sorted(set(reported)):
        here = sa.select(guests.c.server_id).where(
            guests.c.server_id == servers.c.id, guests.c.host == host
        )
        server_ids |= set(
            tx.scalars(
                sa.select(servers.c.id).where(
                    servers.c.id.in_(names),
                    servers.c.deleted == 0,
                    sa.func.coalesce(servers.c.host, "") != host,
                    ~here.exists(),
                )
            )
        )
    return sorted(server_ids)


def discard_removals(tx: Connection, host: str) -> None:
    """Delete the pending cleanups of a host that is being removed, and release their allocations.

    The caller has locked the provider.
    """
    removals_there = list(
        tx.execute(
            sa.select(guests).where(guests.c.host == host, guests.c.wanted == GuestState.ABSENT)
        )
    )
    if removals_there:
        allocations.release(tx, [(row.holder or row.server_id, host) for row in removals_there])
        tx.execute(
            sa.delete(guests).where(guests.c.host == host, guests.c.wanted == GuestState.ABSENT)
        )


def lost_power(
    tx: Connection, host: str, server: str | None = None, idle_too: bool = False
) -> None:
    """Set the power state of servers to SHUTDOWN after a boot of their host.

    These are servers that have an action and whose guest should run on the host. If the action does
    not start the guest, and the server is ACTIVE, PAUSED or RESCUED afterwards, the conductor then
    starts the guest.

    Args:
        tx: The transaction.
        host: The host that was booted.
        server: Only this server. None: all servers of the host.
        idle_too: Include servers without an action.
    """
    here = sa.select(guests.c.server_id).where(
        guests.c.host == host, guests.c.wanted == GuestState.RUNNING
    )
    server_ids = here.where(guests.c.server_id == server) if server else here
    busy = sa.true() if idle_too else servers.c.action.is_not(None)
    tx.execute(
        sa.update(servers)
        .where(servers.c.id.in_(server_ids), busy)
        .values(power_state=states.SHUTDOWN)
    )


def wanted_running_on(tx: Connection, host: str) -> list[ServerKey]:
    """Return servers without an action whose guests should run on this host, ordered by id.

    This takes no locks.
    """
    query = sa.select(servers.c.id, servers.c.project_id).join(
        guests, guests.c.server_id == servers.c.id
    )
    return list(
        tx.execute(
            query.where(
                guests.c.host == host,
                guests.c.wanted == GuestState.RUNNING,
                servers.c.action.is_(None),
                servers.c.deleted == 0,
            ).order_by(servers.c.id)
        )
    )
