# SPDX-License-Identifier: Apache-2.0
"""Private RabbitMQ, PostgreSQL and MariaDB for the tests: each in a folder and on a port of its
own.

Used by deploy/testing/test.py and tests/services.py. ``Servers`` starts them as unprivileged users
and stops them again, also when the block fails or the process is told to end; nothing outside the
folder is written. Data survive a kill of the server, and need not survive one of the machine:
nothing waits for a disk.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from deploy import packages
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.probes import answers, is_taken
from deploy.progress import Failure, run, wait

if TYPE_CHECKING:
    from common.security.tls import Tls

STAND_BY = "postgresql-stand-by"
# on SIGTERM it would wait for its clients
STOP = dict.fromkeys(("postgresql", STAND_BY), signal.SIGINT)
KINDS = ("rabbitmq", "postgresql", "mariadb")
#: Below the ports of outgoing connections, and so far apart that no two clouds have the same part
#: of the underlay.
STEP, EVERYWHERE = 16, ""
STARTS = tuple(range(20000, 30000, STEP))
#: Who chose ports listens there only later. Until this process ends, no other of this machine is
#: given them.
_given: dict[int, socket.socket] = {}


def free_ports(count: int) -> int:
    """The first of at most ``STEP`` ports in a row that nobody listens on, and that nobody was
    given before."""
    first = secrets.randbelow(len(STARTS))
    for start in (*STARTS[first:], *STARTS[:first]):
        if _reserve(start) and not any(
            is_taken(start + number, EVERYWHERE) for number in range(count)
        ):
            return start
    raise Failure("There are no free ports.", "See what listens with: ss -ltnp")


def _reserve(start: int) -> bool:
    """Is this process the first to get these ports? A socket's abstract name is given up when its
    process ends."""
    if start in _given:
        return False
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0kilonova-ports-{start}")
    except OSError as refusal:
        claim.close()
        if refusal.errno == errno.EADDRINUSE:
            return False
        raise
    _given[start] = claim
    return True


class Servers:
    """``with Servers(folder) as servers: url = servers.start("mariadb")``; leaving stops them all.
    With ``proof``, which names 127.0.0.1, they offer TLS; RabbitMQ speaks nothing else then."""

    def __init__(self, folder: Path, proof: Tls | None = None) -> None:
        self.folder, self._proof = folder, proof
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._again: dict[str, Callable[[], object]] = {}
        self.broker: Broker | None = None

    def __enter__(self) -> Servers:
        if os.geteuid() != 0:
            raise Failure(
                "Servers for the tests are started under users of their own, which only root can do.",
                "Run this as root.",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, process in reversed(self._processes):
            process.send_signal(STOP.get(name, signal.SIGTERM))
        for name, process in reversed(self._processes):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                print(f"{name} did not stop within 20 s and is killed", flush=True)
                process.kill()
                process.wait()

    def start(self, kind: str) -> str:
        """Start one of ``KINDS`` and return its URL.

        Raises:
            Failure: it is not installed or does not come up.
        """
        starters: dict[str, Callable[[], str]] = {
            "rabbitmq": self._rabbitmq,
            "postgresql": self._postgresql,
            "mariadb": self._mariadb,
        }
        return starters[kind]()

    def pid(self, kind: str) -> int:
        """Of the server that was started last."""
        return dict(self._processes)[kind].pid

    def kill(self, kind: str) -> None:
        """kill -9, of a server with all its processes. What it had committed stays."""
        process = dict(self._processes)[kind]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._processes.remove((kind, process))

    def restart(self, kind: str) -> None:
        """Start a server that was killed again, at the same address; returns when it answers."""
        self._again[kind]()

    def _rabbitmq(self) -> str:
        self.broker = broker = Broker(
            self.folder / "rabbitmq", free_ports(3), secrets.token_hex(16), proof=self._proof
        )
        broker.prepare()
        self._run("epmd", broker.mapper_command(), "rabbitmq", broker.environment)
        self._run("rabbitmq", broker.command(), "rabbitmq", broker.environment)
        self._wait("rabbitmq", broker.port)
        return broker.url

    def _postgresql(self) -> str:
        folder, port, password = (
            self._own("postgresql", "postgres"),
            free_ports(1),
            secrets.token_hex(16),
        )
        secret = _secret(folder / "password", password, "postgres")
        data = folder / "data"
        _as(
            "postgres",
            [
                _postgresql_program("initdb"),
                "--pgdata",
                str(data),
                "--username",
                "kilonova",
                "--pwfile",
                str(secret),
                "--auth",
                "scram-sha-256",
                "--no-sync",
                "--encoding",
                "UTF8",
                "--locale",
                "C",
            ],
        )
        self._start(
            "postgresql",
            _postgres(folder, port, self._own_proof(folder, "postgres")),
            "postgres",
            port,
            _is_ready,
        )
        return f"postgresql+psycopg://kilonova:{password}@127.0.0.1:{port}/postgres"

    def stand_by(self, way: str) -> str:
        """Start a copy of a PostgreSQL that follows it, some moments behind; returns its URL.
        ``way``: the URL at which it finds the other one."""
        folder, port, primary = self._own(STAND_BY, "postgres"), free_ports(1), urlsplit(way)
        secret = _secret(folder / "passwords", f"*:*:*:*:{primary.password}\n", "postgres")
        source = (
            f"host={primary.hostname} port={primary.port} user={primary.username} passfile={secret}"
        )
        _as(
            "postgres",
            [
                _postgresql_program("pg_basebackup"),
                "--pgdata",
                str(folder / "data"),
                "--write-recovery-conf",
                "--no-sync",
                "--checkpoint",
                "fast",
                "--dbname",
                source,
            ],
        )
        self._start(STAND_BY, _postgres(folder, port), "postgres", port, _is_ready)
        return way.replace(f"@{primary.hostname}:{primary.port}/", f"@127.0.0.1:{port}/")

    def _mariadb(self) -> str:
        folder, port, password = self._own("mariadb", "mysql"), free_ports(1), secrets.token_hex(16)
        data = folder / "data"
        _as(
            "mysql",
            [
                "mariadb-install-db",
                "--no-defaults",
                f"--datadir={data}",
                "--skip-test-db",
                "--auth-root-authentication-method=normal",
            ],
        )
        first = _secret(
            folder / "first.sql",
            "CREATE USER IF NOT EXISTS kilonova@'127.0.0.1' IDENTIFIED BY "
            f"'{password}';\n"
            "GRANT ALL ON *.* TO kilonova@'127.0.0.1' WITH GRANT OPTION;\n",
            "mysql",
        )
        self._start(
            "mariadb",
            [
                "/usr/sbin/mariadbd",
                "--no-defaults",
                f"--datadir={data}",
                f"--socket={folder}/mariadb.sock",
                f"--pid-file={folder}/mariadb.pid",
                f"--port={port}",
                "--bind-address=127.0.0.1",
                f"--init-file={first}",
                "--innodb-flush-log-at-trx-commit=2",
                "--innodb-buffer-pool-size=64M",
                "--max-connections=300",
                "--skip-log-bin",
                "--skip-name-resolve=1",
                # From 11.4 on MariaDB offers TLS by itself, with a certificate that it makes.
                *(["--skip-ssl"] if self._proof is None else []),
                *(
                    f"--ssl-{what}={path}"
                    for what, path in self._own_proof(folder, "mysql").items()
                ),
            ],
            "mysql",
            port,
        )
        plain = "&ssl_disabled=true" if self._proof is None else ""
        return f"mysql+pymysql://kilonova:{password}@127.0.0.1:{port}/mysql?charset=utf8mb4{plain}"

    def _start(
        self,
        name: str,
        command: list[str],
        user: str,
        port: int,
        is_ready: Callable[[int], bool] = answers,
    ) -> None:
        """Start a database, and know how it is started again."""
        self._run(name, command, user)
        self._wait(name, port, is_ready)
        self._again[name] = partial(self._start, name, command, user, port, is_ready)

    def _own_proof(self, folder: Path, user: str) -> dict[str, Path]:
        """Copies that the server may read."""
        if self._proof is None:
            return {}
        return {
            what: _secret(folder / f"{what}.pem", Path(path).read_text(), user)
            for what, path in (
                ("ca", self._proof.ca),
                ("cert", self._proof.cert),
                ("key", self._proof.key),
            )
        }

    def _own(self, name: str, user: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        shutil.chown(folder, user)
        return folder

    def _run(
        self, name: str, command: list[str], user: str, env: Mapping[str, str] | None = None
    ) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=user,
                group=user,
                extra_groups=[],
                start_new_session=True,
                cwd=self.folder,
                env=dict(env) if env is not None else _plain(),
            )
        self._processes.append((name, process))

    def _wait(self, name: str, port: int, is_ready: Callable[[int], bool] = answers) -> None:
        process = dict(self._processes)[name]
        log = self.folder / f"{name}.log"

        def ready() -> bool:
            if process.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise Failure(
                    f"{name} ended with {process.returncode}:\n{tail}", "Its log is above."
                )
            return is_ready(port)

        wait(ready, 90, f"{name} does not listen on port {port}", f"Look into {log}.", pause=0.05)


def _postgresql_program(name: str) -> str:
    """Return the path of a program of this release's PostgreSQL."""
    return f"/usr/lib/postgresql/{packages.postgresql_version()}/bin/{name}"


