# SPDX-License-Identifier: Apache-2.0
"""How far long commands are: the phases that hosts tell become task_state and progress of the
server.

Written by the conductor with each periodic exchange while a command runs; it moves neither
``updated_at`` nor the fence, so that nobody who follows changes is woken by it. That a command
hangs is written down as its action's cause, which ``kilonova action list`` shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from common import states
from common.command_progress import HANGS, CommandPhase, CommandProgress
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


def write(tx: Connection, phases: Mapping[tuple[str, str], str]) -> None:
    """Phases by host and command key; those of commands that are not, or no more, waited for on
    that host are ignored."""
    known = {
        (host, key.split("/")[0]): phase
        for (host, key), phase in phases.items()
        if not key.startswith("debt/")
    }
    for row in actions.waiting(tx, {action for _, action in known}) if known else ():
        phase = known.get((row.host or "", row.id))
        if phase is None:
            continue
        progress = CommandProgress.parse(phase)
        hangs = f"Host {row.host} {phase}" if progress.hanging else None
        if hangs or HANGS in (row.cause or ""):
            actions.say_cause(tx, row, hangs)
        task_state = None if progress.hanging else _TASKS.get(row.workflow, {}).get(progress.phase)
        actions.show_progress(tx, row, task_state, progress.percent)
