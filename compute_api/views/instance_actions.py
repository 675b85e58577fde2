# SPDX-License-Identifier: Apache-2.0
"""Instance actions and their events as answers: the journal in the API's words.

An event of the API is a step that was begun: when it ended and how comes from the later entry of the same attempt.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import states
from compute_api.fields import Field, cut, render
from compute_api.views.servers import fraction, host_id

_API = "os_compute_api:os-instance-actions:"
TRACES, DETAILS = _API + "events", _API + "events:details"
RULES = frozenset((TRACES, DETAILS))

FIELDS: tuple[Field, ...] = (
    Field("action", "name"),
    Field("instance_uuid", "server_id"),
    Field("message", lambda row, view: "Error" if row.state == "failed" else None),
    Field("project_id", "project_id"),
    Field("request_id", "request_id"),
    Field("start_time", lambda row, view: fraction(row.created_at)),
    Field("user_id", "user_id"),
    Field("updated_at", lambda row, view: fraction(row.updated_at), since="2.58"),
)


@dataclass
class Event:
    """One step of the journal: its first entry and, when it is over, its last."""

    workflow: str
    project_id: str
    begun: Any
    ended: Any = None

    @property
    def failed(self) -> bool:
        return self.ended is not None and self.ended.event in ("failed", "undo_failed")


def _result(row: Event, view: Any) -> str | None:
    if row.ended is None:
        return None
    return "Error" if row.failed else "Success"


EVENT_FIELDS: tuple[Field, ...] = (
    Field("event", lambda row, view: states.event_name(row.workflow, row.begun.step)),
    Field("start_time", lambda row, view: fraction(row.begun.at)),
    Field("finish_time", lambda row, view: fraction(row.ended.at) if row.ended else None),
    Field("result", _result),
    Field("traceback", lambda row, view: row.ended.details if row.failed else None, rule=TRACES),
    Field("hostId", lambda row, view: host_id(row.project_id, row.begun.host), since="2.62"),
    Field("host", lambda row, view: row.begun.host, since="2.62", rule=TRACES),
    Field("details", lambda row, view: row.ended.message if row.failed else None, since="2.84", rule=DETAILS),
)
#: Who sees the events at all.
EVENTS = (Field("events", lambda row, view: view, until="2.50", rule=TRACES),
          Field("events", lambda row, view: view, since="2.51"))


def action(row: Any, version: int) -> dict[str, Any]:
    """One action, without its events."""
    return render(cut(FIELDS, version), row)


def action_with_events(row: Any, journal: list[Any], version: int, allowed: frozenset[str]) -> dict[str, Any]:
    """One action with what happened in it, newest first."""
    getters = cut(EVENT_FIELDS, version, allowed)
    rendered = [render(getters, event) for event in reversed(events(row, journal))]
    return {**action(row, version), **render(cut(EVENTS, version, allowed), row, rendered)}


def events(row: Any, journal: list[Any]) -> list[Event]:
    """The journal's entries as events, one for each attempt of a step."""
    found: dict[tuple[str, int], Event] = {}
    for entry in journal:
        key = (entry.step, entry.attempt)
        if key not in found:
            found[key] = Event(row.workflow, row.project_id, entry)
        if entry.event in ("succeeded", "failed"):
            found[key].ended = entry
    return list(found.values())
