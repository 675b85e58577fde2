# SPDX-License-Identifier: Apache-2.0
"""The commands of a page of the documentation, as a shell script for each heading.

A command is an indented block. In the page, a WORD in capitals stands for a value of the operator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

INDENT = "    "


def commands(page: Path, heading: str) -> str:
    """Return the indented blocks below a heading.

    The section ends at the next heading of the same or a higher level.

    Raises:
        LookupError: The page has no such heading, or no block is below the heading.
    """
    level, lines, inside = 0, [], False
    for line in page.read_text().splitlines():
        title = re.match(r"(#+) (.+)$", line)
        if title and inside and len(title[1]) <= level:
            break
        if title and title[2] == heading:
            level, inside = len(title[1]), True
        elif inside and line.startswith(INDENT):
            lines.append(line.removeprefix(INDENT))
    if not lines:
        raise LookupError(f"{page} has no commands below {heading!r}")
    return "\n".join(lines) + "\n"


def fill_words(script: str, values: Mapping[str, str]) -> str:
    """Return the script with the words of ``values`` replaced. Other words stay."""
    return re.sub(
        rf"\b({'|'.join(map(re.escape, values))})\b", lambda match: values[match[1]], script
    )
