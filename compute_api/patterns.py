# SPDX-License-Identifier: Apache-2.0
"""Regular expressions from users: which ones may be tried on every name in the database.

A backtracking engine (Python's for SQLite, PCRE for MariaDB) can be kept busy for hours by a short expression with
repeats inside repeats. Those, and ones with many repeats, are refused; what people search names with is not.
"""
from __future__ import annotations

import re
from typing import Any

MOST_REPEATS = 3
MOST_TIMES = 1000            #: how often a part may have to match, the repeats around it multiplied
_NESTED = MOST_REPEATS + 1
_parser: Any = re._parser  # type: ignore[attr-defined]  # the one place that tells an expression's structure
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def is_harmless(pattern: str) -> bool:
    """Is it an expression, and one whose cost stays small on any name?"""
    try:
        return _repeats(_parser.parse(pattern)) <= MOST_REPEATS
    except (re.error, RecursionError, OverflowError):
        return False


def _repeats(items: Any, times: int = 1) -> int:
    """How many repeats of variable length it has; too many when one holds another, or alternatives, or when fixed ones
    multiply. ``times``: how often the repeats around it want it."""
    count = 0
    for operation, argument in items:
        parts = list(_parts(argument))
        if str(operation) in _REPEATS:
            least, most, body = argument
            wanted = times * max(1, least if most is _parser.MAXREPEAT else most)
            inner = _repeats(body, wanted)
            if wanted > MOST_TIMES or inner or most > 1 and _branches(body):
                return _NESTED
            count += least != most
        else:
            count += sum(_repeats(part, times) for part in parts)
    return count


def _branches(items: Any) -> bool:
    return any(str(operation) == "BRANCH" or any(_branches(part) for part in _parts(argument))
               for operation, argument in items)


def _parts(argument: Any) -> Any:
    """The expressions within an operation's argument, whatever its shape."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _parts(item)
