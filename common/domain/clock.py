# SPDX-License-Identifier: Apache-2.0
"""Time: how it is counted and written.

Stored times are microseconds since the epoch by the *database's* clock
(``common.store.engine.now``); a process's own clock is only ever asked for ages, through an object
with ``monotonic()`` that a simulator replaces.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

SECOND = 1_000_000


class Clock:
    """The real one; tests pass a fake with the same method."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()


def iso(micros: int | None, fraction: bool = False) -> str | None:
    """``2026-01-02T03:04:05Z``, or with ``fraction`` ``2026-01-02T03:04:05.000000``.

    None if the column is empty, or damaged: SQLite keeps texts in columns of numbers, too.
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
    """Microseconds of an ISO 8601 time; without a zone it is UTC.

    Raises:
        ValueError: it is none.
    """
    moment = datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    # exact, as a float is not
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
