# SPDX-License-Identifier: Apache-2.0
"""A SQLite file with engine, tables and two kinds of transaction.

Each embedded service opens one `Database` per process, after gunicorn has forked. Invariant: every
writing transaction begins IMMEDIATE, because a deferred transaction fails when another connection
writes. A committed write is on the disk (synchronous=FULL). Only the owner can read the file,
because of the password hashes.
"""

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Executable, MetaData, Row, Select, create_engine, event
from sqlalchemy.engine import URL

#: The columns of a row follow from the query.
DbSelect = Select[Any]
DbRow = Row[Any]
DbValues = Mapping[Any, Any]
PRAGMAS = ("busy_timeout=30000", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON")


class Database:
    """Connections for reading and for writing to a SQLite file.

    The constructor creates missing tables.
    """

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
        """Yield a connection for reading, whose queries all see the same state of the database."""
        with self._reader.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield the connection of a writing transaction.

        The transaction commits if the block succeeds, and otherwise rolls back.
        """
        with self._writer.begin() as connection:
            yield connection

    def rows(self, query: Executable) -> Sequence[DbRow]:
        """Run a query and return all rows."""
        with self.read() as connection:
            return connection.execute(query).all()

    def first(self, query: Executable) -> DbRow | None:
        """Run a query and return the first row, or None if there is no row."""
        with self.read() as connection:
            return connection.execute(query).first()

    def close(self) -> None:
        self._reader.dispose()


def _prepare(dbapi_connection: sqlite3.Connection, _record: object) -> None:
    # The driver itself would begin a deferred transaction, so `_begin` begins each transaction.
    dbapi_connection.isolation_level = None
    for pragma in PRAGMAS:
        dbapi_connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
