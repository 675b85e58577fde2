# SPDX-License-Identifier: Apache-2.0
"""The store: connections, transactions, the retry on deadlock, and the one clock.

A process makes one ``Store`` after it has forked. ``write`` runs a function in one writing
transaction and runs the whole of it again when the database says that it lost a deadlock, or that a
row was not given to it in time; the function must therefore have no effect outside the transaction.
Whether a transaction was committed whose COMMIT nobody answered is looked up, never guessed.
``read`` takes no locks, and each of its statements sees what was committed before it; in a
``snapshot`` all see the same. The clock is one SQL expression, ``now()``: a simulator replaces it
by passing ``time`` (SQLite only).
"""

from __future__ import annotations

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
TRANSACTION_TIMEOUT_SECONDS = 9.0  #: seconds after which a transaction is not tried again
AT_ONCE = 1.0  #: a connection that breaks sooner had broken while it was idle
#: What begins a snapshot; it is said of one transaction, so the connection is given back as it was.
_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"


class now(sa.sql.functions.FunctionElement[int]):  # noqa: N801 - as SQL's functions
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


class _Unanswered(Exception, Generic[T]):
    """The connection broke at COMMIT; ``made`` is what the transaction would have made."""

    def __init__(self, made: T) -> None:
        super().__init__("COMMIT was not answered")
        self.made = made


class Store:
    """One database, opened by one process.

    Args:
        url: SQLAlchemy URL: sqlite:///FILE, postgresql+psycopg://…, mysql+pymysql://….
        pool: connections kept open.
        time: for SQLite, the clock in microseconds; a simulator passes its own.
        limits: how long the waits for a server may last.
        notifications: its transactions write to the outbox what they change; None: there are no
        notifications.
        tls: what proves the server, and us to it; None: plain text.
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
        """Let the metrics of this process know how much of the pool is in use."""
        pool: Any = self.engine.pool
        if not isinstance(pool, sa.QueuePool):
            return

        def taken(*what: Any) -> None:
            metrics.POOL_USED.set(pool.checkedout())

        def given_back(*what: Any) -> None:  # called just before it is
            metrics.POOL_USED.set(max(0, pool.checkedout() - 1))

        metrics.POOL_SIZE.set(pool.size())
        sa.event.listen(self.engine, "checkout", taken)
        sa.event.listen(self.engine, "checkin", given_back)

    @classmethod
    def opened(
        cls,
        conf: cfg.ConfigOpts,
        pool: int = 8,
        unhurried: bool = False,
        notifications: NotificationSettings | None = None,
    ) -> Store:
        """The database that [database] names. ``unhurried``: for commands whose statements may take
        any time.

        Raises:
            ConfigError: plain text would travel to another machine, or the driver is not installed.
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
                f"[database] url: its driver {problem.name} is not installed; install kilonova with the extra "
                "postgresql, mysql or mysqlclient"
            ) from problem

    def look_in(self) -> None:
        """Open a connection, and close it.

        Raises:
            ConfigError: the server refuses the name, the password or the database of the URL.
            NoStore: the database does not answer.
        """
        try:
            with self.engine.connect():
                return
        except NoConnection as problem:
            raise errors.NoStore from problem
        except DBAPIError as problem:
            if not is_refusal(problem):
                raise _translated(problem) from problem
            said = " ".join(str(problem.orig).split())
            raise ConfigError(
                f"[database] url: the database refuses {self.url.username or 'to be opened'}: {said}. "
                f"{refusal_remedy(problem, self.url)}"
            ) from problem

    def notify_with(self, notifications: NotificationSettings | None) -> None:
        """From now on connections know of which changes notifications are written
        (``notification_settings``)."""
        self.engine.update_execution_options(kilonova_notifications=notifications)

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def write(
        self,
        work: Callable[[Connection], T],
        is_there: Callable[[Connection, T], bool] | None = None,
        *,
        alone: bool = True,
    ) -> T:
        """Run ``work(tx)`` in one transaction, again from its start when it lost a deadlock or
        waited too long for a row.

        ``is_there(tx, result)``: is what this result of ``work`` tells of in the database? Asked
        when the connection broke at COMMIT: then this result is returned, or ``work`` is run again.
        The ids of what is made should be chosen outside ``work``, so that it cannot be made twice.
        Not ``alone``: the caller does the parts one by one when a row is not given in time, so that
        it is not waited for twice.

        Raises:
            Unsure: nobody can say whether it was committed.
            TooBusy: others held what it needs, again and again.
            NoStore: the database does not answer.
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
            if self._is_there(is_there, made):  # it was still being committed when we looked
                return made
            raise

    def _is_there(self, look: Callable[[Connection, T], bool], made: T) -> bool:
        try:
            return self.read(lambda tx: look(tx, made))
        except errors.Unavailable as problem:
            raise errors.Unsure from problem

    def _through(self, work: Callable[[Connection], T], alone: bool) -> T:
        """``work`` in a transaction that is committed. Raises _Unanswered when that is not
        known."""
        end = time.monotonic() + TRANSACTION_TIMEOUT_SECONDS
        lost = 0
        for attempt in range(ATTEMPTS):
            began = time.monotonic()
            try:
                return self._once(work)
            except NoConnection as problem:
                raise errors.NoStore("The database has no free connection; try again.") from problem
            except DBAPIError as problem:
                found = trouble(problem)
                lost += found is Trouble.LOST
                if found is Trouble.OTHER or (
                    lost and (lost > 1 or time.monotonic() - began > AT_ONCE)
                ):
                    raise _translated(problem) from problem
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
        """Run ``work(tx)`` on a connection that takes no locks. Between two statements others may
        commit.

        Raises:
            NoStore: the database does not answer.
        """
        return self._look("", work)

    def snapshot(self, work: Callable[[Connection], T]) -> T:
        """Run ``work(tx)``, which only reads, on one view of the database: whatever others commit
        meanwhile, it sees all of it or, from its first statement on, nothing.

        Raises:
            NoStore: the database does not answer.
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
            raise errors.NoStore("The database has no free connection; try again.") from problem
        except DBAPIError as problem:
            if not (
                again and trouble(problem) is Trouble.LOST and time.monotonic() - began <= AT_ONCE
            ):
                raise _translated(problem) from problem
        return self._look(begin, work, again=False)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """One writing transaction, without the retry; for tests and tools."""
        with self._transaction() as connection:
            yield connection
            connection.commit()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A connection on which a writing transaction has begun; rolled back when the block
        fails."""
        with self.engine.connect() as connection:
            if self.dialect_name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise

    def now(self) -> int:
        """The database's clock, in microseconds."""
        return self.read(moment)


