# SPDX-License-Identifier: Apache-2.0
"""Connections to the database: arguments, time limits, and the meaning of errors.

Only ``engine`` calls this file. Every wait has a limit: for a connection, a locked row, a
statement, a silent server, and on the server's side for a client that disappears in a transaction.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from common.domain.errors import ConfigError
from common.security.tls import Tls, protecting
from common.store import regular_expressions

#: Seconds that a client waits longer than the server, which should end a long statement itself.
MARGIN = 2


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of waits in seconds, as in the options of [database].

    connect: for a connection. lock: for a locked row. statement: for a statement, 0: no limit.
    idle: between two statements of a transaction. After that the server ends the transaction.
    """

    connect: int = 5
    lock: int = 3
    statement: int = 10
    idle: int = 10

    @classmethod
    def of(cls, options: cfg.ConfigOpts.GroupAttr, unhurried: bool = False) -> ConnectionLimits:
        """Return the limits of [database]. ``unhurried``: no limit for statements."""
        return cls(
            options.connect_timeout,
            options.lock_timeout,
            0 if unhurried else options.statement_timeout,
            options.idle_transaction_timeout,
        )

    @property
    def answer(self) -> int | None:
        """Seconds that a client waits for data from the server. None: without limit."""
        return self.statement + MARGIN if self.statement else None


class Trouble(Enum):
    """The meaning of a database error for the transaction."""

    # Rolled back because of another transaction. Retry at once.
    DEADLOCK = "deadlock"
    # A lock timeout.
    LOCKED = "locked"
    # The connection is broken.
    LOST = "lost"
    # The statement reached ``ConnectionLimits.statement``.
    TOO_LONG = "too long"
    OTHER = "other"


#: MariaDB's number or PostgreSQL's SQLSTATE -> meaning. PyMySQL has SQLSTATEs too, but only HY000
#: for 1205.
_NUMBERS = {
    1020: Trouble.DEADLOCK,
    1205: Trouble.LOCKED,
    1213: Trouble.DEADLOCK,
    1969: Trouble.TOO_LONG,
}
_SQLSTATES = {
    "40001": Trouble.DEADLOCK,
    "40P01": Trouble.DEADLOCK,
    "55P03": Trouble.LOCKED,
    "57014": Trouble.TOO_LONG,
}


def trouble(problem: DBAPIError) -> Trouble:
    """Return what a database error means for the transaction."""
    if problem.connection_invalidated:
        return Trouble.LOST
    original = problem.orig
    if isinstance(original, sqlite3.OperationalError):
        return (
            Trouble.LOCKED
            if "locked" in str(original) or "busy" in str(original)
            else Trouble.OTHER
        )
    number = original.args[0] if original is not None and original.args else None
    if isinstance(number, int):
        return _NUMBERS.get(number, Trouble.OTHER)
    return _SQLSTATES.get(str(getattr(original, "sqlstate", None)), Trouble.OTHER)


#: Errors of MariaDB and SQLite that persist until an operator changes the URL or the server.
_REFUSED = {1044, 1045, 1049, 1130, 1698, 3159}
_SQLITE_REFUSED = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_PERM}


#: Name of the file in PostgreSQL's error, in every language, if the client has no entry there.
PG_HBA = "pg_hba.conf"
_WRONG_PASSWORD, _NOT_ALLOWED_HOST, _NEEDS_TLS = 1045, 1130, 3159  #: numbers of MariaDB


def is_refusal(problem: DBAPIError) -> bool:
    """Return True if a connection was refused for address, name, password, database or missing TLS.

    For SQLite: if the file cannot be opened, or is no database. PostgreSQL has no code for a
    refusal. Its error counts as a refusal if the connection used or needs a password, or if the
    text names ``PG_HBA``, the server's file of allowed clients.
    """
    original = problem.orig
    if isinstance(original, sqlite3.Error):
        return original.sqlite_errorcode & 0xFF in _SQLITE_REFUSED
    tried = getattr(original, "pgconn", None)
    if tried is not None:
        return bool(tried.used_password or tried.needs_password or PG_HBA in str(original))
    return bool(original is not None and original.args and original.args[0] in _REFUSED)


