# SPDX-License-Identifier: Apache-2.0
"""Upgrades of the schema and checks of the schema's version on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from common.domain import errors
from common.service.log_repeats import fields_of
from common.store import schema, upgrades, version
from common.store.engine import Store
from tests.log_lines import render_records


def test_upgrade_creates_current_schema_and_is_repeatable(store: Store) -> None:
    revision = store.read(lambda tx: MigrationContext.configure(tx).get_current_revision())
    assert (
        upgrades.upgrade(store)
        == (revision, upgrades.newest())
        == (upgrades.version(store), version.find_needed())
    )
    upgrades.check(store)
    assert (
        store.read(lambda tx: compare_metadata(MigrationContext.configure(tx), schema.metadata))
        == []
    )


def test_tables_with_generated_ids_never_reuse_ids(store: Store) -> None:
    """By default SQLite gives the highest number again after a delete."""
    numbered_tables = [
        table for table in schema.metadata.sorted_tables if table.autoincrement_column is not None
    ]
    assert {"aggregates", "flavors", "services"} < {table.name for table in numbered_tables}
    for table in numbered_tables:
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
        numbers = []
        for _ in range(3):
            result = store.write(
                lambda tx, table=table, row=row: tx.execute(table.insert().values(row))
            )
            numbers.append(result.inserted_primary_key[0])
            store.write(lambda tx, table=table: tx.execute(table.delete()))
        assert numbers == sorted(set(numbers)), f"{table.name} gave {numbers}"


def sample(column: sa.Column[Any]) -> Any:
    """Return a value that fits the column."""
    if isinstance(column.type, schema.Json):
        return {}
    kind = column.type.python_type
    if issubclass(kind, Enum):
        return next(iter(kind))
    return "x" if kind is str else kind(1)


def test_upgrades_check_refuses_empty_database(database_url: str) -> None:
    empty = Store(database_url)
    with pytest.raises(errors.Problem, match="kilonova database upgrade"):
        upgrades.check(empty)
    empty.close()


def test_service_waits_and_logs_until_database_version_matches(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The service logs each version once, and neither reads nor writes until the versions match."""
    store, operator = version.guard(Store(database_url)), Store(database_url)
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
            set_version(operator, version.find_needed())

    with caplog.at_level("INFO"):
        version.await_version(store, wait)
    records = [record for record in caplog.records if record.name == version.__name__]
    lines = render_records(records)
    assert [fields_of(record).get("version") for record in records] == [
        None,
        newer,
        version.find_needed(),
    ]
    assert "The database has version none" in lines[0]
    assert "Run: kilonova database upgrade" in lines[0]
    assert "install the release" in lines[1]
    store.close()
    operator.close()


def set_version(store: Store, number: str) -> None:
    """Write this version number to the database without a change of the schema."""
    store.write(
        lambda tx: tx.execute(sa.text("UPDATE alembic_version SET version_num = :n"), {"n": number})
    )


def test_schema_version_is_read_once_per_connection(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str | None] = []

    def read_version(*args: Any) -> str | None:
        reads.append(version.find_needed())
        return reads[-1]

    monkeypatch.setattr(version, "_read_version", read_version)
    guarded_store = version.guard(Store(store.url))
    for _ in range(3):
        guarded_store.now()
        guarded_store.write(lambda tx: None)
    assert len(reads) == 1
    guarded_store.engine.dispose()
    guarded_store.now()
    assert len(reads) == 2
    guarded_store.close()
