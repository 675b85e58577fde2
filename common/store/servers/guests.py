# SPDX-License-Identifier: Apache-2.0
"""Guests: where a domain of a server exists or may exist, and what is wanted of it.

A row with ``absent`` is a *debt*: it stays until its host has confirmed that nothing is left, and
it is the only licence to remove a domain. One that is ``kept`` is off, on a host that the server
may come back to; one that is ``arriving`` is being made, where the server is not yet. A guest's
allocations live and die with its row (``allocations`` is called from here and from nowhere else),
so the two can always be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, states
from common.domain.service_binaries import Binary
from common.domain.statuses import GuestState
from common.store.engine import for_update, insert_many, now
from common.store.placement import allocations
from common.store.rows import DebtRow, GuestRow, ServerKey, Values
from common.store.schema import guests, heartbeats, servers, services

HERE = (GuestState.RUNNING, GuestState.STOPPED)  #: the guest of the place where the server is


class RemovedGuest(NamedTuple):
    """A guest that its host has removed under a fence."""

    server: str
    host: str
    fence: int


def add(tx: Connection, rows: Sequence[Values]) -> None:
    """New guests of placements that were just claimed: each row has server_id, host, fence, and its
    assignment where it holds particular parts of the host, until the row goes."""
    base = {
        "wanted": GuestState.RUNNING,
        "may_run": True,
        "assignment": None,
        "holder": None,
        "keeps_files": False,
    }
    insert_many(tx, guests, [{**base, **row} for row in rows], "changed_at")


def want(tx: Connection, server_ids: Iterable[str], wanted: GuestState, may_run: bool) -> None:
    """Say what is wanted of the guests of these servers where they are."""
    tx.execute(
        sa.update(guests)
        .where(guests.c.server_id.in_(list(server_ids)), guests.c.wanted.in_(HERE))
        .values(wanted=wanted, may_run=may_run, changed_at=now())
    )


def become(
    tx: Connection, server_id: str, host: str, wanted: GuestState, **changes: object
) -> None:
    """Say what the guest of a server on one host is from now on, unless it is a debt; ``changes``
    may be may_run, holder, fence and keeps_files."""
    tx.execute(
        sa.update(guests)
        .where(
            guests.c.server_id == server_id,
            guests.c.host == host,
            guests.c.wanted != GuestState.ABSENT,
        )
        .values(wanted=wanted, changed_at=now(), **changes)
    )


def hold(tx: Connection, server_id: str, host: str, migration: str | None) -> None:
    """Say whose the allocation of a server's guest on a host is: a migration's, or (None) the
    server's."""
    tx.execute(
        sa.update(guests)
        .where(guests.c.server_id == server_id, guests.c.host == host)
        .values(holder=migration, changed_at=now())
    )


def add_debt(
    tx: Connection,
    server_id: str,
    fence: int,
    *,
    host: str | None = None,
    may_run: bool = True,
    keeps_files: bool = False,
) -> None:
    """Turn the guests of a server (on one host, or all) into debts. ``may_run`` False: it is known
    that nothing of them runs. ``keeps_files``: their files are those of a guest that stays, on
    shared storage."""
    change = sa.update(guests).where(
        guests.c.server_id == server_id, guests.c.wanted != GuestState.ABSENT
    )
    if host is not None:
        change = change.where(guests.c.host == host)
    values: Values = {
        "wanted": GuestState.ABSENT,
        "fence": fence,
        "changed_at": now(),
        "sent_at": None,
    }
    if not may_run:
        values["may_run"] = False
    if host is not None:
        values["keeps_files"] = keeps_files
    tx.execute(change.values(values))


def home(tx: Connection, server_id: str) -> str | None:
    """The host that a server's record names; None: there is no such server, or it is nowhere."""
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
    """Make a debt of a guest that no record knows: of a server that is not there any more, or is
    ``elsewhere``, and idle. ``keeps_files``: they are those of the guest there.

    Its fence is the lowest, or the server's: a host that knows a higher one says so, and the debt
    rises above it.

    Raises:
        Conflict: the server is there, or the guest has a record.
    """
    query = sa.select(servers).where(servers.c.id == server_id, servers.c.deleted == 0)
    row = tx.execute(for_update(query)).one_or_none()
    if row is not None and (elsewhere is None or row.host != elsewhere or row.action is not None):
        raise errors.Conflict(
            f"Server {server_id} is there: delete it, or move it, and its guests go."
        )
    places = tx.execute(sa.select(guests).where(guests.c.server_id == server_id)).all()
    if any(one.host == host or one.host != elsewhere or one.wanted not in HERE for one in places):
        raise errors.Conflict(
            f"A guest of {server_id} has a record: kilonova host debts says what will remove it."
        )
    fence = row.fence if row is not None else 1
    debt = {"server_id": server_id, "host": host, "fence": fence, "wanted": GuestState.ABSENT}
    add(tx, [{**debt, "keeps_files": keeps_files}])