def refusal_remedy(problem: DBAPIError, url: URL) -> str:
    """Return the operator's remedy for a refused connection."""
    original = problem.orig
    if getattr(original, "pgconn", None) is not None and PG_HBA in str(original):
        return (
            f"On the database server add a line for this machine, the user {url.username} and the "
            f"database {url.database} to {PG_HBA}, for example: hostssl {url.database} "
            f"{url.username} ADDRESS/32 scram-sha-256. Then have PostgreSQL read the file again: "
            "SELECT pg_reload_conf()"
        )
    number = original.args[0] if original is not None and original.args else None
    if number == _NOT_ALLOWED_HOST:
        return (
            "The database server has no account for the address of this machine. Create the "
            f"account there: CREATE USER '{url.username}'@'ADDRESS' IDENTIFIED BY 'PASSWORD'"
        )
    if number == _NEEDS_TLS:
        return "The database server requires TLS. Set [database] tls and [tls] ca_file"
    if number == _WRONG_PASSWORD:
        return (
            "Correct the name and password in the URL, or create the account for the address of "
            "this machine, because MariaDB keeps a password for each name and address. If the "
            "account requires TLS, set [database] tls and [tls] ca_file"
        )
    return (
        "Correct the name, password or database in [database] url, or create the account and the "
        "database on the database server"
    )


def protection(conf: cfg.ConfigOpts) -> Tls | None:
    """Return the TLS files for the configured database, or None for SQLite and for plain text.

    Raises:
        ConfigError: The connection would be plain text to another machine, without [tls]
            allow_plain_text. Or the files or options of [tls] cannot be used, or the URL's port is
            not valid.
    """
    url = _parse_url(conf.database.url)
    if url.get_backend_name() == "sqlite":
        return None
    hosts = [url.host]
    for named in (url.query.get(name, ()) for name in ("host", "hostaddr")):
        for part in (
            part
            for text in ([named] if isinstance(named, str) else named)
            for part in text.split(",")
        ):
            hosts.append(part if part.count(":") > 1 else part.partition(":")[0])
    return protecting(
        conf, "[database] url", hosts, off="" if conf.database.tls else "[database] tls is false"
    )


def _parse_url(text: str) -> URL:
    """Return the URL in [database] url, or raise ConfigError if the port is not valid."""
    try:
        url = sa.make_url(text)
        is_valid = url.port is None or 0 < url.port < 65536
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError("[database] url: the port must be a number from 1 to 65535")
    return url


def connect_arguments(
    url: URL, limits: ConnectionLimits, tls: Tls | None = None
) -> dict[str, object]:
    """Return the driver's arguments for each new connection to PostgreSQL or MariaDB.

    They override the arguments in the URL, but PostgreSQL's ``options`` are appended to the
    options there. With ``tls`` the client verifies the server's certificate and name.
    """
    if url.get_backend_name() == "postgresql":
        return _to_postgresql(url, limits) | (_proving_postgresql(tls) if tls else {})
    waits = {"read_timeout": limits.answer, "write_timeout": limits.answer} if limits.answer else {}
    proof = _proving_mariadb(url, tls) if tls else _plain_to_mariadb(url)
    return {
        "connect_timeout": limits.connect,
        "init_command": _greeting_of_mariadb(limits),
        **waits,
        **proof,
    }


def _proving_postgresql(tls: Tls) -> dict[str, object]:
    own = {"sslcert": tls.cert, "sslkey": tls.key} if tls.cert else {}
    return {
        "sslmode": "verify-full",
        "sslrootcert": tls.ca,
        "gssencmode": "disable",
        "ssl_min_protocol_version": "TLSv1.2",
        **own,
    }


def _proving_mariadb(url: URL, tls: Tls) -> dict[str, object]:
    if url.get_driver_name() == "pymysql":
        own = {"ssl_cert": tls.cert, "ssl_key": tls.key} if tls.cert else {}
        return {
            "ssl_disabled": False,
            "ssl_ca": tls.ca,
            "ssl_verify_cert": True,
            "ssl_verify_identity": True,
            **own,
        }
    own = {"cert": tls.cert, "key": tls.key} if tls.cert else {}
    return {"ssl_mode": "VERIFY_IDENTITY", "ssl": {"ca": tls.ca, **own}}


def _plain_to_mariadb(url: URL) -> dict[str, object]:
    """Return the argument that switches TLS off for PyMySQL, for a connection in plain text.

    Return {} for another driver, and for a URL with options named ssl….

    PyMySQL would try TLS without verifying the server, and would load this machine's certificate
    authorities for each connection, which takes 50 ms of CPU time.
    """
    if url.get_driver_name() != "pymysql" or any(name.startswith("ssl") for name in url.query):
        return {}
    return {"ssl_disabled": True}


