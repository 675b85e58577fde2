# SPDX-License-Identifier: Apache-2.0
"""What is tried again, and what has been tried often enough: it is stuck, visible, and left to an
operator.

What waits for a service, a host or a lock is postponed; that is no failure. What fails where nobody
foresaw it is
counted: ``count_failure`` in the transaction of a run, ``count_exception`` in one of its own.
Called by ``conductor.engine.runner`` and ``conductor.engine.reports``.

Servers whose rows somebody holds locked are set aside until the lock is gone, so that who waited
for one once does not wait for it again and again, and others with them: the runner postpones their
actions, reports leave out what hosts say of them, which comes again. While none is set aside,
asking costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from common.domain import errors
from common.domain.clock import SECOND
from common.domain.statuses import ActionState, StepEvent
from common.store.engine import Connection, now
from common.store.rows import ActionRow
from common.store.servers import actions
from conductor.engine.run import AnyRun, Run
from conductor.engine.workflow_engine import WorkflowEngine

log = logging.getLogger(__name__)
MAX_EXCEPTIONS = 10  #: unforeseen failures in a row: about three minutes of a due action
MAX_REFUSALS = 120  #: answers of a host that it cannot do this yet: about ten minutes
FIRST_PAUSE_MICROS, MAX_PAUSE_MICROS = SECOND // 4, 60 * SECOND  #: before the next try
LOCK_POLL_SECONDS = 10.0  #: between two looks whether a lock is gone
UNFORESEEN = "an unforeseen failure, again and again."


def postpone(
    engine: WorkflowEngine,
    rows: Sequence[ActionRow],
    at_most: int,
    wait: float = 0,
    cause: str = "",
) -> None:
    """Look again soon, but not within ``wait`` seconds; what waits long is looked at less and less
    often, up to ``at_most`` seconds. Rows that somebody else has locked are left to the end of
    their lease. ``cause``: what they wait for, which operators see until they go on.

    Raises:
        Unavailable: the database does not answer.
    """

    def pause(row: ActionRow) -> int:
        return max(int(wait * SECOND), min(at_most * SECOND, _pause(row.sends)))

    def work(tx: Connection) -> None:
        actions.update(
            tx,
            {
                row.id: {
                    "due_at": now() + pause(row),
                    "sends": row.sends + 1,
                    "owner": None,
                    "lease_until": None,
                    "cause": cause or row.cause,
                }
                for row in actions.lock(tx, (row.id for row in rows)).values()
                if row.owner == engine.owner and row.state == ActionState.DUE
            },
        )

    try:
        if rows:
            engine.store.write(work, alone=False)
    except errors.TooBusy as problem:
        log.warning("actions stay leased for a while: %s", problem)


def _pause(before: int) -> int:
    """µs before the next try, after so many."""
    return FIRST_PAUSE_MICROS << min(before, 8)


def count_failure(run: AnyRun, text: str, details: str, tries: int) -> None:
    """Count a failure; the last one of ``tries`` in a row makes the action stuck. ``text`` is safe
    for the tenant, ``details`` are for the operator."""
    row, cause = run.action, f"{text} {details}".strip()
    run.head.update(failures=row.failures + 1, cause=cause)
    if row.failures + 1 < tries:
        return
    waits, step = row.state == ActionState.WAITING, row.step or "begin"
    message = (
        f"The {row.name} is stuck at its step {step}: {text} Ask the operator, who sees it as action {row.id} and "
        "can let it go on or end it."
    )
    run.head.update(
        state=ActionState.STUCK,
        due_at=None,
        owner=None,
        lease_until=None,
        sent_at=row.sent_at if waits else None,
    )
    run.record_event(step, StepEvent.STUCK, row.host if waits else None, message, cause)
    before = getattr(run.server, "fault", None)
    if isinstance(before, dict) and "action" in before:  # of another one, which was superseded
        before = before["before"]
    run.set(
        fault={
            "code": 500,
            "message": message,
            "details": cause,
            "created": run.locked_at,
            "action": row.id,
            "before": before,
        }
    )
    log.error(
        "action %s of server %s is stuck at step %s of %s; see kilonova action show %s: %s",
        row.id,
        row.server_id,
        step,
        row.workflow,
        row.id,
        cause,
    )


def count_exception(engine: WorkflowEngine, row: ActionRow, problem: Exception) -> None:
    """Count an unforeseen failure of this action, if it still stands where it failed. One that is
    due is tried again, less and less often; a command is sent again with its host's next report."""

    def work(tx: Connection) -> None:
        server = actions.lock_servers(tx, [row.server_id]).get(row.server_id)
        head = actions.lock(tx, [row.id]).get(row.id)
        if (
            head is None
            or _place(head) != _place(row)
            or (head.state == ActionState.DUE and head.owner != engine.owner)
        ):
            return
        run: Any = Run(head, server, None, None)  # type: ignore[arg-type]  # its data may be what fails
        if head.state == ActionState.DUE:
            run.head.update(
                due_at=now() + min(MAX_PAUSE_MICROS, _pause(head.failures)),
                sends=head.sends + 1,
                owner=None,
                lease_until=None,
            )
        count_failure(run, UNFORESEEN, f"{type(problem).__name__}: {problem}", MAX_EXCEPTIONS)
        actions.update(tx, {head.id: run.head})
        actions.append(tx, run.events)
        if run.changes and server is not None and server.action == head.id:
            actions.update_servers(tx, {server.id: run.changes})

    try:
        engine.store.write(work, alone=False)
    except errors.TooBusy as busy:
        log.warning("a failure of action %s is not counted: %s", row.id, busy)


def _place(action: ActionRow) -> tuple[Any, ...]:
    return action.state, action.workflow, action.step, action.phase, action.attempt


# --- servers whose rows somebody holds locked ---
def set_aside(engine: WorkflowEngine, servers: Iterable[str]) -> None:
    """Leave these servers alone from now on."""
    engine.locked_servers.update(
        dict.fromkeys(servers, engine.clock.monotonic() + LOCK_POLL_SECONDS)
    )


def find_locked(engine: WorkflowEngine, servers: Iterable[str]) -> set[str]:
    """Set those of these servers aside whose rows are locked just now, without waiting for any;
    returns them.

    Raises:
        Unavailable: the database does not answer.
    """
    names = set(servers)
    locked = names - engine.store.write(lambda tx: actions.unlocked(tx, names))
    set_aside(engine, locked)
    return locked


def locked_servers(engine: WorkflowEngine) -> set[str]:
    """Those that are set aside now."""
    late = {
        server
        for server, until in list(engine.locked_servers.items())
        if engine.clock.monotonic() > until
    }
    if late:
        for server in late - find_locked(engine, late):
            engine.locked_servers.pop(server, None)
    return set(engine.locked_servers)
