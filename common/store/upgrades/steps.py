# SPDX-License-Identifier: Apache-2.0
"""Steps of upgrades that do nothing when they run again after an interruption."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


def add_column(op: Any, table: str, column: sa.Column[Any]) -> None:
    """Add a column to a table, unless the table has a column of this name.

    Args:
        op: ``alembic.op``.
        table: Name of the table.
        column: The column. The code before must be able to insert rows without a value for it.
    """
    if column.name not in {found["name"] for found in sa.inspect(op.get_bind()).get_columns(table)}:
        op.add_column(table, column)


def add_index(op: Any, table: str, name: str, columns: list[str]) -> None:
    """Add an index to a table, unless the table has an index of this name.

    PostgreSQL blocks changes of the table meanwhile, about a second for a million rows.
    """
    if name not in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}:
        op.create_index(name, table, columns)
