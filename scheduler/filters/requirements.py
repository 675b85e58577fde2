# SPDX-License-Identifier: Apache-2.0
"""What an extra spec requires of a value, in Nova's small language: ``>= 4``, ``s== x``, ``<or> a
<or> b``, ``<in> x``.

Pure. A requirement that does not begin with an operator must be equal to the value. Numbers are
compared as numbers; a word in a number's place is a requirement that nothing meets.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

_NUMBERS: dict[str, Callable[[float, float], bool]] = {
    "=": operator.ge,  # at least: so it is in Nova, for the sake of the oldest flavors
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
}
_TEXTS: dict[str, Callable[[str, str], bool]] = {
    "s==": operator.eq,
    "s!=": operator.ne,
    "s>=": operator.ge,
    "s>": operator.gt,
    "s<=": operator.le,
    "s<": operator.lt,
    "<in>": operator.contains,
}


def meets(requirement: str, value: str) -> bool:
    """Is this value what is required?"""
    first, *words = requirement.split() or [""]
    if first == "<or>":
        return value in words[::2]  # the words between are <or> again
    if first == "<all-in>":
        return bool(words) and all(word in value for word in words)
    if first in _TEXTS:
        return bool(words) and _TEXTS[first](value, words[0])
    if first in _NUMBERS:
        return bool(words) and _compared(_NUMBERS[first], value, words[0])
    return value == requirement


def _compared(compare: Callable[[float, float], bool], value: str, wanted: str) -> bool:
    try:
        return compare(float(value), float(wanted))
    except ValueError:
        return False
