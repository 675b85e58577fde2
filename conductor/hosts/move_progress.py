# SPDX-License-Identifier: Apache-2.0
"""What drain and evacuate say of servers under way, and how long the rest will take.

Pure: made of moves as ``common.store.views.host_contents`` reads them, by the database's clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import median

from common.domain.clock import SECOND
from common.store.hosts.host_actions import Progress
from common.store.views.host_contents import Move

MIB = 1 << 20


def seconds(move: Move, at: int) -> float:
    """How long it has been under way."""
    return max(0, at - move.begun) / SECOND


def line(move: Move, at: int) -> str:
    """One line of a move that is under way."""
    parts = [f"{move.name} ({move.server})", f"{move.source} -> {move.dest or '?'}", move.status]
    parts += [
        f"{what} {_amount(move, what)}"
        for what in ("memory", "disk")
        if move.progress.get(f"{what}_total")
    ]
    parts.append(words(seconds(move, at)))
    if move.stuck:
        parts.append(f"stuck: {move.stuck} See: kilonova action list --stuck")
    return "  ".join(parts)


def _amount(move: Move, what: str) -> str:
    total, left = move.progress[f"{what}_total"], move.progress.get(f"{what}_remaining", 0)
    return f"{max(0, total - left) // MIB}/{total // MIB} MiB"


def words(number: float) -> str:
    """A time in words: 12 s, 3 min 5 s, 2 h 10 min."""
    whole = round(number)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def forecast(
    took: Sequence[float], running: Sequence[Move], waiting: int, parallel: int, at: int
) -> float | None:
    """Seconds until all have moved: those under way end when their bytes are over, or after the
    usual time, and each makes room for one that waits. None while no move has ended, so that
    nothing is usual."""
    if not took:
        return None
    usual = median(took)
    ends = [_left(move, at, usual) for move in running]
    ends += [0.0] * max(0, parallel - len(ends))
    heapq.heapify(ends)
    for _ in range(waiting):
        heapq.heapreplace(ends, ends[0] + usual)
    return max(ends, default=0.0)


def _left(move: Move, at: int, usual: float) -> float:
    """By its bytes where it counts them; a pass over memory that changes may be repeated, so it is
    no promise."""
    done = sum(move.progress.get(f"{what}_processed", 0) for what in ("memory", "disk"))
    rest = sum(move.progress.get(f"{what}_remaining", 0) for what in ("memory", "disk"))
    so_far = seconds(move, at)
    return so_far * rest / done if done and rest else max(0.0, usual - so_far)


def summary(progress: Progress) -> str:
    """How far an action on a host is, in words."""
    rest = (
        ""
        if progress.seconds_left is None or not (progress.under_way or progress.waiting)
        else (f": about {words(progress.seconds_left)}")
    )
    return f"{progress.moved} moved, {progress.under_way} under way, {progress.waiting} to go{rest}"
