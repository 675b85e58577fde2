# SPDX-License-Identifier: Apache-2.0
"""Actions and their journal: what was asked of servers, how far it is, and what happened.

``begin`` is the one door through which an action takes a server: under the server's lock it
compares state and holder and raises the fence. The API calls ``begin``; the conductor's runner
calls the rest. An action is *due* (a conductor should advance it from ``due_at`` on), *waiting*
(its command is at a host), *stuck* (an operator should look, see ``store.stuck``) or ended: done,
failed, superseded.
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

LEASE = 15 * SECOND  #: how long a conductor's burst of work may take
ENDED = (ActionState.DONE, ActionState.FAILED, ActionState.SUPERSEDED)
LONG_LEASE = 60 * SECOND  #: the same, where it calls a neighbour
LIVE = (ActionState.DUE, ActionState.WAITING, ActionState.STUCK)
#: which command of an action: its id, phase, step and attempt
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
    """Let an action take the server, if its state, lock and holder allow; returns the action's id.

    Raises the fence. A row that supersedes ends the running action without its undo. ``project_id``
    None means any project. Of several rows the first one that starts from the server's vm_state
    counts.
    ``secrets`` are sealed; ``changes`` are written to the server in the same transaction.

    Raises:
        NotFound: no such server (in that project).
        Locked: a lock forbids it. WrongState: its state does. Busy: a running action does.
    """
    found = take_lock(tx, server_id, project_id)
    row = rows if isinstance(rows, states.Action) else states.matching_row(rows, found.vm_state)
    check(row, server_id, found, context, tx)
    if row.supersedes and found.action:
        supersede(tx, found.action)
    action_id = ids.new()
    tx.execute(
        sa.update(servers)
        .where(servers.c.id == server_id)
        .values(
            fence=found.fence + 1,
            action=action_id,
            task_state=row.during,
            updated_at=now(),
            **(changes or {}),
        )
    )
    insert(
        tx,
        [
            {
                "id": action_id,
                "server_id": server_id,
                "project_id": found.project_id,
                "user_id": context.user_id,
                "request_id": context.request_id,
                "name": row.name,
                "workflow": row.workflow,
                "args": {"was": found.vm_state, **(args or {})},
                "fence": found.fence + 1,
                "secrets": secrets,
                "data": {"after": found.action} if found.action else {},
            }
        ],
        found,
    )
    return action_id


def is_begun(tx: Connection, action_id: str, server_id: str) -> bool:
    """Has this action taken the server? Waits for whoever has the server locked: it may be the one
    that begins it."""
    tx.execute(for_update(sa.select(servers.c.id).where(servers.c.id == server_id)))
    return show_by_id(tx, action_id) is not None


def take_lock(tx: Connection, server_id: str, project_id: str | None) -> ServerState:
    """Lock a server that is not deleted.

    Raises:
        NotFound: there is none, or it is another project's.
    """
    query = sa.select(
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
    ).where(servers.c.id == server_id, servers.c.deleted == 0)
    if project_id is not None:
        query = query.where(servers.c.project_id == project_id)
    found = tx.execute(for_update(query)).first()
    if found is None:
        raise errors.NotFound(f"Instance {server_id} could not be found.")
    return found


def check(
    row: states.Action,
    server_id: str,
    found: ServerState,
    context: RequestContext,
    tx: Connection | None = None,
) -> None:
    """Whether the table allows the action now. With ``tx`` a refusal names the action that holds
    the server."""
    if row.locked and found.locked and not context.is_admin:
        raise errors.Locked(server_id)
    if row.vm != states.ANY and found.vm_state not in row.vm:
        raise errors.WrongState(row.name, server_id, "vm_state", found.vm_state)
    if row.task != states.ANY and found.task_state not in row.task:
        raise errors.WrongState(row.name, server_id, "task_state", found.task_state)
    if found.host is None and row.needs_host:
        raise errors.Conflict(
            f"Cannot '{row.name}' instance {server_id}: it is on no host. Delete it and create it "
            "again."
        )
    if found.shares and not row.with_shares:
        raise errors.Conflict(
            f"Cannot '{row.name}' instance {server_id} while it has shares; detach them first."
        )
    # What shows no task_state (an attach) is no hanging action: only what goes over everything may
    # end it.
    ends_it = row.supersedes and (row.task == states.ANY or found.task_state is not None)
    if found.action and not ends_it and row.immediate is None:
        raise errors.Busy(
            server_id,
            None
            if tx is None
            else tx.scalar(sa.select(actions.c.name).where(actions.c.id == found.action)),
        )


def insert(tx: Connection, rows: Sequence[Values], was: ServerState | None = None) -> None:
    """Write new actions, due at once; ``was``: the server of the only one before it."""
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
    outbox.begun(tx, rows, was)


def supersede(tx: Connection, action_id: str) -> None:
    """End a running action without its undo: whatever it left is found through its server's guests.

    Its lease stays, so that the action that follows can see when the old burst has let go.
    """
    args = tx.scalar(sa.select(actions.c.args).where(actions.c.id == action_id))
    tx.execute(
        sa.update(actions)
        .where(actions.c.id == action_id, actions.c.state.in_(LIVE))
        .values(
            **forgotten(args),
            state=ActionState.SUPERSEDED,
            due_at=None,
            secrets=None,
            finished_at=now(),
            updated_at=now(),
            message="Superseded by a later action.",
        )
    )
    outbox.ended(tx, action_id)


def forgotten(args: object) -> Values:
    """The change of an action that ends: its arguments without the user data, which is readable
    there in a cloud that has no key to seal it with."""
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
    """Lease up to ``limit`` due actions of workflows that this conductor knows, oldest first.

    ``workflows`` maps each name to the highest version understood: newer ones are left alone. Those
    that stand at one of the steps ``only``, or at any but the steps ``but``. ``owner`` of a row is
    who held it before and did not let go.
    """
    rows: list[ActionRow] = list(
        tx.execute(_due(tuple(workflows.items()), limit, tuple(only), tuple(but)))
    )
    if rows:
        tx.execute(
            sa.update(actions)
            .where(actions.c.id.in_([row.id for row in rows]))
            .values(owner=owner, lease_until=now() + lease)
        )
    return rows


@cache
def _due(
    workflows: tuple[tuple[str, int], ...], limit: int, only: tuple[str, ...], but: tuple[str, ...]
) -> sa.Select[Any]:
    """What ``take`` asks for: made once for each lane, since it is asked all the time."""
    names: dict[int, list[str]] = defaultdict(list)  # by version: few conditions
    for name, version in workflows:
        names[version].append(name)
    known = sa.or_(
        *(
            sa.and_(actions.c.workflow.in_(alike), actions.c.version <= version)
            for version, alike in names.items()
        )
    )
    free = sa.or_(actions.c.lease_until.is_(None), actions.c.lease_until < now())
    lane = (
        actions.c.step.in_(only)
        if only
        else sa.or_(actions.c.step.is_(None), actions.c.step.not_in(but))
    )
    query = sa.select(actions).where(
        actions.c.due_at <= now(), actions.c.state == ActionState.DUE, free, known, lane
    )
    return query.order_by(actions.c.due_at).limit(limit).with_for_update(skip_locked=True)


def let_go(tx: Connection, owner: str, action_ids: Iterable[str]) -> None:
    """End the lease of a burst whose outcome was not written (it lost the fence, or nobody
    answered)."""
    tx.execute(
        sa.update(actions)
        .where(actions.c.id.in_(list(action_ids)), actions.c.owner == owner)
        .values(owner=None, lease_until=None)
    )


def free_leases_of(tx: Connection, owner: str) -> None:
    """A conductor that starts again under its name frees what its predecessor held; who that was
    stays to be seen."""
    tx.execute(
        sa.update(actions)
        .where(actions.c.owner == owner, actions.c.state == ActionState.DUE)
        .values(lease_until=None)
    )


def wake(tx: Connection, server_ids: Iterable[str], step: str) -> None:
    """Actions of these servers that wait at this step for a neighbour look again at once."""
    tx.execute(
        sa.update(actions)
        .where(
            actions.c.server_id.in_(sorted(set(server_ids))),
            actions.c.state == ActionState.DUE,
            actions.c.step == step,
        )
        .values(due_at=now())
    )


# What is asked in every burst is made once: to make such a statement takes SQLAlchemy five times as
# long as to send it.
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_ASSIGNMENT = sa.select(guests.c.assignment).where(
    guests.c.server_id == servers.c.id, guests.c.host == servers.c.host
)
#: Servers with ``assignment``: what the guest on its host holds of it (models.HardwareAssignment),
#: mostly NULL.
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
    """Lock servers in the order of their ids; the fence that each has now is the one that
    counts."""
    return {row.id: row for row in tx.execute(_SERVERS_LOCKED, {"ids": sorted(set(server_ids))})}


def unlocked(tx: Connection, server_ids: Iterable[str]) -> set[str]:
    """Those of these servers that nobody else has locked, or that are gone; it waits for none of
    them."""
    names = set(server_ids)
    query = sa.select(servers.c.id).where(servers.c.id.in_(sorted(names)))
    there = set(tx.scalars(query))
    return names - there | set(tx.scalars(query.with_for_update(skip_locked=True)))


def servers_of(tx: Connection, server_ids: Iterable[str]) -> dict[str, PlacedServerRow]:
    """Servers by id, without locks."""
    return {row.id: row for row in tx.execute(_SERVERS, {"ids": sorted(set(server_ids))})}


def lock(tx: Connection, action_ids: Iterable[str]) -> dict[str, LockedActionRow]:
    """Lock actions, whose servers are locked already; ``locked_at`` is the time, for what is
    written of them."""
    return {row.id: row for row in tx.execute(_ACTIONS_LOCKED, {"ids": sorted(set(action_ids))})}


def update(tx: Connection, changes: dict[str, Values]) -> None:
    """Write the heads of the journals of many actions."""
    update_grouped(
        tx,
        actions,
        actions.c.id,
        {key: {**values, "updated_at": now()} for key, values in changes.items()},
    )


def update_servers(tx: Connection, changes: dict[str, Values]) -> None:
    """Write many servers whose rows are locked and whose fences were compared."""
    update_grouped(
        tx,
        servers,
        servers.c.id,
        {key: {**values, "updated_at": now()} for key, values in changes.items()},
    )


def append(tx: Connection, rows: Sequence[Values]) -> None:
    """Append events to journals; each row has action_id, seq, step, attempt, event and may have
    host, message, details. Their time is in each (``lock`` tells it), or in none: then it is
    now."""
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
    """Actions whose command is at this host and was sent more than ``older_than`` µs ago, but for
    those ``known``. One that somebody works on just now is left out too."""
    query = _OUTSTANDING
    if known:
        query = query.where(
            sa.tuple_(actions.c.id, actions.c.phase, actions.c.step, actions.c.attempt).not_in(
                sorted(known)
            )
        )
    return list(tx.execute(query, {"at": host, "older_than": older_than, "most": limit}))


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


def commands_on_dead_hosts(
    tx: Connection, abandoned: Sequence[tuple[str, str]], silence: int, limit: int
) -> list[LostActionRow]:
    """Actions whose command is at a host that was forced down or fenced (``dead``), but for those
    on the way back at one that was heard within ``silence`` seconds; and those at one of the steps
    ``abandoned`` (workflow, step), at a host that is down."""
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
    # Where too few hosts are heard to judge by silence, a dead one counts as up.
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
    """Idle servers in this state for more than ``longer_than`` µs, by the column that says since
    when."""
    query = sa.select(servers.c.id, servers.c.project_id).where(
        servers.c[since] <= now() - longer_than,
        servers.c.vm_state == vm_state,
        servers.c.action.is_(None),
        servers.c.deleted == 0,
    )
    return list(tx.execute(query.order_by(servers.c[since]).limit(limit)))


def waiting(tx: Connection, action_ids: Iterable[str]) -> list[ActionRow]:
    """Those of these actions whose command is at a host."""
    query = sa.select(actions).where(
        actions.c.id.in_(sorted(action_ids)), actions.c.state == ActionState.WAITING
    )
    return list(tx.execute(query))


def say_cause(tx: Connection, action: ActionRow, cause: str | None) -> None:
    """Say why an action that has not failed does not go on, or that it does."""
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
    """Say how far a server's action is, if it still is at it; no change of the server in the sense
    of ``updated_at``."""
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
    """The servers of those of these actions that have ended, each with the highest fence of such an
    action."""
    query = (
        sa.select(actions.c.server_id, sa.func.max(actions.c.fence).label("fence"))
        .where(actions.c.id.in_(sorted(set(action_ids))), actions.c.state.in_(ENDED))
        .group_by(actions.c.server_id)
    )
    return {row.server_id: row.fence for row in tx.execute(query)}


def mark_sent(tx: Connection, action_ids: Sequence[str]) -> None:
    """A command was sent once more."""
    tx.execute(
        sa.update(actions)
        .where(actions.c.id.in_(action_ids), actions.c.state == ActionState.WAITING)
        .values(sent_at=now(), sends=actions.c.sends + 1)
    )


def busy_until(tx: Connection, action_id: str) -> int | None:
    """Until when the burst of an ended action may still be in hand; None when it has let go."""
    return tx.scalar(
        sa.select(actions.c.lease_until).where(
            actions.c.id == action_id, actions.c.lease_until > now()
        )
    )


def step_outcome(tx: Connection, action_id: str, step: str) -> EventRow | None:
    """The last *succeeded* or *failed* event of a step, for answer_after; None while it is not
    there."""
    query = sa.select(events).where(
        events.c.action_id == action_id,
        events.c.step == step,
        events.c.event.in_((StepEvent.SUCCEEDED, StepEvent.FAILED)),
    )
    return tx.execute(query.order_by(events.c.seq.desc()).limit(1)).first()


def show_by_id(tx: Connection, action_id: str) -> ActionRow | None:
    """One action."""
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
    """The actions of a server, newest first; ``marker`` is the request id of the last one seen.

    Raises:
        BadRequest: the marker is none of this server's actions.
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
    """A server's action by the request that asked for it."""
    query = sa.select(actions).where(
        actions.c.server_id == server_id, actions.c.request_id == request_id
    )
    return tx.execute(query.order_by(actions.c.created_at.desc()).limit(1)).first()


def backup_fences(tx: Connection, server_id: str) -> dict[str, int]:
    """Return the fence of each backup of a server by the id of its image.

    A server's fence only grows, so the fences are the order in which the backups were made.
    """
    query = sa.select(actions.c.args, actions.c.fence).where(
        actions.c.server_id == server_id, actions.c.workflow == "backup"
    )
    return {row.args["image_id"]: row.fence for row in tx.execute(query)}


def events_of(tx: Connection, action_id: str) -> list[EventRow]:
    """The journal of an action, in order."""
    return list(
        tx.execute(sa.select(events).where(events.c.action_id == action_id).order_by(events.c.seq))
    )
