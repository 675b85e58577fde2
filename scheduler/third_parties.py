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
    """Return the entry points for the names that are not built in, by name.

    The installed distributions are only read if there is such a name, because that takes 40 ms.

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
    """Return the message for a failed factory of an entry point."""
    return f"[scheduler] {option}: {point.name} ({point.value}) cannot be made: {type(problem).__name__}: {problem}"
