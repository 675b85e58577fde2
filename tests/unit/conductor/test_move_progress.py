# SPDX-License-Identifier: Apache-2.0
"""Progress lines of moves and the forecast of their end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.domain.clock import SECOND
from common.store.hosts.host_actions import Progress
from common.store.views.host_contents import Move
from conductor.hosts.move_progress import MIB, forecast, line, seconds, summary, words

MOVE = Move("m", "s1", "web", "live-migration", "running", "h1", "h2", begun=10 * SECOND, changed=0)
BYTES = {
    "memory_total": 128 * MIB,
    "memory_processed": 96 * MIB,
    "memory_remaining": 32 * MIB,
    "disk_total": 4 * MIB,
    "disk_processed": 4 * MIB,
    "disk_remaining": 0,
}


def test_move_progress_line_shows_hosts_status_and_copied_bytes() -> None:
    assert (
        line(replace(MOVE, dest=None, status="accepted"), 10 * SECOND)
        == "web (s1)  h1 -> ?  accepted  0 s"
    )
    assert line(replace(MOVE, progress=BYTES), 22 * SECOND) == (
        "web (s1)  h1 -> h2  running  memory 96/128 MiB  disk 4/4 MiB  12 s"
    )


def test_move_seconds_are_not_negative_when_the_clock_jumps_back() -> None:
    assert seconds(MOVE, 9 * SECOND) == 0


@pytest.mark.parametrize(
    ("number", "text"), [(0.4, "0 s"), (59.4, "59 s"), (125, "2 min 5 s"), (7800, "2 h 10 min")]
)
def test_words_formats_seconds_minutes_and_hours(number: float, text: str) -> None:
    assert words(number) == text


def test_forecast_is_none_before_the_first_move_has_ended() -> None:
    assert forecast([], [MOVE], 3, 2, 12 * SECOND) is None
    assert summary(Progress(0, 1, 3)) == "0 moved, 1 under way, 3 to go"


def test_forecast_counts_waiting_moves_in_parallel_slots() -> None:
    """Each move takes about ten seconds, and two moves run at a time."""
    assert forecast([10, 8, 12], [], 4, 2, 0) == 20
    assert forecast([10], [], 5, 2, 0) == 30
    assert forecast([10], [MOVE], 1, 2, 14 * SECOND) == 10, (
        "the running move ends in 6 seconds, the other begins now"
    )
    assert forecast([10], [MOVE, MOVE], 1, 2, 14 * SECOND) == 16
    assert forecast([10], [MOVE], 0, 2, 90 * SECOND) == 0, "the move is late by an unknown time"
    assert summary(Progress(1, 1, 1, 16)) == "1 moved, 1 under way, 1 to go: about 16 s"
    assert summary(Progress(2, 0, 0, 0)) == "2 moved, 0 under way, 0 to go"


def test_forecast_prefers_copied_bytes_to_average_duration() -> None:
    """After ten seconds, 100 of 132 MiB are copied."""
    assert forecast([1000], [replace(MOVE, progress=BYTES)], 0, 1, 20 * SECOND) == pytest.approx(
        3.2
    )
