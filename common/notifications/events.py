# SPDX-License-Identifier: Apache-2.0
"""The table of events that notify about an action: at its start, at its end, or at its failure.

``states.Action.notification`` is the base name. Most actions use NAME.start, NAME.end and
NAME.error. ``EVENT_NAMES`` lists the others. Events of single steps are declared at the step
(``conductor.engine.step.Step.events``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from common.domain import states
from common.domain.json_types import JsonObject
from common.domain.models import Control
from common.domain.statuses import ActionState, MigrationStatus

COMPUTE, API, CONDUCTOR = "nova-compute", "nova-api", "nova-conductor"
EXISTS = "instance.exists"
_API_EVENTS = (
    "instance.lock",
    "instance.unlock",
    "instance.evacuate",
    *(
        f"instance.share_{verb}.{phase}"
        for verb in ("attach", "detach")
        for phase in ("start", "end", "error")
    ),
)


@dataclass(frozen=True, slots=True)
class Notice:
    """One notification to be written.

    ``key`` is the id of the object. Notices with the same key are sent in order. ``request``
    contains id, user and project of the request. ``about`` contains payload data that is not in the
    object's snapshot.
    """

    event: str
    key: str
    request: dict[str, str] = field(default_factory=dict)
    about: JsonObject = field(default_factory=dict)

    @property
    def of_server(self) -> bool:
        """True if the notification is about a server, so that ``key`` is the server's id."""
        return self.event.startswith(("instance.", "compute_task."))

    @property
    def source(self) -> str:
        """The name of the service that sends this event in Nova, for example nova-compute."""
        if self.event.startswith("instance."):
            return API if self.event in _API_EVENTS else COMPUTE
        if self.event.startswith("service."):
            return str(self.about["object"]["binary"])
        return (
            CONDUCTOR
            if self.event.startswith("compute_task.") or self.event.endswith(".progress")
            else API
        )


@dataclass(frozen=True, slots=True)
class EventNames:
    """The events of an action, with their prefix.

    ``failed`` also applies if a later action has superseded the action.
    """

    begun: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


#: Actions that change the resources of a server. They first send the usage up to that moment.
_USED_UNTIL = ("rebuild", "rescue", "resize_revert", "shelve", "evacuate", "resize")
EVENT_NAMES = {
    "lock": EventNames(done=("instance.lock",)),
    "unlock": EventNames(done=("instance.unlock",)),
    "live_migration_abort": EventNames(done=("instance.live_migration_abort.start",)),
    "live_migration_force_complete": EventNames(
        done=("instance.live_migration_force_complete.start",)
    ),
    "evacuate": EventNames(
        ("instance.evacuate", "instance.rebuild.start"),
        ("instance.rebuild.end",),
        ("instance.rebuild.error",),
    ),
    "resize": EventNames(
        ("instance.resize_prep.start",), ("instance.resize_finish.end",), ("instance.resize.error",)
    ),
    "live_migration": EventNames(
        done=("instance.live_migration_post.end",),
        failed=("instance.live_migration_rollback.start", "instance.live_migration_rollback.end"),
    ),
    "delete": EventNames(("instance.delete.start",), (), ("instance.delete.error",)),
}


def event_names(row: states.Action | None) -> EventNames:
    """Return the names of an action's events: at the begin, after success and after failure.

    The names are empty for None, and for an action without notifications.
    """
    if row is None or row.notification is None:
        return EventNames()
    plain = EventNames(
        *((f"instance.{row.notification}.{phase}",) for phase in ("start", "end", "error"))
    )
    names = EVENT_NAMES.get(row.notification, plain)
    return (
        replace(names, begun=(EXISTS, *names.begun)) if row.notification in _USED_UNTIL else names
    )


def of_control(
    state: ActionState | None, migration: MigrationStatus | None, requested: str | None
) -> tuple[str, ...]:
    """Return the event about an abort or a forced completion at the end of a live migration.

    Args:
        state: The new state of the action, or None if unchanged.
        migration: The new status of the migration, or None if unchanged.
        requested: The control that was requested during the migration, or None.

    Returns:
        The event of the abort if the action failed and the migration was cancelled. The event of
        the completion if the action is done and COMPLETE was requested. Otherwise empty.
    """
    if state == ActionState.FAILED and migration == MigrationStatus.CANCELLED:
        return ("instance.live_migration_abort.end",)
    return (
        ("instance.live_migration_force_complete.end",)
        if (state, requested) == (ActionState.DONE, Control.COMPLETE)
        else ()
    )


def about(workflow: str, args: JsonObject) -> JsonObject:
    """Return the arguments of an action for payloads of notifications, under the payloads' names.

    Why: other arguments may be secret, and must not reach the outbox.
    """
    fields: JsonObject = {}
    if workflow in ("snapshot", "backup"):
        fields["snapshot_image_id"] = args.get("image_id")
    if workflow == "rescue":
        fields["rescue_image_ref"] = (args.get("image") or {}).get("id")
    if workflow in ("resize", "migrate", "resize_here"):
        fields["new_flavor"] = args.get("new_flavor")
    if workflow in ("attach_share", "detach_share"):
        fields["share_id"] = (args.get("share") or {}).get("share_id")
    if workflow in ("attach_volume", "detach_volume"):
        fields["volume_id"] = args.get("volume_id")
    if workflow == "swap_volume":
        fields["old_volume_id"] = args.get("volume_id")
        fields["new_volume_id"] = args.get("new_volume_id")
    return fields


class RequestColumns(Protocol):
    """The row of an action, or the columns of a new one."""

    def __getitem__(self, column: str, /) -> str: ...


def request(row: RequestColumns) -> dict[str, str]:
    """Return id, user and project of the request, from an action's row."""
    return {"id": row["request_id"], "user": row["user_id"], "project": row["project_id"]}
