# SPDX-License-Identifier: Apache-2.0
"""Actions and their journals: the requests that change servers, their progress and their outcome.

Every action takes its server in ``begin``. Under the server's lock, ``begin`` compares state, lock
and running action, and raises the fence. The API, the conductor and the doctor's repairs call
``begin``. The conductor's runner writes progress and outcome.

The state of an action is *due* (a conductor advances it from ``due_at`` on), *waiting* (its command
is at a host), *stuck* (an operator must act, see ``stuck_actions``) or ended: done, failed or
superseded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, ids, states
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.domain.service_binaries import Binary
from common.domain.statuses import ActionPhase, ActionState, StepEvent
from common.store.engine import for_update, insert_many, now, update_grouped
from common.store.notifications import outbox
from common.store.rows import (
    ActionRow,
    EventRow,
    LockedActionRow,
    LostActionRow,
    PlacedServerRow,
    ServerKey,
    ServerState,
    Values,
)
from common.store.schema import actions, events, guests, heartbeats, servers, services

#: Duration of a conductor's lease of an action.
LEASE = 15 * SECOND
ENDED = (ActionState.DONE, ActionState.FAILED, ActionState.SUPERSEDED)
#: Duration of the lease if the step calls an external service.
LONG_LEASE = 60 * SECOND
LIVE = (ActionState.DUE, ActionState.WAITING, ActionState.STUCK)
#: Identifies a command: action id, phase, step and attempt.
CommandOf = tuple[str, ActionPhase, str, int]


def begin(
    tx: Connection,
    rows: states.Action | Sequence[states.Action],
    server_id: str,
    *,
    context: RequestContext,
    args: Values | None = None,
    project_id: str | None = None,
    secrets: str | None = None,
    changes: Values | None = None,
) -> str:
    """Insert an action as the running action of the server, and return the action's id.

    A conductor then carries out the action. The server's fence is raised. If the action supersedes
    others, the running action is ended without its undo.

    Args:
        tx: The transaction.
        rows: The row of the action. Of several rows, the first that permits the server's vm_state
            applies.
        server_id: Id of the server.
        context: The caller's request.
        args: Arguments of the action.
        project_id: Project of the server. None: any project.
        secrets: Sealed secrets of the action.
        changes: Columns of the server to be written in the same transaction.

    Raises:
        NotFound: The server does not exist, or not in this project.
        Locked: The server is locked, and the caller is no admin.
        WrongState: The server's state does not permit the action.
        Busy: Another action is running, and the new action may not supersede that action.
        Conflict: The server is on no host, or has shares, and the action does not permit that.
    """
    server = take_lock(tx, server_id, project_id)
    row = rows if isinstance(rows, states.Action) else states.matching_row(rows, server.vm_state)
    check(row, server_id, server, context, tx)
    if row.supersedes and server.action:
        supersede(tx, server.action)
    action_id = ids.new()
    taken = {"fence": server.fence + 1, "action": action_id, "task_state": row.during}
    update_servers(tx, {server_id: {**taken, **(changes or {})}})
    insert(
        tx,
        [
            {
                "id": action_id,
                "server_id": server_id,
                "project_id": server.project_id,
                "user_id": context.user_id,
                "request_id": context.request_id,
                "name": row.name,
                "workflow": row.workflow,
                "args": {"was": server.vm_state, **(args or {})},
                "fence": server.fence + 1,
                "secrets": secrets,
                "data": {"after": server.action} if server.action else {},
            }
        ],
        server,
    )
    return action_id


def is_begun(tx: Connection, action_id: str, server_id: str) -> bool:
    """Return True if the action exists, which shows that ``begin`` was committed.

    Waits for another transaction that has locked the server, because that one may begin the action.
    """
    tx.execute(for_update(sa.select(servers.c.id).where(servers.c.id == server_id)))
    return show_by_id(tx, action_id) is not None


def take_lock(tx: Connection, server_id: str, project_id: str | None) -> ServerState:
    """Lock a server that is not deleted, and return its state. ``project_id`` None: any project.

    Raises:
        NotFound: The server does not exist, or not in this project.
    """
    server = tx.execute(_STATE_LOCKED, {"server": server_id}).first()
    if server is None or project_id not in (None, server.project_id):
        raise errors.NotFound(f"Instance {server_id} could not be found.")
    return server


_STATE_LOCKED = for_update(
    sa.select(
        servers.c.project_id,
        servers.c.user_id,
        servers.c.fence,
        servers.c.action,
        servers.c.vm_state,
        servers.c.task_state,
        servers.c.locked,
        servers.c.locked_by,
        servers.c.host,
        servers.c.launched_at,
        servers.c.shares,
        servers.c.volumes,
    ).where(servers.c.id == sa.bindparam("server"), servers.c.deleted == 0)
)


def check(
    row: states.Action,
    server_id: str,
    server: ServerState,
    context: RequestContext,
    tx: Connection | None = None,
) -> None:
    """Check that the server permits the action now.

    Args:
        row: The row of the action in the table of actions.
        server_id: Id of the server.
        server: The state of the server.
        context: The caller's request.
        tx: The transaction, with which Busy names the running action. None: without this name.

    Raises:
        Locked, WrongState, Conflict: As in ``begin``.
        Busy: As in ``begin``, but never for an immediate action, which no conductor carries out.
    """
    if row.locked and server.locked and not context.is_admin:
        raise errors.Locked(server_id)
    if row.vm != states.ANY and server.vm_state not in row.vm:
        raise errors.WrongState(row.name, server_id, "vm_state", server.vm_state)
    if row.task != states.ANY and server.task_state not in row.task:
        raise errors.WrongState(row.name, server_id, "task_state", server.task_state)
    if server.host is None and row.needs_host:
        raise errors.Conflict(
            f"Cannot '{row.name}' instance {server_id}: it is on no host. Delete it and create it "
            "again."
        )
    if server.shares and not row.with_shares:
        raise errors.Conflict(
            f"Cannot '{row.name}' instance {server_id} while it has shares; detach them first."
        )
    # An action without task_state, for example an attach, never counts as hung. Only a row
    # that permits every task_state may end such an action.
    may_end = row.supersedes and (row.task == states.ANY or server.task_state is not None)
    if server.action and not may_end and row.immediate is None:
        raise errors.Busy(
            server_id,
            None
            if tx is None
            else tx.scalar(sa.select(actions.c.name).where(actions.c.id == server.action)),
        )


def insert(tx: Connection, rows: Sequence[Values], was: ServerState | None = None) -> None:
    """Insert new actions that are due at once, and write their notices.

    Args:
        tx: The transaction.
        rows: The columns of each action. Missing columns get defaults.
        was: The server before the action, if ``rows`` has one row. See ``outbox.add_begun``.
    """
    base = {
        "version": 1,
        "state": ActionState.DUE,
        "phase": ActionPhase.FORWARD,
        "attempt": 1,
        "sends": 0,
        "next_seq": 1,
    }
    insert_many(
        tx,
        actions,
        [{**base, "data": {}, "args": {}, **row} for row in rows],
        "created_at",
        "updated_at",
        "due_at",
    )
    outbox.add_begun(tx, rows, was)


def supersede(tx: Connection, action_id: str) -> None:
    """End a running action as superseded, without its undo. An ended action stays unchanged.

    The action's secrets and user data are removed, and the notices of its failure are written. The
    next action finds the remains by the guest records of the server. The lease stays, so that the
    next action can see when the old conductor has finished (``busy_until``).
    """
    args = tx.scalar(sa.select(actions.c.args).where(actions.c.id == action_id))
    update = tx.execute(
        sa.update(actions)
        .where(actions.c.id == action_id, actions.c.state.in_(LIVE))
        .values(
            **without_user_data(args),
            state=ActionState.SUPERSEDED,
            due_at=None,
            secrets=None,
            finished_at=now(),
            updated_at=now(),
            message="Superseded by a later action.",
        )
    )
    if update.rowcount:
        outbox.add_ended(tx, action_id)


def without_user_data(args: object) -> Values:
    """Return the column ``args`` of an action that ends, without the server's earlier user data.

    Returns {} if the arguments contain no user data. Why: if no key for secrets is configured, user
    data is stored there in plain text.
    """
    if not isinstance(args, dict) or "user_data" not in args.get("before", ()):
        return {}
    before = {name: value for name, value in args["before"].items() if name != "user_data"}
    return {"args": {**args, "before": before}}


def take(
    tx: Connection,
    owner: str,
    workflows: Mapping[str, int],
    limit: int,
    *,
    only: Collection[str] = (),
    but: Collection[str] = (),
    lease: int = LEASE,
) -> list[ActionRow]:
    """Lease up to ``limit`` due actions, and return their rows, the longest due first.

    Actions with a valid lease, or locked by another transaction, are left out. The rows are from
    before the lease: ``owner`` is the previous owner, or None if there was none or ``let_go``
    released the lease.

    Args:
        tx: The transaction.
        owner: Id of the conductor that takes the lease.
        workflows: Name -> highest version that this conductor supports. Other actions are left out.
        limit: Most actions to lease.
        only: If not empty, only actions at these steps.
        but: Otherwise, all actions except those at these steps.
        lease: Duration of the lease in µs.
    """
    rows: list[ActionRow] = list(
        tx.execute(_due(tuple(workflows.items()), limit, tuple(only), tuple(but)))
    )
    if rows:
        tx.execute(_LEASE, {"ids": [row.id for row in rows], "owner": owner, "lease": lease})
    return rows


_LEASE = (
    sa.update(actions)
    .where(actions.c.id.in_(sa.bindparam("ids", expanding=True)))
    .values(lease_until=now() + sa.bindparam("lease", type_=sa.BigInteger))
)


@cache
def _due(
    workflows: tuple[tuple[str, int], ...], limit: int, only: tuple[str, ...], but: tuple[str, ...]
) -> sa.Select[Any]:
    """Build the statement of ``take``. Cached, because each lane repeats the same statement."""
    # By version, which needs few conditions.
    names: dict[int, list[str]] = defaultdict(list)
    for name, version in workflows:
        names[version].append(name)
    is_supported = sa.or_(
        *(
            sa.and_(actions.c.workflow.in_(names_of_version), actions.c.version <= version)
            for version, names_of_version in names.items()
        )
    )
    is_free = sa.or_(actions.c.lease_until.is_(None), actions.c.lease_until < now())
    lane = (
        actions.c.step.in_(only)
        if only
        else sa.or_(actions.c.step.is_(None), actions.c.step.not_in(but))
    )
    query = sa.select(actions).where(
        actions.c.due_at <= now(), actions.c.state == ActionState.DUE, is_free, is_supported, lane
    )
    return query.order_by(actions.c.due_at).limit(limit).with_for_update(skip_locked=True)


def let_go(tx: Connection, owner: str, action_ids: Iterable[str]) -> None:
    """Release the owner's leases of these actions, so that any conductor can take them at once.

    Why: the outcome of a step was not written, for example because the fence has changed.
    """
    tx.execute(
        sa.update(actions)
        .where(actions.c.id.in_(list(action_ids)), actions.c.owner == owner)
        .values(owner=None, lease_until=None)
    )


def free_leases_of(tx: Connection, owner: str) -> None:
    """End the leases of due actions that an earlier process with the same name has left.

    The owner stays in the row, so that ``take`` returns the previous owner.
    """
    tx.execute(
        sa.update(actions)
        .where(actions.c.owner == owner, actions.c.state == ActionState.DUE)
        .values(lease_until=None)
    )


def wake(tx: Connection, server_ids: Iterable[str], step: str) -> None:
    """Make actions of these servers due at once if they poll a service at this step."""
    tx.execute(
        sa.update(actions)
        .where(
            actions.c.server_id.in_(sorted(set(server_ids))),
            actions.c.state == ActionState.DUE,
            actions.c.step == step,
        )
        .values(due_at=now())
    )


# Statements of every burst are built once, because SQLAlchemy needs five times as long to build one
# as to send it.
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_ASSIGNMENT = sa.select(guests.c.assignment).where(
    guests.c.server_id == servers.c.id, guests.c.host == servers.c.host
)
#: Servers with ``assignment``: the hardware assignment of the guest on the server's host
#: (models.HardwareAssignment), mostly NULL.
_SERVERS = sa.select(servers, _ASSIGNMENT.scalar_subquery().label("assignment")).where(
    servers.c.id.in_(_IDS)
)
_SERVERS_LOCKED = for_update(_SERVERS.order_by(servers.c.id))
_ACTIONS_LOCKED = for_update(
    sa.select(actions, now().label("locked_at"))
    .where(actions.c.id.in_(_IDS))
    .order_by(actions.c.id)
)


def lock_servers(tx: Connection, server_ids: Iterable[str]) -> dict[str, PlacedServerRow]:
    """Lock servers in the order of their ids, and return them by id, deleted servers too."""
    return {row.id: row for row in tx.execute(_SERVERS_LOCKED, {"ids": sorted(set(server_ids))})}


def find_unlocked(tx: Connection, server_ids: Iterable[str]) -> set[str]:
    """Lock the servers that no other transaction has locked, without a wait for locks.

    Returns:
        The ids of the servers locked here, and the ids of ``server_ids`` without a server.
    """
    names = set(server_ids)
    query = sa.select(servers.c.id).where(servers.c.id.in_(sorted(names)))
    existing = set(tx.scalars(query))
    return names - existing | set(tx.scalars(query.with_for_update(skip_locked=True)))


def servers_of(tx: Connection, server_ids: Iterable[str]) -> dict[str, PlacedServerRow]:
    """Return servers by id, without locks, deleted servers too."""
    return {row.id: row for row in tx.execute(_SERVERS, {"ids": sorted(set(server_ids))})}


def lock(tx: Connection, action_ids: Iterable[str]) -> dict[str, LockedActionRow]:
    """Lock actions, and return them by id. ``locked_at`` is the current time in µs.

    The caller has locked their servers. Unknown ids are left out.
    """
    return {row.id: row for row in tx.execute(_ACTIONS_LOCKED, {"ids": sorted(set(action_ids))})}


def update(tx: Connection, changes: dict[str, Values]) -> None:
    """Write columns of many actions: id -> column values. ``updated_at`` becomes now."""
    update_grouped(
        tx,
        actions,
        actions.c.id,
        {key: {**values, "updated_at": now()} for key, values in changes.items()},
    )


def update_servers(tx: Connection, changes: dict[str, Values]) -> None:
    """Write columns of many servers: id -> column values. ``updated_at`` becomes now.

    The caller has locked the servers and compared their fences.
    """
    update_grouped(
        tx,
        servers,
        servers.c.id,
        {key: {**values, "updated_at": now()} for key, values in changes.items()},
    )


def append(tx: Connection, rows: Sequence[Values]) -> None:
    """Append events to journals.

    Each row has action_id, seq, step, attempt and event, and can have host, message and details.
    If all rows have ``at`` (for example ``locked_at``), these times are stored. Otherwise all rows
    get the current time.
    """
    base = {"host": None, "message": None, "details": None}
    insert_many(
        tx,
        events,
        [{**base, **row} for row in rows],
        *([] if all("at" in row for row in rows) else ["at"]),
    )


def outstanding(
    tx: Connection, host: str, older_than: int, limit: int, known: Collection[CommandOf] = ()
) -> list[ActionRow]:
    """Lock and return up to ``limit`` actions that wait for a command at this host.

    The command that was sent earliest comes first. Actions locked by another transaction are left
    out.

    Args:
        tx: The transaction.
        host: Name of the host.
        older_than: Leave out commands sent within the last ``older_than`` µs.
        limit: Most actions to return.
        known: Leave out these commands, which the host has: (action id, phase, step, attempt).
    """
    values = {"at": host, "older_than": older_than, "most": limit}
    if known:
        return list(tx.execute(_OUTSTANDING_UNKNOWN, {**values, "known": sorted(known)}))
    return list(tx.execute(_OUTSTANDING, values))


_OUTSTANDING = (
    sa.select(actions)
    .where(
        actions.c.host == sa.bindparam("at"),
        actions.c.state == ActionState.WAITING,
        actions.c.sent_at <= now() - sa.bindparam("older_than", type_=sa.BigInteger),
    )
    .order_by(actions.c.sent_at)
    .limit(sa.bindparam("most", type_=sa.Integer))
    .with_for_update(skip_locked=True)
)
_OUTSTANDING_UNKNOWN = _OUTSTANDING.where(
    sa.tuple_(actions.c.id, actions.c.phase, actions.c.step, actions.c.attempt).not_in(
        sa.bindparam("known", expanding=True)
    )
)


def commands_on_dead_hosts(
    tx: Connection, abandoned: Sequence[tuple[str, str]], silence: int, limit: int
) -> list[LostActionRow]:
    """Return up to ``limit`` waiting actions whose command is at a host that does not answer.

    A host that is forced down (also by a fencing): the result contains every command with ``dead``
    True, except undo commands if the host sent a heartbeat within ``silence`` seconds. A host that
    is only down: the result contains the forward commands of the steps in ``abandoned`` with
    ``dead`` False.

    Args:
        tx: The transaction.
        abandoned: The (workflow, step) pairs whose commands are given up if the host is down.
        silence: Seconds, within which a heartbeat shows that a host answers undo commands.
        limit: Most actions to return.
    """
    values = {"most": limit, "silence": silence * SECOND}
    return list(tx.execute(_on_dead_hosts(tuple(abandoned)), values))


@cache
def _on_dead_hosts(abandoned: tuple[tuple[str, str], ...]) -> sa.Select[Any]:
    both = sa.and_(services.c.host == actions.c.host, services.c.binary == Binary.COMPUTE)
    beats = sa.and_(heartbeats.c.host == actions.c.host, heartbeats.c.binary == Binary.COMPUTE)
    forward = sa.and_(
        actions.c.phase == ActionPhase.FORWARD,
        sa.tuple_(actions.c.workflow, actions.c.step).in_(abandoned),
    )
    # If too many hosts are silent, silence proves no failure, and even a dead host counts as up.
    recently = now() - sa.bindparam("silence", type_=sa.BigInteger)
    answers = sa.and_(actions.c.phase == ActionPhase.UNDO, heartbeats.c.seen_at > recently)
    query = sa.select(actions, services.c.forced_down.label("dead")).select_from(
        actions.join(services, both).join(heartbeats, beats)
    )
    return query.where(
        actions.c.state == ActionState.WAITING,
        sa.or_(
            sa.and_(services.c.forced_down.is_(True), sa.not_(answers)),
            sa.and_(heartbeats.c.up.is_(False), forward),
        ),
    ).limit(sa.bindparam("most", type_=sa.Integer))


def resting(
    tx: Connection, *, vm_state: str, since: str, longer_than: int, limit: int
) -> list[ServerKey]:
    """Return servers without an action that are in this vm_state for at least ``longer_than`` µs.

    ``since`` is the name of the column with the start of the state. The servers with the earliest
    start come first, up to ``limit``. Deleted servers are left out.
    """
    query = sa.select(servers.c.id, servers.c.project_id).where(
        servers.c[since] <= now() - longer_than,
        servers.c.vm_state == vm_state,
        servers.c.action.is_(None),
        servers.c.deleted == 0,
    )
    return list(tx.execute(query.order_by(servers.c[since]).limit(limit)))


def waiting(tx: Connection, action_ids: Iterable[str]) -> list[ActionRow]:
    """Return the actions in the argument that wait for the result of a host's command."""
    query = sa.select(actions).where(
        actions.c.id.in_(sorted(action_ids)), actions.c.state == ActionState.WAITING
    )
    return list(tx.execute(query))


