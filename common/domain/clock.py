# SPDX-License-Identifier: Apache-2.0
"""Clocks, and the text form of times.

Stored times are microseconds since the epoch by the *database's* clock
(``common.store.engine.now``). A process's own clock measures only durations, through an object with
``monotonic()`` that a simulator can replace.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

SECOND = 1_000_000


class Clock:
    """The real clock. Tests pass a fake with the same method."""

    def monotonic(self) -> float:
        """Return seconds that never decrease. Only differences are meaningful."""
        return time.monotonic()


def iso(micros: int | None, fraction: bool = False) -> str | None:
    """Format a stored time as ``2026-01-02T03:04:05Z``.

    Args:
        micros: Microseconds since the epoch, or the value of an empty or damaged column.
        fraction: Write microseconds and no zone: ``2026-01-02T03:04:05.000000``.

    Returns:
        The text, or None if ``micros`` is no valid time. SQLite can store text in a numeric column.
    """
    if not isinstance(micros, int):
        return None
    try:
        moment = datetime.fromtimestamp(micros // SECOND, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    if fraction:
        return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{micros % SECOND:06d}"
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(text: str) -> int:
    """Return the microseconds since the epoch of an ISO 8601 time. Without a zone the time is UTC.

    Raises:
        ValueError: The text is no ISO 8601 time.
    """
    moment = datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    # Integer division is exact, unlike timestamp(), which returns a float.
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
