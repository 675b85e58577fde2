# SPDX-License-Identifier: Apache-2.0
"""Regular expressions from users.

Users write RE2's syntax with every database. RE2 reads a text once without backtracking, so
every expression takes linear time, and other threads run meanwhile. Invariant: Python's ``re``
never gets a pattern from a user.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import re2

_MAX_COMPILED_BYTES = 1 << 20
_OPTIONS = re2.Options()
_OPTIONS.max_mem = _MAX_COMPILED_BYTES
# Callers need only a boolean, and matching without captures is faster.
_OPTIONS.never_capture = True
_OPTIONS.log_errors = False


def is_pattern(text: str) -> bool:
    """Return True if RE2 accepts this regular expression."""
    try:
        _compile(text)
    except (re2.error, UnicodeEncodeError):
        return False
    return True


def is_found(pattern: str, text: str | None) -> bool | None:
    """Return whether the pattern matches anywhere in the text, or None if the text is None.

    Raises:
        re2.error, UnicodeEncodeError: ``is_pattern`` refuses the pattern, and the text is not None.
    """
    return None if text is None else _compile(pattern).search(text) is not None


@lru_cache(64)
def _compile(pattern: str) -> Any:  # noqa: ANN401 - re2 declares no types
    return re2.compile(pattern, _OPTIONS)
