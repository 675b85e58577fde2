# SPDX-License-Identifier: Apache-2.0
"""The store: connections, transactions, retries after deadlocks, and the database's clock.

A process creates one ``Store`` after its fork. ``write`` runs a function in one transaction, and
runs the whole function again after a deadlock or a lock timeout. So the function must have no
effect outside the transaction. If the connection breaks at COMMIT, a function of the caller looks
up whether the transaction was committed. ``read`` takes no locks, and each statement sees the
latest commits. In a ``snapshot`` all statements see the same state. The clock is the SQL expression
``now()``. A simulator replaces the clock with ``time`` (SQLite only).
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from oslo_config import cfg
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

from common.domain import errors
from common.domain.errors import ConfigError
from common.security.tls import Tls
from common.service import metrics
from common.service.notification_options import NotificationSettings
from common.store.connections import (
    ConnectionLimits,
    Trouble,
    is_refusal,
    protection,
    refusal_remedy,
    server_engine,
    sqlite_engine,
    trouble,
)
from common.store.rows import Numbered, Values

__all__ = [
    "Connection",
    "ConnectionLimits",
    "Store",
    "for_update",
    "insert_ignore",
    "insert_many",
    "is_there",
    "moment",
    "notification_settings",
    "now",
    "update_grouped",
]
T = TypeVar("T")
Statement = TypeVar("Statement", bound=sa.Select[Any])
ATTEMPTS = 8
#: Time after which a transaction is not tried again.
TRANSACTION_TIMEOUT_SECONDS = 9.0
#: A connection that breaks earlier was broken while idle.
AT_ONCE = 1.0
#: Begins a snapshot. The setting ends with the transaction, so the pooled connection is unchanged.
_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"


class now(sa.sql.functions.FunctionElement[int]):  # noqa: N801 - as SQL's functions
    """The current time of the database's clock in µs since the epoch."""

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


class _Unanswered(Exception, Generic[T]):
    """The connection broke at COMMIT, so its outcome is unknown. ``made`` is the work's result."""

    def __init__(self, made: T) -> None:
        super().__init__("COMMIT was not answered")
        self.made = made