def set_cause(tx: Connection, action: ActionRow, cause: str | None) -> None:
    """Record why a waiting action makes no progress. ``cause`` None: the action makes progress.

    ``action`` is the row as read earlier. An action that by now does not wait, or has another
    attempt number, stays unchanged.
    """
    if cause != action.cause:
        tx.execute(
            sa.update(actions)
            .where(
                actions.c.id == action.id,
                actions.c.state == ActionState.WAITING,
                actions.c.attempt == action.attempt,
            )
            .values(cause=cause)
        )


def show_progress(
    tx: Connection, action: ActionRow, task_state: str | None, percent: int | None
) -> None:
    """Write task_state and progress (in percent) of the action's server. None: unchanged.

    Nothing is written if the server has another action or fence by now. ``updated_at`` stays
    unchanged.
    """
    values: Values = {}
    if task_state is not None:
        values["task_state"] = task_state
    if percent is not None:
        values["progress"] = percent
    if values:
        tx.execute(
            sa.update(servers)
            .where(
                servers.c.id == action.server_id,
                servers.c.action == action.id,
                servers.c.fence == action.fence,
            )
            .values(values)
        )


def ended_of(tx: Connection, action_ids: Iterable[str]) -> dict[str, int]:
    """Return server -> highest fence of these actions, without actions that have not ended."""
    query = (
        sa.select(actions.c.server_id, sa.func.max(actions.c.fence).label("fence"))
        .where(actions.c.id.in_(sorted(set(action_ids))), actions.c.state.in_(ENDED))
        .group_by(actions.c.server_id)
    )
    return {row.server_id: row.fence for row in tx.execute(query)}


