# SPDX-License-Identifier: Apache-2.0
"""The progress of a command on its host.

The agent reports progress with the periodic exchange. Conductors derive task_state and progress of
the server from the report. Only operators see the text: "fetching image 40 %", "hangs in rescue
(making disks)".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CommandPhase(StrEnum):
    """The present work of a command. Operators read the value."""

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
    #: A phase that only a later release knows.
    OTHER = "busy"

    @classmethod
    def _missing_(cls, value: object) -> CommandPhase:
        return cls.OTHER


@dataclass(frozen=True, slots=True)
class CommandProgress:
    """The progress of a command."""

    phase: CommandPhase
    #: Percentage of the phase, or None if the verb counts no progress.
    percent: int | None = None
    #: The name of a verb without a sign of life, else empty.
    stalled_verb: str = ""

    def __str__(self) -> str:
        """Format the progress, for example "moving memory 40 %" or "hangs in rescue (queued)"."""
        text = str(self.phase) if self.percent is None else f"{self.phase} {self.percent} %"
        return f"hangs in {self.stalled_verb} ({text})" if self.stalled_verb else text