class Store:
    """One database, opened by one process.

    Args:
        url: SQLAlchemy URL: sqlite:///FILE, postgresql+psycopg://…, mysql+pymysql://….
        pool: Maximum of idle connections.
        time: The clock in µs, for SQLite only.
        limits: Limits of the waits for a server. None: the defaults of ``ConnectionLimits``.
        notifications: Options of the outbox. None: no notifications are written.
        tls: TLS files for the connections to a server. None: plain text.
    """

    def __init__(
        self,
        url: str | URL,
        pool: int = 8,
        time: Callable[[], int] = _micros,
        limits: ConnectionLimits | None = None,
        notifications: NotificationSettings | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.url = sa.make_url(url)
        self.dialect_name = self.url.get_backend_name()
        self.engine = (
            sqlite_engine(self.url, time)
            if self.dialect_name == "sqlite"
            else server_engine(self.url, pool, limits or ConnectionLimits(), tls)
        )
        self.notify_with(notifications)
        if metrics.is_counting():
            self._count_connections()

    def _count_connections(self) -> None:
        """Report the pool's size and, at each change, its used connections as metrics.

        SQLite in memory has no such pool and no metrics.
        """
        pool: Any = self.engine.pool
        if not isinstance(pool, sa.QueuePool):
            return

        def count_checkout(*what: Any) -> None:
            metrics.POOL_USED.set(pool.checkedout())

        def count_return(*what: Any) -> None:
            # The pool calls this before it counts the connection as returned.
            metrics.POOL_USED.set(max(0, pool.checkedout() - 1))

        metrics.POOL_SIZE.set(pool.size())
        sa.event.listen(self.engine, "checkout", count_checkout)
        sa.event.listen(self.engine, "checkin", count_return)

    @classmethod
    def open(
        cls,
        conf: cfg.ConfigOpts,
        pool: int = 8,
        unhurried: bool = False,
        notifications: NotificationSettings | None = None,
    ) -> Store:
        """Return a store for the database in [database]. The first use opens a connection.

        Args:
            conf: The configuration.
            pool: Maximum of idle connections.
            unhurried: Set no time limit for statements, for commands of operators.
            notifications: Options of notifications. None: notifications are off.

        Raises:
            ConfigError: The connection would be plain text to another machine without [tls]
                allow_plain_text, the files or options of [tls] cannot be used, the driver is not
                installed, or the port in the URL is not valid.
        """
        try:
            return cls(
                conf.database.url,
                pool,
                limits=ConnectionLimits.of(conf.database, unhurried),
                notifications=notifications,
                tls=protection(conf),
            )
        except ModuleNotFoundError as problem:
            raise ConfigError(
                f"[database] url: the driver {problem.name} is not installed; install kilonova with the extra "
                "postgresql, mysql or mysqlclient"
            ) from problem

    def look_in(self) -> None:
        """Check that a connection can be opened, and leave the connection to the pool.

        Raises:
            ConfigError: The server refuses this machine's address, the user, password or database
                of the URL, or a connection without TLS. Or SQLite cannot open the file.
            NoStore: The database does not answer, or the pool has no free connection.
        """
        try:
            with self.engine.connect():
                return
        except NoConnection as problem:
            raise errors.NoStore from problem
        except DBAPIError as problem:
            if not is_refusal(problem):
                raise _translate_error(problem) from problem
            said = " ".join(str(problem.orig).split())
            raise ConfigError(
                f"[database] url: the database refuses {self.url.username or 'the connection'}: {said}. "
                f"{refusal_remedy(problem, self.url)}"
            ) from problem

    def notify_with(self, notifications: NotificationSettings | None) -> None:
        """Set the options of notifications for all later transactions. None: write none."""
        self.engine.update_execution_options(kilonova_notifications=notifications)

    def close(self) -> None:
        """Close all idle connections of the pool."""
        self.engine.dispose()

    def write(
        self,
        work: Callable[[Connection], T],
        is_there: Callable[[Connection, T], bool] | None = None,
        *,
        alone: bool = True,
    ) -> T:
        """Run ``work(tx)`` in one transaction, commit, and return the result.

        ``work`` runs again after a deadlock or a lock timeout, and once if the connection was
        broken while idle. Another exception of ``work`` rolls back, and the caller gets this
        exception. The caller should choose ids of new rows outside ``work``, so that no row is
        created twice.

        Args:
            work: The function. Its argument is the transaction.
            is_there: ``is_there(tx, result)`` returns True if the database contains the effect of
                this result. The store calls this function if the connection broke at COMMIT. After
                False, ``work`` runs again. Without the function, the store raises Unsure.
            alone: False if the caller repeats parts of the work itself after a lock timeout. Then
                a lock timeout raises TooBusy at once.

        Raises:
            Unsure: It is unknown whether the transaction was committed.
            TooBusy: Deadlocks or lock timeouts repeat.
            NoStore: The database does not answer, or the pool has no free connection.
        """
        try:
            return self._through(work, alone)
        except _Unanswered as doubt:
            made: T = doubt.made
        if is_there is None:
            raise errors.Unsure
        if self._is_there(is_there, made):
            return made
        try:
            return self._through(work, alone)
        except _Unanswered as doubt:
            raise errors.Unsure from doubt
        except Exception:
            # The first transaction may have been committed after the first look.
            if self._is_there(is_there, made):
                return made
            raise

    def _is_there(self, look: Callable[[Connection, T], bool], made: T) -> bool:
        try:
            return self.read(lambda tx: look(tx, made))
        except errors.Unavailable as problem:
            raise errors.Unsure from problem

    def _through(self, work: Callable[[Connection], T], alone: bool) -> T:
        """Run ``work`` in a transaction, commit, and return the result.

        ``alone`` and the retries are as in ``write``.

        Raises:
            _Unanswered: The result of the commit is unknown.
            TooBusy, NoStore: As for ``write``.
        """
        end = time.monotonic() + TRANSACTION_TIMEOUT_SECONDS
        lost = 0
        for attempt in range(ATTEMPTS):
            began = time.monotonic()
            try:
                return self._once(work)
            except NoConnection as problem:
                raise errors.NoStore(
                    "This process has no free connection to the database. Try again."
                ) from problem
            except DBAPIError as problem:
                found = trouble(problem)
                lost += found is Trouble.LOST
                if found is Trouble.OTHER or (
                    lost and (lost > 1 or time.monotonic() - began > AT_ONCE)
                ):
                    raise _translate_error(problem) from problem
                if found is Trouble.LOCKED and not alone:
                    break
            if time.monotonic() > end:
                break
            time.sleep(random.uniform(0, 0.005 * 2**attempt))  # noqa: S311 - needs no cryptography
        raise errors.TooBusy

    def _once(self, work: Callable[[Connection], T]) -> T:
        with self._transaction() as connection:
            made = work(connection)
            try:
                connection.commit()
            except DBAPIError as problem:
                if trouble(problem) is Trouble.LOST:
                    raise _Unanswered(made) from problem
                raise
            return made

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run ``work(tx)``, which only reads, without locks, and return the result.

        Each statement sees all commits before it. ``work`` runs once again if the connection was
        broken while idle.

        Raises:
            NoStore: The database does not answer, or the pool has no free connection.
            TooSlow: The database ended a statement at the time limit.
        """
        return self._look("", work)

    def snapshot(self, work: Callable[[Connection], T]) -> T:
        """Run ``work(tx)``, which only reads, on one consistent state, and return the result.

        ``work`` runs once again if the connection was broken while idle.

        Raises:
            NoStore: The database does not answer, or the pool has no free connection.
        """
        return self._look("BEGIN" if self.dialect_name == "sqlite" else _SNAPSHOT, work)

    def _look(self, begin: str, work: Callable[[Connection], T], again: bool = True) -> T:
        began = time.monotonic()
        try:
            with self.engine.connect() as connection:
                if begin:
                    connection.exec_driver_sql(begin)
                return work(connection)
        except NoConnection as problem:
            raise errors.NoStore(
                "This process has no free connection to the database. Try again."
            ) from problem
        except DBAPIError as problem:
            if not (
                again and trouble(problem) is Trouble.LOST and time.monotonic() - began <= AT_ONCE
            ):
                raise _translate_error(problem) from problem
        return self._look(begin, work, again=False)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Open a writing transaction, and commit at the end of the block. For tests and tools.

        An exception in the block rolls back. Deadlocks and lock timeouts are not retried.
        """
        with self._transaction() as connection:
            yield connection
            connection.commit()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Open a connection with a writing transaction, which the block commits.

        Roll back if the block fails or does not commit.
        """
        with self.engine.connect() as connection:
            if self.dialect_name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise

    def now(self) -> int:
        """Return the current time of the database's clock in µs."""
        return self.read(moment)


def moment(tx: Connection) -> int:
    """Return the current time of the database's clock in µs, with one statement."""
    return int(tx.scalar(_MOMENT) or 0)


_MOMENT = sa.select(now())


def notification_settings(tx: Connection) -> NotificationSettings | None:
    """Return the options of notifications, or None if they are off. This runs no statement."""
    notifications: NotificationSettings | None = tx.get_execution_options().get(
        "kilonova_notifications"
    )
    return notifications


def for_update(statement: Statement) -> Statement:
    """Return the query with FOR UPDATE, which locks the rows until the transaction ends.

    SQLite needs no row locks, because it has one writer at a time.
    """
    return statement.with_for_update()


def is_there(table: sa.Table) -> Callable[[Connection, Numbered], bool]:
    """Return an ``is_there`` function for a ``Store.write`` whose result is a new row of the table.

    The function looks for the row's id and ``created_at``. The id alone may belong to another row,
    because a database may use the number of a lost transaction again.
    """

    def look(tx: Connection, row: Numbered) -> bool:
        same = sa.select(table.c.id).where(
            table.c.id == row.id, table.c.created_at == row.created_at
        )
        return tx.scalar(same) is not None

    return look


def insert_ignore(tx: Connection, table: sa.Table, values: Values) -> bool:
    """Insert a row and return True, or return False if another row has an equal unique key."""
    done = tx.execute(
        _insert_into(table, tx.dialect.name).values(values),
        execution_options={"preserve_rowcount": True},
    )
    return bool(done.rowcount > 0)


@cache
def _insert_into(table: sa.Table, ignoring: str = "", times: tuple[str, ...] = ()) -> sa.Insert:
    """Return an insert of the columns that the parameters name. Cached like ``_update_of``.

    Args:
        table: The table.
        ignoring: The name of the dialect, to skip rows with an existing key. "": skip none.
        times: Columns that get the current time.
    """
    insert = sa.insert(table)
    if ignoring == "postgresql":
        insert = postgresql.insert(table).on_conflict_do_nothing()
    elif ignoring:
        insert = insert.prefix_with("OR IGNORE" if ignoring == "sqlite" else "IGNORE")
    return insert.values(dict.fromkeys(times, now())) if times else insert


def insert_many(
    tx: Connection,
    table: sa.Table,
    rows: Sequence[Values],
    *times: str,
    ignore: bool = False,
) -> None:
    """Insert rows with the same columns.

    A single row gets the time in its own statement. Several rows share one reading of the clock,
    because MariaDB's driver combines only inserts of plain values into one statement.

    Args:
        tx: The transaction.
        table: The table.
        rows: The rows.
        ignore: Skip rows whose key exists.
        times: Names of columns that get the current time.
    """
    if not rows:
        return
    ignoring = tx.dialect.name if ignore else ""
    if not times:
        tx.execute(_insert_into(table, ignoring), rows)
        return
    if len(rows) == 1:
        tx.execute(_insert_into(table, ignoring, times), rows)
        return
    at = dict.fromkeys(times, moment(tx))
    tx.execute(_insert_into(table, ignoring), [row | at for row in rows])


def update_grouped(
    tx: Connection, table: sa.Table, key: sa.Column[str], changes: Mapping[str, Values]
) -> None:
    """Update rows, with one statement for each distinct set of values.

    Args:
        tx: The transaction.
        table: The table.
        key: The column that identifies rows.
        changes: Value of the key -> column values. Missing rows are ignored.
    """
    groups: dict[str, tuple[Values, list[str]]] = {}
    for row, values in changes.items():
        same = repr([(name, _represent(values[name])) for name in sorted(values)])
        groups.setdefault(same, (values, []))[1].append(row)
    for values, rows in groups.values():
        plain = {name: value for name, value in values.items() if not _is_expression(value)}
        delays = {
            name: delay for name in values if (delay := _read_delay(values[name])) is not None
        }
        if len(plain) + len(delays) == len(values):
            parameters = {f"new_{name}": value for name, value in (plain | delays).items()}
            tx.execute(
                _update_of(table, key, tuple(plain), tuple(delays)),
                {"keys": sorted(rows), **parameters},
            )
        else:
            tx.execute(sa.update(table).where(key.in_(sorted(rows))).values(values))


@cache
def _update_of(
    table: sa.Table, key: sa.Column[str], plain: tuple[str, ...], times: tuple[str, ...]
) -> sa.Update:
    """Return an update of these columns, cached because the conductor repeats few kinds often.

    Args:
        table: The table.
        key: The column that selects rows by the parameter ``keys``.
        plain: Columns that get the value of the parameter ``new_NAME``.
        times: Columns that get the current time plus the parameter ``new_NAME``, in µs.
    """
    new = {name: sa.bindparam(f"new_{name}", type_=table.c[name].type) for name in (*plain, *times)}
    values = {name: now() + new[name] if name in times else new[name] for name in new}
    return sa.update(table).where(key.in_(sa.bindparam("keys", expanding=True))).values(values)


def _read_delay(value: object) -> int | None:
    """Return the µs that an expression adds to the current time, or None for another value."""
    match value:
        case now():
            return 0
        case sa.BinaryExpression(
            left=now(), operator=operator.add, right=sa.BindParameter(value=int(delay))
        ):
            return delay
    return None


def _is_expression(value: Any) -> bool:
    return isinstance(value, sa.ClauseElement)


def _represent(value: Any) -> Any:
    """Return a replacement for a column value, with the same ``repr`` for equal values.

    Why: the ``repr`` of an SQL expression contains a memory address.
    """
    if isinstance(value, now):
        return "now()"
    if isinstance(value, sa.BinaryExpression):
        return _represent(value.left), value.operator, _represent(value.right)
    return value.value if isinstance(value, sa.BindParameter) else value


def _translate_error(problem: DBAPIError) -> Exception:
    if trouble(problem) is Trouble.TOO_LONG:
        return errors.TooSlow()
    if problem.connection_invalidated or isinstance(problem, OperationalError):
        return errors.NoStore()
    return problem