def mark_sent(tx: Connection, action_ids: Sequence[str]) -> None:
    """Record that the commands of these actions were sent again, if the actions still wait."""
    tx.execute(
        sa.update(actions)
        .where(actions.c.id.in_(action_ids), actions.c.state == ActionState.WAITING)
        .values(sent_at=now(), sends=actions.c.sends + 1)
    )


def busy_until(tx: Connection, action_id: str) -> int | None:
    """Return the end (time in µs) of the action's lease, or None if no conductor has a valid lease.

    Until then a conductor may still work on the action, even if the action has ended.
    """
    return tx.scalar(
        sa.select(actions.c.lease_until).where(
            actions.c.id == action_id, actions.c.lease_until > now()
        )
    )


def step_outcome(tx: Connection, action_id: str, step: str) -> EventRow | None:
    """Return the last event *succeeded* or *failed* of a step, or None."""
    query = sa.select(events).where(
        events.c.action_id == action_id,
        events.c.step == step,
        events.c.event.in_((StepEvent.SUCCEEDED, StepEvent.FAILED)),
    )
    return tx.execute(query.order_by(events.c.seq.desc()).limit(1)).first()


def show_by_id(tx: Connection, action_id: str) -> ActionRow | None:
    """Return the action with this id, or None."""
    return tx.execute(sa.select(actions).where(actions.c.id == action_id)).first()


