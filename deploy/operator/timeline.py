# SPDX-License-Identifier: Apache-2.0
"""``kilonova timeline SERVER|REQUEST``: the history of a server or a request.

The output has each action with user and steps, the steps with hosts and durations, and the retries.
The command reads only the journals of actions. Log lines contain the same request id, for answers
of the API and for commands on hosts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from common.domain import errors, ids
from common.domain.clock import SECOND, iso
from common.domain.json_types import JsonObject
from common.domain.statuses import StepEvent
from common.domain.text import one_line
from common.service import config
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.rows import ActionRow, EventRow
from common.store.servers import actions
from deploy.operator.output import columns
from deploy.operator.store import journals


def timeline(options: argparse.Namespace) -> int:
    """Print the actions of a server or request, oldest first. Return 1 if there are none, else 0.

    Raises:
        NotFound: No server has this name.
        Conflict: Several servers have this name.
    """

    def work(tx: Connection) -> list[tuple[Any, list[Any]]]:
        actions_with_events = (
            journals.of_request(tx, options.about)
            if ids.is_request(options.about)
            else journals.of_server(tx, _server_id(tx, options.about))
        )
        return [(row, actions.events_of(tx, row.id)) for row in actions_with_events]

    store = Store.open(config.load(options.config), unhurried=True)
    upgrades.check(store)
    try:
        actions_with_events = store.snapshot(work)
    finally:
        store.close()
    history = [facts(row, events) for row, events in actions_with_events]
    if options.json:
        print(json.dumps(history, indent=1))
    elif not history:
        print(
            f"{options.about} has no action. Requests that were refused before an action began are only in "
            "the API's log"
        )
    else:
        print("\n\n".join(text(action) for action in history))
    return 0 if history else 1


def _server_id(tx: Connection, text: str) -> str:
    """Return the id of the server with this name, even if deleted. Return an id without a check.

    Raises:
        NotFound: No server has this name.
        Conflict: Several servers have this name.
    """
    if ids.is_uuid(text):
        return text
    server_ids = journals.find_servers(tx, text)
    if not server_ids:
        raise errors.NotFound(
            f"No server has the name {text!r}; give its id, or the id of a request."
        )
    if len(server_ids) > 1:
        raise errors.Conflict(
            f"Several servers have the name {text!r}: {', '.join(server_ids)}; give its id."
        )
    return server_ids[0]


def facts(row: ActionRow, events: Sequence[EventRow]) -> JsonObject:
    """Return an action with the steps for JSON output.

    ``after`` is the time in seconds since the action began. ``seconds`` of a step is the time since
    its start, or since the previous event (or the action's start) if the step has no start.
    ``seconds`` is None for the start of a step, and for an action that has not ended.
    """
    steps, started, before = [], {}, row.created_at
    for event in events:
        if event.event == StepEvent.STARTED:
            started[event.step] = event.at
        since = started.get(event.step, before)
        steps.append(
            {
                "at": iso(event.at, fraction=True),
                "after": round((event.at - row.created_at) / SECOND, 3),
                "step": event.step,
                "event": event.event,
                "attempt": event.attempt,
                "host": event.host,
                "seconds": None
                if event.event == StepEvent.STARTED
                else round((event.at - since) / SECOND, 3),
                "message": event.message,
                "details": event.details,
            }
        )
        before = event.at
    end = row.finished_at
    return {
        "action": row.id,
        "name": row.name,
        "workflow": row.workflow,
        "server": row.server_id,
        "request": row.request_id,
        "user": row.user_id,
        "project": row.project_id,
        "state": row.state,
        "message": row.message,
        "began": iso(row.created_at, fraction=True),
        "seconds": None if end is None else round((end - row.created_at) / SECOND, 3),
        "sends": row.sends,
        "failures": row.failures,
        "cause": row.cause,
        "steps": steps,
    }


def text(action: JsonObject) -> str:
    """Return the action with the steps as text for people."""
    duration = "in hand" if action["seconds"] is None else f"{action['seconds']:.3f} s"
    lines = [
        f"{action['began']} {action['name']} of server {action['server']}: {action['state']}, {duration}",
        f"  {action['request']}, user {action['user']}, project {action['project']}, action "
        f"{action['action']}",
    ]
    if action["cause"]:
        lines.append(f"  failed {action['failures']} times in a row: {one_line(action['cause'])}")
    table = [
        [
            f"  +{step['after']:.3f}",
            step["step"],
            step["event"],
            "" if step["seconds"] is None else f"{step['seconds']:.3f} s",
            step["host"] or "-",
            f"attempt {step['attempt']}" if step["attempt"] > 1 else "",
            (step["message"] or "").partition("\n")[0],
        ]
        for step in action["steps"]
    ]
    return "\n".join([*lines, *([columns(table)] if table else [])])