def _is_ready(port: int) -> bool:
    """Does a PostgreSQL take connections? It listens before that."""
    asked = subprocess.run(
        [_postgresql_program("pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={port}"],
        check=False,
        stdin=subprocess.DEVNULL,
        env=_plain(),
    )
    return asked.returncode == 0


def _postgres(folder: Path, port: int, proof: Mapping[str, Path] | None = None) -> list[str]:
    settings: dict[str, object] = {
        "port": port,
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": folder,
        "fsync": "off",
        "full_page_writes": "off",
        "max_connections": 300,
        "shared_buffers": "64MB",
    }
    if proof:
        settings |= {"ssl": "on", **{f"ssl_{what}_file": path for what, path in proof.items()}}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return [_postgresql_program("postgres"), "-D", str(folder / "data"), *options]


def _secret(path: Path, text: str, user: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    shutil.chown(path, user)
    return path


def _as(user: str, command: list[str]) -> None:
    """Run to its end as that user."""
    run(
        ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command],
        f"Install the Debian packages {' and '.join(packages.databases())}.",
        env=_plain(),
    )


def _plain() -> dict[str, str]:
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "HOME": "/nonexistent",
        "TZ": os.environ.get("TZ", "UTC"),
    }


def main() -> None:
    """Start all and wait for Enter: for trials by hand."""
    folder = Path("/tmp") / f"kilonova-servers-{os.getpid()}"  # noqa: S108 - holds nothing secret and has this process's number
    with Servers(folder) as servers:
        for kind in KINDS:
            began = time.monotonic()
            print(
                f"export KILONOVA_TEST_{kind.upper()}_URL='{servers.start(kind)}'"
                f"  # {time.monotonic() - began:.1f} s",
                flush=True,
            )
        input("Enter stops them. ")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
