# SPDX-License-Identifier: Apache-2.0
"""The states of a server, and the only table of the actions that each state allows.

The API checks requests against this table, the store compares and sets by this table
(``common.store.servers.actions.begin``), and the conductor reads the workflow and the state
afterwards. Values and rules are those of the Compute API, so that clients get the states and the
409s that they know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# vm_state: the resting state of the server
BUILDING, ACTIVE, STOPPED, PAUSED, SUSPENDED = (
    "building",
    "active",
    "stopped",
    "paused",
    "suspended",
)
ERROR, DELETED, SOFT_DELETED, RESCUED, RESIZED = (
    "error",
    "deleted",
    "soft-delete",
    "rescued",
    "resized",
)
SHELVED, SHELVED_OFFLOADED = "shelved", "shelved_offloaded"
VM_STATES = (
    BUILDING,
    ACTIVE,
    STOPPED,
    PAUSED,
    SUSPENDED,
    ERROR,
    DELETED,
    SOFT_DELETED,
    RESCUED,
    RESIZED,
    SHELVED,
    SHELVED_OFFLOADED,
)

# task_state: the running task of the server
SCHEDULING, NETWORKING = "scheduling", "networking"
BLOCK_DEVICE_MAPPING, SPAWNING = "block_device_mapping", "spawning"
POWERING_ON, POWERING_OFF, DELETING = "powering-on", "powering-off", "deleting"
REBOOTING, REBOOT_PENDING, REBOOT_STARTED = "rebooting", "reboot_pending", "reboot_started"
REBOOTING_HARD = "rebooting_hard"
PAUSING, UNPAUSING, SUSPENDING, RESUMING = "pausing", "unpausing", "suspending", "resuming"
RESCUING, UNRESCUING, REBUILDING = "rescuing", "unrescuing", "rebuilding"
REBUILD_BLOCK_DEVICE_MAPPING, REBUILD_SPAWNING = "rebuild_block_device_mapping", "rebuild_spawning"
IMAGE_SNAPSHOT_PENDING, IMAGE_SNAPSHOT = "image_snapshot_pending", "image_snapshot"
IMAGE_UPLOADING, IMAGE_BACKUP = "image_uploading", "image_backup"
UPDATING_PASSWORD, SOFT_DELETING, RESTORING = "updating_password", "soft-deleting", "restoring"
RESIZE_PREP, RESIZE_MIGRATING = "resize_prep", "resize_migrating"
RESIZE_MIGRATED, RESIZE_FINISH = "resize_migrated", "resize_finish"
RESIZE_REVERTING, MIGRATING = "resize_reverting", "migrating"
SHELVING, SHELVING_OFFLOADING, UNSHELVING = "shelving", "shelving_offloading", "unshelving"

# power_state: the hypervisor's state of the domain (the API's numbers)
NOSTATE, RUNNING, POWER_PAUSED, SHUTDOWN, CRASHED, POWER_SUSPENDED = 0, 1, 3, 4, 6, 7

ANY = ("*",)
NONE: tuple[str | None, ...] = (None,)


@dataclass(frozen=True, slots=True)
class Action:
    """An action that a caller can request for a server.

    Each row has exactly one of ``workflow``, ``query`` and ``immediate``.
    """

    #: The key in the body of POST /servers/{id}/action, or the HTTP operation in words.
    key: str
    #: The name in os-instance-actions.
    name: str
    policy: str
    #: The vm_states in which the action may start. ANY: all.
    vm: tuple[str, ...] = ANY
    #: The task_states in which the action may start. ANY: all.
    task: tuple[str | None, ...] = NONE
    #: The task_state while the action runs. None: unchanged.
    during: str | None = None
    #: The vm_state after success. None: unchanged.
    after: str | None = None
    #: The workflow that the conductor runs.
    workflow: str | None = None
    #: (field, value) of the body that selects this row where several rows share a key.
    when: tuple[str, str] | None = None
    #: The API executes the action at once and writes no journal. For example, it queries the host,
    #: or changes the network service with the user's own token.
    query: str | None = None
    #: The transaction that accepts the action also executes it.
    immediate: str | None = None
    #: True if the action ends a running action instead of being refused.
    supersedes: bool = False
    #: True if a lock forbids the action to all but admins.
    locked: bool = True
    #: The first microversion with the action.
    since: str = "2.1"
    #: The last microversion with the action. None: the latest.
    until: str | None = None
    #: The HTTP status of success.
    success: int = 202
    #: The API waits for the outcome of this step before the answer.
    answer_after: str | None = None
    #: The name in notifications, see ``common.notifications.events``. None: no notification.
    notification: str | None = None
    #: True if the action is possible for a server with shares.
    with_shares: bool = True
    #: True if the action needs the server's host. A server has none after a failed build.
    needs_host: bool = False


_REBOOTABLE = (
    None,
    REBOOTING,
    REBOOT_PENDING,
    REBOOT_STARTED,
    REBOOTING_HARD,
    PAUSING,
    UNPAUSING,
    SUSPENDING,
    RESUMING,
)
#: The task_states of a server that stays on its host, from which it may be evacuated if the host is
#: dead. A move of the server ends by itself then.
_STAYING = (
    None,
    POWERING_ON,
    POWERING_OFF,
    REBOOTING,
    REBOOT_PENDING,
    REBOOT_STARTED,
    REBOOTING_HARD,
    PAUSING,
    SUSPENDING,
    RESUMING,
    RESCUING,
    UNRESCUING,
    REBUILDING,
    REBUILD_BLOCK_DEVICE_MAPPING,
    REBUILD_SPAWNING,
    IMAGE_SNAPSHOT_PENDING,
    IMAGE_SNAPSHOT,
    IMAGE_UPLOADING,
    IMAGE_BACKUP,
    UPDATING_PASSWORD,
)
_PLUGGABLE = (ACTIVE, PAUSED, STOPPED)
_WITH_DISKS = (ACTIVE, PAUSED, STOPPED, RESIZED, SOFT_DELETED, SHELVED, SHELVED_OFFLOADED)
_ALIVE = (ACTIVE, PAUSED, STOPPED, SUSPENDED, RESCUED, RESIZED, SHELVED, SHELVED_OFFLOADED, ERROR)
_P = "os_compute_api:"

# In the order of a server's life, one row per action.
ACTIONS: tuple[Action, ...] = (
    Action(
        "create",
        "create",
        _P + "servers:create",
        vm=(BUILDING,),
        during=SCHEDULING,
        after=ACTIVE,
        workflow="create",
        locked=False,
        notification="create",
    ),
    Action(
        "os-start",
        "start",
        _P + "servers:start",
        vm=(STOPPED,),
        during=POWERING_ON,
        after=ACTIVE,
        workflow="start",
        notification="power_on",
        needs_host=True,
    ),
    Action(
        "os-stop",
        "stop",
        _P + "servers:stop",
        vm=(ACTIVE, ERROR),
        during=POWERING_OFF,
        after=STOPPED,
        workflow="stop",
        notification="power_off",
        needs_host=True,
    ),
    Action(
        "reboot",
        "reboot",
        _P + "servers:reboot",
        vm=(ACTIVE,),
        during=REBOOTING,
        after=ACTIVE,
        workflow="reboot_soft",
        when=("type", "SOFT"),
        notification="reboot",
        needs_host=True,
    ),
    Action(
        "reboot",
        "reboot",
        _P + "servers:reboot",
        vm=(ACTIVE, STOPPED, PAUSED, SUSPENDED, ERROR),
        task=_REBOOTABLE,
        during=REBOOTING_HARD,
        after=ACTIVE,
        workflow="reboot_hard",
        when=("type", "HARD"),
        supersedes=True,
        notification="reboot",
        needs_host=True,
    ),
    Action(
        "pause",
        "pause",
        _P + "os-pause-server:pause",
        vm=(ACTIVE,),
        during=PAUSING,
        after=PAUSED,
        workflow="pause",
        notification="pause",
        needs_host=True,
    ),
    Action(
        "unpause",
        "unpause",
        _P + "os-pause-server:unpause",
        vm=(PAUSED,),
        during=UNPAUSING,
        after=ACTIVE,
        workflow="unpause",
        notification="unpause",
        needs_host=True,
    ),
    Action(
        "suspend",
        "suspend",
        _P + "os-suspend-server:suspend",
        vm=(ACTIVE,),
        during=SUSPENDING,
        after=SUSPENDED,
        workflow="suspend",
        notification="suspend",
        with_shares=False,
        needs_host=True,
    ),
    Action(
        "resume",
        "resume",
        _P + "os-suspend-server:resume",
        vm=(SUSPENDED,),
        during=RESUMING,
        after=ACTIVE,
        workflow="resume",
        notification="resume",
        needs_host=True,
    ),
    Action(
        "rescue",
        "rescue",
        _P + "os-rescue",
        vm=(ACTIVE, STOPPED, ERROR),
        during=RESCUING,
        after=RESCUED,
        workflow="rescue",
        success=200,
        notification="rescue",
        needs_host=True,
    ),
    Action(
        "unrescue",
        "unrescue",
        _P + "os-unrescue",
        vm=(RESCUED,),
        during=UNRESCUING,
        after=ACTIVE,
        workflow="unrescue",
        notification="unrescue",
        needs_host=True,
    ),
    Action(
        "rebuild",
        "rebuild",
        _P + "servers:rebuild",
        vm=(ACTIVE, STOPPED, ERROR),
        during=REBUILDING,
        after=ACTIVE,
        workflow="rebuild",
        notification="rebuild",
        with_shares=False,
        needs_host=True,
    ),
    Action(
        "changePassword",
        "changePassword",
        _P + "os-admin-password",
        vm=(ACTIVE,),
        during=UPDATING_PASSWORD,
        after=ACTIVE,
        workflow="change_password",
        answer_after="set",
        needs_host=True,
    ),
    Action(
        "trigger_crash_dump",
        "trigger_crash_dump",
        _P + "servers:trigger_crash_dump",
        vm=(ACTIVE, PAUSED, RESCUED, RESIZED, ERROR),
        workflow="crash_dump",
        since="2.17",
        answer_after="interrupt",
        notification="trigger_crash_dump",
        needs_host=True,
    ),
    Action(
        "createImage",
        "createImage",
        _P + "servers:create_image",
        vm=(ACTIVE, STOPPED, PAUSED, SUSPENDED),
        during=IMAGE_SNAPSHOT_PENDING,
        workflow="snapshot",
        locked=False,
        answer_after="record",
        notification="snapshot",
        needs_host=True,
    ),
    Action(
        "createBackup",
        "createBackup",
        _P + "os-create-backup",
        vm=(ACTIVE, STOPPED, PAUSED, SUSPENDED),
        during=IMAGE_BACKUP,
        workflow="backup",
        locked=False,
        answer_after="record",
        notification="snapshot",
        needs_host=True,
    ),
    Action(
        "attach_interface",
        "attach_interface",
        _P + "os-attach-interfaces:create",
        vm=_PLUGGABLE,
        workflow="attach_interface",
        success=200,
        answer_after="attach",
        notification="interface_attach",
    ),
    Action(
        "detach_interface",
        "detach_interface",
        _P + "os-attach-interfaces:delete",
        vm=_PLUGGABLE,
        workflow="detach_interface",
        notification="interface_detach",
    ),
    Action(
        "attach_share",
        "attach_share",
        _P + "os-server-shares:create",
        vm=(STOPPED,),
        workflow="attach_share",
        locked=False,
        since="2.97",
        success=201,
        notification="share_attach",
    ),
    Action(
        "detach_share",
        "detach_share",
        _P + "os-server-shares:delete",
        vm=(STOPPED, ERROR),
        workflow="detach_share",
        locked=False,
        since="2.97",
        success=200,
        notification="share_detach",
    ),
    Action(
        "attach_volume",
        "attach_volume",
        _P + "os-volumes-attachments:create",
        vm=_WITH_DISKS,
        workflow="attach_volume",
        success=200,
        answer_after="reserve",
        notification="volume_attach",
    ),
    Action(
        "detach_volume",
        "detach_volume",
        _P + "os-volumes-attachments:delete",
        vm=_WITH_DISKS,
        workflow="detach_volume",
        notification="volume_detach",
    ),
    Action(
        "swap_volume",
        "swap_volume",
        _P + "os-volumes-attachments:swap",
        vm=(ACTIVE, PAUSED, RESIZED),
        workflow="swap_volume",
        notification="volume_swap",
    ),
    Action(
        "volume_snapshot_create",
        "volume_snapshot_create",
        _P + "os-assisted-volume-snapshots:create",
        vm=_PLUGGABLE,
        workflow="volume_snapshot_create",
        locked=False,
        success=200,
    ),
    Action(
        "volume_snapshot_delete",
        "volume_snapshot_delete",
        _P + "os-assisted-volume-snapshots:delete",
        vm=(ACTIVE, PAUSED),
        workflow="volume_snapshot_delete",
        locked=False,
        success=204,
    ),
    Action(
        "extend_volume",
        "extend_volume",
        _P + "os-server-external-events:create",
        vm=(*_WITH_DISKS, SUSPENDED, RESCUED, ERROR),
        workflow="extend_volume",
        locked=False,
        since="2.51",
    ),
    Action(
        "addSecurityGroup",
        "addSecurityGroup",
        _P + "os-security-groups:add",
        vm=_ALIVE,
        workflow="add_security_group",
        locked=False,
        answer_after="change",
    ),
    Action(
        "removeSecurityGroup",
        "removeSecurityGroup",
        _P + "os-security-groups:remove",
        vm=_ALIVE,
        workflow="remove_security_group",
        locked=False,
        answer_after="change",
    ),
    Action(
        "addFixedIp",
        "addFixedIp",
        _P + "os-multinic:add",
        query="add_fixed_ip",
        task=ANY,
        locked=False,
        until="2.43",
    ),
    Action(
        "removeFixedIp",
        "removeFixedIp",
        _P + "os-multinic:remove",
        query="remove_fixed_ip",
        task=ANY,
        locked=False,
        until="2.43",
    ),
    Action(
        "addFloatingIp",
        "addFloatingIp",
        _P + "os-floating-ips:add",
        query="add_floating_ip",
        task=ANY,
        locked=False,
        until="2.43",
    ),
    Action(
        "removeFloatingIp",
        "removeFloatingIp",
        _P + "os-floating-ips:remove",
        query="remove_floating_ip",
        task=ANY,
        locked=False,
        until="2.43",
    ),
    Action(
        "lock",
        "lock",
        _P + "os-lock-server:lock",
        task=ANY,
        immediate="lock",
        locked=False,
        notification="lock",
    ),
    Action(
        "unlock",
        "unlock",
        _P + "os-lock-server:unlock",
        task=ANY,
        immediate="unlock",
        locked=False,
        notification="unlock",
    ),
    Action(
        "os-resetState",
        "resetState",
        _P + "os-admin-actions:reset_state",
        task=ANY,
        immediate="reset_state",
        locked=False,
    ),
    Action(
        "shelve",
        "shelve",
        _P + "os-shelve:shelve",
        vm=(ACTIVE, STOPPED, PAUSED, SUSPENDED),
        during=SHELVING,
        after=SHELVED,
        workflow="shelve",
        notification="shelve",
        with_shares=False,
        needs_host=True,
    ),
    Action(
        "shelveOffload",
        "shelveOffload",
        _P + "os-shelve:shelve_offload",
        vm=(SHELVED,),
        during=SHELVING_OFFLOADING,
        after=SHELVED_OFFLOADED,
        workflow="offload",
        notification="shelve_offload",
    ),
    Action(
        "unshelve",
        "unshelve",
        _P + "os-shelve:unshelve",
        vm=(SHELVED_OFFLOADED,),
        during=UNSHELVING,
        after=ACTIVE,
        workflow="unshelve",
        notification="unshelve",
    ),
    Action(
        "unshelve",
        "unshelve",
        _P + "os-shelve:unshelve",
        vm=(SHELVED,),
        during=UNSHELVING,
        after=ACTIVE,
        workflow="unshelve_here",
        notification="unshelve",
    ),
    Action(
        "resize",
        "resize",
        _P + "servers:resize",
        vm=(ACTIVE, STOPPED),
        during=RESIZE_PREP,
        after=RESIZED,
        workflow="resize",
        notification="resize",
        with_shares=False,
    ),
    Action(
        "migrate",
        "migrate",
        _P + "os-migrate-server:migrate",
        vm=(ACTIVE, STOPPED),
        during=RESIZE_PREP,
        after=RESIZED,
        workflow="migrate",
        notification="resize",
        with_shares=False,
    ),
    Action(
        "confirmResize",
        "confirmResize",
        _P + "servers:confirm_resize",
        vm=(RESIZED,),
        after=ACTIVE,
        workflow="confirm_resize",
        success=204,
        notification="resize_confirm",
    ),
    Action(
        "revertResize",
        "revertResize",
        _P + "servers:revert_resize",
        vm=(RESIZED,),
        during=RESIZE_REVERTING,
        after=ACTIVE,
        workflow="revert_resize",
        notification="resize_revert",
    ),
    Action(
        "os-migrateLive",
        "live-migration",
        _P + "os-migrate-server:migrate_live",
        vm=(ACTIVE, PAUSED),
        during=MIGRATING,
        workflow="live_migrate",
        notification="live_migration",
        with_shares=False,
    ),
    Action(
        "evacuate",
        "evacuate",
        _P + "os-evacuate",
        vm=(ACTIVE, STOPPED, ERROR),
        task=_STAYING,
        during=REBUILDING,
        after=ACTIVE,
        workflow="evacuate",
        supersedes=True,
        success=200,
        notification="evacuate",
        with_shares=False,
    ),
    Action(
        "os-getConsoleOutput",
        "console-output",
        _P + "os-console-output",
        query="console_output",
        task=ANY,
        locked=False,
        success=200,
    ),
    Action(
        "os-getVNCConsole",
        "get-vnc-console",
        _P + "os-remote-consoles",
        query="vnc_console",
        task=ANY,
        locked=False,
        until="2.5",
        success=200,
    ),
    Action(
        "os-getSPICEConsole",
        "get-spice-console",
        _P + "os-remote-consoles",
        query="spice_console",
        task=ANY,
        locked=False,
        until="2.5",
        success=200,
    ),
    Action(
        "os-getSerialConsole",
        "get-serial-console",
        _P + "os-remote-consoles",
        query="serial_console",
        task=ANY,
        locked=False,
        until="2.5",
        success=200,
    ),
    Action(
        "injectNetworkInfo",
        "injectNetworkInfo",
        _P + "os-admin-actions:inject_network_info",
        query="network_info",
        task=ANY,
        locked=False,
    ),
    Action(
        "diagnostics",
        "diagnostics",
        _P + "os-server-diagnostics",
        query="diagnostics",
        task=ANY,
        locked=False,
        success=200,
    ),
    Action(
        "restore",
        "restore",
        _P + "os-deferred-delete:restore",
        vm=(SOFT_DELETED,),
        during=RESTORING,
        after=ACTIVE,
        workflow="restore",
        notification="restore",
    ),
    Action(
        "softDelete",
        "delete",
        _P + "servers:delete",
        vm=(ACTIVE, STOPPED, PAUSED, SUSPENDED, RESCUED, SHELVED, ERROR),
        during=SOFT_DELETING,
        after=SOFT_DELETED,
        workflow="soft_delete",
        success=204,
        notification="soft_delete",
    ),
    Action(
        "forceDelete",
        "forceDelete",
        _P + "os-deferred-delete:force",
        task=ANY,
        during=DELETING,
        after=DELETED,
        workflow="delete",
        supersedes=True,
        notification="delete",
    ),
    Action(
        "delete",
        "delete",
        _P + "servers:delete",
        task=ANY,
        during=DELETING,
        after=DELETED,
        workflow="delete",
        supersedes=True,
        success=204,
        notification="delete",
    ),
)
# fmt: on

#: The row with the end state of a workflow. Rows that share a workflow have the same end state.
BY_WORKFLOW = {row.workflow: row for row in ACTIONS if row.workflow}
#: Workflows that another workflow switches to when source and destination are the same host.
BY_WORKFLOW |= {
    "resize_here": BY_WORKFLOW["resize"],
    "confirm_here": BY_WORKFLOW["confirm_resize"],
    "revert_here": BY_WORKFLOW["revert_resize"],
}


def action(key: str, value: str | None = None) -> Action | None:
    """Return the first row of ``ACTIONS`` with this key and value, or None.

    ``key`` is ``Action.key``. ``value`` is compared only with a row that has ``Action.when``. For
    example, ``reboot`` has one row for the value SOFT and one for HARD.
    """
    for row in ACTIONS:
        if row.key == key and (row.when is None or row.when[1] == value):
            return row
    return None


def row(key: str, value: str | None = None) -> Action:
    """Return the row of ``ACTIONS`` that ``action`` finds, which must exist.

    Raises:
        AssertionError: No row has the key and value.
    """
    entry = action(key, value)
    assert entry is not None, key
    return entry


def matching_row(rows: Sequence[Action], vm_state: str) -> Action:
    """Return the first row whose action may start in this vm_state.

    If no row permits the state, return the first row. The caller then refuses the action.
    """
    return next((row for row in rows if row.vm == ANY or vm_state in row.vm), rows[0])


_REBUILD = {
    REBUILDING: "REBUILD",
    REBUILD_BLOCK_DEVICE_MAPPING: "REBUILD",
    REBUILD_SPAWNING: "REBUILD",
}
_RESIZE = {
    RESIZE_PREP: "RESIZE",
    RESIZE_MIGRATING: "RESIZE",
    RESIZE_MIGRATED: "RESIZE",
    RESIZE_FINISH: "RESIZE",
}
# fmt: off
_STATUS: dict[str, tuple[str, dict[str, str]]] = {
    BUILDING: ("BUILD", {}),
    ACTIVE: ("ACTIVE", {REBOOTING: "REBOOT", REBOOT_PENDING: "REBOOT", REBOOT_STARTED: "REBOOT",
                        REBOOTING_HARD: "HARD_REBOOT", UPDATING_PASSWORD: "PASSWORD", MIGRATING: "MIGRATING",
                        **_REBUILD, **_RESIZE}),
    STOPPED: ("SHUTOFF", {REBOOTING_HARD: "HARD_REBOOT", **_REBUILD, **_RESIZE}),
    PAUSED: ("PAUSED", {REBOOTING_HARD: "HARD_REBOOT", MIGRATING: "MIGRATING"}),
    SUSPENDED: ("SUSPENDED", {REBOOTING_HARD: "HARD_REBOOT"}),
    ERROR: ("ERROR", {REBOOTING_HARD: "HARD_REBOOT", **_REBUILD}),
    DELETED: ("DELETED", {}),
    SOFT_DELETED: ("SOFT_DELETED", {}),
    RESCUED: ("RESCUE", {}),
    RESIZED: ("VERIFY_RESIZE", {RESIZE_REVERTING: "REVERT_RESIZE"}),
    SHELVED: ("SHELVED", {}),
    SHELVED_OFFLOADED: ("SHELVED_OFFLOADED", {}),
}
# fmt: on


def status(vm_state: str, task_state: str | None) -> str:
    """Return the API's ``status`` of a server, "UNKNOWN" for an unknown vm_state."""
    default, during = _STATUS.get(vm_state, ("UNKNOWN", {}))
    return during.get(task_state or "", default)


