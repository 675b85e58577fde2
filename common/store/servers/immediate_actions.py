# SPDX-License-Identifier: Apache-2.0
"""Actions that the accepting transaction does by itself: lock, unlock, reset of the state.

The API calls ``do`` for rows of ``states.ACTIONS`` with ``immediate``. Each is journalled as an
action that is done, so that os-instance-actions shows it; none of them waits for a conductor.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.context import RequestContext
from common.domain.statuses import ActionState
from common.store.engine import Connection, now
from common.store.notifications import outbox
from common.store.rows import ServerState, Values
from common.store.schema import actions as actions_table
from common.store.schema import servers
from common.store.servers import actions, migrations

OWNER, ADMIN = "owner", "admin"


def do(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    args: Values | None = None,
    project_id: str | None = None,
) -> None:
    """Carry an immediate action out.

    Raises:
        NotFound: no such server (in that project). Locked, Forbidden: the lock is an admin's.
    """
    assert row.immediate is not None
    found = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, found, context, tx)
    changes = _IMMEDIATE[row.immediate](tx, server_id, found, context, args or {})
    tx.execute(
        sa.update(servers).where(servers.c.id == server_id).values(**changes, updated_at=now())
    )
    note(tx, row.name, server_id, found, context, args or {})
    outbox.done(tx, row, server_id, context, found)


def note(
    tx: Connection,
    name: str,
    server_id: str,
    found: ServerState,
    context: RequestContext,
    args: Values,
) -> None:
    """Journal what was done at once to a server, whose locked row is ``found``, as an action that
    is done."""
    tx.execute(
        sa.insert(actions_table).values(created_at=now(), updated_at=now(), finished_at=now()),
        {
            "id": ids.new(),
            "server_id": server_id,
            "project_id": found.project_id,
            "user_id": context.user_id,
            "request_id": context.request_id,
            "name": name,
            "workflow": "",
            "version": 1,
            "args": args,
            "fence": found.fence,
            "state": ActionState.DONE,
            "data": {},
        },
    )


def _lock(
    tx: Connection, server_id: str, found: ServerState, context: RequestContext, args: Values
) -> Values:
    """Lock as Nova does: the owner changes nothing of a lock, and another project's admin takes it
    over. Who is of the server's project is its owner, whatever their role."""
    is_owner = context.project_id == found.project_id
    if found.locked and is_owner:
        return {}
    reason = args.get("locked_reason")
    kept = {} if reason is None and found.locked else {"locked_reason": reason}
    return {"locked": True, "locked_by": OWNER if is_owner else ADMIN, **kept}


def _unlock(
    tx: Connection, server_id: str, found: ServerState, context: RequestContext, args: Values
) -> Values:
    """An admin's lock is not undone by the owner, unless policy lets them (``override``)."""
    is_owner = context.project_id == found.project_id
    if found.locked_by == ADMIN and is_owner and not args.get("override"):
        raise errors.Forbidden(
            "Policy doesn't allow os_compute_api:os-lock-server:unlock:unlock_override to be "
            "performed."
        )
    return {"locked": False, "locked_by": None, "locked_reason": None}


def _reset_state(
    tx: Connection, server_id: str, found: ServerState, context: RequestContext, args: Values
) -> Values:
    """An admin's word about the state: whatever runs is ended without its undo."""
    if found.action:
        actions.supersede(tx, found.action)
    migrations.abandon(tx, server_id, found.fence + 1)
    return {
        "vm_state": states.ACTIVE if args.get("state") == states.ACTIVE else states.ERROR,
        "task_state": None,
        "action": None,
        "fence": found.fence + 1,
    }


_IMMEDIATE: dict[str, Callable[[Connection, str, ServerState, RequestContext, Values], Values]] = {
    "lock": _lock,
    "unlock": _unlock,
    "reset_state": _reset_state,
}
