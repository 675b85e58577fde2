# SPDX-License-Identifier: Apache-2.0
"""Actions that are stuck: what an operator sees of them, and the three ways out: retry, settle,
abort.

Called by ``deploy.operator.actions``; ``conductor.engine.retries`` is what makes an action stuck.
A way out is one transaction, which locks the server and its action and compares before it changes
anything. A stuck action holds its server until then; whatever supersedes a running action
supersedes a stuck one too.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, states
from common.domain.clock import SECOND
from common.domain.statuses import ActionState, StepEvent
from common.store.engine import now
from common.store.notifications import outbox
from common.store.rows import ActionInHandRow, ActionRow, LockedActionRow, PlacedServerRow, Values
from common.store.schema import actions, servers
from common.store.servers.actions import (
    LIVE,
    append,
    lock,
    lock_servers,
    update,
    update_servers,
    without_user_data,
)
from common.store.servers.migrations import abandon

#: a due action that nobody has taken for so long is of no release that runs here
OVERDUE = 600 * SECOND


def overdue() -> sa.ColumnElement[bool]:
    """Due for long, and in nobody's hands."""
    return sa.and_(
        actions.c.state == ActionState.DUE,
        actions.c.due_at < now() - OVERDUE,
        sa.or_(actions.c.lease_until.is_(None), actions.c.lease_until < now()),
    )


def listed(tx: Connection, *, only_stuck: bool = False) -> list[ActionInHandRow]:
    """Actions in hand, oldest first, or those that need an operator: the action's columns, and of
    its server ``server`` (the name), ``vm_state`` and ``task_state``; ``overdue``."""
    query = (
        sa.select(
            actions,
            servers.c.name.label("server"),
            servers.c.vm_state,
            servers.c.task_state,
            overdue().label("overdue"),
        )
        .select_from(actions.outerjoin(servers, servers.c.id == actions.c.server_id))
        .where(actions.c.state.in_(LIVE))
    )
    if only_stuck:
        query = query.where(sa.or_(actions.c.state == ActionState.STUCK, overdue()))
    return list(tx.execute(query.order_by(actions.c.created_at, actions.c.id)))


def retry(tx: Connection, action_id: str) -> ActionRow:
    """Let it go on where it stands: a command is sent again under the same key, any other step is
    due at once. Returns the action as it was.

    Raises:
        NotFound, Conflict: as ``_held``.
    """
    row, server = _held(tx, action_id)
    again: Values = (
        {"state": ActionState.WAITING, "sent_at": 0}
        if row.sent_at is not None
        else {"state": ActionState.DUE, "due_at": now()}
    )
    update(tx, {row.id: {**again, "failures": 0, "cause": None}})
    _leave(tx, row, server)
    return row


def abort(tx: Connection, action_id: str, why: str, may: Callable[[ActionRow], None]) -> ActionRow:
    """Let a conductor undo it from where it stands; the fence is raised, so that a host that is
    still at it stops.
    ``may`` raises a Problem when the action cannot be undone. Returns the action as it was.

    Raises:
        NotFound, Conflict: as ``_held``.
    """
    row, server = _held(tx, action_id)
    may(row)
    if server is None or not isinstance(row.data, dict):
        raise errors.Conflict(
            f"Action {row.id} has no server, or no data, that could be undone; settle it."
        )
    update(
        tx,
        {
            row.id: {
                "state": ActionState.DUE,
                "due_at": now(),
                "failures": 0,
                "cause": None,
                "fence": server.fence + 1,
                "data": {**row.data, "abort": why},
            }
        },
    )
    _leave(tx, row, server, fence=server.fence + 1)
    return row


def settle(tx: Connection, action_id: str, why: str) -> ActionRow:
    """End it as failed without its undo, as a reset of the server's state does; the server shows
    why in ERROR and is free for what its user asks next. Also for one that is overdue. Returns the
    action as it was.

    Raises:
        NotFound, Conflict: as ``_held``.
    """
    row, server = _held(tx, action_id, also_overdue=True)
    message = f"{why} {row.cause or 'No conductor knows it.'}"
    append(
        tx,
        [
            {
                "action_id": row.id,
                "seq": row.next_seq,
                "step": row.step or "begin",
                "attempt": row.attempt,
                "event": StepEvent.FAILED,
                "host": row.host,
                "message": why,
                "details": row.cause,
            }
        ],
    )
    update(
        tx,
        {
            row.id: {
                **without_user_data(row.args),
                "state": ActionState.FAILED,
                "due_at": None,
                "owner": None,
                "lease_until": None,
                "secrets": None,
                "finished_at": now(),
                "message": why,
                "next_seq": row.next_seq + 1,
            }
        },
    )
    if server is None or server.deleted:
        _leave(tx, row, server, action=None)
        return row
    abandon(tx, server.id, server.fence + 1)
    _leave(
        tx,
        row,
        server,
        action=None,
        task_state=None,
        vm_state=states.ERROR,
        fence=server.fence + 1,
        fault={"code": 500, "message": why, "details": message, "created": row.locked_at},
    )
    outbox.add_ended(tx, row.id)
    return row


def _held(
    tx: Connection, action_id: str, also_overdue: bool = False
) -> tuple[LockedActionRow, PlacedServerRow | None]:
    """A stuck action and its server, both locked; the server may be gone.

    Raises:
        NotFound: there is no such action.
        Conflict: it is not stuck, or does not hold its server.
    """
    known = tx.execute(
        sa.select(actions.c.server_id, overdue().label("overdue")).where(actions.c.id == action_id)
    ).first()
    if known is None:
        raise errors.NotFound(f"There is no action {action_id}.")
    server = lock_servers(tx, [known.server_id]).get(known.server_id)
    row = lock(tx, [action_id])[action_id]
    if row.state != ActionState.STUCK and not (
        also_overdue and row.state == ActionState.DUE and known.overdue
    ):
        raise errors.Conflict(f"Action {action_id} is {row.state}, not stuck.")
    if server is not None and server.action != action_id:
        raise errors.Conflict(f"Action {action_id} does not hold server {server.id} any more.")
    return row, server


def _leave(
    tx: Connection, row: ActionRow, server: PlacedServerRow | None, **changes: object
) -> None:
    """Change the server, which does not show any more that this action is stuck."""
    if server is None:
        return
    if isinstance(server.fault, dict) and server.fault.get("action") == row.id:
        changes.setdefault("fault", server.fault.get("before"))
    if changes:
        update_servers(tx, {server.id: changes})
