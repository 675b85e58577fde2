# SPDX-License-Identifier: Apache-2.0
"""The progress of long commands, as task_state and progress of the server.

The conductor writes the progress with each periodic report while a command runs. ``updated_at`` and
the fence stay unchanged, so a client that polls for changes sees no change. For a command without a
sign of life the conductor writes the cause that ``kilonova action list`` shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.domain import states
from common.domain.command_key import CommandKey
from common.domain.command_progress import CommandPhase, CommandProgress
from common.store.engine import Connection
from common.store.servers import actions

#: Workflow -> phase of its command -> task_state of the server.
_TASKS: dict[str, dict[CommandPhase, str]] = {
    "create": {
        CommandPhase.FETCHING_IMAGE: states.BLOCK_DEVICE_MAPPING,
        CommandPhase.MAKING_DISKS: states.BLOCK_DEVICE_MAPPING,
        CommandPhase.STARTING: states.SPAWNING,
    },
    "unshelve": {
        CommandPhase.FETCHING_IMAGE: states.UNSHELVING,
        CommandPhase.STARTING: states.SPAWNING,
    },
    "rebuild": {
        CommandPhase.MAKING_DISKS: states.REBUILD_BLOCK_DEVICE_MAPPING,
        CommandPhase.STARTING: states.REBUILD_SPAWNING,
    },
    "snapshot": {
        CommandPhase.COPYING_DISK: states.IMAGE_SNAPSHOT,
        CommandPhase.UPLOADING: states.IMAGE_UPLOADING,
    },
}


def write(tx: Connection, reported: Mapping[tuple[str, CommandKey], CommandProgress]) -> None:
    """Write the progress of commands as task_state and progress of their servers.

    For a stalled command the text of the progress becomes the action's cause, and the task_state
    stays unchanged. Other progress removes the cause.

    Args:
        tx: The transaction.
        reported: (host, key of the command) -> progress. The progress is ignored if the action in
            the key does not wait for a command on that host.
    """
    by_action = {
        (host, key.owner): progress
        for (host, key), progress in reported.items()
        if key.is_of_action
    }
    for row in actions.waiting(tx, {action for _, action in by_action}) if by_action else ():
        progress = by_action.get((row.host or "", row.id))
        if progress is None:
            continue
        stalled = bool(progress.stalled_verb)
        actions.set_cause(tx, row, f"Host {row.host} {progress}" if stalled else None)
        task_state = None if stalled else _TASKS.get(row.workflow, {}).get(progress.phase)
        percent = None if progress.percent is None else max(0, min(100, progress.percent))
        actions.show_progress(tx, row, task_state, percent)
