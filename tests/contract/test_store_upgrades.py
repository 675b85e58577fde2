# SPDX-License-Identifier: Apache-2.0
"""The schema as upgrades make it on SQLite, PostgreSQL and MariaDB: the one that the code knows,
with its rows."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from common import errors
from common.models import HostInventory
from common.store import schema, upgrades, version
from common.store.engine import Store, insert_many
from common.store.hosts import hosts


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
    return "x" if column.type.python_type is str else column.type.python_type(1)


def test_a_database_of_another_version_is_refused(database_url: str) -> None:
    empty = Store(database_url)
    with pytest.raises(errors.Problem, match="kilonova database upgrade"):
        upgrades.check(empty)
    empty.close()


def test_what_hosts_had_before_placement_came_is_theirs(database_url: str) -> None:
    """An upgrade with rows: what a host reported stays its own, ratios keep their digits, and it
    registers again."""
    store = Store(database_url)
    upgrades.upgrade(store, "0003")
    with store.begin() as tx:
        tx.execute(
            sa.text(
                "INSERT INTO providers (id, uuid, name, host, root_uuid, created_at, changed_at) "
                "VALUES (1, 'u', 'h1', 'h1', 'u', 1, 1)"
            )
        )
        tx.execute(
            sa.text(
                "INSERT INTO inventories (provider_id, resource_class, total, reserved, allocation_ratio) "
                "VALUES (1, 'VCPU', 10, 0, 0.9), (1, 'MEMORY_MB', 1000, 100, 1.5)"
            )
        )
        tx.execute(
            sa.text(
                "INSERT INTO guests (server_id, host, fence, wanted, may_run, changed_at) "
                "VALUES ('s', 'h1', 1, 'absent', :no, 1)"
            ),
            {"no": False},
        )
    assert upgrades.upgrade(store) == ("0003", upgrades.newest())
    stock = store.read(
        lambda tx: {row.resource_class: row for row in tx.execute(sa.select(schema.inventories))}
    )
    assert {
        name: (row.reserved, row.allocation_ratio, row.host_reserved, row.host_ratio, row.excess)
        for name, row in stock.items()
    } == {"VCPU": (0, 0.9, 0, 0.9, 0), "MEMORY_MB": (100, 1.5, 100, 1.5, 0)}
    store.write(
        lambda tx: hosts.register(
            tx, "h1", "boot", HostInventory("memory", 1, "h1", 10, 10240, 1000)
        )
    )
    assert store.read(lambda tx: tx.scalar(sa.select(schema.providers.c.id))) == 1
    with store.begin() as tx:
        tx.execute(
            sa.insert(schema.providers).values(
                uuid="v", name="v", root_uuid="v", created_at=1, changed_at=1
            )
        )
    store.close()


def test_files_of_ended_actions_are_forgotten(database_url: str) -> None:
    """They were readable in the arguments; an action that still runs needs them."""
    store = Store(database_url)
    upgrades.upgrade(store, "0006")
    files = {"files": [{"path": "/etc/key", "contents": "c2VjcmV0"}], "was": "active"}
    row = {
        "server_id": "s",
        "project_id": "p",
        "user_id": "u",
        "request_id": "r",
        "name": "create",
        "version": 1,
        "workflow": "create",
        "args": files,
        "fence": 1,
        "data": {},
        "created_at": 1,
        "updated_at": 1,
    }
    with store.begin() as tx:
        insert_many(
            tx, schema.actions, [{**row, "id": state, "state": state} for state in ("done", "due")]
        )
    upgrades.upgrade(store)
    found = store.read(
        lambda tx: {
            row.id: row.args
            for row in tx.execute(sa.select(schema.actions.c.id, schema.actions.c.args))
        }
    )
    assert found == {"done": {"was": "active"}, "due": files}
    store.close()


def test_a_service_waits_for_the_version_that_it_needs(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, reads and writes nothing, and goes on when they fit."""
    store, operator = version.guarded(Store(database_url)), Store(database_url)

    def waited(seconds: float) -> None:
        for work in (store.now, lambda: store.write(lambda tx: None)):
            with pytest.raises(errors.WrongSchema, match="version (none|0006), this service needs"):
                work()
        upgrades.upgrade(operator, "0006" if upgrades.version(operator) is None else "head")

    with caplog.at_level("INFO"):
        version.await_version(store, waited)
    said = [record.getMessage() for record in caplog.records if record.name == version.__name__]
    assert [line.split("version ")[1].split()[0].strip(",") for line in said] == [
        "none",
        "0006",
        version.needed(),
    ]
    store.close()
    operator.close()


def test_a_version_is_asked_of_connections_only(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def found(*given: Any) -> str | None:
        asked.append(version.needed())
        return asked[-1]

    monkeypatch.setattr(version, "_found", found)
    served = version.guarded(Store(store.url))
    for _ in range(3):
        served.now()
        served.write(lambda tx: None)
    assert len(asked) == 1
    served.engine.dispose()
    served.now()
    assert len(asked) == 2
    served.close()
