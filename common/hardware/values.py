# SPDX-License-Identifier: Apache-2.0
"""What the text of an extra spec or an image property means: one function for each kind of value.

Called by the other modules of ``common.hardware`` and by the API's check of extra specs. A tenant writes image
properties, so every text is bounded before it is read. Each raises ValueError whose text says what is wrong.
"""
from __future__ import annotations

import re
from collections.abc import Callable

#: More than any guest has; what is asked beyond is refused before anything is made of it.
MOST_CPUS, MOST_CELLS = 1024, 64
_LONGEST = 4096
TRUE = frozenset(("true", "1", "on", "yes", "t", "y"))
FALSE = frozenset(("false", "0", "off", "no", "f", "n"))
_PAGES = {"small": 4, "large": -1, "any": -2}
_UNITS = {"": 0, "k": 10, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"([0-9]{1,12})([kKMGT]?)i?(b|bit|B|)", re.ASCII)


def whole(least: int = 0, most: int = 2 ** 31 - 1) -> Callable[[str], int]:
    """A whole number in decimal digits."""
    def read(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,19}", text.strip(), re.ASCII):
            raise ValueError("is not a whole number")
        number = int(text)
        if not least <= number <= most:
            raise ValueError(f"is not between {least} and {most}")
        return number
    return read


def truth(text: str) -> bool:
    """A boolean."""
    word = text.strip().lower()
    if word not in TRUE | FALSE:
        raise ValueError("is neither true nor false")
    return word in TRUE


def one_of(*words: str) -> Callable[[str], str]:
    """One of these words, in any case."""
    def read(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"is not one of {', '.join(words)}")
        return word
    return read


def cpus(text: str) -> frozenset[int]:
    """CPU numbers as ``0-3,^2,8``; ``^`` takes away."""
    given: tuple[set[int], set[int]] = (set(), set())
    for part in text[:_LONGEST + 1].split(","):
        match = re.fullmatch(r"\s*(\^?)([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part, re.ASCII)
        if match is None or len(text) > _LONGEST:
            raise ValueError("is not a list of CPUs like 0-3,^2,8")
        first, last = int(match[2]), int(match[3] or match[2])
        if last < first or last >= MOST_CPUS:
            raise ValueError(f"is not a list of CPUs below {MOST_CPUS}")
        given[bool(match[1])].update(range(first, last + 1))
    return frozenset(given[0] - given[1])


def page_kb(text: str) -> int:
    """A page size in KiB; small, large and any as ``Hardware.page_kb`` has them."""
    if text.strip().lower() in _PAGES:
        return _PAGES[text.strip().lower()]
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not small, large, any, or a size like 2MB")
    number, unit, ends = int(match[1]), match[2], match[3]
    size = number << (_UNITS[unit] if unit or ends else 10)          # a bare number is KiB
    size = (size // 8 if ends in ("b", "bit") else size) >> 10
    if size < 4 or size & (size - 1) or size > 1 << 30:
        raise ValueError("is not the size of memory pages")
    return size
