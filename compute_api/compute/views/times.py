# SPDX-License-Identifier: Apache-2.0
"""Times in responses. Formatted times are cached, because lists repeat times."""

from __future__ import annotations

import functools
from datetime import UTC, datetime


@functools.lru_cache(maxsize=8192)
def format_seconds(micros: int | None) -> str | None:
    """Return a time like 2026-01-02T03:04:05Z, or None for an empty or damaged column.

    ``micros`` are microseconds since 1970.
    """
    return _format(micros, "%Y-%m-%dT%H:%M:%SZ")


@functools.lru_cache(maxsize=8192)
def format_micros(micros: int | None) -> str | None:
    """Return a time like 2026-01-02T03:04:05.000000, or None for an empty or damaged column.

    ``micros`` are microseconds since 1970.
    """
    text = _format(micros, "%Y-%m-%dT%H:%M:%S.")
    return None if text is None or micros is None else f"{text}{micros % 1_000_000:06d}"


def _format(micros: int | None, form: str) -> str | None:
    # SQLite does not check the type of a value, so a damaged column may hold any type.
    if not isinstance(micros, int):
        return None
    try:
        return datetime.fromtimestamp(micros // 1_000_000, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return None
