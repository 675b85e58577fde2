# SPDX-License-Identifier: Apache-2.0
"""Text tables for the output of ``kilonova`` commands."""

from __future__ import annotations

from collections.abc import Iterable

from common.domain.text import one_line


def columns(lines: Iterable[list[str]]) -> str:
    """Return the lines as a table with aligned columns. Each cell is reduced to one line."""
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
