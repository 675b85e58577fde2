# SPDX-License-Identifier: Apache-2.0
"""Records of the guests expected from other hosts, and the proxy process that admits them.

Called by ``virt.libvirt.driver`` and ``incoming_migration``. Each expected guest is a file. The
proxy reads the file for each call, so the removal of the file revokes the permission at once, and a
restarted agent continues with the existing records. The agent stops the proxy with the last record.
If the agent dies, the proxy exits after the last connection.

Invariant: a record holds for one guest, one fence and one source, for at most ``LONGEST_SECONDS``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from common.security.tls import Tls
from common.service.log import get_logger
from compute_agent.verb_context import VerbFailed

log = get_logger(__name__)
#: The longest life of a record. No migration takes longer, including the time in the queue.
LONGEST_SECONDS = 7 * 86400.0
READY = "listens"
#: Sockets of libvirtd, and of the daemon for QEMU alone.
SOCKETS = ("/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock")
_PROXY_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from compute_agent.virt.libvirt.migration.incoming import proxy; proxy.main(sys.argv[2])"
)
#: Environment variables of the agent that the proxy gets.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Arrival:
    """The record of a guest that may arrive at this host.

    Attributes:
        server: Id of the server.
        fence: Fence of the command that announced the guest.
        source: Address of the source, as in the source's certificate.
        xml: This host's definition of the domain.
        address: Address at which QEMU receives the guest.
        shared: True if the hosts share storage.
        encrypted: True if the guest must arrive over QEMU's TLS.
        until: Expiry, in seconds since the epoch.
    """

    server: str
    fence: int
    source: str
    xml: str
    address: str
    shared: bool = False
    encrypted: bool = False
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the proxy.

    Attributes:
        folder: Folder of the records.
        address: Address to listen on.
        port: Port to listen on.
        socket: Path of the local libvirtd's socket.
        name: URI under which the filter opens that libvirtd.
        uri: URI of that libvirtd for libvirt's own library.
        tls: This host's certificates and key, or None for plain text.
    """

    folder: str
    address: str
    port: int
    socket: str
    name: str
    uri: str
    tls: Tls | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Settings:
        fields = json.loads(text)
        return cls(**{**fields, "tls": Tls(**fields["tls"]) if fields["tls"] else None})


def settings(state_dir: Path, uri: str, address: str, port: int, tls: Tls | None) -> Settings:
    """Return the proxy's settings for an agent whose libvirtd is at ``uri``.

    Args:
        state_dir: State folder of the agent.
        uri: libvirt's connection URI. Without the parameter "socket", the first existing path of
            ``SOCKETS`` is used.
        address: Address to listen on.
        port: Port to listen on.
        tls: This host's certificates and key, or None for plain text.
    """
    parts = urlsplit(uri)
    socket_paths = parse_qs(parts.query).get("socket", [])
    path = (
        socket_paths[0]
        if socket_paths
        else next(
            (socket_path for socket_path in SOCKETS if os.path.exists(socket_path)), SOCKETS[0]
        )
    )
    return Settings(
        str(state_dir / "arrivals"), address, port, path, f"qemu://{parts.path}", uri, tls
    )


class Records:
    """The expected guests, one file each in ``folder``. Safe for processes and threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Arrival]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [arrival for name in names if (arrival := self.find(name))]

    def find(self, server: str) -> Arrival | None:
        """Return the record of the server. None if it is missing, malformed or expired.

        An id that is not a UUID has no record. A malformed record is logged.
        """
        if not _is_id(server):
            return None
        try:
            arrival = Arrival(**json.loads((self.folder / server).read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as problem:
            log.warning(
                "the arrival record of a server cannot be read", server=server, problem=problem
            )
            return None
        return arrival if time.time() < arrival.until else None

    def write(self, arrival: Arrival) -> None:
        if not _is_id(arrival.server):
            raise ValueError(f"the id of a server is not a UUID: {arrival.server!r}")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        part = self.folder / f"{arrival.server}.new"
        part.write_text(json.dumps(asdict(arrival)))
        part.replace(self.folder / arrival.server)

    def remove(self, server: str) -> None:
        (self.folder / server).unlink(missing_ok=True)


class Incoming:
    """The records of expected guests, and the proxy process of this agent. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._records = settings, Records(Path(settings.folder))
        self._lock = threading.Lock()
        self._proxy: subprocess.Popen[str] | None = None
        #: Proxies that are ending. They are polled so that they do not remain as zombies.
        self._ending: list[subprocess.Popen[str]] = []

    def expect(self, arrival: Arrival) -> None:
        """Record the guest as expected for ``LONGEST_SECONDS``, and start the proxy if necessary.

        An earlier record of the server is replaced. ``arrival.until`` is ignored.

        Raises:
            VerbFailed: The proxy does not start. The record remains.
        """
        self._records.write(dataclasses.replace(arrival, until=time.time() + LONGEST_SECONDS))
        self.keep()

    def withdraw(self, server: str) -> None:
        """Remove the record, so that the guest is not admitted any more.

        Without a record this has no effect. The next ``keep`` stops the proxy if no record is left.
        """
        self._records.remove(server)

    def keep(self) -> None:
        """Start the proxy if a guest is expected, else stop the proxy.

        If a guest is expected and the proxy already runs, nothing changes.

        Raises:
            VerbFailed: The proxy does not start.
        """
        with self._lock:
            self._ending = [process for process in self._ending if process.poll() is None]
            if not self._records.all():
                self._stop_proxy()
            elif self._proxy is None or self._proxy.poll() is not None:
                self._stop_proxy()
                self._proxy = self._start_proxy()

    def close(self) -> None:
        """Stop the proxy when the agent ends. A running migration continues, and records stay."""
        with self._lock:
            self._stop_proxy()

    def _start_proxy(self) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            _PROXY_PROGRAM,
            json.dumps(sys.path),
            self._settings.to_json(),
        ]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        # In a new session, so that a kill of the agent's process group does not break a migration.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert process.stdout is not None
        output = process.stdout.readline().strip()
        if output == READY:
            return process
        process.kill()
        process.wait()
        where = f"[migration] live_migration_port {self._settings.port}"
        raise VerbFailed(
            "The host cannot receive live migrations, because its proxy does not start.",
            retryable=True,
            details=f"{where}: {output or 'the proxy ended without a message'}",
        )

    def _stop_proxy(self) -> None:
        """Close the proxy's standard input, and do not wait.

        The proxy then stops listening, and exits after the last connection.
        """
        if self._proxy is None:
            return
        assert self._proxy.stdin is not None and self._proxy.stdout is not None
        self._proxy.stdin.close()
        self._proxy.stdout.close()
        self._ending.append(self._proxy)
        self._proxy = None


def _is_id(server: str) -> bool:
    try:
        return str(uuid.UUID(server)) == server
    except ValueError:
        return False
