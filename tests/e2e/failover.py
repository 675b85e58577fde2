# SPDX-License-Identifier: Apache-2.0
"""Databases that lose commits: a PostgreSQL whose stand-by takes over, a MariaDB that is set back
to a dump. Each has a cloud on two hosts in memory.

Used by test_database_failover.py.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from deploy.servers import Servers
from tests.e2e.conftest import without_guests
from tests.e2e.live import Live
from tests.faults import Wire
from tests.waiting import await_true

NAME = "failover"
#: By their names these have to tell all that they have within four seconds, others within a minute
#: (``conductor.heartbeats``).
HOSTS = ("g7", "k4")


@contextmanager
def _servers() -> Iterator[Servers]:
    """In a folder that is none of pytest's, which another run of pytest closes to all but root."""
    with tempfile.TemporaryDirectory(prefix="kn-failover-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            yield servers


def _ask(url: str, statement: str) -> object:
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        result = connection.exec_driver_sql(statement)
        return result.scalar() if result.returns_rows else None


@dataclass
class Pair:
    """A PostgreSQL and its stand-by: ``way`` is where the cloud finds the one in charge, ``link``
    the way on which the other follows."""

    servers: Servers
    live: Live
    way: Wire
    link: Wire
    primary: str
    other: str

    def part(self) -> None:
        """The stand-by has all that was committed so far, and gets nothing more."""
        told = _ask(self.primary, "SELECT pg_current_wal_lsn()")
        await_true(
            lambda: _ask(self.other, f"SELECT pg_last_wal_replay_lsn() >= '{told}'"),
            30,
            "the stand-by follows",
        )
        self.link.freeze()

    def fail_over(self) -> None:
        """kill -9; the stand-by takes over."""
        self.servers.kill("postgresql")
        self.link.cut()
        assert _ask(self.other, "SELECT pg_promote()")
        self.way.lead_to(self.other)
        self.way.cut()


@contextmanager
def with_stand_by() -> Iterator[Pair]:
    """A cloud on a PostgreSQL that has a stand-by."""
    with _servers() as servers:
        first = servers.start("postgresql")
        _ask(first, f"CREATE DATABASE {NAME}")
        way, link = Wire(first), Wire(first)
        try:
            other = servers.stand_by(link.url.render_as_string(hide_password=False))
            url = way.url.set(database=NAME).render_as_string(hide_password=False)
            with without_guests(HOSTS, database_url=url) as live:
                yield Pair(servers, live, way, link, first, other)
        finally:
            link.close()
            way.close()


@dataclass
class Dumped:
    """A MariaDB that is set back to its last dump."""

    live: Live
    url: sa.URL
    file: Path

    def dump(self) -> None:
        with self.file.open("wb") as file:
            self._run("mariadb-dump", "--single-transaction", stdout=file)

    def set_back(self) -> None:
        with self.file.open("rb") as file:
            self._run("mariadb", stdin=file)

    def _run(self, program: str, *options: str, **more: Any) -> None:
        where = (
            f"--host={self.url.host}",
            f"--port={self.url.port}",
            f"--user={self.url.username}",
        )
        subprocess.run(
            [program, "--no-defaults", *where, *options, NAME],
            check=True,
            timeout=60,
            env={**os.environ, "MYSQL_PWD": str(self.url.password)},
            **more,
        )


@contextmanager
def with_dumps() -> Iterator[Dumped]:
    """A cloud on a MariaDB."""
    with _servers() as servers:
        url = sa.make_url(servers.start("mariadb"))
        _ask(url.render_as_string(hide_password=False), f"CREATE DATABASE {NAME}")
        url = url.set(database=NAME)
        with without_guests(HOSTS, database_url=url.render_as_string(hide_password=False)) as live:
            yield Dumped(live, url, servers.folder / "dump.sql")
