# SPDX-License-Identifier: Apache-2.0
"""The store: connections, transactions, the retry on deadlock, and the one clock.

A process makes one ``Store`` after it has forked. ``write`` runs a function in one writing transaction and
runs the whole of it again when the database says that it lost a deadlock; the function must therefore have
no effect outside the transaction. ``read`` takes no locks, and each of its statements sees what was committed before
it; in a ``snapshot`` all see the same. The clock is one SQL expression, ``now()``: a simulator replaces it by passing
``time`` (SQLite only).
"""
from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL, Connection, Row
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

from common import errors

__all__ = ["Connection", "Row", "Store", "for_update", "insert_ignore", "insert_many", "moment", "now",
           "update_grouped"]
T = TypeVar("T")
ATTEMPTS = 8
#: What connections begin with. MariaDB's clock is made of local time, which stands still for an hour in autumn.
GREETINGS = {name: {"init_command": "SET time_zone = '+00:00'"} for name in ("mysql", "mariadb")}
#: Deadlock, lock wait time-out, serialization failure, record changed: the whole transaction runs again.
_RETRY_CODES = {"1213", "1205", "1020", "40001", "40P01", "55P03"}
#: What begins a snapshot; it is said of one transaction, so the connection is given back as it was.
_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"


class now(sa.sql.functions.FunctionElement[int]):
    """The database's clock at this moment, in microseconds since the epoch."""

    type = sa.BigInteger()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_sqlite(element: Any, compiler: SQLCompiler, **more: Any) -> str:
    return "kilonova_now()"