def vm_states_of(status_name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the (vm_state, task_states) pairs that the API shows as this status.

    Empty task_states stand for no task_state, and for each task_state that the API does not show as
    another status of the vm_state. The result is empty if no server can have the status.
    """
    pairs: list[tuple[str, tuple[str, ...]]] = []
    for vm_state, (default, during) in _STATUS.items():
        if default == status_name:
            pairs.append((vm_state, ()))
        else:
            tasks = tuple(task for task, shown in during.items() if shown == status_name)
            if tasks:
                pairs.append((vm_state, tasks))
    return tuple(pairs)


# (workflow, step) -> name of the event in os-instance-actions. Clients and Tempest wait for these
# names.
EVENT_NAMES: dict[tuple[str, str], str] = {
    ("create", "place"): "conductor_schedule_and_build_instances",
    ("create", "build"): "compute__do_build_and_run_instance",
    ("attach_interface", "attach"): "compute_attach_interface",
    ("detach_interface", "detach"): "compute_detach_interface",
    ("attach_volume", "attach"): "compute_attach_volume",
    ("detach_volume", "detach"): "compute_detach_volume",
    ("swap_volume", "copy"): "compute_swap_volume",
    ("extend_volume", "extend"): "compute_extend_volume",
    ("volume_snapshot_create", "snapshot"): "compute_volume_snapshot_create",
    ("volume_snapshot_delete", "merge"): "compute_volume_snapshot_delete",
    ("attach_share", "allow"): "compute_allow_share",
    ("detach_share", "deny"): "compute_deny_share",
    ("add_security_group", "change"): "conductor_add_security_group",
    ("remove_security_group", "change"): "conductor_remove_security_group",
    ("start", "run"): "compute_start_instance",
    ("stop", "stop"): "compute_stop_instance",
    ("reboot_soft", "reboot"): "compute_reboot_instance",
    ("reboot_hard", "reboot"): "compute_reboot_instance",
    ("pause", "pause"): "compute_pause_instance",
    ("unpause", "run"): "compute_unpause_instance",
    ("suspend", "suspend"): "compute_suspend_instance",
    ("resume", "run"): "compute_resume_instance",
    ("rescue", "rescue"): "compute_rescue_instance",
    ("unrescue", "unrescue"): "compute_unrescue_instance",
    ("rebuild", "rebuild"): "compute_rebuild_instance",
    ("change_password", "set"): "compute_set_admin_password",
    ("crash_dump", "interrupt"): "compute_trigger_crash_dump",
    ("snapshot", "upload"): "compute_snapshot_instance",
    ("backup", "upload"): "compute_backup_instance",
    ("shelve", "upload"): "compute_shelve_instance",
    ("offload", "remove"): "compute_shelve_offload_instance",
    ("unshelve", "build"): "compute_unshelve_instance",
    ("unshelve_here", "run"): "compute_unshelve_instance",
    ("restore", "run"): "compute_restore_instance",
    ("resize", "place"): "conductor_migrate_server",
    ("resize", "prepare"): "compute_prep_resize",
    ("resize", "copy"): "compute_resize_instance",
    ("resize", "install"): "compute_finish_resize",
    ("migrate", "place"): "conductor_migrate_server",
    ("migrate", "prepare"): "compute_prep_resize",
    ("migrate", "copy"): "compute_resize_instance",
    ("migrate", "install"): "compute_finish_resize",
    ("confirm_resize", "leave"): "compute_confirm_resize",
    ("revert_resize", "stop"): "compute_revert_resize",
    ("revert_resize", "install"): "compute_finish_revert_resize",
    ("resize_here", "remake"): "compute_finish_resize",
    ("confirm_here", "drop"): "compute_confirm_resize",
    ("revert_here", "remake"): "compute_finish_revert_resize",
    ("live_migrate", "place"): "conductor_live_migrate_instance",
    ("live_migrate", "offer"): "compute_check_can_live_migrate_source",
    ("live_migrate", "prepare"): "compute_check_can_live_migrate_destination",
    ("live_migrate", "migrate"): "compute_live_migration",
    ("live_migrate", "arrive"): "compute_post_live_migration_at_destination",
    ("evacuate", "place"): "conductor_rebuild_server",
    ("evacuate", "build"): "compute_rebuild_instance",
    ("soft_delete", "stop"): "compute_soft_delete_instance",
    ("delete", "remove"): "compute_terminate_instance",
}
# fmt: on


def event_name(workflow: str, step: str) -> str:
    """Return the name of a step's event in os-instance-actions.

    A step without an entry in ``EVENT_NAMES`` has "conductor_" and its own name.
    """
    return EVENT_NAMES.get((workflow, step), f"conductor_{step}")
