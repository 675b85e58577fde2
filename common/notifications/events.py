# SPDX-License-Identifier: Apache-2.0
"""Which events an action is told by: at its begin, after its steps, at its end. One table.

``states.Action.notification`` is the name of the whole; most are told as NAME.start, NAME.end or
NAME.error.
``EVENT_NAMES`` has the others. What is told when a step has begun, succeeded or failed stands at
the step:
``conductor.engine.step.Step.events``.
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
        f"instance.share_{what}.{phase}"
        for what in ("attach", "detach")
        for phase in ("start", "end", "error")
    ),
)


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell. ``key``: id of its object, whose notices are told in order; ``about``:
    what else than the object's picture the payload needs. ``request``: id, user and project of who
    asked."""

    event: str
    key: str
    request: dict[str, str] = field(default_factory=dict)
    about: JsonObject = field(default_factory=dict)

    @property
    def of_server(self) -> bool:
        return self.event.startswith(("instance.", "compute_task."))

    @property
    def source(self) -> str:
        """The service that Nova would have told it by."""
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
    """The events of an action, without the word before them; ``failed``: also when a later one has
    superseded it."""

    begun: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


#: What changes what a server uses is told after what it used until then.
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
    """The events of an action by its row; of none, or of one that nothing is told of: none."""
    if row is None or row.notification is None:
        return EventNames()
    plain = EventNames(
        *((f"instance.{row.notification}.{phase}",) for phase in ("start", "end", "error"))
    )
    found = EVENT_NAMES.get(row.notification, plain)
    return (
        replace(found, begun=(EXISTS, *found.begun)) if row.notification in _USED_UNTIL else found
    )


def of_control(
    state: ActionState | None, migration: MigrationStatus | None, requested: str | None
) -> tuple[str, ...]:
    """What is notified at the end of a live migration of the control that was requested of it."""
    if state == ActionState.FAILED and migration == MigrationStatus.CANCELLED:
        return ("instance.live_migration_abort.end",)
    return (
        ("instance.live_migration_force_complete.end",)
        if (state, requested) == (ActionState.DONE, Control.COMPLETE)
        else ()
    )


def about(workflow: str, args: JsonObject) -> JsonObject:
    """What payloads need of an action's arguments: nothing else of them, which may be secret, is
    kept."""
    found: JsonObject = {}
    if workflow in ("snapshot", "backup"):
        found["snapshot_image_id"] = args.get("image_id")
    if workflow == "rescue":
        found["rescue_image_ref"] = (args.get("image") or {}).get("id")
    if workflow in ("resize", "migrate", "resize_here"):
        found["new_flavor"] = args.get("new_flavor")
    if workflow in ("attach_share", "detach_share"):
        found["share_id"] = (args.get("share") or {}).get("share_id")
    if workflow in ("attach_volume", "detach_volume"):
        found["volume_id"] = args.get("volume_id")
    if workflow == "swap_volume":
        found["old_volume_id"] = args.get("volume_id")
        found["new_volume_id"] = args.get("new_volume_id")
    return found


class Asked(Protocol):
    """An action's row, or one that is to be written."""

    def __getitem__(self, column: str, /) -> str: ...


def request(row: Asked) -> dict[str, str]:
    """Who asked for an action, by its row."""
    return {"id": row["request_id"], "user": row["user_id"], "project": row["project_id"]}
