# SPDX-License-Identifier: Apache-2.0
"""The rules of the API for actions on servers: states, roles, locks and effects.

Tests compare ``common.domain.states.ACTIONS`` and the behaviour of the API with these rules. They
are written by hand and independent of the table, so that a mistake in the table shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EVERY_STATE = (
    "building",
    "active",
    "stopped",
    "paused",
    "suspended",
    "error",
    "deleted",
    "soft-delete",
    "rescued",
    "resized",
    "shelved",
    "shelved_offloaded",
)
REBOOTABLE = (
    "rebooting",
    "reboot_pending",
    "reboot_started",
    "rebooting_hard",
    "pausing",
    "unpausing",
    "suspending",
    "resuming",
)
#: Task states of actions that leave the server on its host.
STAYING = (
    "powering-on",
    "powering-off",
    "rebooting",
    "reboot_pending",
    "reboot_started",
    "rebooting_hard",
    "pausing",
    "suspending",
    "resuming",
    "rescuing",
    "unrescuing",
    "rebuilding",
    "rebuild_block_device_mapping",
    "rebuild_spawning",
    "image_snapshot_pending",
    "image_snapshot",
    "image_uploading",
    "image_backup",
    "updating_password",
)
IMAGE = "70a599e0-31e7-49b7-b260-868f441e862b"


@dataclass(frozen=True)
class Rule:
    """The rules of one action.

    Attributes:
        body: Value of the action in the request body.
        vm: The vm_states that allow the action, or None for all.
        tasks: The task_states that allow the action besides None. ``ANY`` stands for all.
        lowest_persona: The lowest persona that may request the action: member, manager or admin.
        lockable: True if a lock refuses the action to all callers except admins.
        during: The task_state during the action. "=" keeps the previous task_state.
        ok: The HTTP status of a success.
    """

    body: Any
    vm: str | None = None
    tasks: tuple[str, ...] = ()
    lowest_persona: str = "member"
    lockable: bool = True
    during: str | None = None
    ok: int = 202


ANY = ("*",)
ALIVE = "active paused stopped suspended rescued resized shelved shelved_offloaded error"
ALL: dict[str, Rule] = {
    "os-start": Rule(None, "stopped", during="powering-on"),
    "os-stop": Rule(None, "active error", during="powering-off"),
    "reboot SOFT": Rule({"type": "SOFT"}, "active", during="rebooting"),
    "reboot HARD": Rule(
        {"type": "HARD"},
        "active stopped paused suspended error",
        REBOOTABLE,
        during="rebooting_hard",
    ),
    "pause": Rule(None, "active", during="pausing"),
    "unpause": Rule(None, "paused", during="unpausing"),
    "suspend": Rule(None, "active", during="suspending"),
    "resume": Rule(None, "suspended", during="resuming"),
    "rescue": Rule(None, "active stopped error", during="rescuing", ok=200),
    "unrescue": Rule(None, "rescued", during="unrescuing"),
    "rebuild": Rule({"imageRef": IMAGE}, "active stopped error", during="rebuilding"),
    "changePassword": Rule({"adminPass": "p"}, "active", during="updating_password"),
    "trigger_crash_dump": Rule(None, "active paused rescued resized error"),
    "createImage": Rule(
        {"name": "i"},
        "active stopped paused suspended",
        lockable=False,
        during="image_snapshot_pending",
    ),
    "createBackup": Rule(
        {"name": "i", "backup_type": "daily", "rotation": 1},
        "active stopped paused suspended",
        lockable=False,
        during="image_backup",
    ),
    "addSecurityGroup": Rule({"name": "web"}, ALIVE, lockable=False),
    "removeSecurityGroup": Rule({"name": "web"}, ALIVE, lockable=False),
    "lock": Rule(None, tasks=ANY, lockable=False, during="="),
    "unlock": Rule(None, tasks=ANY, lockable=False, during="="),
    "os-resetState": Rule({"state": "active"}, tasks=ANY, lowest_persona="admin", lockable=False),
    "shelve": Rule(None, "active stopped paused suspended", during="shelving"),
    "shelveOffload": Rule(None, "shelved", lowest_persona="admin", during="shelving_offloading"),
    "unshelve": Rule(None, "shelved shelved_offloaded", during="unshelving"),
    "resize": Rule({"flavorRef": "2"}, "active stopped", during="resize_prep"),
    "migrate": Rule(None, "active stopped", lowest_persona="manager", during="resize_prep"),
    "confirmResize": Rule(None, "resized", ok=204),
    "revertResize": Rule(None, "resized", during="resize_reverting"),
    "os-migrateLive": Rule(
        {"host": None, "block_migration": False, "disk_over_commit": False},
        "active paused",
        lowest_persona="manager",
        during="migrating",
    ),
    "evacuate": Rule(
        {}, "active stopped error", STAYING, lowest_persona="admin", during="rebuilding", ok=200
    ),
    "restore": Rule(None, "soft-delete", during="restoring"),
    "forceDelete": Rule(None, tasks=ANY, during="deleting"),
    "delete": Rule(None, tasks=ANY, during="deleting", ok=204),
}
#: Token -> persona of the caller towards a server of PROJECT.
PERSONAS = {
    "user": "member",
    "stranger": "stranger",
    "reader": "reader",
    "manager": "manager",
    "admin": "admin",
}
_RANKS = ("member", "manager", "admin")


def status(name: str, persona: str, vm_state: str, task_state: str | None, locked: bool) -> int:
    """Return the HTTP status that the API must answer."""
    rule = ALL[name]
    if persona == "stranger":
        return 404
    if persona == "reader" or _RANKS.index(persona) < _RANKS.index(rule.lowest_persona):
        return 403
    if locked and rule.lockable and persona != "admin":
        return 409
    if rule.vm is not None and vm_state not in rule.vm.split():
        return 409
    if task_state is not None and rule.tasks != ANY and task_state not in rule.tasks:
        return 409
    return rule.ok


def task_after(name: str, task_state: str | None) -> str | None:
    """Return the task_state of a server after the API has accepted the action."""
    return task_state if ALL[name].during == "=" else ALL[name].during