def _greeting_of_mariadb(limits: ConnectionLimits) -> str:
    """Return the first statement of each connection to MariaDB, which sets the limits.

    The session's time zone is UTC, because the clock ``now()`` uses local time, which repeats an
    hour in autumn. Settings unknown to MySQL are in ``/*M!``, a comment that only MariaDB runs.
    """
    return (
        f"SET time_zone = '+00:00', SESSION innodb_lock_wait_timeout = {limits.lock}, "
        f"SESSION lock_wait_timeout = {limits.lock}, SESSION net_write_timeout = {limits.idle} "
        f"/*M! , SESSION idle_transaction_timeout = {limits.idle}, "
        f"SESSION max_statement_time = {limits.statement} */"
    )


def _to_postgresql(url: URL, limits: ConnectionLimits) -> dict[str, object]:
    settings = {
        "lock_timeout": limits.lock,
        "statement_timeout": limits.statement,
        "idle_in_transaction_session_timeout": limits.idle,
    }
    given = url.query.get("options", "")
    options = [
        given if isinstance(given, str) else " ".join(given),
        *(f"-c {name}={seconds * 1000}" for name, seconds in settings.items()),
    ]
    arguments: dict[str, object] = {
        "connect_timeout": limits.connect,
        "options": " ".join(filter(None, options)),
        "keepalives": 1,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }
    return arguments | ({"tcp_user_timeout": limits.answer * 1000} if limits.answer else {})


def server_engine(
    url: URL, pool: int, limits: ConnectionLimits, tls: Tls | None = None
) -> sa.Engine:
    """Return an engine for PostgreSQL or MariaDB, which keeps up to ``pool`` idle connections.

    Connections are not tested before use, which would cost one exchange per transaction. The first
    statement detects a connection that broke while idle. ``Store`` then repeats the transaction,
    except in ``Store.begin``.
    """
    engine = sa.create_engine(
        url,
        isolation_level="READ COMMITTED",
        pool_size=pool,
        max_overflow=32,
        pool_timeout=limits.connect,
        pool_recycle=1800,
        connect_args=connect_arguments(url, limits, tls),
    )
    if engine.dialect.driver == "psycopg" and limits.answer:
        connect = _impatient(limits.answer)
        sa.event.listen(
            engine, "do_connect", lambda dialect, record, given, named: connect(*given, **named)
        )
    return engine


def _impatient(seconds: int) -> Callable[..., Any]:
    """Return a function that connects to PostgreSQL with a limit for a silent server.

    The driver itself waits without limit. Here a wait of more than ``seconds`` for the server
    raises OperationalError and closes the connection.
    """
    import psycopg

    def until(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        end = time.monotonic() + seconds
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > end:
                    raise psycopg.OperationalError(
                        f"the database server sent no data for {seconds} s"
                    )
                wanted = steps.send(ready)
        except StopIteration as done:
            return done.value

    class Impatient(psycopg.Connection[Any]):
        def wait(self, gen: Any, *given: Any, **named: Any) -> Any:
            try:
                return super().wait(until(gen), *given, **named)
            except psycopg.OperationalError as problem:
                if problem.sqlstate is None:
                    self.pgconn.finish()
                raise

    return Impatient.connect


def sqlite_engine(url: URL, clock: Callable[[], int]) -> sa.Engine:
    """Return an engine for SQLite, with full synchronization and a 30 s lock timeout.

    A database file is in WAL mode.
    Connections begin no transactions by themselves. ``engine`` begins those of writers with BEGIN
    IMMEDIATE. ``clock`` returns the time in µs for the SQL function kilonova_now. Connecting
    creates the folder of the file. All users of a database in memory share one connection.
    """
    if url.database and url.database != ":memory:":
        folder = Path(url.database).parent
        engine = sa.create_engine(
            url, connect_args={"timeout": 30, "isolation_level": None}, pool_size=8, max_overflow=32
        )
        # Create the folder only when connecting, so that a command without a database leaves no
        # folder.
        sa.event.listen(engine, "do_connect", lambda *_: folder.mkdir(parents=True, exist_ok=True))
    else:
        engine = sa.create_engine(
            url,
            connect_args={"isolation_level": None, "check_same_thread": False},
            poolclass=sa.StaticPool,
        )

    @sa.event.listens_for(engine, "connect")
    def configure_connection(connection: sqlite3.Connection, record: Any) -> None:
        connection.create_function("kilonova_now", 0, clock)
        regular_expressions.teach(connection)
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "busy_timeout=30000",
            "foreign_keys=OFF",
            "cache_size=-16000",
        ):
            connection.execute("PRAGMA " + pragma)

    return engine
