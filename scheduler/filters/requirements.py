# SPDX-License-Identifier: Apache-2.0
"""Compare values with the requirements in extra specs, in Nova's syntax.

For example, ``>= 4``, ``s== x``, ``<or> a <or> b`` and ``<in> x``. A requirement without an
operator must be equal to the value. If a number is expected and either side is another text, the
requirement is not met.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

_NUMBERS: dict[str, Callable[[float, float], bool]] = {
    # "=" means "at least", as in Nova, for compatibility with old flavors.
    "=": operator.ge,
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
    """Return True if the value meets the requirement in Nova's syntax, for example ``>= 4``.

    A requirement without an operator must equal the value. The module's docstring has more.
    """
    first, *words = requirement.split() or [""]
    if first == "<or>":
        # The words between the values are <or> again.
        return value in words[::2]
    if first == "<all-in>":
        return bool(words) and all(word in value for word in words)
    if first in _TEXTS:
        return bool(words) and _TEXTS[first](value, words[0])
    if first in _NUMBERS:
        return bool(words) and _compare_numbers(_NUMBERS[first], value, words[0])
    return value == requirement


def _compare_numbers(compare: Callable[[float, float], bool], value: str, required: str) -> bool:
    try:
        return compare(float(value), float(required))
    except ValueError:
        return False
