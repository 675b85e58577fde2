# SPDX-License-Identifier: Apache-2.0
"""One SQLite file: its engine, its tables and its two kinds of transaction.

Each standalone service opens one `Database` per process, after gunicorn has forked. What must stay
true: every writing transaction begins IMMEDIATE (a deferred one fails when it meets another
writer), an answered write has reached the disk (synchronous=FULL), and the file can be read by its
owner only, for it holds password hashes.
"""

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Executable, MetaData, Row, Select, create_engine, event
from sqlalchemy.engine import URL

#: What a query gives defines the columns of a row.
DbSelect = Select[Any]
DbRow = Row[Any]
DbValues = Mapping[Any, Any]
PRAGMAS = ("busy_timeout=30000", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON")


class Database:
    """Hands out `read()` and `write()` connections; creates missing tables when it is opened."""

    def __init__(self, path: Path, tables: MetaData) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._reader = create_engine(URL.create("sqlite", database=str(path)))
        event.listen(self._reader, "connect", _prepare)
        event.listen(self._reader, "begin", _begin)
        self._writer = self._reader.execution_options(begin="BEGIN IMMEDIATE")
        with self.write() as connection:
            tables.create_all(connection)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one moment of the database."""
        with self._reader.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that commits when the block ends well and leaves nothing behind when it
        raises."""
        with self._writer.begin() as connection:
            yield connection

    def rows(self, query: Executable) -> Sequence[DbRow]:
        """All rows of one query."""
        with self.read() as connection:
            return connection.execute(query).all()

    def first(self, query: Executable) -> DbRow | None:
        """The first row of one query."""
        with self.read() as connection:
            return connection.execute(query).first()

    def close(self) -> None:
        """Close the pooled connections."""
        self._reader.dispose()


def _prepare(dbapi_connection: sqlite3.Connection, _record: object) -> None:
    # The driver's own implicit BEGIN would be a deferred one: transactions are begun in `_begin`
    # instead.
    dbapi_connection.isolation_level = None
    for pragma in PRAGMAS:
        dbapi_connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
