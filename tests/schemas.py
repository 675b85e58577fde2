# SPDX-License-Identifier: Apache-2.0
"""Databases that have the newest schema and no rows: what the upgrades make is made once and used
again.

An upgrade from nothing takes half a second on SQLite and three seconds on MariaDB. SQLite gets a
copy of the first one that this process made. A server keeps the databases of this process; each is
emptied between two tests, or dropped if somebody still has a connection to it. How upgrades go is
tried on databases that are empty: ``new_database``.
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

#: The names of the tables that have rows.
WRITTEN = " UNION ALL ".join(
    f"SELECT '{table.name}' WHERE EXISTS (SELECT 1 FROM {table.name})"
    for table in schema.metadata.sorted_tables
)


def upgrade(store: Store) -> Store:
    """What ``upgrades.upgrade`` does to an empty SQLite database; returns the store."""
    with store.engine.connect() as connection:
        _newest().backup(connection.connection.dbapi_connection)  # type: ignore[arg-type]  # it is sqlite3's
    return store


def memory_store(time: Callable[[], int]) -> Store:
    """An empty store in memory, by this clock."""
    return upgrade(Store("sqlite://", time=time))


@cache
def _newest() -> sqlite3.Connection:
    made = Store("sqlite://")
    upgrades.upgrade(made)
    kept = sqlite3.connect(":memory:", check_same_thread=False)
    with made.engine.connect() as connection:
        connection.connection.dbapi_connection.backup(kept)  # type: ignore[union-attr]  # it is sqlite3's
    made.close()
    return kept


class Server:
    """The databases of this process on a PostgreSQL or MariaDB."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        self._is_postgresql = self._engine.dialect.name == "postgresql"
        self._idle: list[str] = []

    def create(self) -> str:
        """An empty database; returns its URL."""
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
        """A database with the newest schema and no rows; returns its URL."""
        if self._idle:
            return self._idle.pop()
        url = self.create()
        store = Store(url)
        upgrades.upgrade(store)
        store.close()
        return url

    def take_back(self, url: str) -> None:
        """Empty it for the next test, unless somebody may still write into it."""
        name = sa.make_url(url).database or ""
        if self._is_left(name):
            self._empty(url)
            self._idle.append(url)
            return
        for connection in [] if self._is_postgresql else self._connections(name):
            self._do(f"KILL {connection}")  # MariaDB would wait for the end of its transaction
        self.drop(url)

    def close(self) -> None:
        while self._idle:
            self.drop(self._idle.pop())

    def _is_left(self, name: str) -> bool:
        """Whether nobody has a connection to it; the server notices the end of one a moment
        later."""
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
        """Delete what was written; numbers begin with 1 again."""
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            written = list(connection.exec_driver_sql(WRITTEN).scalars())
            if self._is_postgresql:
                moved = connection.exec_driver_sql(
                    "SELECT sequencename FROM pg_sequences WHERE last_value IS NOT NULL"
                )
                again = [f"ALTER SEQUENCE {name} RESTART" for name in moved.scalars()]
                again += [f"TRUNCATE {', '.join(written)}"] if written else []
            else:
                moved = connection.exec_driver_sql(
                    "SELECT table_name FROM information_schema.tables "
                    "WHERE table_schema = database() AND auto_increment > 1"
                )
                again = [f"DELETE FROM {name}" for name in written]
                again += [f"ALTER TABLE {name} AUTO_INCREMENT = 1" for name in moved.scalars()]
            for statement in again:
                connection.exec_driver_sql(statement)

    def _do(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.exec_driver_sql(statement)
