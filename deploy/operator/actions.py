# SPDX-License-Identifier: Apache-2.0
"""``kilonova action list | show | retry | abort | fail``: running and stuck actions.

An action is stuck if it failed repeatedly for an unexpected reason. The action holds the server,
and conductors do not repeat the action. ``retry``, ``abort`` and ``fail`` write one transaction
for each action, which conductors see within a second.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common.domain import errors
from common.domain.clock import SECOND, iso
from common.domain.json_types import JsonObject
from common.domain.statuses import ActionPhase, ActionState
from common.domain.text import one_line
from common.service import config
from common.service.notification_options import NotificationSettings
from common.store import upgrades
from common.store.engine import Connection, Store, moment
from common.store.rows import ActionInHandRow, ActionRow
from common.store.servers import actions
from conductor.hosts.move_progress import words
from deploy.operator.output import columns
from deploy.operator.store import stuck_actions

ENDED_BY_HAND = "The action did not continue, and an operator ended it."
#: Verb of the operator -> its effect.
WAYS = {
    "retry": "the action continues at its step; repair the cause first",
    "abort": "the action is undone from its step, and fails",
    "fail": "the action ends as failed; the server goes to ERROR, and then accepts further actions and a delete",
}


@contextmanager
def _store(options: argparse.Namespace) -> Iterator[Store]:
    conf = config.load(options.config)
    store = Store.open(conf, notifications=NotificationSettings.of(conf))
    upgrades.check(store)
    try:
        yield store
    finally:
        store.close()


def listed(options: argparse.Namespace) -> int:
    """Print the actions that have not ended, oldest first. Return 1 if one needs an operator.

    Stuck and overdue actions need an operator. With ``--stuck`` print only these.
    """
    with _store(options) as store:
        at, rows = store.snapshot(
            lambda tx: (moment(tx), stuck_actions.listed(tx, only_stuck=options.stuck))
        )
    if options.json:
        print(json.dumps([facts(row, at) for row in rows], indent=1))
    elif not rows:
        print("no action is stuck" if options.stuck else "no action is in hand")
    else:
        lines = [["action", "server", "what", "state", "at step", "host", "for", "cause"]]
        print(columns([*lines, *(_line(row, at) for row in rows)]))
    return 1 if any(_needs_operator(row) for row in rows) else 0


def _line(row: ActionInHandRow, at: int) -> list[str]:
    return [
        row.id,
        row.server_id,
        row.name,
        state(row),
        row.step or "begin",
        row.host or "-",
        _age(row, at),
        (row.cause or "").partition("\n")[0],
    ]


def state(row: ActionInHandRow) -> str:
    """Return due, waiting, stuck or overdue, followed by ", undoing" during the undo."""
    return ("overdue" if row.overdue else row.state) + (
        ", undoing" if row.phase == ActionPhase.UNDO else ""
    )


def _needs_operator(row: ActionInHandRow) -> bool:
    return bool(row.state == ActionState.STUCK or row.overdue)


def _age(row: ActionInHandRow, at: int) -> str:
    return words((at - row.created_at) / SECOND)


def facts(row: ActionInHandRow, at: int) -> JsonObject:
    """Return the action for JSON output, without arguments and secrets.

    Args:
        row: The action, from ``stuck_actions.listed``.
        at: The present time of the database in µs, for the action's age ``seconds``.
    """
    return {
        "id": row.id,
        "server_id": row.server_id,
        "server": row.server,
        "vm_state": row.vm_state,
        "task_state": row.task_state,
        "project_id": row.project_id,
        "request_id": row.request_id,
        "name": row.name,
        "workflow": row.workflow,
        "version": row.version,
        "state": row.state,
        "overdue": bool(row.overdue),
        "phase": row.phase,
        "step": row.step,
        "attempt": row.attempt,
        "host": row.host,
        "failures": row.failures,
        "cause": row.cause,
        "created_at": iso(row.created_at),
        "updated_at": iso(row.updated_at),
        "seconds": (at - row.created_at) // SECOND,
    }


def show(options: argparse.Namespace) -> int:
    """Print an action that has not ended, with its journal. Return 1 if it is stuck or overdue.

    Raises:
        NotFound: The action has ended or does not exist.
    """

    def work(tx: Connection) -> tuple[int, Any, list[Any]]:
        rows = [row for row in stuck_actions.listed(tx) if row.id == options.id]
        if not rows:
            row = actions.show_by_id(tx, options.id)
            raise errors.NotFound(
                f"Action {options.id} has ended: it is {row.state}. Run: kilonova timeline {row.server_id}"
                if row is not None
                else f"There is no action {options.id}."
            )
        return moment(tx), rows[0], actions.events_of(tx, options.id)

    with _store(options) as store:
        at, row, events = store.snapshot(work)
    journal = [
        {
            "step": event.step,
            "attempt": event.attempt,
            "event": event.event,
            "host": event.host,
            "message": event.message,
            "details": event.details,
            "at": iso(event.at),
        }
        for event in events
    ]
    print(
        json.dumps({**facts(row, at), "events": journal}, indent=1)
        if options.json
        else text(row, at, journal)
    )
    return 1 if _needs_operator(row) else 0


def text(row: ActionInHandRow, at: int, journal: list[JsonObject]) -> str:
    """Return the action with the journal as text for people.

    The last lines are the commands for a stuck or overdue action.

    Args:
        row: The action, from ``stuck_actions.listed``.
        at: The present time of the database.
        journal: The events of the action, oldest first.
    """
    lines = [
        f"action {row.id}: {row.name} of server {row.server_id} ({row.server or 'gone'}), {row.request_id}",
        f"{state(row)} at step {row.step or 'begin'} of {row.workflow}, attempt {row.attempt}, on "
        f"{row.host or 'no host'}, begun {_age(row, at)} ago",
        f"the server is {row.vm_state}, task_state {row.task_state}",
    ]
    if row.cause:
        cause = one_line(row.cause)
        lines.append(f"failed {row.failures} times in a row: {cause}" if row.failures else cause)
    for event in journal:
        message = f": {one_line(event['message'])}" if event["message"] else ""
        lines.append(
            f"  {event['at']}  {event['step']}, attempt {event['attempt']}, {event['event']}"
            f"{' on ' + event['host'] if event['host'] else ''}{message}"
        )
    ways = list(WAYS) if row.state == ActionState.STUCK else ["fail"] if row.overdue else []
    return "\n".join([*lines, *(f"kilonova action {way} {row.id}: {WAYS[way]}" for way in ways)])


def retry(options: argparse.Namespace) -> int:
    """Let conductors continue stuck actions at their current step. Return 1 if any is refused."""
    return _change_each(options, stuck_actions.retry, "continues")


def abort(options: argparse.Namespace) -> int:
    """Let conductors undo stuck actions. Return 1 if any is refused."""
    return _change_each(
        options,
        lambda tx, name: stuck_actions.abort(tx, name, ENDED_BY_HAND, undoable),
        "is being undone",
    )


def fail(options: argparse.Namespace) -> int:
    """End stuck and overdue actions as failed, without undo. Return 1 if any is refused."""
    return _change_each(
        options,
        lambda tx, name: stuck_actions.fail(tx, name, ENDED_BY_HAND),
        "has ended as failed",
    )


def undoable(row: ActionRow) -> None:
    """Check that an action can be undone.

    Raises:
        Conflict: This release does not know the action's workflow, version or step, or the action
            is past its pivot.
    """
    from conductor.workflows import WORKFLOWS

    try:
        if not WORKFLOWS.knows(row):
            raise LookupError(f"this release does not know {row.workflow} in version {row.version}")
        steps = WORKFLOWS[row.workflow].steps[: WORKFLOWS[row.workflow].index(row.step)]
    except LookupError as problem:
        raise errors.Conflict(
            f"Action {row.id} cannot be undone: {problem}. Run kilonova action fail, or "
            "retry the action under a release that knows the workflow."
        ) from problem
    if any(step.pivot for step in steps):
        raise errors.Conflict(
            f"Action {row.id} cannot be undone: step {row.step} comes after the pivot, from which an action is "
            "only completed. Run kilonova action retry or fail."
        )


def _change_each(
    options: argparse.Namespace, work: Callable[[Connection, str], Any], done: str
) -> int:
    """Change each action in a separate transaction. Return 1 if a change was refused, else 0.

    A change is refused by NotFound or Conflict. Other errors end the command.

    Args:
        options: The command line, with the ids of the actions.
        work: Changes the action with this id and returns its row.
        done: Completes the printed sentence "action …, … of server …, ".
    """
    refused = 0
    with _store(options) as store:
        for name in options.id:
            try:
                row = store.write(lambda tx, name=name: work(tx, name))  # type: ignore[misc]  # bound at once
            except (errors.NotFound, errors.Conflict) as problem:
                print(problem)
                refused += 1
            else:
                print(f"action {row.id}, {row.name} of server {row.server_id}, {done}")
    return 1 if refused else 0
