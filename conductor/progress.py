# SPDX-License-Identifier: Apache-2.0
"""How far long commands are: the phases that hosts tell become task_state and progress of the server.

Written by the conductor with each periodic exchange while a command runs; it moves neither ``updated_at`` nor the
fence, so that nobody who follows changes is woken by it. That a command hangs is written down as its action's cause,
which ``kilonova action list`` shows.
"""
from __future__ import annotations

import re
from collections.abc import Mapping

from common import states
from common.models import HANGS
from common.store import actions
from common.store.engine import Connection

#: (workflow's task_state while it runs, first words of the phase) -> task_state
_TASKS: dict[str, dict[str, str]] = {
    "create": {"fetching": states.BLOCK_DEVICE_MAPPING, "making": states.BLOCK_DEVICE_MAPPING,
               "starting": states.SPAWNING},
    "unshelve": {"fetching": states.UNSHELVING, "starting": states.SPAWNING},
    "rebuild": {"making": states.REBUILD_BLOCK_DEVICE_MAPPING, "starting": states.REBUILD_SPAWNING},
    "snapshot": {"copying": states.IMAGE_SNAPSHOT, "uploading": states.IMAGE_UPLOADING},
}
_PERCENT = re.compile(r"(\d{1,3})\s*%")


def write(tx: Connection, phases: Mapping[tuple[str, str], str]) -> None:
    """Phases by host and command key; those of commands that are not, or no more, waited for on that host are
    ignored."""
    told = {(host, key.split("/")[0]): phase for (host, key), phase in phases.items() if not key.startswith("debt/")}
    for row in actions.waiting(tx, {action for _, action in told}) if told else ():
        phase = told.get((row.host, row.id))
        if phase is None:
            continue
        hangs = f"Host {row.host} {phase}" if phase.startswith(HANGS) else None
        if hangs or HANGS in (row.cause or ""):
            actions.say_cause(tx, row, hangs)
        task_state = _TASKS.get(row.workflow, {}).get(phase.split(" ")[0])
        percent = _PERCENT.search(phase)
        actions.show_progress(tx, row, task_state, min(100, int(percent.group(1))) if percent else None)
