# SPDX-License-Identifier: Apache-2.0
"""Texts of hosts, guests and external services, made fit for a terminal and a column.

Such a text may hold escape sequences, or line feeds that forge a line of a table. Conductors clean
the texts of hosts when they take them in, and the operator's commands clean all that they print."""

from __future__ import annotations

import re
import unicodedata

MAX_LINE_CHARACTERS = 500
_SPACE = re.compile(r"[\s\x1c-\x1f\x85\u2028\u2029]+")


def is_printable(text: str) -> bool:
    """True without control and format characters, surrogates, and separators of lines."""
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
    """Return the name and the suffix, the name cut if both have more than ``most`` characters."""
    return name[: most - len(suffix)] + suffix


def one_line(text: str, most: int = MAX_LINE_CHARACTERS) -> str:
    """Return the text as one printable line of at most ``most`` characters."""
    if not text.isprintable():
        text = printable(_SPACE.sub(" ", text[: 4 * most])).strip()
    return text if len(text) <= most else text[: most - 1] + "…"
