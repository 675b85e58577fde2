# SPDX-License-Identifier: Apache-2.0
"""Databases that lose commits, each with a cloud on two hosts in memory.

A PostgreSQL fails over to its stand-by, or a PostgreSQL or MariaDB is restored from a dump. Used by
test_database_failover.py.
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

#: Name of the database in docs/backup.md.
NAME = "kilonova"
DATE = re.compile(r"\d{4}-\d\d-\d\d")
#: Names of hosts that must report all their domains within four seconds. The time depends on the
#: name, and is up to a minute for other hosts (``conductor.engine.heartbeats``).
HOSTS = ("g7", "k4")


@contextmanager
def _servers() -> Iterator[Servers]:
    """Yield database servers in a new folder that is open to other users.

    Why: another run of pytest closes pytest's own temporary folders to all users except root.
    """
    with tempfile.TemporaryDirectory(prefix="kn-failover-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            yield servers


def _execute(url: str, statement: str) -> object:
    """Run a statement without a transaction and return the first value of the result, if any."""
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        result = connection.exec_driver_sql(statement)
        return result.scalar() if result.returns_rows else None


@dataclass
class Pair:
    """A PostgreSQL and its stand-by.

    Attributes:
        way: Proxy between the cloud and the primary.
        link: Proxy of the replication to the stand-by.
        primary: URL of the first server.
        other: URL of the stand-by.
    """

    servers: Servers
    live: Live
    way: Wire
    link: Wire
    primary: str
    other: str

    def stop_replication(self) -> None:
        """Wait until the stand-by has all commits so far, then stop the replication."""
        position = _execute(self.primary, "SELECT pg_current_wal_lsn()")
        await_true(
            lambda: _execute(self.other, f"SELECT pg_last_wal_replay_lsn() >= '{position}'"),
            30,
            "the stand-by follows",
        )
        self.link.freeze()

    def fail_over(self) -> None:
        """Kill the primary with signal 9, promote the stand-by and redirect the cloud."""
        self.servers.kill("postgresql")
        self.link.cut()
        assert _execute(self.other, "SELECT pg_promote()")
        self.way.redirect(self.other)
        self.way.cut()


@contextmanager
def with_stand_by() -> Iterator[Pair]:
    """Run a cloud on a PostgreSQL with a stand-by."""
    with _servers() as servers:
        first = servers.start("postgresql")
        _execute(first, f"CREATE DATABASE {NAME}")
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
class BackedUpCloud:
    """A cloud with backup and restore of the database by the commands of docs/backup.md.

    ``kind`` is "postgresql" or "mariadb".
    """

    live: Live
    kind: str
    url: sa.URL
    folder: Path

    def dump(self) -> None:
        """Back up the database with the command of the page's chapter "Backup"."""
        [command] = self._commands("Backup")
        self._run(command)

    def restore(self) -> None:
        """Restore the dump with the command of the page's chapter "Restore"."""
        [dump] = self.folder.glob(f"{NAME}-*")
        [command] = self._commands("Restore")
        assert DATE.search(command), command
        self._run(DATE.sub(DATE.findall(dump.name)[0], command))

    def restore_while_cloud_runs(self) -> None:
        """Restore the tables without dropping the database, so that MariaDB keeps connections."""
        [dump] = self.folder.glob(f"{NAME}-*")
        command = f"gunzip --stdout {dump.name} | grep -v 'DROP DATABASE' | mariadb"
        self._run(command)

    def stop(self) -> list[str]:
        """Stop the cloud's processes as the chapter "Restore" does, and return their names."""
        [command] = [line for line in commands("Restore") if line.startswith("systemctl stop ")]
        processes = [
            name
            for unit in command.split()[2:]
            if find_process(self.live.cloud, name := unit.removeprefix(f"{NAME}-")) is not None
        ]
        assert {"api", "scheduler", "conductor", "placement"} <= set(processes), processes
        for name in processes:
            process_control.stop(self.live.cloud, name)
        return processes

    def upgrade(self) -> None:
        """Run the page's database commands before the start. The dump is of this release."""
        steps = [line.split()[1:] for line in commands("Restore") if line.startswith("kilonova ")]
        database_steps = [words for words in steps if words[0] == "database"]
        assert database_steps == [["database", "version"], ["database", "upgrade"]]
        for words in database_steps:
            result = self.live.kilonova(*words)
            assert result.returncode == 0, result

    def run_checks(self) -> dict[str, int]:
        """Run the page's commands after the start, and return the exit status of each command."""
        steps = [line.split()[1:] for line in commands("Restore") if line.startswith("kilonova ")]
        checks = [
            words for words in steps if words[0] != "database" and words[:2] != ["host", "rotate"]
        ]
        return {" ".join(words): self.live.kilonova(*words).returncode for words in checks}

    def _commands(self, chapter: str) -> list[str]:
        """Return the commands of a chapter for this kind of database."""
        tool = {"postgresql": "pg_", "mariadb": "mariadb"}[self.kind]
        return [line for line in commands(chapter) if tool in line]

    def _run(self, command: str) -> None:
        """Run a command in a shell, with the database account in the environment."""
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            check=True,
            timeout=60,
            cwd=self.folder,
            env={**os.environ, **self._account()},
        )

    def _account(self) -> dict[str, str]:
        """Return the environment variables with the address and account of the test database.

        On a machine with a database of its own, the commands need no such variables.
        """
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
    """Return the commands of a chapter of docs/backup.md, without their comments."""
    page = (ROOT / "docs/backup.md").read_text()
    [text] = [part for part in page.split("\n## ") if part.startswith(f"{chapter}\n")]
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    results = [line.partition("  # ")[0].strip() for line in lines]
    assert results, chapter
    return results


@contextmanager
def with_dumps(kind: str) -> Iterator[BackedUpCloud]:
    """Run a cloud on a database of this kind, "postgresql" or "mariadb"."""
    with _servers() as servers:
        url = sa.make_url(servers.start(kind))
        _execute(url.render_as_string(hide_password=False), f"CREATE DATABASE {NAME}")
        url = url.set(database=NAME)
        folder = servers.folder / "backup"
        folder.mkdir()
        with without_guests(HOSTS, database_url=url.render_as_string(hide_password=False)) as live:
            yield BackedUpCloud(live, kind, url, folder)
