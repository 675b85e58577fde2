# SPDX-License-Identifier: Apache-2.0
"""Find filters and weighers that installed distributions declare as entry points."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import metadata


def find_entry_points(
    option: str,
    names: Iterable[str],
    group: str,
    built_in: Collection[str],
    unknown: type[ValueError],
) -> dict[str, metadata.EntryPoint]:
    """Return all entry points of the group that are not built in, by name.

    If all ``names`` are built in, the installed distributions are not read, because that takes 40
    ms, and the result is empty.

    Args:
        option: The option of [scheduler] with the names.
        names: The option's value.
        group: The group of the entry points.
        built_in: Names that no distribution can replace.
        unknown: Class of the error for unknown names.

    Raises:
        unknown: A name is neither built in nor in an installed distribution.
    """
    others = [name for name in names if name not in built_in]
    if not others:
        return {}
    foreign = {
        point.name: point
        for point in metadata.entry_points(group=group)
        if point.name not in built_in
    }
    missing = [name for name in others if name not in foreign]
    if missing:
        raise unknown(
            f"[scheduler] {option}: unknown {', '.join(missing)}; "
            f"allowed are {', '.join(sorted({*built_in, *foreign}))}"
        )
    return foreign


def refusal(option: str, point: metadata.EntryPoint, problem: Exception) -> str:
    """Return the message for an entry point whose factory failed."""
    return f"[scheduler] {option}: {point.name} ({point.value}) cannot be created: {type(problem).__name__}: {problem}"
