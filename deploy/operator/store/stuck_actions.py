# SPDX-License-Identifier: Apache-2.0
"""Stuck actions: listing, and the three ways out: retry, abort, fail.

``deploy.operator.actions`` and the doctor call this module. ``conductor.engine.retries`` makes
actions stuck. A way out is one transaction, which locks the server and the action and checks both
before any change. Until then a stuck action holds the server. Actions that may supersede a running
action may also supersede a stuck one.
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

#: If no conductor takes a due action within this time, no conductor of the action's release runs.
OVERDUE = 600 * SECOND


def overdue() -> sa.ColumnElement[bool]:
    """Return the condition on actions that are due for longer than ``OVERDUE`` and not leased."""
    return sa.and_(
        actions.c.state == ActionState.DUE,
        actions.c.due_at < now() - OVERDUE,
        sa.or_(actions.c.lease_until.is_(None), actions.c.lease_until < now()),
    )


def listed(tx: Connection, *, only_stuck: bool = False) -> list[ActionInHandRow]:
    """Return the actions that have not ended, oldest first, or only stuck and overdue actions.

    A row has the action's columns, the server's name as ``server``, ``vm_state`` and ``task_state``
    of the server (None without a server's row), and ``overdue``.
    """
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
    """Let a conductor continue a stuck action at its step. Return the action before the change.

    A command that was sent is sent again under the same key. Any other step is due at once.

    Raises:
        NotFound, Conflict: As ``_lock_stuck``.
    """
    row, server = _lock_stuck(tx, action_id)
    changes: Values = (
        {"state": ActionState.WAITING, "sent_at": 0}
        if row.sent_at is not None
        else {"state": ActionState.DUE, "due_at": now()}
    )
    update(tx, {row.id: {**changes, "failures": 0, "cause": None}})
    _update_server(tx, row, server)
    return row


def abort(
    tx: Connection, action_id: str, why: str, check_undo: Callable[[ActionRow], None]
) -> ActionRow:
    """Let a conductor undo a stuck action from its step. Return the action before the change.

    The fence is raised, so that hosts refuse commands of the action that are still under way.

    Args:
        tx: The transaction.
        action_id: Id of the action.
        why: The reason, which the server's fault and the journal show.
        check_undo: Raises a Problem if the action cannot be undone.

    Raises:
        NotFound, Conflict: As ``_lock_stuck``. Conflict also if the action has no data, or if its
            server does not exist.
        Problem: From ``check_undo``.
    """
    row, server = _lock_stuck(tx, action_id)
    check_undo(row)
    if server is None or not isinstance(row.data, dict):
        raise errors.Conflict(
            f"Action {row.id} cannot be undone, because its server or its data is missing. Run: kilonova action "
            f"fail {row.id}"
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
    _update_server(tx, row, server, fence=server.fence + 1)
    return row


def fail(tx: Connection, action_id: str, why: str) -> ActionRow:
    """End a stuck or overdue action as failed, without undo. Return the action before the change.

    The server goes to ERROR with the reason, and the user can start the next action. The server's
    open migration ends too. A deleted server is only released.

    Raises:
        NotFound, Conflict: As ``_lock_stuck``.
    """
    row, server = _lock_stuck(tx, action_id, also_overdue=True)
    message = f"{why} {row.cause or 'No conductor takes the action.'}"
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
        _update_server(tx, row, server, action=None)
        return row
    abandon(tx, server.id, server.fence + 1)
    _update_server(
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


def _lock_stuck(
    tx: Connection, action_id: str, also_overdue: bool = False
) -> tuple[LockedActionRow, PlacedServerRow | None]:
    """Lock and return a stuck action and its server. The server is None if its row is purged.

    Args:
        tx: The transaction.
        action_id: Id of the action.
        also_overdue: True to accept overdue actions too.

    Raises:
        NotFound: There is no such action.
        Conflict: The action is not stuck, or does not hold its server.
    """
    server_id = tx.scalar(sa.select(actions.c.server_id).where(actions.c.id == action_id))
    if server_id is None:
        raise errors.NotFound(f"There is no action {action_id}.")
    server = lock_servers(tx, [server_id]).get(server_id)
    row = lock(tx, [action_id])[action_id]
    # Read after the lock: a conductor may have taken an overdue action before it.
    is_overdue = also_overdue and tx.scalar(sa.select(overdue()).where(actions.c.id == action_id))
    if row.state != ActionState.STUCK and not is_overdue:
        raise errors.Conflict(f"Action {action_id} is {row.state}, not stuck.")
    if server is not None and server.action != action_id:
        raise errors.Conflict(f"Action {action_id} does not hold server {server.id} any more.")
    return row, server


def _update_server(
    tx: Connection, row: ActionRow, server: PlacedServerRow | None, **changes: object
) -> None:
    """Set these columns of the server, and restore the fault from before the action was stuck.

    A fault in ``changes``, or from another action, stays. Without a server this function has no
    effect.
    """
    if server is None:
        return
    if isinstance(server.fault, dict) and server.fault.get("action") == row.id:
        changes.setdefault("fault", server.fault.get("before"))
    if changes:
        update_servers(tx, {server.id: changes})