@compiles(now, "postgresql")
def _now_postgresql(element: Any, compiler: SQLCompiler, **more: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"


@compiles(now, "mysql")
@compiles(now, "mariadb")
def _now_mariadb(element: Any, compiler: SQLCompiler, **more: Any) -> str:
    return "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"


def _micros() -> int:
    return time.time_ns() // 1000


class Store:
    """One database, opened by one process.

    Args:
        url: SQLAlchemy URL: sqlite:///FILE, postgresql+psycopg://…, mysql+pymysql://….
        pool: connections kept open.
        time: for SQLite, the clock in microseconds; a simulator passes its own.
    """

    def __init__(self, url: str | URL, pool: int = 8, time: Callable[[], int] = _micros) -> None:
        self.url = sa.make_url(url)
        self.dialect_name = self.url.get_backend_name()
        if self.dialect_name == "sqlite":
            self.engine = _sqlite(self.url, time)
        else:
            level = "READ COMMITTED"
            self.engine = sa.create_engine(self.url, isolation_level=level, pool_size=pool, max_overflow=32,
                                           pool_pre_ping=True, pool_recycle=1800,
                                           connect_args=GREETINGS.get(self.dialect_name, {}))

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run ``work(tx)`` in one transaction, again from its start after a deadlock.

        Raises:
            Unavailable: the database did not let it through in eight attempts, or does not answer.
        """
        for attempt in range(ATTEMPTS):
            try:
                with self.begin() as tx:
                    return work(tx)
            except DBAPIError as problem:
                if not _is_retryable(problem):
                    raise _translated(problem) from problem
            time.sleep(random.uniform(0, 0.005 * 2 ** attempt))
        raise errors.Unavailable("The database is too busy; try again.")

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run ``work(tx)`` on a connection that takes no locks. Between two statements others may commit.

        Raises:
            Unavailable: the database does not answer.
        """
        return self._look("", work)

    def snapshot(self, work: Callable[[Connection], T]) -> T:
        """Run ``work(tx)``, which only reads, on one view of the database: whatever others commit meanwhile, it sees
        all of it or, from its first statement on, nothing.

        Raises:
            Unavailable: the database does not answer.
        """
        return self._look("BEGIN" if self.dialect_name == "sqlite" else _SNAPSHOT, work)

    def _look(self, begin: str, work: Callable[[Connection], T]) -> T:
        try:
            with self.engine.connect() as connection:
                if begin:
                    connection.exec_driver_sql(begin)
                return work(connection)
        except OperationalError as problem:
            raise _translated(problem) from problem

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """One writing transaction, without the retry; for tests and tools."""
        with self.engine.connect() as connection:
            if self.dialect_name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    def now(self) -> int:
        """The database's clock, in microseconds."""
        return self.read(moment)


def moment(tx: Connection) -> int:
    """The database's clock, within a transaction."""
    return int(tx.scalar(sa.select(now())) or 0)


def for_update(statement: sa.Select[Any]) -> sa.Select[Any]:
    """Lock the selected rows until the transaction ends (SQLite's writers are alone anyway)."""
    return statement.with_for_update()


def insert_ignore(tx: Connection, table: sa.Table, values: dict[str, Any]) -> None:
    """Insert a row unless its key exists."""
    tx.execute(_ignoring(tx, table).values(values))


def _ignoring(tx: Connection, table: sa.Table) -> sa.Insert:
    """An insert that leaves rows whose key exists as they are."""
    if tx.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sa.insert(table).prefix_with("OR IGNORE" if tx.dialect.name == "sqlite" else "IGNORE")


def insert_many(tx: Connection, table: sa.Table, rows: Sequence[dict[str, Any]], *times: str, ignore: bool = False
                ) -> None:
    """Insert rows alike, ``times`` being columns that get the clock's value; ``ignore``: unless their key exists.

    One row asks the clock in its own statement; many share one reading of it, because MariaDB's driver folds
    inserts of plain values into one statement and no others.
    """
    if not rows:
        return
    insert = _ignoring(tx, table) if ignore else sa.insert(table)
    if not times:
        tx.execute(insert, rows)
        return
    if len(rows) == 1:
        tx.execute(insert.values(dict.fromkeys(times, now())), rows)
        return
    at = dict.fromkeys(times, moment(tx))
    tx.execute(insert, [row | at for row in rows])


def update_grouped(tx: Connection, table: sa.Table, key: sa.Column[Any], changes: dict[Any, dict[str, Any]]) -> None:
    """Update many rows by key, one statement for each distinct set of values (a batch mostly has one)."""
    groups: dict[str, tuple[dict[str, Any], list[Any]]] = {}
    for row, values in changes.items():
        groups.setdefault(repr(sorted(values.items(), key=lambda item: item[0])), (values, []))[1].append(row)
    for values, rows in groups.values():
        tx.execute(sa.update(table).where(key.in_(sorted(rows))).values(values))


def _is_retryable(problem: DBAPIError) -> bool:
    original = problem.orig
    if isinstance(original, sqlite3.OperationalError):
        return "locked" in str(original) or "busy" in str(original)
    code = getattr(original, "sqlstate", None) or (original.args[0] if original and original.args else "")
    return str(code) in _RETRY_CODES


def _translated(problem: DBAPIError) -> Exception:
    if problem.connection_invalidated or isinstance(problem, OperationalError):
        return errors.Unavailable("The database does not answer; try again.")
    return problem


def _sqlite(url: URL, clock: Callable[[], int]) -> sa.Engine:
    """SQLite with explicit transactions: BEGIN IMMEDIATE for writers, WAL, FULL, 30 s of patience."""
    if url.database and url.database != ":memory:":
        folder = Path(url.database).parent
        engine = sa.create_engine(url, connect_args={"timeout": 30, "isolation_level": None}, pool_size=8,
                                  max_overflow=32)
        # Only who connects makes the folder: a command that finds no database leaves none behind.
        sa.event.listen(engine, "do_connect", lambda *_: folder.mkdir(parents=True, exist_ok=True))
    else:
        engine = sa.create_engine(url, connect_args={"isolation_level": None, "check_same_thread": False},
                                  poolclass=sa.StaticPool)

    @sa.event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, record: Any) -> None:
        connection.create_function("kilonova_now", 0, clock)
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=30000", "foreign_keys=OFF",
                       "cache_size=-16000"):
            connection.execute("PRAGMA " + pragma)

    return engine

