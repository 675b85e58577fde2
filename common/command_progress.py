# SPDX-License-Identifier: Apache-2.0
"""How far a command is on its host: its phase, and how much of the phase is done.

The agent reports it with the periodic exchange; conductors derive task_state and progress of the
server from it. On the wire it is a text, as operators read it: "fetching image 40 %", "hangs in
rescue (making disks)".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class CommandPhase(StrEnum):
    """What a command does at the moment."""

    QUEUED = "queued"
    ATTACHING_INTERFACE = "attaching the interface"
    ATTACHING_VOLUME = "attaching the volume"
    CONNECTING_VOLUMES = "connecting its volumes"
    COPYING_DISK = "copying disk"
    COPYING_FILES = "copying files"
    COPYING_VOLUME = "copying the volume"
    DETACHING_INTERFACE = "detaching the interface"
    DETACHING_VOLUME = "detaching the volume"
    ENDING_MIGRATION = "ending an earlier migration"
    FETCHING_IMAGE = "fetching image"
    MAKING_DISKS = "making disks"
    MERGING_VOLUME = "merging a snapshot of the volume"
    MIGRATING = "migrating"
    MOUNTING_SHARES = "mounting its shares"
    MOVING_DISK = "moving disk"
    MOVING_MEMORY = "moving memory"
    SAVING_MEMORY = "saving memory"
    SNAPSHOTTING_VOLUME = "taking a snapshot of the volume"
    STARTING = "starting"
    UPLOADING = "uploading"
    VERIFYING_DISKS = "verifying disks"
    VERIFYING_FILES = "verifying files"
    WAITING_FOR_NETWORK = "waiting for the network"
    WAITING_TO_FETCH = "waiting to fetch image"
    OTHER = "busy"  #: one that only a later release knows

    @classmethod
    def _missing_(cls, value: object) -> CommandPhase:
        return cls.OTHER


#: How the text of a command begins that gives no sign of life.
HANGS = "hangs in"
_HANGS = re.compile(rf"{HANGS} (?P<verb>\w+) \((?P<inside>.*)\)")
_PERCENT = re.compile(r"(?P<phase>.*) (?P<percent>\d{1,3}) %")


@dataclass(frozen=True, slots=True)
class CommandProgress:
    """``percent``: of the phase, None where nobody counts. ``hanging``: the verb, when it gives no
    sign of life."""

    phase: CommandPhase
    percent: int | None = None
    hanging: str = ""

    def __str__(self) -> str:
        text = str(self.phase) if self.percent is None else f"{self.phase} {self.percent} %"
        return f"{HANGS} {self.hanging} ({text})" if self.hanging else text

    @classmethod
    def parse(cls, text: str) -> CommandProgress:
        """What ``str`` made a text; a phase that is not known here is OTHER."""
        hangs = _HANGS.fullmatch(text)
        inside = hangs["inside"] if hangs else text
        counted = _PERCENT.fullmatch(inside)
        return cls(
            CommandPhase(counted["phase"] if counted else inside),
            min(100, int(counted["percent"])) if counted else None,
            hangs["verb"] if hangs else "",
        )
