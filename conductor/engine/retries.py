# SPDX-License-Identifier: Apache-2.0
"""Postpone and repeat actions, count their unexpected failures, and mark them stuck.

An action that waits for a service, a host or a lock is postponed, which is no failure. Unexpected
failures are counted: ``count_failure`` counts in the transaction of a run, ``count_exception`` in a
transaction of its own. After enough failures in a row the action is stuck, until an operator
intervenes. ``conductor.engine.runner`` and ``conductor.engine.reports`` call these functions.

Work on a server that another transaction has locked is postponed until the lock is gone
(``set_aside``). The runner postpones the server's action. Reports are processed without these
servers, because hosts repeat that part. So a lock delays one server only. Without locked servers
the check needs no query.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from common.domain import errors
from common.domain.clock import SECOND
from common.domain.statuses import ActionState, StepEvent
from common.service.log import get_logger
from common.store.engine import Connection, now
from common.store.rows import ActionRow
from common.store.servers import actions
from conductor.engine.run import AnyRun, Run
from conductor.engine.workflow_engine import WorkflowEngine

log = get_logger(__name__)
#: Unexpected failures in a row that make an action stuck, after about three minutes.
MAX_EXCEPTIONS = 10
#: Refusals by a host in a row that make an action stuck, after about ten minutes.
MAX_REFUSALS = 120
#: The shortest and the longest pause before the next try.
FIRST_PAUSE_MICROS, MAX_PAUSE_MICROS = SECOND // 4, 60 * SECOND
#: Time between two checks whether a lock is gone.
LOCK_POLL_SECONDS = 10.0
UNFORESEEN = "an unexpected error in each try."


def postpone(
    engine: WorkflowEngine,
    rows: Sequence[ActionRow],
    at_most: int,
    wait: float = 0,
    cause: str = "",
) -> None:
    """Make due actions of this conductor due again after a pause, and release their leases.

    The pause doubles with each try. If another transaction has locked one of the rows, no action is
    changed, and all of them wait until their leases expire.

    Args:
        engine: The conductor's engine.
        rows: The actions. An action that has another state or another owner by now stays unchanged.
        at_most: Upper limit of the pause, in seconds.
        wait: Lower limit of the pause, in seconds. Takes precedence over ``at_most``.
        cause: The reason for the wait, shown to operators until the action continues. "" keeps the
            previous reason.

    Raises:
        Unavailable: The database does not answer.
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
        log.warning(
            "actions cannot be postponed and wait until their leases expire", problem=problem
        )


def _pause(tries: int) -> int:
    """Return the pause after this number of tries, in microseconds.

    The pause begins with ``FIRST_PAUSE_MICROS`` and doubles with each of the first eight tries.
    """
    return FIRST_PAUSE_MICROS << min(tries, 8)


def count_failure(run: AnyRun, text: str, details: str, tries: int) -> None:
    """Count an unexpected failure, and mark the action as stuck after ``tries`` failures in a row.

    The changes are recorded in the run, and the caller writes them. The server of a stuck action
    shows a fault.

    Args:
        run: The run of the action.
        text: Description for the tenant.
        details: Further description, for the operator only.
        tries: Number of failures in a row that make the action stuck.
    """
    row, cause = run.action, f"{text} {details}".strip()
    run.head.update(failures=row.failures + 1, cause=cause)
    if row.failures + 1 < tries:
        return
    is_waiting, step = row.state == ActionState.WAITING, row.step or "begin"
    message = (
        f"The {row.name} is stuck at its step {step}: {text} Ask the operator to continue or end "
        f"action {row.id} of server {row.server_id}."
    )
    run.head.update(
        state=ActionState.STUCK,
        due_at=None,
        owner=None,
        lease_until=None,
        sent_at=row.sent_at if is_waiting else None,
    )
    run.record_event(step, StepEvent.STUCK, row.host if is_waiting else None, message, cause)
    previous_fault = getattr(run.server, "fault", None)
    # The fault of a superseded, stuck action is replaced by the fault before that action.
    if isinstance(previous_fault, dict) and "action" in previous_fault:
        previous_fault = previous_fault["before"]
    run.set(
        fault={
            "code": 500,
            "message": message,
            "details": cause,
            "created": run.locked_at,
            "action": row.id,
            "before": previous_fault,
        }
    )
    log.error(
        "an action is stuck; see: kilonova action show",
        action=row.id,
        server=row.server_id,
        step=step,
        workflow=row.workflow,
        problem=cause,
    )


def count_exception(engine: WorkflowEngine, row: ActionRow, problem: Exception) -> None:
    """Count an unexpected failure of an action, in a transaction of its own.

    After ``MAX_EXCEPTIONS`` failures in a row the action is stuck. Failures of an action that has
    advanced meanwhile, or that another conductor has leased, are not counted. A due action is tried
    again after a growing pause. A command that the action waits for is sent again with a later
    report of its host. If another transaction has locked the rows, nothing is counted.

    Raises:
        Unavailable: The database does not answer.
    """

    def work(tx: Connection) -> None:
        server = actions.lock_servers(tx, [row.server_id]).get(row.server_id)
        head = actions.lock(tx, [row.id]).get(row.id)
        if (
            head is None
            or _position(head) != _position(row)
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
        log.warning("a failure of an action is not counted", action=row.id, problem=busy)


def _position(action: ActionRow) -> tuple[Any, ...]:
    return action.state, action.workflow, action.step, action.phase, action.attempt


# --- servers with locked rows ---
def set_aside(engine: WorkflowEngine, servers: Iterable[str]) -> None:
    """Record that this conductor postpones its work on these servers until their locks are gone.

    ``locked_servers`` checks the locks for the first time after ``LOCK_POLL_SECONDS``.
    """
    engine.locked_servers.update(
        dict.fromkeys(servers, engine.clock.monotonic() + LOCK_POLL_SECONDS)
    )


def find_locked(engine: WorkflowEngine, servers: Iterable[str]) -> set[str]:
    """Return the servers whose rows another transaction has locked, and postpone their work.

    The check does not wait for locks. ``set_aside`` postpones the work.

    Raises:
        Unavailable: The database does not answer.
    """
    names = set(servers)
    locked = names - engine.store.write(lambda tx: actions.find_unlocked(tx, names))
    set_aside(engine, locked)
    return locked


def locked_servers(engine: WorkflowEngine) -> set[str]:
    """Return the ids of the servers whose work waits for a lock of another transaction.

    ``set_aside`` has postponed this work. Locks that were last checked more than
    ``LOCK_POLL_SECONDS`` ago are checked again here.

    Raises:
        Unavailable: The database does not answer.
    """
    expired = {
        server
        for server, until in list(engine.locked_servers.items())
        if engine.clock.monotonic() > until
    }
    if expired:
        for server in expired - find_locked(engine, expired):
            engine.locked_servers.pop(server, None)
    return set(engine.locked_servers)
