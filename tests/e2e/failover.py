# SPDX-License-Identifier: Apache-2.0
"""Databases that lose commits: a PostgreSQL whose stand-by takes over, and either that is set back
to a dump. Each has a cloud on two hosts in memory.

Used by test_database_failover.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from deploy.one_machine.cloud import process_control
from deploy.one_machine.cloud.process_control import find_process
from deploy.packages import ROOT
from deploy.testing.servers import Servers
from tests.e2e.conftest import without_guests
from tests.e2e.live import Live
from tests.faults import Wire
from tests.waiting import await_true

#: As docs/backup.md calls the database.
NAME = "kilonova"
DATE = re.compile(r"\d{4}-\d\d-\d\d")
#: By their names these have to tell all that they have within four seconds, others within a minute
#: (``conductor.engine.heartbeats``).
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
            other = servers.start_standby(link.url.render_as_string(hide_password=False))
            url = way.url.set(database=NAME).render_as_string(hide_password=False)
            with without_guests(HOSTS, database_url=url) as live:
                yield Pair(servers, live, way, link, first, other)
        finally:
            link.close()
            way.close()


@dataclass
class Dumped:
    """A database that is backed up and restored by the commands of docs/backup.md. kind: as
    ``Servers.start`` has it."""

    live: Live
    kind: str
    url: sa.URL
    folder: Path

    def dump(self) -> None:
        """By the page's chapter "Backup"."""
        [command] = self._said("Backup")
        self._run(command)

    def set_back(self) -> None:
        """By the page's chapter "Restore"; the date is that of the dump."""
        [dump] = self.folder.glob(f"{NAME}-*")
        [command] = self._said("Restore")
        assert DATE.search(command), command
        self._run(DATE.sub(DATE.findall(dump.name)[0], command))

    def set_back_while_all_runs(self) -> None:
        """Table by table, in the database as it is: MariaDB's connections stay in it."""
        [dump] = self.folder.glob(f"{NAME}-*")
        without = f"gunzip --stdout {dump.name} | grep -v 'DROP DATABASE' | mariadb"
        self._run(without)

    def stop(self) -> list[str]:
        """Stop what the page's chapter "Restore" has stopped; returns those that this cloud has."""
        [command] = [one for one in commands("Restore") if one.startswith("systemctl stop ")]
        there = [
            name
            for unit in command.split()[2:]
            if find_process(self.live.cloud, name := unit.removeprefix(f"{NAME}-")) is not None
        ]
        assert {"api", "scheduler", "conductor", "placement"} <= set(there), there
        for name in there:
            process_control.stop(self.live.cloud, name)
        return there

    def upgrade(self) -> None:
        """What comes before the start, by the page; the dump is of this release."""
        asked = [one.split()[1:] for one in commands("Restore") if one.startswith("kilonova ")]
        words = [one for one in asked if one[0] == "database"]
        assert words == [["database", "version"], ["database", "upgrade"]]
        for one in words:
            answer = self.live.kilonova(*one)
            assert answer.returncode == 0, answer

    def look(self) -> dict[str, int]:
        """What comes after the start, by the page: command and status."""
        asked = [one.split()[1:] for one in commands("Restore") if one.startswith("kilonova ")]
        words = [one for one in asked if one[0] != "database" and one[:2] != ["host", "rotate"]]
        return {" ".join(one): self.live.kilonova(*one).returncode for one in words}

    def _said(self, chapter: str) -> list[str]:
        tool = {"postgresql": "pg_", "mariadb": "mariadb"}[self.kind]
        return [one for one in commands(chapter) if tool in one]

    def _run(self, command: str) -> None:
        """As the operator types it, who is at the database as the page says."""
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            check=True,
            timeout=60,
            cwd=self.folder,
            env={**os.environ, **self._account()},
        )

    def _account(self) -> dict[str, str]:
        """Where these databases are, and as whom they are asked, which a machine of its own needs
        nobody to say."""
        options = self.folder / ".my.cnf"
        options.touch(mode=0o600)
        options.write_text(
            f"[client]\nhost={self.url.host}\nport={self.url.port}\nuser={self.url.username}\n"
            f"password={self.url.password}\n"
        )
        return {
            "HOME": str(self.folder),
            "PGHOST": str(self.url.host),
            "PGPORT": str(self.url.port),
            "PGUSER": str(self.url.username),
            "PGPASSWORD": str(self.url.password),
        }


def commands(chapter: str) -> list[str]:
    """The commands of a chapter of docs/backup.md, without their comments."""
    page = (ROOT / "docs/backup.md").read_text()
    [text] = [one for one in page.split("\n## ") if one.startswith(f"{chapter}\n")]
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    found = [line.partition("  # ")[0].strip() for line in lines]
    assert found, chapter
    return found


@contextmanager
def with_dumps(kind: str) -> Iterator[Dumped]:
    """A cloud on a database of this kind."""
    with _servers() as servers:
        url = sa.make_url(servers.start(kind))
        _ask(url.render_as_string(hide_password=False), f"CREATE DATABASE {NAME}")
        url = url.set(database=NAME)
        folder = servers.folder / "backup"
        folder.mkdir()
        with without_guests(HOSTS, database_url=url.render_as_string(hide_password=False)) as live:
            yield Dumped(live, kind, url, folder)
