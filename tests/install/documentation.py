# SPDX-License-Identifier: Apache-2.0
"""The commands that documentation tells an operator to type, as a shell's script for each heading.

A command is an indented block. What a reader replaces is a WORD in capitals, here as in the samples
of configuration; it is replaced by a value from a table, and a word that has none is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

INDENT = "    "


def commands(page: Path, heading: str) -> str:
    """The indented blocks below this heading, up to the next one of the same or a higher level.

    Raises:
        LookupError: the page has no such heading, or no block stands below it.
    """
    level, found, inside = 0, [], False
    for line in page.read_text().splitlines():
        title = re.match(r"(#+) (.+)$", line)
        if title and inside and len(title[1]) <= level:
            break
        if title and title[2] == heading:
            level, inside = len(title[1]), True
        elif inside and line.startswith(INDENT):
            found.append(line.removeprefix(INDENT))
    if not found:
        raise LookupError(f"{page} has no commands below {heading!r}")
    return "\n".join(found) + "\n"


def filled(script: str, values: Mapping[str, str]) -> str:
    """The script with values for the reader's words."""
    return re.sub(rf"\b({'|'.join(map(re.escape, values))})\b", lambda one: values[one[1]], script)
