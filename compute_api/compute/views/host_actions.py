# SPDX-License-Identifier: Apache-2.0
"""Actions on hosts as answers."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from common.domain.wire import to_wire
from common.store.hosts.host_actions import Event, HostAction, Name
from compute_api.compute.views.times import format_micros

#: What each takes, of ``store.host_actions.Arguments``.
_ARGUMENTS = {Name.DRAIN: ("cold", "parallel", "wait"), Name.EVACUATE: ("parallel", "force")}


def action(row: HostAction) -> JsonObject:
    """One, without its journal. ``message``: how it ended, and what to do next."""
    given = to_wire(row.args)
    return {
        "id": row.id,
        "host": row.host,
        "action": row.name,
        "state": row.state,
        "arguments": {name: given[name] for name in _ARGUMENTS[row.name]},
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
    """One with its journal, the oldest entry first."""
    return action(row) | {
        "events": [
            {
                "event": one.event,
                "message": one.message,
                "server_id": one.server_id,
                "migration_id": one.migration,
                "time": format_micros(one.at),
            }
            for one in journal
        ]
    }
