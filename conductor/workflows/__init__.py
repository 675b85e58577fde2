# SPDX-License-Identifier: Apache-2.0
"""The registry of workflows by name. Each file contains an action and its counterpart."""

from __future__ import annotations

from conductor.engine.workflow import Workflows
from conductor.workflows import (
    assisted_snapshots,
    create,
    delete,
    evacuate,
    interfaces,
    live_migrate,
    power,
    rebuild,
    rescue,
    resize,
    resize_here,
    shares,
    shelve,
    snapshot,
    volume_swap,
    volumes,
)

WORKFLOWS = Workflows(
    (workflow.name, workflow)
    for workflow in (
        create.CREATE,
        power.START,
        power.STOP,
        power.REBOOT_SOFT,
        power.REBOOT_HARD,
        power.PAUSE,
        power.UNPAUSE,
        power.SUSPEND,
        power.RESUME,
        power.CRASH_DUMP,
        power.CHANGE_PASSWORD,
        rescue.RESCUE,
        rescue.UNRESCUE,
        rebuild.REBUILD,
        snapshot.SNAPSHOT,
        snapshot.BACKUP,
        shelve.SHELVE,
        shelve.OFFLOAD,
        shelve.UNSHELVE,
        shelve.UNSHELVE_HERE,
        interfaces.ATTACH_INTERFACE,
        interfaces.DETACH_INTERFACE,
        interfaces.ADD_SECURITY_GROUP,
        interfaces.REMOVE_SECURITY_GROUP,
        shares.ATTACH_SHARE,
        shares.DETACH_SHARE,
        volumes.ATTACH_VOLUME,
        volumes.DETACH_VOLUME,
        volumes.EXTEND_VOLUME,
        volume_swap.SWAP_VOLUME,
        assisted_snapshots.VOLUME_SNAPSHOT_CREATE,
        assisted_snapshots.VOLUME_SNAPSHOT_DELETE,
        resize.RESIZE,
        resize.MIGRATE,
        resize.CONFIRM_RESIZE,
        resize.REVERT_RESIZE,
        live_migrate.LIVE_MIGRATE,
        evacuate.EVACUATE,
        resize_here.RESIZE_HERE,
        resize_here.CONFIRM_HERE,
        resize_here.REVERT_HERE,
        delete.SOFT_DELETE,
        delete.RESTORE,
        delete.DELETE,
    )
)