def list_for(
    tx: Connection,
    server_id: str,
    *,
    limit: int = 1000,
    marker: str | None = None,
    changed_since: int | None = None,
    changed_before: int | None = None,
) -> list[ActionRow]:
    """Return a page of a server's actions, newest first.

    Args:
        tx: The transaction.
        server_id: Id of the server.
        limit: Most actions to return.
        marker: Request id of the last action of the previous page.
        changed_since: Only actions that changed at this time or later, in µs.
        changed_before: Only actions that changed at this time or earlier, in µs.

    Raises:
        BadRequest: The server has no action with the marker's request id.
    """
    query = sa.select(actions).where(actions.c.server_id == server_id)
    if changed_since is not None:
        query = query.where(actions.c.updated_at >= changed_since)
    if changed_before is not None:
        query = query.where(actions.c.updated_at <= changed_before)
    if marker is not None:
        last = show(tx, server_id, marker)
        if last is None:
            raise errors.BadRequest(f"Marker {marker} could not be found.")
        query = query.where(
            sa.or_(
                actions.c.created_at < last.created_at,
                sa.and_(actions.c.created_at == last.created_at, actions.c.id < last.id),
            )
        )
    return list(
        tx.execute(query.order_by(actions.c.created_at.desc(), actions.c.id.desc()).limit(limit))
    )


def show(tx: Connection, server_id: str, request_id: str) -> ActionRow | None:
    """Return the newest action on the server that this request began, or None."""
    query = sa.select(actions).where(
        actions.c.server_id == server_id, actions.c.request_id == request_id
    )
    return tx.execute(query.order_by(actions.c.created_at.desc()).limit(1)).first()


def backup_fences(tx: Connection, server_id: str) -> dict[str, int]:
    """Return image id -> fence of all backup actions of a server, in any state.

    A server's fence only grows, so the fences are the order of the backups.
    """
    query = sa.select(actions.c.args, actions.c.fence).where(
        actions.c.server_id == server_id, actions.c.workflow == "backup"
    )
    return {row.args["image_id"]: row.fence for row in tx.execute(query)}


def events_of(tx: Connection, action_id: str) -> list[EventRow]:
    """Return the journal of an action in order."""
    return list(
        tx.execute(sa.select(events).where(events.c.action_id == action_id).order_by(events.c.seq))
    )
