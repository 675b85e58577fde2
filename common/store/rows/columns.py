# SPDX-License-Identifier: Apache-2.0
"""What rows of all tables have in common, and what is written to them."""

from __future__ import annotations

from typing import Any, Protocol

#: Columns to write, by their names; values may be expressions (``now()``).
Values = dict[str, Any]


class Numbered(Protocol):
    """Any row that was given a number, or a uuid, and has a time."""

    @property
    def id(self) -> object: ...

    @property
    def created_at(self) -> int: ...
