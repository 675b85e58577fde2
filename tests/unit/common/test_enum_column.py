# SPDX-License-Identifier: Apache-2.0
"""Columns of enums: text in the database, members in rows."""

from __future__ import annotations

import sqlalchemy as sa

from common.domain.statuses import ActionState
from common.store.schema.columns import EnumColumn

ENGINE = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
TABLE = sa.Table(
    "things", sa.MetaData(), sa.Column("state", EnumColumn(ActionState, 16), nullable=True)
)


def store_and_read(value: str | None) -> object:
    """Store a value and return the value of the row."""
    with ENGINE.begin() as tx:
        TABLE.drop(tx, checkfirst=True)
        TABLE.create(tx)
        tx.execute(sa.insert(TABLE).values(state=value))
        return tx.scalar(sa.select(TABLE.c.state))


def test_enum_column_returns_member_of_stored_text() -> None:
    assert store_and_read(ActionState.DUE) is ActionState.DUE
    assert store_and_read("waiting") is ActionState.WAITING


def test_enum_column_returns_none_for_null() -> None:
    assert store_and_read(None) is None


def test_enum_column_returns_unknown_text_unchanged() -> None:
    assert store_and_read("damaged") == "damaged"


def test_enum_column_finds_rows_by_member() -> None:
    store_and_read(ActionState.STUCK)
    with ENGINE.begin() as tx:
        query = sa.select(sa.func.count()).where(TABLE.c.state == ActionState.STUCK)
        assert tx.scalar(query) == 1
