# SPDX-License-Identifier: Apache-2.0
"""The states of a server and the one table of what may be asked of it.

Read by the API (may this be asked now?), the store (``begin_action`` compares and sets by it) and the
conductor (which workflow, which state after). Nobody else decides about states. Values and rules are the
Compute API's own, so that clients meet the states and the 409s they know.
"""
from __future__ import annotations

from dataclasses import dataclass

# vm_state: what the server rests in
BUILDING, ACTIVE, STOPPED, PAUSED, SUSPENDED = "building", "active", "stopped", "paused", "suspended"
ERROR, DELETED, SOFT_DELETED, RESCUED, RESIZED = "error", "deleted", "soft-delete", "rescued", "resized"
SHELVED, SHELVED_OFFLOADED = "shelved", "shelved_offloaded"
VM_STATES = (BUILDING, ACTIVE, STOPPED, PAUSED, SUSPENDED, ERROR, DELETED, SOFT_DELETED, RESCUED, RESIZED,
             SHELVED, SHELVED_OFFLOADED)

# task_state: what is being done to it now
SCHEDULING, NETWORKING = "scheduling", "networking"
BLOCK_DEVICE_MAPPING, SPAWNING = "block_device_mapping", "spawning"
POWERING_ON, POWERING_OFF, DELETING = "powering-on", "powering-off", "deleting"
REBOOTING, REBOOT_PENDING, REBOOT_STARTED = "rebooting", "reboot_pending", "reboot_started"
REBOOTING_HARD = "rebooting_hard"
PAUSING, UNPAUSING, SUSPENDING, RESUMING = "pausing", "unpausing", "suspending", "resuming"

# power_state: what the hypervisor says (the API's numbers)
NOSTATE, RUNNING, POWER_PAUSED, SHUTDOWN, CRASHED, POWER_SUSPENDED = 0, 1, 3, 4, 6, 7

ANY = ("*",)
NONE: tuple[str | None, ...] = (None,)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that can be asked of a server.

    key: the body key of POST /servers/{id}/action, or the HTTP operation in words; ``when`` picks among
    rows of one key by the body's value. name: as os-instance-actions shows it. vm, task: the states it may
    start from (ANY: not asked). during: the task_state meanwhile (None: keeps None). after: the vm_state
    when it succeeded (None: unchanged). workflow: what the conductor runs; None with ``query`` for a
    question that the host answers at once. supersedes: it ends a running action instead of being refused.
    locked: a lock forbids it to all but admins. answer_after: the step whose outcome the API waits for.
    """

    key: str
    name: str
    policy: str
    vm: tuple[str, ...] = ANY
    task: tuple[str | None, ...] = NONE
    during: str | None = None
    after: str | None = None
    workflow: str | None = None
    when: tuple[str, str] | None = None
    query: str | None = None
    supersedes: bool = False
    locked: bool = True
    since: str = "2.1"
    until: str | None = None
    success: int = 202
    answer_after: str | None = None


_REBOOTABLE = (None, REBOOTING, REBOOT_PENDING, REBOOT_STARTED, REBOOTING_HARD, PAUSING, UNPAUSING, SUSPENDING,
               RESUMING)
_P = "os_compute_api:"

#: In the order of a server's life. One line an action.
ACTIONS: tuple[Action, ...] = (
    Action("create", "create", _P + "servers:create", vm=(BUILDING,), during=SCHEDULING, after=ACTIVE,
           workflow="create", locked=False),
    Action("os-start", "start", _P + "servers:start", vm=(STOPPED,), during=POWERING_ON, after=ACTIVE,
           workflow="start"),
    Action("os-stop", "stop", _P + "servers:stop", vm=(ACTIVE, ERROR), during=POWERING_OFF, after=STOPPED,
           workflow="stop"),
    Action("reboot", "reboot", _P + "servers:reboot", vm=(ACTIVE,), during=REBOOTING, after=ACTIVE,
           workflow="reboot_soft", when=("type", "SOFT")),
    Action("reboot", "reboot", _P + "servers:reboot", vm=(ACTIVE, STOPPED, PAUSED, SUSPENDED, ERROR),
           task=_REBOOTABLE, during=REBOOTING_HARD, after=ACTIVE, workflow="reboot_hard", when=("type", "HARD"),
           supersedes=True),
    Action("os-getConsoleOutput", "console-output", _P + "os-console-output", query="console_output",
           task=ANY, locked=False, success=200),
    Action("delete", "delete", _P + "servers:delete", task=ANY, during=DELETING, after=DELETED,
           workflow="delete", supersedes=True, success=204),
)

BY_WORKFLOW = {row.workflow: row for row in ACTIONS if row.workflow}


def action(key: str, value: str | None = None) -> Action | None:
    """The row for a body key; ``value`` is the body's distinguishing value where rows share a key."""
    for row in ACTIONS:
        if row.key == key and (row.when is None or row.when[1] == value):
            return row
    return None


_STATUS: dict[str, tuple[str, dict[str, str]]] = {
    BUILDING: ("BUILD", {}),
    ACTIVE: ("ACTIVE", {REBOOTING: "REBOOT", REBOOT_PENDING: "REBOOT", REBOOT_STARTED: "REBOOT",
                        REBOOTING_HARD: "HARD_REBOOT"}),
    STOPPED: ("SHUTOFF", {REBOOTING_HARD: "HARD_REBOOT"}),
    PAUSED: ("PAUSED", {REBOOTING_HARD: "HARD_REBOOT"}),
    SUSPENDED: ("SUSPENDED", {REBOOTING_HARD: "HARD_REBOOT"}),
    ERROR: ("ERROR", {REBOOTING_HARD: "HARD_REBOOT"}),
    DELETED: ("DELETED", {}),
    SOFT_DELETED: ("SOFT_DELETED", {}),
    RESCUED: ("RESCUE", {}),
    RESIZED: ("VERIFY_RESIZE", {}),
    SHELVED: ("SHELVED", {}),
    SHELVED_OFFLOADED: ("SHELVED_OFFLOADED", {}),
}


def status(vm_state: str, task_state: str | None) -> str:
    """The API's ``status`` of a server."""
    default, during = _STATUS.get(vm_state, ("UNKNOWN", {}))
    return during.get(task_state or "", default)


def vm_states_of(status_name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The (vm_state, task_states) pairs that show as this status; no task_states: all but those shown
    otherwise. Empty for a status that no server can have."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for vm_state, (default, during) in _STATUS.items():
        if default == status_name:
            found.append((vm_state, ()))
        else:
            tasks = tuple(task for task, shown in during.items() if shown == status_name)
            if tasks:
                found.append((vm_state, tasks))
    return tuple(found)


#: What os-instance-actions calls the steps of a workflow; clients and Tempest wait for these names.
EVENT_NAMES: dict[tuple[str, str], str] = {
    ("create", "place"): "conductor_schedule_and_build_instances",
    ("create", "build"): "compute__do_build_and_run_instance",
    ("start", "run"): "compute_start_instance",
    ("stop", "stop"): "compute_stop_instance",
    ("reboot_soft", "reboot"): "compute_reboot_instance",
    ("reboot_hard", "reboot"): "compute_reboot_instance",
    ("delete", "remove"): "compute_terminate_instance",
}


def event_name(workflow: str, step: str) -> str:
    """The API's name of a step's event."""
    return EVENT_NAMES.get((workflow, step), f"conductor_{step}")
