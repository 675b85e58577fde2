# SPDX-License-Identifier: Apache-2.0
"""Instance actions and their events in responses, from the journal of the action.

An event is an attempt of a step. Its start comes from the first journal entry of the attempt, its
end and result from a later entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.domain import states
from common.domain.json_types import JsonObject
from common.domain.statuses import ActionState, StepEvent
from common.store.rows import ActionRow, EventRow
from compute_api.compute.views.fields import Field, render_readable, visible_fields
from compute_api.compute.views.servers.servers import host_id
from compute_api.compute.views.times import format_micros

_API = "os_compute_api:os-instance-actions:"
TRACES, DETAILS = _API + "events", _API + "events:details"
RULES = frozenset((TRACES, DETAILS))

FIELDS: tuple[Field, ...] = (
    Field("action", "name"),
    Field("instance_uuid", "server_id"),
    Field("message", lambda row, view: "Error" if row.state == ActionState.FAILED else None),
    Field("project_id", "project_id"),
    Field("request_id", "request_id"),
    Field("start_time", lambda row, view: format_micros(row.created_at)),
    Field("user_id", "user_id"),
    Field("updated_at", lambda row, view: format_micros(row.updated_at), since="2.58"),
)


@dataclass
class ActionEvent:
    """An attempt of a step, with its first journal entry, and the last entry if the attempt ended.

    If a later action superseded the action during the step, there is no last entry. The event then
    ends with the action.
    """

    action: ActionRow
    begun: EventRow
    ended: EventRow | None = None

    @property
    def cut_off(self) -> bool:
        """True if the action ended during the attempt, for example because it was superseded."""
        return self.ended is None and self.action.finished_at is not None

    @property
    def failed(self) -> bool:
        """True if the attempt failed, its undo failed, or the action ended during the attempt."""
        return self.cut_off or (
            self.ended is not None and self.ended.event in (StepEvent.FAILED, StepEvent.UNDO_FAILED)
        )


def _get_finish_time(row: ActionEvent, view: object) -> str | None:
    return format_micros(row.action.finished_at if row.ended is None else row.ended.at)


def _get_result(row: ActionEvent, view: object) -> str | None:
    if row.failed:
        return "Error"
    return None if row.ended is None else "Success"


def _get_details(row: ActionEvent, view: object) -> str | None:
    source = row.action if row.ended is None else row.ended
    text: str | None = source.message if row.failed else None
    return text


EVENT_FIELDS: tuple[Field, ...] = (
    Field("event", lambda row, view: states.event_name(row.action.workflow, row.begun.step)),
    Field("start_time", lambda row, view: format_micros(row.begun.at)),
    Field("finish_time", _get_finish_time),
    Field("result", _get_result),
    Field(
        "traceback",
        lambda row, view: row.ended.details if row.failed and row.ended else None,
        rule=TRACES,
    ),
    Field("hostId", lambda row, view: host_id(row.action.project_id, row.begun.host), since="2.62"),
    Field("host", lambda row, view: row.begun.host or "", since="2.62", rule=TRACES),
    Field("details", _get_details, since="2.84", rule=DETAILS),
)
#: The events of an action. Before 2.51 a policy rule protects them.
EVENTS = (
    Field("events", lambda row, view: view, until="2.50", rule=TRACES),
    Field("events", lambda row, view: view, since="2.51"),
)


def action(row: ActionRow, version: int) -> JsonObject:
    """Return the body of an action without events."""
    return render_readable(visible_fields(FIELDS, version), row)


def action_with_events(
    row: ActionRow, journal: list[EventRow], version: int, allowed: frozenset[str]
) -> JsonObject:
    """Return the body of an action with its events, newest first.

    Before 2.51 the events are left out unless the caller passes ``TRACES``.

    Args:
        row: The action.
        journal: All journal entries of the action, oldest first.
        version: The microversion of the request.
        allowed: The rules of ``RULES`` that the caller passes.
    """
    getters = visible_fields(EVENT_FIELDS, version, allowed)
    rendered = [render_readable(getters, event) for event in reversed(events(row, journal))]
    return {
        **action(row, version),
        **render_readable(visible_fields(EVENTS, version, allowed), row, rendered),
    }


def events(row: ActionRow, journal: list[EventRow]) -> list[ActionEvent]:
    """Return the events of a journal, one for each attempt of a step, oldest first.

    The entries in ``journal`` must be in order, oldest first.
    """
    events_by_attempt: dict[tuple[str, int], ActionEvent] = {}
    for entry in journal:
        event = events_by_attempt.setdefault((entry.step, entry.attempt), ActionEvent(row, entry))
        if entry.event in (StepEvent.SUCCEEDED, StepEvent.FAILED, StepEvent.UNDO_FAILED) or (
            event.begun is entry and entry.event == StepEvent.UNDONE
        ):
            event.ended = entry
    return list(events_by_attempt.values())
