# SPDX-License-Identifier: Apache-2.0
"""Keyset pages: the rows after a marker in any order, without reading the rows before it.

Lists of the API use this. The last key of an order must be unique. Then a page begins exactly after
the previous one, whatever is inserted or deleted meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa


@dataclass(frozen=True)
class SortOrder:
    """A column by which rows are sorted.

    NULL counts as the smallest value of the column's type, because databases sort NULL differently.
    """

    column: sa.ColumnElement[object]
    descending: bool = False

    @property
    def value(self) -> sa.ColumnElement[object]:
        # Databases compare booleans, but SQLAlchemy does not.
        if isinstance(self.column.type, sa.Boolean):
            return sa.cast(self.column, sa.Integer)
        if not getattr(self.column, "nullable", False):
            return self.column
        empty = "" if isinstance(self.column.type, sa.String) else 0
        return sa.func.coalesce(self.column, empty)

    @property
    def clause(self) -> sa.ColumnElement[object]:
        return self.value.desc() if self.descending else self.value.asc()

    def beyond(self, value: object) -> sa.ColumnElement[bool]:
        later: sa.ColumnElement[bool] = (
            self.value < value if self.descending else self.value > value
        )
        return later

    def reaches(self, value: object) -> sa.ColumnElement[bool]:
        """Return the condition that a row comes at this value of the key, or after it."""
        return self.value <= value if self.descending else self.value >= value


def after(order: list[SortOrder], values: Sequence[object]) -> sa.ColumnElement[bool]:
    """Return the condition for rows that come after the row with these values of the sort keys.

    The values are the row's results of ``SortOrder.value``, which are never NULL.
    """
    choices = []
    for index, key in enumerate(order):
        same = [
            before.value == value
            for before, value in zip(order[:index], values[:index], strict=True)
        ]
        choices.append(sa.and_(*same, key.beyond(values[index])))
    # Without the first part, PostgreSQL would read the index from its start, because of the OR.
    return sa.and_(order[0].reaches(values[0]), sa.or_(*choices))
