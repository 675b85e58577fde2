# SPDX-License-Identifier: Apache-2.0
"""Drains and evacuations: actions on a whole host, each with a journal that an admin reads.

The API and the operator's command begin one, ask it to stop, and read it; a conductor that has its
lease carries it out (``conductor.hosts.host_actions``). A host has at most one that is open:
``open_host`` is unique. Of what is done to single servers nothing is kept here: those are
migrations, whatever becomes of the host's action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, ids
from common.domain.clock import SECOND, iso
from common.domain.context import RequestContext
from common.domain.wire import from_wire, to_wire
from common.store.engine import insert_many, moment, now
from common.store.hosts import host_status, services
from common.store.rows import HostActionRow
from common.store.schema import host_action_events, host_actions

#: after which another conductor goes on with an action whose conductor is silent
LEASE = 30 * SECOND
DISABLED_BY = "kilonova host drain"  #: what the reason of a host names that a drain has disabled


class Name(StrEnum):
    """What is done to the host."""

    DRAIN = "drain"
    EVACUATE = "evacuate"


class State(StrEnum):
    """How far it is. STOPPING: nothing more is begun, and what is under way is waited for."""

    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


OPEN = (State.RUNNING, State.STOPPING)


class EventName(StrEnum):
    """What the journal says."""

    PLANNED = "planned"  # a server has a place elsewhere
    BEGUN = "begun"  # its move has begun
    MOVED = "moved"  # it is elsewhere
    UNCONFIRMED = "unconfirmed"  # it is elsewhere, and its owner has to confirm that
    DELETED = "deleted"  # its owner deleted it meanwhile
    STAYS = "stays"  # it cannot leave now
    NOTE = "note"  # something about the host


@dataclass(frozen=True)
class Arguments:
    """How the host is emptied."""

    cold: bool = False  # stop servers that run, move them, and start them
    parallel: int = 2  # so many servers at a time
    wait: bool = False  # go on until also those have gone that cannot go now
    force: bool = False  # evacuate although many hosts are gone at once


@dataclass(frozen=True)
class Progress:
    """How many servers have moved, are under way and are still to go."""

    moved: int = 0
    under_way: int = 0
    waiting: int = 0
    seconds_left: float | None = None  # until all have moved; None: not known


@dataclass(frozen=True)
class HostAction:
    """One of them. Times in microseconds."""

    id: str
    host: str
    name: Name
    state: State
    args: Arguments
    progress: Progress
    message: str
    user_id: str
    project_id: str
    request_id: str
    created_at: int
    updated_at: int
    finished_at: int | None

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


@dataclass(frozen=True)
class Event:
    """A line of the journal."""

    event: EventName
    message: str
    server_id: str | None = None
    migration: str | None = None
    seq: int = 0
    at: int = 0


# --- for who asks for one ---
def begin(
    tx: Connection, host: str, name: Name, args: Arguments, context: RequestContext
) -> HostAction:
    """Begin one; a drain disables the host, so that no more servers come.

    Raises:
        NotFound: there is no such host. Conflict: another action on it is open.
    """
    state = host_status.host_state(tx, host, locked=True)
    if found := open_of(tx, host):
        raise errors.Conflict(
            f"Host {host} has an open {found.name} since {iso(found.created_at)}, action {found.id}; "
            "wait for its end, or stop it."
        )
    if name is Name.DRAIN and not state.disabled:
        services.set_state(
            tx,
            state.service,
            disabled=True,
            disabled_reason=f"drained by {DISABLED_BY} since {iso(moment(tx))}",
        )
    action = ids.new()
    insert_many(
        tx,
        host_actions,
        [
            {
                "id": action,
                "host": host,
                "open_host": host,
                "name": name,
                "state": State.RUNNING,
                "args": to_wire(args),
                "progress": to_wire(Progress()),
                "message": "",
                "user_id": context.user_id,
                "project_id": context.project_id,
                "request_id": context.request_id,
                "locked_until": 0,
                "next_seq": 1,
            }
        ],
        "created_at",
        "updated_at",
    )
    return show(tx, action)


#: The host of one that is open; a comparison, as SQLite finds no NOT NULL by an index.
_IS_OPEN = host_actions.c.open_host > ""
_ANY_OPEN = sa.select(host_actions.c.id).where(_IS_OPEN).limit(1)


def open_of(tx: Connection, host: str) -> HostAction | None:
    """The one that is open on a host."""
    row = tx.execute(sa.select(host_actions).where(host_actions.c.open_host == host)).first()
    return _read(row) if row else None


def show(tx: Connection, action: str) -> HostAction:
    """One of them.

    Raises:
        NotFound: there is none of this id.
    """
    row = tx.execute(sa.select(host_actions).where(host_actions.c.id == action)).first()
    if row is None:
        raise errors.NotFound(f"There is no action {action} on a host.")
    return _read(row)


def page(tx: Connection, host: str, limit: int) -> list[HostAction]:
    """The newest of a host, the newest first."""
    query = (
        sa.select(host_actions)
        .where(host_actions.c.host == host)
        .order_by(host_actions.c.created_at.desc(), host_actions.c.id)
        .limit(limit)
    )
    return [_read(row) for row in tx.execute(query)]


def list_open(tx: Connection) -> list[HostAction]:
    """The open ones of all hosts, the oldest first."""
    query = (
        sa.select(host_actions)
        .where(_IS_OPEN)
        .order_by(host_actions.c.created_at, host_actions.c.id)
    )
    return [_read(row) for row in tx.execute(query)]


def events(tx: Connection, action: str, after: int = 0) -> list[Event]:
    """The journal of one, from behind this number on."""
    query = (
        sa.select(host_action_events)
        .where(host_action_events.c.action_id == action, host_action_events.c.seq > after)
        .order_by(host_action_events.c.seq)
    )
    return [
        Event(EventName(row.event), row.message, row.server_id, row.migration, row.seq, row.at)
        for row in tx.execute(query)
    ]


def stop(tx: Connection, action: str) -> HostAction:
    """Begin nothing more; it ends when what is under way has ended.

    Raises:
        NotFound: there is none of this id. Conflict: it has ended.
    """
    changed = tx.execute(
        sa.update(host_actions)
        .where(host_actions.c.id == action, host_actions.c.state.in_(OPEN))
        .values(state=State.STOPPING, updated_at=now())
    )
    found = show(tx, action)
    if not changed.rowcount:
        raise errors.Conflict(
            f"Action {action} on host {found.host} has ended already: it is {found.state}."
        )
    return found


# --- for the conductor that carries it out ---
def is_any_open(tx: Connection) -> bool:
    """Is there anything to do? One statement, by an index."""
    return tx.scalar(_ANY_OPEN) is not None


def take(tx: Connection, owner: str) -> list[HostAction]:
    """The open ones that this conductor carries out from now on: its own, and those that nobody
    has."""
    rows = list(
        tx.execute(
            sa.select(host_actions)
            .where(
                _IS_OPEN,
                sa.or_(host_actions.c.locked_by == owner, host_actions.c.locked_until < now()),
            )
            .with_for_update(skip_locked=True)
        )
    )
    if rows:
        tx.execute(
            sa.update(host_actions)
            .where(host_actions.c.id.in_([row.id for row in rows]))
            .values(locked_by=owner, locked_until=now() + LEASE)
        )
    return [_read(row) for row in rows]


def record(
    tx: Connection,
    action: str,
    owner: str,
    lines: Sequence[Event],
    progress: Progress,
    *,
    ended: State | None = None,
    message: str = "",
) -> bool:
    """Write down a round; False when another conductor has the action by now, and nothing was
    written."""
    row = tx.execute(
        sa.select(host_actions)
        .where(
            host_actions.c.id == action,
            host_actions.c.locked_by == owner,
            _IS_OPEN,
        )
        .with_for_update()
    ).first()
    if row is None:
        return False
    insert_many(
        tx,
        host_action_events,
        [
            {
                "action_id": action,
                "seq": seq,
                "event": line.event,
                "server_id": line.server_id,
                "migration": line.migration,
                "message": line.message,
            }
            for seq, line in enumerate(lines, row.next_seq)
        ],
        "at",
    )
    end = (
        {}
        if ended is None
        else {"state": ended, "message": message, "open_host": None, "finished_at": now()}
    )
    tx.execute(
        sa.update(host_actions)
        .where(host_actions.c.id == action)
        .values(
            next_seq=row.next_seq + len(lines), progress=to_wire(progress), updated_at=now(), **end
        )
    )
    return True


def let_go(tx: Connection, owner: str) -> None:
    """Another conductor may go on with them at once."""
    tx.execute(
        sa.update(host_actions)
        .where(host_actions.c.open_host.is_not(None), host_actions.c.locked_by == owner)
        .values(locked_until=0)
    )


def _read(row: HostActionRow) -> HostAction:
    return HostAction(
        row.id,
        row.host,
        Name(row.name),
        State(row.state),
        from_wire(Arguments, row.args),
        from_wire(Progress, row.progress),
        row.message,
        row.user_id,
        row.project_id,
        row.request_id,
        row.created_at,
        row.updated_at,
        row.finished_at,
    )
