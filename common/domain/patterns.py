# SPDX-License-Identifier: Apache-2.0
"""Regular expressions from users: which ones are taken, and what they match.

RE2's language is what users may write, whatever the database. Its engine goes through a text once
and never back, so that no expression takes long, and lets other threads run meanwhile. Python's
``re`` never gets one from a user.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import re2

_MAX_COMPILED_BYTES = 1 << 20
_OPTIONS = re2.Options()
_OPTIONS.max_mem = _MAX_COMPILED_BYTES
_OPTIONS.never_capture = True  # only whether a text matches is asked, which is quicker
_OPTIONS.log_errors = False


def is_pattern(text: str) -> bool:
    """Is it a regular expression that we take?"""
    try:
        _compiled(text)
    except (re2.error, UnicodeEncodeError):
        return False
    return True


def is_found(pattern: str, text: str | None) -> bool | None:
    """Does the pattern match anywhere in the text? None for no text, as in SQL. Raises re2.error
    for no pattern."""
    return None if text is None else _compiled(pattern).search(text) is not None


@lru_cache(64)
def _compiled(pattern: str) -> Any:  # noqa: ANN401 - re2 declares no types
    return re2.compile(pattern, _OPTIONS)
