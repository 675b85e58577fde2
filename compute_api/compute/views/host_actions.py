# SPDX-License-Identifier: Apache-2.0
"""Actions on hosts in responses."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from common.domain.wire import to_wire
from common.store.hosts.host_actions import Event, HostAction, Name
from compute_api.compute.views.times import format_micros

#: Action -> fields of ``store.hosts.host_actions.Arguments`` that apply to the action.
_ARGUMENTS = {Name.DRAIN: ("cold", "parallel", "wait"), Name.EVACUATE: ("parallel", "force")}


def action(row: HostAction) -> JsonObject:
    """Return the body of an action without events.

    The field ``message`` explains the result of an ended action, and is empty before.
    """
    arguments = to_wire(row.args)
    return {
        "id": row.id,
        "host": row.host,
        "action": row.name,
        "state": row.state,
        "arguments": {name: arguments[name] for name in _ARGUMENTS[row.name]},
        "progress": to_wire(row.progress),
        "message": row.message,
        "user_id": row.user_id,
        "project_id": row.project_id,
        "request_id": row.request_id,
        "start_time": format_micros(row.created_at),
        "updated_at": format_micros(row.updated_at),
        "finish_time": format_micros(row.finished_at),
    }


def with_events(row: HostAction, journal: list[Event]) -> JsonObject:
    """Return the body of an action with its events, in the order of the journal."""
    return action(row) | {
        "events": [
            {
                "event": entry.event,
                "message": entry.message,
                "server_id": entry.server_id,
                "migration_id": entry.migration,
                "time": format_micros(entry.at),
            }
            for entry in journal
        ]
    }
