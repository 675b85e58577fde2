# SPDX-License-Identifier: Apache-2.0
"""Texts about moves under way, and the forecast of a drain or an evacuation.

Free of effects. The input is moves as ``common.store.views.host_contents`` reads them, with times
of the database's clock.
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
    """Return for how many seconds a move has been under way at the time ``at`` in µs."""
    return max(0, at - move.begun) / SECOND


def line(move: Move, at: int) -> str:
    """Return a line about a move under way: server, hosts, status, copied data, duration.

    ``at`` is the current time in µs. If the move is stuck, the line ends with the reason and the
    command that lists stuck actions.
    """
    parts = [f"{move.name} ({move.server})", f"{move.source} -> {move.dest or '?'}", move.status]
    parts += [
        f"{unit} {_describe_amount(move, unit)}"
        for unit in ("memory", "disk")
        if move.progress.get(f"{unit}_total")
    ]
    parts.append(words(seconds(move, at)))
    if move.stuck:
        parts.append(f"stuck: {move.stuck} See: kilonova action list --stuck")
    return "  ".join(parts)


def _describe_amount(move: Move, unit: str) -> str:
    total, left = move.progress[f"{unit}_total"], move.progress.get(f"{unit}_remaining", 0)
    return f"{max(0, total - left) // MIB}/{total // MIB} MiB"


def words(number: float) -> str:
    """Return a number of seconds as text, for example 12 s, 3 min 5 s or 2 h 10 min."""
    whole = round(number)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def forecast(
    took: Sequence[float], running: Sequence[Move], waiting: int, parallel: int, at: int
) -> float | None:
    """Estimate the seconds until all servers have moved. Return None if ``took`` is empty.

    The rest of a move under way is estimated from its bytes, or else from the median of ``took``.
    Each end makes room for one waiting server, which takes the median.

    Args:
        took: Durations of completed moves, in seconds.
        running: The moves under way.
        waiting: Number of waiting servers.
        parallel: Moves at a time.
        at: The current time, in µs.
    """
    if not took:
        return None
    usual = median(took)
    ends = [_estimate_remaining(move, at, usual) for move in running]
    ends += [0.0] * max(0, parallel - len(ends))
    heapq.heapify(ends)
    for _ in range(waiting):
        heapq.heapreplace(ends, ends[0] + usual)
    return max(ends, default=0.0)


def _estimate_remaining(move: Move, at: int, usual: float) -> float:
    """Estimate the remaining seconds of a move from its copied and remaining bytes.

    If no bytes are copied yet, or none remain, return the rest of ``usual``, the seconds that a
    move usually takes, or 0 if the move is late. This is only an estimate, because changed memory
    is copied again.
    """
    done = sum(move.progress.get(f"{unit}_processed", 0) for unit in ("memory", "disk"))
    remaining = sum(move.progress.get(f"{unit}_remaining", 0) for unit in ("memory", "disk"))
    elapsed = seconds(move, at)
    return elapsed * remaining / done if done and remaining else max(0.0, usual - elapsed)


def summary(progress: Progress) -> str:
    """Return a host action's progress as text, with the forecast, if any, while servers move."""
    rest = (
        ""
        if progress.seconds_left is None or not (progress.under_way or progress.waiting)
        else (f": about {words(progress.seconds_left)}")
    )
    return f"{progress.moved} moved, {progress.under_way} under way, {progress.waiting} to go{rest}"
