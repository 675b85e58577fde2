# SPDX-License-Identifier: Apache-2.0
"""Types that all rows share."""

from __future__ import annotations

from typing import Any, Protocol

#: Column name -> value to write. Values may be expressions (``now()``).
Values = dict[str, Any]


class Numbered(Protocol):
    """A new row: its id, which is a number or a uuid, and the time of its creation in µs."""

    @property
    def id(self) -> object: ...

    @property
    def created_at(self) -> int: ...
