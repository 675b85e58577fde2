# SPDX-License-Identifier: Apache-2.0
"""Private RabbitMQ, PostgreSQL and MariaDB servers for the tests, in folders of their own.

deploy/testing/test.py and tests/services.py use this module. ``Servers`` starts the servers as
unprivileged users and stops them at exit, also after an exception. The servers write only to the
folder. Their data survive a kill of the server, but may be lost if the machine crashes, because the
servers do not wait for the disk.
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

STANDBY = "postgresql-stand-by"
# After SIGTERM PostgreSQL would wait for the clients.
STOP = dict.fromkeys(("postgresql", STANDBY), signal.SIGINT)
KINDS = ("rabbitmq", "postgresql", "mariadb")
#: Below the ports of outgoing connections. The step is so wide that no two clouds get the same part
#: of the underlay.
STEP, EVERYWHERE = 16, ""
STARTS = tuple(range(20000, 30000, STEP))
#: First port -> the socket that reserves the range for this process. The servers listen on their
#: ports only later. Other processes of this machine get the range after this process ends.
_claims: dict[int, socket.socket] = {}


def free_ports(count: int) -> int:
    """Reserve a range of ``STEP`` ports for this process, and return the first port.

    The first ``count`` ports are free. Until this process ends, no other call of this function
    returns the range, in any process of this machine.

    Args:
        count: The number of ports, at most ``STEP``.

    Raises:
        Failure: No range is free.
    """
    first = secrets.randbelow(len(STARTS))
    for start in (*STARTS[first:], *STARTS[:first]):
        if _reserve(start) and not any(
            is_taken(start + number, EVERYWHERE) for number in range(count)
        ):
            return start
    raise Failure("There are no free ports.", "List the listening programs with: ss -ltnp")


def _reserve(start: int) -> bool:
    """Reserve the range of ports from ``start`` on, and return True.

    Return False if this or another process has reserved the range already.

    The reservation is a socket with an abstract name, which the kernel releases when the process
    ends.
    """
    if start in _claims:
        return False
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0kilonova-ports-{start}")
    except OSError as refusal:
        claim.close()
        if refusal.errno == errno.EADDRINUSE:
            return False
        raise
    _claims[start] = claim
    return True


class Servers:
    """A context manager that starts private servers, and stops them at exit.

    For example, ``with Servers(folder) as servers: url = servers.start("mariadb")``. Only root may
    enter the context.

    Args:
        folder: The folder for data and logs.
        proof: A certificate for 127.0.0.1. The servers then offer TLS, and RabbitMQ only TLS.
    """

    def __init__(self, folder: Path, proof: Tls | None = None) -> None:
        self.folder, self._proof = folder, proof
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._restarts: dict[str, Callable[[], object]] = {}
        self.broker: Broker | None = None

    def __enter__(self) -> Servers:
        if os.geteuid() != 0:
            raise Failure(
                "The servers for the tests run as users of their own, and only root can start them so.",
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
                print(f"killing {name}, which did not stop within 20 s", flush=True)
                process.kill()
                process.wait()

    def start(self, kind: str) -> str:
        """Start a server of a kind in ``KINDS``, wait until it is ready, and return the URL.

        PostgreSQL and MariaDB can be started only once.

        Raises:
            Failure: RabbitMQ is not installed, a database cannot be created, or the server ends or
                is not ready after 90 s.
            LookupError: The user of the database server does not exist.
        """
        starters: dict[str, Callable[[], str]] = {
            "rabbitmq": self._rabbitmq,
            "postgresql": self._postgresql,
            "mariadb": self._mariadb,
        }
        return starters[kind]()

    def pid(self, kind: str) -> int:
        """Return the process id of the server of this kind that was started last."""
        return dict(self._processes)[kind].pid

    def kill(self, kind: str) -> None:
        """Kill the process group of a server with SIGKILL, and wait for the server's main process.

        Committed data remain.
        """
        process = dict(self._processes)[kind]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._processes.remove((kind, process))

    def restart(self, kind: str) -> None:
        """Start a killed database server again at the same address, and wait until it is ready.

        Raises:
            Failure: The server ends, or is not ready after 90 s.
        """
        self._restarts[kind]()

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
            self._make_folder("postgresql", "postgres"),
            free_ports(1),
            secrets.token_hex(16),
        )
        secret = _write_secret(folder / "password", password, "postgres")
        data = folder / "data"
        _run_as(
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
            _postgres_command(folder, port, self._copy_certificates(folder, "postgres")),
            "postgres",
            port,
            _is_ready,
        )
        return f"postgresql+psycopg://kilonova:{password}@127.0.0.1:{port}/postgres"

    def start_standby(self, primary_url: str) -> str:
        """Start a standby that follows a PostgreSQL server, and return the standby's URL.

        Args:
            primary_url: The URL of the primary with user and password.

        Raises:
            Failure: The standby does not start.
        """
        folder, port, primary = (
            self._make_folder(STANDBY, "postgres"),
            free_ports(1),
            urlsplit(primary_url),
        )
        secret = _write_secret(folder / "passwords", f"*:*:*:*:{primary.password}\n", "postgres")
        source = (
            f"host={primary.hostname} port={primary.port} user={primary.username} passfile={secret}"
        )
        _run_as(
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
        self._start(STANDBY, _postgres_command(folder, port), "postgres", port, _is_ready)
        return primary_url.replace(f"@{primary.hostname}:{primary.port}/", f"@127.0.0.1:{port}/")

    def _mariadb(self) -> str:
        folder, port, password = (
            self._make_folder("mariadb", "mysql"),
            free_ports(1),
            secrets.token_hex(16),
        )
        data = folder / "data"
        _run_as(
            "mysql",
            [
                "mariadb-install-db",
                "--no-defaults",
                f"--datadir={data}",
                "--skip-test-db",
                "--auth-root-authentication-method=normal",
            ],
        )
        first = _write_secret(
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
                # From 11.4 on MariaDB offers TLS with a self-made certificate.
                *(["--skip-ssl"] if self._proof is None else []),
                *(
                    f"--ssl-{what}={path}"
                    for what, path in self._copy_certificates(folder, "mysql").items()
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
        """Start a database server, wait until it is ready, and enable ``restart`` for it.

        Raises:
            Failure: The server ends, or is not ready after 90 s.
        """
        self._run(name, command, user)
        self._wait(name, port, is_ready)
        self._restarts[name] = partial(self._start, name, command, user, port, is_ready)

    def _copy_certificates(self, folder: Path, user: str) -> dict[str, Path]:
        """Copy the certificate's files into ``folder``, readable only by the server's user.

        Returns:
            The paths of the copies by "ca", "cert" and "key". {} without a certificate.
        """
        if self._proof is None:
            return {}
        return {
            what: _write_secret(folder / f"{what}.pem", Path(path).read_text(), user)
            for what, path in (
                ("ca", self._proof.ca),
                ("cert", self._proof.cert),
                ("key", self._proof.key),
            )
        }

    def _make_folder(self, name: str, user: str) -> Path:
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
                env=dict(env) if env is not None else _make_environment(),
            )
        self._processes.append((name, process))

    def _wait(self, name: str, port: int, is_ready: Callable[[int], bool] = answers) -> None:
        process = dict(self._processes)[name]
        log = self.folder / f"{name}.log"

        def ready() -> bool:
            if process.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise Failure(
                    f"{name} ended with status {process.returncode}:\n{tail}",
                    "Read the end of the server's log above.",
                )
            return is_ready(port)

        wait(ready, 90, f"{name} does not listen on port {port}", f"Read {log}.", pause=0.05)


def _postgresql_program(name: str) -> str:
    """Return the path of a program of the PostgreSQL in this machine's release of Debian."""
    return f"/usr/lib/postgresql/{packages.postgresql_version()}/bin/{name}"


def _is_ready(port: int) -> bool:
    """Return True if the PostgreSQL server at this port accepts connections.

    A server that only listens is not ready yet.
    """
    result = subprocess.run(
        [_postgresql_program("pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={port}"],
        check=False,
        stdin=subprocess.DEVNULL,
        env=_make_environment(),
    )
    return result.returncode == 0


def _postgres_command(
    folder: Path, port: int, proof: Mapping[str, Path] | None = None
) -> list[str]:
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


def _write_secret(path: Path, text: str, user: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    shutil.chown(path, user)
    return path


def _run_as(user: str, command: list[str]) -> None:
    """Run a command as the user and wait until it ends.

    Raises:
        Failure: The command fails.
    """
    run(
        ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command],
        f"Install the Debian packages {' and '.join(packages.databases())}.",
        env=_make_environment(),
    )


def _make_environment() -> dict[str, str]:
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "HOME": "/nonexistent",
        "TZ": os.environ.get("TZ", "UTC"),
    }


def main() -> None:
    """Start all servers, print their URLs, and stop them after Enter, for manual tests."""
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
