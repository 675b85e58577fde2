# SPDX-License-Identifier: Apache-2.0
"""``CommandProgress`` as data in a report and as text for operators."""

from __future__ import annotations

import pytest

from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import Sync
from common.domain.wire import from_wire, to_wire


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (CommandProgress(CommandPhase.FETCHING_IMAGE, 40), "fetching image 40 %"),
        (CommandProgress(CommandPhase.MAKING_DISKS), "making disks"),
        (
            CommandProgress(CommandPhase.STARTING, stalled_verb="ensure_guest"),
            "hangs in ensure_guest (starting)",
        ),
        (
            CommandProgress(CommandPhase.COPYING_DISK, 0, "snapshot"),
            "hangs in snapshot (copying disk 0 %)",
        ),
    ],
)
def test_command_progress_survives_the_wire_and_has_a_text(
    progress: CommandProgress, text: str
) -> None:
    report = Sync("h1", 1, phases={"do/a/build/1": progress})
    assert from_wire(Sync, to_wire(report)) == report
    assert str(progress) == text


def test_command_progress_with_unknown_phase_is_read_as_phase_other() -> None:
    wire = {"phase": "folding paper", "percent": 3, "stalled_verb": ""}
    assert from_wire(CommandProgress, wire) == CommandProgress(CommandPhase.OTHER, 3)
