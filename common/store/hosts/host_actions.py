# SPDX-License-Identifier: Apache-2.0
"""Drains and evacuations: actions on a whole host, each with a journal for admins.

The API and the CLI begin, stop and read them, and the automatic evacuation begins them. The
conductor with the lease carries them out (``conductor.hosts.host_actions``). A host has at most one
open action, because ``open_host`` is unique. Moves of single servers are migrations and are stored
there.
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

#: Duration of a lease. Afterwards another conductor continues the action.
LEASE = 30 * SECOND
#: Name of the drain in the reason of a host that it has disabled.
DISABLED_BY = "kilonova host drain"


class Name(StrEnum):
    """The kind of a host action."""

    DRAIN = "drain"
    EVACUATE = "evacuate"


class State(StrEnum):
    """The state of a host action. STOPPING: no further move begins, and running moves continue."""

    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


OPEN = (State.RUNNING, State.STOPPING)


class EventName(StrEnum):
    """The kinds of journal lines."""

    # The server has a destination.
    PLANNED = "planned"
    # The server's move has begun.
    BEGUN = "begun"
    # The server has moved.
    MOVED = "moved"
    # The server has moved, and its owner must confirm that.
    UNCONFIRMED = "unconfirmed"
    # The owner has deleted the server.
    DELETED = "deleted"
    # The server cannot leave now.
    STAYS = "stays"
    # A note about the host.
    NOTE = "note"


@dataclass(frozen=True)
class Arguments:
    """Options of a host action."""

    # Stop running servers, move them, and start them.
    cold: bool = False
    # Servers that move at a time.
    parallel: int = 2
    # Continue until servers that cannot leave now have left.
    wait: bool = False
    # Evacuate even if many hosts are down at once.
    force: bool = False


@dataclass(frozen=True)
class Progress:
    """Numbers of servers that have moved, are moving, and wait."""

    moved: int = 0
    under_way: int = 0
    waiting: int = 0
    # Estimated seconds until all servers have moved. None: unknown.
    seconds_left: float | None = None


@dataclass(frozen=True)
class HostAction:
    """An action on a host. Times are in µs."""

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
    """A line of the journal of a host action.

    ``seq`` and ``at`` (in µs) are 0 until the line is stored.
    """

    event: EventName
    message: str
    server_id: str | None = None
    migration: str | None = None
    seq: int = 0
    at: int = 0


# --- for the API and the CLI ---
def begin(
    tx: Connection, host: str, name: Name, args: Arguments, context: RequestContext
) -> HostAction:
    """Record a new action on a host, which a conductor then carries out, and return the action.

    A drain also disables the host, so that no new servers arrive.

    Args:
        tx: The transaction.
        host: Name of the host.
        name: The kind of the action.
        args: Options of the action.
        context: The caller's request, which is recorded with the action.

    Raises:
        NotFound: The host does not exist.
        Conflict: Another action on the host is open.
    """
    state = host_status.host_state(tx, host, locked=True)
    if found := open_of(tx, host):
        raise errors.Conflict(
            f"Host {host} has an open {found.name} since {iso(found.created_at)}, action {found.id}. "
            "Wait until this action has ended, or stop the action."
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


#: Condition of open actions. A comparison, because SQLite uses no index for IS NOT NULL.
_IS_OPEN = host_actions.c.open_host > ""
_ANY_OPEN = sa.select(host_actions.c.id).where(_IS_OPEN).limit(1)


def open_of(tx: Connection, host: str) -> HostAction | None:
    """Return the open action on a host, or None."""
    row = tx.execute(sa.select(host_actions).where(host_actions.c.open_host == host)).first()
    return _read(row) if row else None


def show(tx: Connection, action: str) -> HostAction:
    """Return a host action by its id.

    Raises:
        NotFound: No host action has this id.
    """
    row = tx.execute(sa.select(host_actions).where(host_actions.c.id == action)).first()
    if row is None:
        raise errors.NotFound(f"Host action {action} could not be found.")
    return _read(row)


def page(tx: Connection, host: str, limit: int) -> list[HostAction]:
    """Return up to ``limit`` actions on a host, newest first, open or ended."""
    query = (
        sa.select(host_actions)
        .where(host_actions.c.host == host)
        .order_by(host_actions.c.created_at.desc(), host_actions.c.id)
        .limit(limit)
    )
    return [_read(row) for row in tx.execute(query)]


def list_open(tx: Connection) -> list[HostAction]:
    """Return the open actions on all hosts, oldest first."""
    query = (
        sa.select(host_actions)
        .where(_IS_OPEN)
        .order_by(host_actions.c.created_at, host_actions.c.id)
    )
    return [_read(row) for row in tx.execute(query)]


def events(tx: Connection, action: str, after: int = 0) -> list[Event]:
    """Return the lines of an action's journal with a sequence number above ``after``, in order."""
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
    """Set an open action to STOPPING, and return the action. It may be STOPPING already.

    The conductor then begins no further move, and ends the action after the running moves.

    Raises:
        NotFound: No action has this id.
        Conflict: The action has ended.
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


# --- for the conductor ---
def is_any_open(tx: Connection) -> bool:
    """Return True if an action on any host is open, in one statement by an index."""
    return tx.scalar(_ANY_OPEN) is not None


def take(tx: Connection, owner: str) -> list[HostAction]:
    """Lease the open actions for the conductor ``owner``, and return them.

    Actions with a valid lease of another conductor, or locked by another transaction, are left out.
    """
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
    """Append a conductor's journal lines to an action, and store its progress.

    Args:
        tx: The transaction.
        action: Id of the host action.
        owner: The conductor.
        lines: New journal lines. Their ``seq`` and ``at`` are set here.
        progress: The present progress.
        ended: The final state. None: the action continues.
        message: Outcome of an ended action.

    Returns:
        True, or False without a change if another conductor has leased the action, or the action
        has ended.
    """
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
    """Release the owner's leases, so that another conductor can continue the actions at once."""
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
