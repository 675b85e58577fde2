# SPDX-License-Identifier: Apache-2.0
"""The schema as upgrades make it on SQLite, PostgreSQL and MariaDB: the one that the code knows,
with its rows."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from common.domain import errors
from common.store import schema, upgrades, version
from common.store.engine import Store


def test_upgrades_make_the_schema_and_are_repeatable(store: Store) -> None:
    found = store.read(lambda tx: MigrationContext.configure(tx).get_current_revision())
    assert (
        upgrades.upgrade(store)
        == (found, upgrades.newest())
        == (upgrades.version(store), version.needed())
    )
    upgrades.check(store)
    assert (
        store.read(lambda tx: compare_metadata(MigrationContext.configure(tx), schema.metadata))
        == []
    )


def test_every_number_is_given_once(store: Store) -> None:
    """SQLite gives the highest number again after a delete, unless its table says otherwise."""
    numbered = [
        table for table in schema.metadata.sorted_tables if table.autoincrement_column is not None
    ]
    assert {"aggregates", "flavors", "services"} < {table.name for table in numbered}
    for table in numbered:
        assert table.dialect_options["sqlite"]["autoincrement"], (
            f"{table.name} is not NUMBERED in the schema"
        )
        row = {
            column.name: sample(column)
            for column in table.columns
            if column is not table.autoincrement_column
            and not column.nullable
            and column.server_default is None
        }
        given = []
        for _ in range(3):
            made = store.write(
                lambda tx, table=table, row=row: tx.execute(table.insert().values(row))
            )
            given.append(made.inserted_primary_key[0])
            store.write(lambda tx, table=table: tx.execute(table.delete()))
        assert given == sorted(set(given)), f"{table.name} gave {given}"


def sample(column: sa.Column[Any]) -> Any:
    """Some value that fits the column."""
    if isinstance(column.type, schema.Json):
        return {}
    kind = column.type.python_type
    if issubclass(kind, Enum):
        return next(iter(kind))
    return "x" if kind is str else kind(1)


def test_a_database_of_another_version_is_refused(database_url: str) -> None:
    empty = Store(database_url)
    with pytest.raises(errors.Problem, match="kilonova database upgrade"):
        upgrades.check(empty)
    empty.close()


def test_service_with_another_version_waits_until_the_database_fits(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs each version once, reads and writes nothing, and goes on when the versions fit."""
    store, operator = version.guarded(Store(database_url)), Store(database_url)
    newer = "9999"

    def wait(seconds: float) -> None:
        for work in (store.now, lambda: store.write(lambda tx: None)):
            with pytest.raises(
                errors.WrongSchema, match=f"version (none|{newer}), this service needs"
            ):
                work()
        if upgrades.version(operator) is None:
            upgrades.upgrade(operator)
            set_version(operator, newer)
        else:
            set_version(operator, version.needed())

    with caplog.at_level("INFO"):
        version.await_version(store, wait)
    lines = [record.getMessage() for record in caplog.records if record.name == version.__name__]
    assert [line.split("version ")[1].split()[0].strip(",") for line in lines] == [
        "none",
        newer,
        version.needed(),
    ]
    assert "Run: kilonova database upgrade" in lines[0]
    assert "install the release" in lines[1]
    store.close()
    operator.close()


def set_version(store: Store, number: str) -> None:
    """Write another version than that of the schema."""
    store.write(
        lambda tx: tx.execute(sa.text("UPDATE alembic_version SET version_num = :n"), {"n": number})
    )


def test_a_version_is_asked_of_connections_only(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def found(*given: Any) -> str | None:
        asked.append(version.needed())
        return asked[-1]

    monkeypatch.setattr(version, "_read_version", found)
    served = version.guarded(Store(store.url))
    for _ in range(3):
        served.now()
        served.write(lambda tx: None)
    assert len(asked) == 1
    served.engine.dispose()
    served.now()
    assert len(asked) == 2
    served.close()
