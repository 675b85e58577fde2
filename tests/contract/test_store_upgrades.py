# SPDX-License-Identifier: Apache-2.0
"""Upgrades of the schema and checks of the schema's version on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from common.domain import errors
from common.service.log_repeats import fields_of
from common.store import schema, upgrades, version
from common.store.engine import Store
from common.store.hosts import services
from tests.log_lines import render_records

#: The tables of releases, for each database: ``python -m tests.workflows.release_samples``.
RELEASES = Path(upgrades.__file__).parents[3] / "deploy/releases"


def difference_to_schema(store: Store) -> list[Any]:
    """Return what alembic would change in the database to reach the schema of this code."""

    def is_ours(part: Any, name: str, kind: str, *more: Any) -> bool:
        return kind != "table" or name != version.USABLE_FROM

    options = {"version_table": version.UPGRADED_TO, "include_object": is_ours}
    return store.read(
        lambda tx: compare_metadata(MigrationContext.configure(tx, opts=options), schema.metadata)
    )


def test_upgrade_creates_current_schema_and_is_repeatable(store: Store) -> None:
    newest = upgrades.version(store)
    assert newest is not None
    assert upgrades.upgrade(store) == (newest, newest)
    assert newest.upgraded_to == version.find_needed()
    upgrades.check(store)
    assert difference_to_schema(store) == []


@pytest.fixture
def old_store(database_url: str) -> Iterator[Store]:
    """Yield a store with the tables of 0.1.0, without rows."""
    store = Store(database_url)
    file = f"schema-{store.engine.dialect.name.replace('mysql', 'mariadb')}.sql"
    with store.begin() as tx:
        for statement in (RELEASES / "0.1.0" / file).read_text().splitlines():
            tx.exec_driver_sql(statement)
        tx.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
        tx.exec_driver_sql("INSERT INTO alembic_version VALUES ('0001')")
    yield store
    store.close()


def test_upgrade_of_0_1_0_gives_the_current_schema(old_store: Store) -> None:
    with pytest.raises(errors.Problem, match="kilonova database upgrade"):
        upgrades.check(old_store)
    before, after = upgrades.upgrade(old_store)
    assert before == version.DatabaseVersion("0001", "0001")
    assert after.upgraded_to == version.find_needed()
    assert difference_to_schema(old_store) == []
    upgrades.check(version.guard(old_store))


def test_upgraded_database_still_serves_0_1_0(old_store: Store) -> None:
    """0.1.0 requires this number, and inserts services without a version."""
    upgrades.upgrade(old_store)
    number = old_store.read(
        lambda tx: tx.scalar(sa.text("SELECT version_num FROM alembic_version"))
    )
    assert number == "0001"
    old = {"uuid": "u", "host": "c1", "binary": "nova-conductor", "created_at": 1, "updated_at": 1}
    columns = [sa.column(name) for name in old]
    old_store.write(lambda tx: tx.execute(sa.table("services", *columns).insert().values(old)))
    [row] = old_store.read(services.list_all)
    assert (row.host, row.version) == ("c1", None)


def test_upgrade_goes_on_after_interruption_between_table_and_version(old_store: Store) -> None:
    """MariaDB commits each change of a table, so a killed upgrade leaves the change behind."""
    upgrades.upgrade(old_store)
    old_store.write(lambda tx: tx.execute(sa.text("DROP TABLE schema_version")))
    upgrades.upgrade(old_store)
    assert difference_to_schema(old_store) == []


def test_upgrade_of_new_database_goes_on_after_interruption(database_url: str) -> None:
    store = Store(database_url)
    with store.begin() as tx:
        schema.metadata.sorted_tables[0].create(tx)
    before, after = upgrades.upgrade(store)
    assert (before, after.upgraded_to) == (None, version.find_needed())
    assert difference_to_schema(store) == []
    store.close()


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
    newer = version.DatabaseVersion("9999", "9998")

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
            set_version(operator, version.DatabaseVersion(version.find_needed(), "0001"))

    with caplog.at_level("INFO"):
        version.await_version(store, wait)
    records = [record for record in caplog.records if record.name == version.__name__]
    lines = render_records(records)
    assert [fields_of(record).get("version") for record in records] == [
        None,
        newer,
        version.DatabaseVersion(version.find_needed(), "0001"),
    ]
    assert "The database has version none" in lines[0]
    assert "Run: kilonova database upgrade" in lines[0]
    assert "install the release" in lines[1]
    store.close()
    operator.close()


@pytest.mark.parametrize(
    ("upgraded_to", "usable_from", "is_usable"),
    [
        ("9999", "0001", True),  # a newer release has only added to the tables
        ("9999", version.find_needed(), True),
        ("9999", "9998", False),
        ("0000", "0000", False),
    ],
)
def test_code_uses_database_of_newer_release_unless_marked_unusable(
    store: Store, upgraded_to: str, usable_from: str, is_usable: bool
) -> None:
    own = upgrades.version(store)
    assert own is not None
    set_version(store, version.DatabaseVersion(upgraded_to, usable_from))
    guarded_store = version.guard(Store(store.url))
    try:
        with nullcontext() if is_usable else pytest.raises(errors.WrongSchema):
            guarded_store.now()
        with nullcontext() if is_usable else pytest.raises(errors.Problem):
            upgrades.check(store)
    finally:
        guarded_store.close()
        set_version(store, own)


def test_upgrade_leaves_extended_database_of_newer_release_unchanged(store: Store) -> None:
    own, newer = upgrades.version(store), version.DatabaseVersion("9999", "0001")
    assert own is not None
    set_version(store, newer)
    try:
        assert upgrades.upgrade(store) == (newer, newer)
    finally:
        set_version(store, own)


def set_version(store: Store, number: version.DatabaseVersion) -> None:
    """Write this version to the database without a change of the schema."""
    with store.begin() as tx:
        for table, value in (
            (version.UPGRADED_TO, number.upgraded_to),
            (version.USABLE_FROM, number.usable_from),
        ):
            tx.execute(sa.text(f"UPDATE {table} SET version_num = :n"), {"n": value})


def test_schema_version_is_read_once_per_connection(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[version.DatabaseVersion] = []

    def read_version(*args: Any) -> version.DatabaseVersion:
        reads.append(version.DatabaseVersion(version.find_needed(), "0001"))
        return reads[-1]

    monkeypatch.setattr(version, "read_version", read_version)
    guarded_store = version.guard(Store(store.url))
    for _ in range(3):
        guarded_store.now()
        guarded_store.write(lambda tx: None)
    assert len(reads) == 1
    guarded_store.engine.dispose()
    guarded_store.now()
    assert len(reads) == 2
    guarded_store.close()
