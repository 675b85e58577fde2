# SPDX-License-Identifier: Apache-2.0
"""Actions that complete in the transaction of the request: lock, unlock and reset of the state.

The API calls ``do`` for rows of ``states.ACTIONS`` with ``immediate``. The journal gets a completed
action, so that os-instance-actions shows it. No conductor is needed.
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
    """Carry out an immediate action (lock, unlock, reset_state), and insert its row as done.

    ``project_id`` None means any project.

    Raises:
        NotFound: The server does not exist, or not in this project.
        Locked, WrongState, Conflict: As in ``actions.check``, if ``row`` has such a condition.
        Forbidden: As in ``_unlock``.
    """
    assert row.immediate is not None
    server = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, server, context, tx)
    changes = _IMMEDIATE[row.immediate](tx, server_id, server, context, args or {})
    tx.execute(
        sa.update(servers).where(servers.c.id == server_id).values(**changes, updated_at=now())
    )
    note(tx, row.name, server_id, server, context, args or {})
    outbox.add_done(tx, row, server_id, context, server)


def note(
    tx: Connection,
    name: str,
    server_id: str,
    found: ServerState,
    context: RequestContext,
    args: Values,
) -> None:
    """Insert the row of a completed action. ``found`` is the locked row of the server."""
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
    tx: Connection, server_id: str, server: ServerState, context: RequestContext, args: Values
) -> Values:
    """Return the columns that lock the server, as Nova does.

    A caller of the server's project does not change an existing lock, so the result is {}. A caller
    of another project, an admin, takes over the lock. Without a new reason the old reason stays.
    """
    is_owner = context.project_id == server.project_id
    if server.locked and is_owner:
        return {}
    reason = args.get("locked_reason")
    reason_change = {} if reason is None and server.locked else {"locked_reason": reason}
    return {"locked": True, "locked_by": OWNER if is_owner else ADMIN, **reason_change}


def _unlock(
    tx: Connection, server_id: str, server: ServerState, context: RequestContext, args: Values
) -> Values:
    """Return the columns that unlock the server.

    Raises:
        Forbidden: An admin of another project has locked the server, the caller is of the server's
            project, and ``args`` has no ``override`` (a permission by policy).
    """
    is_owner = context.project_id == server.project_id
    if server.locked_by == ADMIN and is_owner and not args.get("override"):
        raise errors.Forbidden(
            "Policy doesn't allow os_compute_api:os-lock-server:unlock:unlock_override to be "
            "performed."
        )
    return {"locked": False, "locked_by": None, "locked_reason": None}


def _reset_state(
    tx: Connection, server_id: str, server: ServerState, context: RequestContext, args: Values
) -> Values:
    """End the server's running action and open migration, and return the columns to reset.

    The action ends without its undo. The vm_state becomes ACTIVE if ``state`` in ``args`` is
    ACTIVE, else ERROR. The fence is raised.
    """
    if server.action:
        actions.supersede(tx, server.action)
    migrations.abandon(tx, server_id, server.fence + 1)
    return {
        "vm_state": states.ACTIVE if args.get("state") == states.ACTIVE else states.ERROR,
        "task_state": None,
        "action": None,
        "fence": server.fence + 1,
    }


_IMMEDIATE: dict[str, Callable[[Connection, str, ServerState, RequestContext, Values], Values]] = {
    "lock": _lock,
    "unlock": _unlock,
    "reset_state": _reset_state,
}