def moment(tx: Connection) -> int:
    """The database's clock, within a transaction."""
    return int(tx.scalar(_MOMENT) or 0)


_MOMENT = sa.select(now())


def notification_settings(tx: Connection) -> NotificationSettings | None:
    """What this transaction is to write to the outbox; None: nothing. Costs no statement."""
    notifications: NotificationSettings | None = tx.get_execution_options().get(
        "kilonova_notifications"
    )
    return notifications


def for_update(statement: Statement) -> Statement:
    """Lock the selected rows until the transaction ends (SQLite's writers are alone anyway)."""
    return statement.with_for_update()


def is_there(table: sa.Table) -> Callable[[Connection, Numbered], bool]:
    """For ``Store.write``: is this new row of the table in the database? A number may have been
    given to another."""

    def look(tx: Connection, row: Numbered) -> bool:
        same = sa.select(table.c.id).where(
            table.c.id == row.id, table.c.created_at == row.created_at
        )
        return tx.scalar(same) is not None

    return look


def insert_ignore(tx: Connection, table: sa.Table, values: Values) -> bool:
    """Insert a row unless its key exists; returns whether it did not."""
    done = tx.execute(
        _ignoring(tx, table).values(values), execution_options={"preserve_rowcount": True}
    )
    return bool(done.rowcount > 0)


def _ignoring(tx: Connection, table: sa.Table) -> sa.Insert:
    """An insert that leaves rows whose key exists as they are."""
    if tx.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sa.insert(table).prefix_with("OR IGNORE" if tx.dialect.name == "sqlite" else "IGNORE")


def insert_many(
    tx: Connection,
    table: sa.Table,
    rows: Sequence[Values],
    *times: str,
    ignore: bool = False,
) -> None:
    """Insert rows alike, ``times`` being columns that get the clock's value; ``ignore``: unless
    their key exists.

    One row asks the clock in its own statement; many share one reading of it, because MariaDB's
    driver folds inserts of plain values into one statement and no others.
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


def update_grouped(
    tx: Connection, table: sa.Table, key: sa.Column[str], changes: Mapping[str, Values]
) -> None:
    """Update many rows by key, one statement for each distinct set of values (a batch mostly has
    one)."""
    groups: dict[str, tuple[Values, list[str]]] = {}
    for row, values in changes.items():
        same = repr([(name, _shown(values[name])) for name in sorted(values)])
        groups.setdefault(same, (values, []))[1].append(row)
    for values, rows in groups.values():
        plain = {name: value for name, value in values.items() if not _is_expression(value)}
        if all(name in plain or isinstance(value, now) for name, value in values.items()):
            clocked = tuple(name for name in values if name not in plain)
            tx.execute(
                _update_of(table, key, tuple(plain), clocked),
                {"keys": sorted(rows), **{f"new_{name}": plain[name] for name in plain}},
            )
        else:
            tx.execute(sa.update(table).where(key.in_(sorted(rows))).values(values))


@cache
def _update_of(
    table: sa.Table, key: sa.Column[str], plain: tuple[str, ...], clocked: tuple[str, ...]
) -> sa.Update:
    """Return an update of these columns, built once: the conductor runs few kinds of it, often.

    Args:
        table: The table.
        key: The column that selects rows by the parameter ``keys``.
        plain: Columns that get the value of the parameter ``new_NAME``.
        clocked: Columns that get the clock's value.
    """
    values = {name: sa.bindparam(f"new_{name}", type_=table.c[name].type) for name in plain}
    return (
        sa.update(table)
        .where(key.in_(sa.bindparam("keys", expanding=True)))
        .values({**values, **dict.fromkeys(clocked, now())})
    )


def _is_expression(value: Any) -> bool:
    return isinstance(value, sa.ClauseElement)


def _shown(value: Any) -> Any:
    """A value so that its ``repr`` says all of it; that of an expression holds an address."""
    if isinstance(value, now):
        return "now()"
    if isinstance(value, sa.BinaryExpression):
        return _shown(value.left), value.operator, _shown(value.right)
    return value.value if isinstance(value, sa.BindParameter) else value


def _translated(problem: DBAPIError) -> Exception:
    if problem.connection_invalidated or isinstance(problem, OperationalError):
        return errors.NoStore()
    return problem
