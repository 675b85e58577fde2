# SPDX-License-Identifier: Apache-2.0
"""How far a command is, as a text and back."""

from __future__ import annotations

import pytest

from common.command_progress import CommandPhase, CommandProgress


@pytest.mark.parametrize("phase", CommandPhase)
@pytest.mark.parametrize("percent", [None, 0, 40, 100])
@pytest.mark.parametrize("hanging", ["", "rescue"])
def test_progress_parsed_from_its_text_is_equal(
    phase: CommandPhase, percent: int | None, hanging: str
) -> None:
    progress = CommandProgress(phase, percent, hanging)
    assert CommandProgress.parse(str(progress)) == progress


@pytest.mark.parametrize(
    ("text", "progress"),
    [
        ("fetching image 40 %", CommandProgress(CommandPhase.FETCHING_IMAGE, 40)),
        ("making disks", CommandProgress(CommandPhase.MAKING_DISKS)),
        (
            "hangs in ensure_guest (starting)",
            CommandProgress(CommandPhase.STARTING, hanging="ensure_guest"),
        ),
        ("saving memory 250 %", CommandProgress(CommandPhase.SAVING_MEMORY, 100)),
        ("folding paper 3 %", CommandProgress(CommandPhase.OTHER, 3)),
        ("", CommandProgress(CommandPhase.OTHER)),
    ],
)
def test_progress_text_of_another_release_is_understood(
    text: str, progress: CommandProgress
) -> None:
    assert CommandProgress.parse(text) == progress
