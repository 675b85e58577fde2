# SPDX-License-Identifier: Apache-2.0
"""``kilonova timeline SERVER|REQUEST``: what was done to a server, or for a request: who asked,
each step with its host and how long it took, what was tried again.

It reads the journals of actions and changes nothing. The log has the same request id for what was
answered, and for what the host says of its commands.
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
    """Print it, oldest first; 1 when there is none."""

    def work(tx: Connection) -> list[tuple[Any, list[Any]]]:
        found = (
            journals.of_request(tx, options.about)
            if ids.is_request(options.about)
            else journals.of_server(tx, _server_id(tx, options.about))
        )
        return [(row, actions.events_of(tx, row.id)) for row in found]

    store = Store.opened(config.load(options.config), unhurried=True)
    upgrades.check(store)
    try:
        found = store.snapshot(work)
    finally:
        store.close()
    line = [facts(row, events) for row, events in found]
    if options.json:
        print(json.dumps(line, indent=1))
    elif not line:
        print(
            f"no action is of {options.about}; what was refused before it became one stands in the "
            "API's log alone"
        )
    else:
        print("\n\n".join(text(action) for action in line))
    return 0 if line else 1


def _server_id(tx: Connection, text: str) -> str:
    """Raises NotFound, Conflict: no server has this name, or several."""
    if ids.is_uuid(text):
        return text
    known = journals.named(tx, text)
    if not known:
        raise errors.NotFound(f"There is no server {text!r}; give its id or a request's.")
    if len(known) > 1:
        raise errors.Conflict(
            f"Several servers are named {text!r}: {', '.join(known)}; give an id."
        )
    return known[0]


def facts(row: ActionRow, events: Sequence[EventRow]) -> JsonObject:
    """An action with its steps; seconds are since it began, and of each step since it started."""
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
    """For people."""
    took = "in hand" if action["seconds"] is None else f"{action['seconds']:.3f} s"
    lines = [
        f"{action['began']} {action['name']} of server {action['server']}: {action['state']}, {took}",
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
