# SPDX-License-Identifier: Apache-2.0
"""Databases with the newest schema and no rows, which tests reuse because upgrades are slow.

An upgrade of an empty database takes half a second on SQLite and three seconds on MariaDB. A SQLite
store gets a copy of the first upgraded database of this process. On a database server, the process
empties its databases between tests, or drops a database that still has a connection. Tests of the
upgrades themselves use empty databases (``new_database``).
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable
from functools import cache

import sqlalchemy as sa

from common.store import schema, upgrades
from common.store.engine import Store
from tests.waiting import is_true_within

#: SQL that returns the names of the tables with rows.
WRITTEN = " UNION ALL ".join(
    f"SELECT '{table.name}' WHERE EXISTS (SELECT 1 FROM {table.name})"
    for table in schema.metadata.sorted_tables
)


def upgrade(store: Store) -> Store:
    """Give an empty SQLite database the newest schema, as ``upgrades.upgrade`` does.

    Returns:
        The same store.
    """
    with store.engine.connect() as connection:
        _newest().backup(connection.connection.dbapi_connection)  # type: ignore[arg-type]  # The driver is sqlite3.
    return store


def memory_store(time: Callable[[], int]) -> Store:
    """Return an empty store in memory with this clock."""
    return upgrade(Store("sqlite://", time=time))


@cache
def _newest() -> sqlite3.Connection:
    store = Store("sqlite://")
    upgrades.upgrade(store)
    copy = sqlite3.connect(":memory:", check_same_thread=False)
    with store.engine.connect() as connection:
        connection.connection.dbapi_connection.backup(copy)  # type: ignore[union-attr]  # The driver is sqlite3.
    store.close()
    return copy


class Server:
    """The databases of this process on a PostgreSQL or MariaDB."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        self._is_postgresql = self._engine.dialect.name == "postgresql"
        self._idle: list[str] = []

    def create(self) -> str:
        """Create an empty database and return its URL."""
        name = f"kn_{uuid.uuid4().hex[:20]}"
        self._do(
            f"CREATE DATABASE {name}" + ("" if self._is_postgresql else " CHARACTER SET utf8mb4")
        )
        return self._engine.url.set(database=name).render_as_string(hide_password=False)

    def drop(self, url: str) -> None:
        self._do(
            f"DROP DATABASE {sa.make_url(url).database}"
            + (" WITH (FORCE)" if self._is_postgresql else "")
        )

    def lend(self) -> str:
        """Return the URL of a database with the newest schema and no rows."""
        if self._idle:
            return self._idle.pop()
        url = self.create()
        store = Store(url)
        upgrades.upgrade(store)
        store.close()
        return url

    def take_back(self, url: str) -> None:
        """Empty a database for the next test, or drop it if it still has connections."""
        name = sa.make_url(url).database or ""
        if self._is_free(name):
            self._empty(url)
            self._idle.append(url)
            return
        for connection in [] if self._is_postgresql else self._connections(name):
            # DROP DATABASE of MariaDB would wait for the end of the connection's transaction.
            self._do(f"KILL {connection}")
        self.drop(url)

    def close(self) -> None:
        while self._idle:
            self.drop(self._idle.pop())

    def _is_free(self, name: str) -> bool:
        """Return True if the database has no connections. A closed one may still count."""
        return is_true_within(lambda: not self._connections(name), 2, pause=0.002)

    def _connections(self, name: str) -> list[int]:
        query = (
            "SELECT pid FROM pg_stat_activity WHERE datname = :name AND backend_type = 'client backend'"
            if self._is_postgresql
            else "SELECT id FROM information_schema.processlist WHERE db = :name"
        )
        with self._engine.connect() as connection:
            return list(connection.scalars(sa.text(query), {"name": name}))

    def _empty(self, url: str) -> None:
        """Delete all rows and restart the sequences at 1."""
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            tables = list(connection.exec_driver_sql(WRITTEN).scalars())
            if self._is_postgresql:
                sequences = connection.exec_driver_sql(
                    "SELECT sequencename FROM pg_sequences WHERE last_value IS NOT NULL"
                )
                statements = [f"ALTER SEQUENCE {name} RESTART" for name in sequences.scalars()]
                statements += [f"TRUNCATE {', '.join(tables)}"] if tables else []
            else:
                sequences = connection.exec_driver_sql(
                    "SELECT table_name FROM information_schema.tables "
                    "WHERE table_schema = database() AND auto_increment > 1"
                )
                statements = [f"DELETE FROM {name}" for name in tables]
                statements += [
                    f"ALTER TABLE {name} AUTO_INCREMENT = 1" for name in sequences.scalars()
                ]
            for statement in statements:
                connection.exec_driver_sql(statement)

    def _do(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.exec_driver_sql(statement)