def confirm_debts(tx: Connection, confirmed: Iterable[RemovedGuest]) -> set[str]:
    """Remove the debts of guests that hosts have removed, and release their allocations.

    A confirmation under an older fence is ignored.

    Returns:
        The servers of which a debt was removed.
    """
    fences = {(server, host): fence for server, host, fence in confirmed}
    if not fences:
        return set()
    rows = tx.execute(
        for_update(
            sa.select(guests).where(
                guests.c.server_id.in_(sorted({server for server, _ in fences})),
                guests.c.wanted == GuestState.ABSENT,
            )
        )
    )
    removed = [
        row
        for row in rows
        if (row.server_id, row.host) in fences and row.fence <= fences[row.server_id, row.host]
    ]
    found = [(row.server_id, row.host) for row in removed]
    if found:
        allocations.release(tx, [(row.holder or row.server_id, row.host) for row in removed])
        tx.execute(
            sa.delete(guests).where(
                guests.c.server_id.in_([server for server, _ in found]),
                sa.tuple_(guests.c.server_id, guests.c.host).in_(found),
            )
        )
    return {server for server, _ in found}


def debts(
    tx: Connection, host: str, older_than: int, limit: int, known: Collection[tuple[str, int]] = ()
) -> list[GuestRow]:
    """Debts of a host that were not sent within the last ``older_than`` µs, but for those
    ``known``: (server, fence). One that somebody works on just now is left out too."""
    query = _DEBTS
    if known:
        query = query.where(sa.tuple_(guests.c.server_id, guests.c.fence).not_in(sorted(known)))
    return list(tx.execute(query, {"at": host, "older_than": older_than, "most": limit}))


_DEBTS = (
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


def debts_of(tx: Connection, server_ids: Iterable[str]) -> list[DebtRow]:
    """The debts of these servers, with ``up``: whether their host can be reached."""
    return list(tx.execute(_DEBTS_OF, {"servers": list(server_ids)}))


_DEBTS_OF = (
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
        guests.c.server_id.in_(sa.bindparam("servers", expanding=True)),
        guests.c.wanted == GuestState.ABSENT,
    )
)


def mark_sent(tx: Connection, host: str, server_ids: Sequence[str]) -> None:
    """The command to remove them was sent."""
    tx.execute(
        sa.update(guests)
        .where(guests.c.host == host, guests.c.server_id.in_(server_ids))
        .values(sent_at=now())
    )


def fences_on(tx: Connection, host: str) -> dict[str, int]:
    """All that may exist on a host, with the fence it must know: the answer to its registration."""
    return {
        row.server_id: row.fence
        for row in tx.execute(
            sa.select(guests.c.server_id, guests.c.fence).where(guests.c.host == host)
        )
    }


def places(tx: Connection, server_id: str) -> list[GuestRow]:
    """All guests of a server, debts too; its row is locked."""
    return list(
        tx.execute(sa.select(guests).where(guests.c.server_id == server_id).order_by(guests.c.host))
    )


def off_on(tx: Connection, host: str, reported: Iterable[str]) -> list[str]:
    """Servers whose domain on this host must be off, because they are, or may be, elsewhere: what
    is kept there; and of the domains that the host has told of, those of servers that have no
    record there and another place: the host was forgotten while it was away."""
    kept = sa.select(guests.c.server_id).where(
        guests.c.host == host, guests.c.wanted == GuestState.KEPT
    )
    found = set(tx.scalars(kept))
    if names := sorted(set(reported)):
        here = sa.select(guests.c.server_id).where(
            guests.c.server_id == servers.c.id, guests.c.host == host
        )
        found |= set(
            tx.scalars(
                sa.select(servers.c.id).where(
                    servers.c.id.in_(names),
                    servers.c.deleted == 0,
                    sa.func.coalesce(servers.c.host, "") != host,
                    ~here.exists(),
                )
            )
        )
    return sorted(found)


def discard_debts(tx: Connection, host: str) -> None:
    """Remove the debts of a host that will never confirm them; its provider is locked."""
    debts_there = list(
        tx.execute(
            sa.select(guests).where(guests.c.host == host, guests.c.wanted == GuestState.ABSENT)
        )
    )
    if debts_there:
        allocations.release(tx, [(row.holder or row.server_id, host) for row in debts_there])
        tx.execute(
            sa.delete(guests).where(guests.c.host == host, guests.c.wanted == GuestState.ABSENT)
        )


def lost_power(
    tx: Connection, host: str, server: str | None = None, idle_too: bool = False
) -> None:
    """The host was booted: guests that should run there, of servers with an action in hand, are
    known to be off. When that action does not start them they are started after it. ``idle_too``:
    servers without an action as well."""
    here = sa.select(guests.c.server_id).where(
        guests.c.host == host, guests.c.wanted == GuestState.RUNNING
    )
    wanted = here.where(guests.c.server_id == server) if server else here
    busy = sa.true() if idle_too else servers.c.action.is_not(None)
    tx.execute(
        sa.update(servers).where(servers.c.id.in_(wanted), busy).values(power_state=states.SHUTDOWN)
    )


def wanted_running_on(tx: Connection, host: str) -> list[ServerKey]:
    """Idle servers whose guests should run on this host, by id; without locks."""
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
