# SPDX-License-Identifier: Apache-2.0
"""Which events an action is told by: at its begin, after its steps, at its end. One table.

``states.Action.told`` is the name of the whole; most are told as NAME.start, NAME.end or NAME.error. ``TALES`` has the
others, ``STEPS`` what is told when a step has begun, succeeded or failed.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common import states

COMPUTE, API, CONDUCTOR = "nova-compute", "nova-api", "nova-conductor"
_API_EVENTS = ("instance.lock", "instance.unlock", "instance.evacuate")


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell. ``key``: id of its object, whose notices are told in order; ``about``: what else than the
    object's picture the payload needs. ``request``: id, user and project of who asked."""

    event: str
    key: str
    request: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

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
        return CONDUCTOR if self.event.startswith("compute_task.") else API


@dataclass(frozen=True, slots=True)
class Tale:
    """The events of an action, without the word before them; ``failed``: also when a later one has superseded it."""

    begun: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


TALES = {
    "lock": Tale(done=("instance.lock",)),
    "unlock": Tale(done=("instance.unlock",)),
    "evacuate": Tale(("instance.evacuate", "instance.rebuild.start"), ("instance.rebuild.end",),
                     ("instance.rebuild.error",)),
    "resize": Tale(("instance.resize_prep.start",), ("instance.resize_finish.end",), ("instance.resize.error",)),
    "live_migration": Tale(done=("instance.live_migration_post.end",), failed=(
        "instance.live_migration_rollback.start", "instance.live_migration_rollback.end")),
    "delete": Tale(("instance.delete.start",), (), ("instance.delete.error",)),
}
_PREPARED = ("instance.resize_prep.end", "instance.resize.start")
_SWITCHED = ("instance.resize.end", "instance.resize_finish.start")
_NO_HOST = ("compute_task.migrate_server.error",)

#: (workflow, step, what the journal says of it) -> events
STEPS: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("create", "place", "failed"): ("compute_task.build_instances.error",),
    ("delete", "remove", "succeeded"): ("instance.shutdown.start", "instance.shutdown.end"),
    ("delete", "gone", "succeeded"): ("instance.delete.end",),
    ("resize", "place", "failed"): _NO_HOST, ("migrate", "place", "failed"): _NO_HOST,
    ("live_migrate", "place", "failed"): _NO_HOST,
    ("resize", "prepare", "succeeded"): _PREPARED, ("migrate", "prepare", "succeeded"): _PREPARED,
    ("resize_here", "place", "succeeded"): _PREPARED,
    ("resize", "switch", "succeeded"): _SWITCHED, ("migrate", "switch", "succeeded"): _SWITCHED,
    ("resize_here", "switch", "succeeded"): _SWITCHED,
    ("live_migrate", "prepare", "started"): ("instance.live_migration_pre.start",),
    ("live_migrate", "prepare", "succeeded"): ("instance.live_migration_pre.end",),
    ("live_migrate", "switch", "succeeded"): (
        "instance.live_migration_post.start", "instance.live_migration_post_dest.start",
        "instance.live_migration_post_dest.end"),
    ("evacuate", "place", "failed"): ("compute_task.rebuild_server.error",),
}


def tale(row: states.Action | None) -> Tale:
    """The events of an action by its row; of none, or of one that nothing is told of: none."""
    if row is None or row.told is None:
        return Tale()
    plain = Tale(*((f"instance.{row.told}.{phase}",) for phase in ("start", "end", "error")))
    return TALES.get(row.told, plain)


def about(workflow: str, args: dict[str, Any]) -> dict[str, Any]:
    """What payloads need of an action's arguments: nothing else of them, which may be secret, is kept."""
    found: dict[str, Any] = {}
    if workflow in ("snapshot", "backup"):
        found["snapshot_image_id"] = args.get("image_id")
    if workflow == "rescue":
        found["rescue_image_ref"] = (args.get("image") or {}).get("id")
    if workflow in ("resize", "migrate", "resize_here"):
        found["new_flavor"] = args.get("new_flavor")
    return found


def request(row: Any) -> dict[str, str]:
    """Who asked for an action, by its row."""
    return {"id": row["request_id"], "user": row["user_id"], "project": row["project_id"]}
