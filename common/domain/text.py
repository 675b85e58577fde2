# SPDX-License-Identifier: Apache-2.0
"""Cleaning of texts from hosts, guests and external services, for terminals and columns.

Such a text may contain escape sequences, or line feeds that forge a line of a table. Conductors
clean the texts of hosts on receipt, and the operator's commands clean all output.
"""

from __future__ import annotations

import re
import unicodedata

MAX_LINE_CHARACTERS = 500
_SPACE = re.compile(r"[\s\x1c-\x1f\x85\u2028\u2029]+")


def is_printable(text: str) -> bool:
    """Return True if the text has no unprintable character.

    Unprintable are control, format, private and unassigned characters, surrogates, and line and
    paragraph separators.
    """
    return text.isprintable() or all(map(_is_printable, text))


def _is_printable(letter: str) -> bool:
    kind = unicodedata.category(letter)
    return kind[0] != "C" and kind not in ("Zl", "Zp")


def printable(text: str) -> str:
    """Return the text with ? for each unprintable character. Line feeds and tabs stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter in "\n\t" or _is_printable(letter) else "?" for letter in text)


def with_suffix(name: str, suffix: str, most: int = 255) -> str:
    """Return the name and the suffix. The name is cut if both exceed ``most`` characters.

    The suffix must not be longer than ``most``.
    """
    return name[: most - len(suffix)] + suffix


def one_line(text: str, most: int = MAX_LINE_CHARACTERS) -> str:
    """Return the text as one printable line of at most ``most`` characters.

    Only the first ``4 * most`` characters of an unprintable text are read. A line that is still too
    long is cut and ends with "…".
    """
    if not text.isprintable():
        text = printable(_SPACE.sub(" ", text[: 4 * most])).strip()
    return text if len(text) <= most else text[: most - 1] + "…"
