# SPDX-License-Identifier: Apache-2.0
"""Which guests are expected from which hosts, and the process that lets them in while there are
any.

Called by ``virt.libvirt.driver`` and ``incoming_migration``. Each expected guest is a file, read by
the proxy whenever it is named, so that removing the file ends the permission at once, and an agent
that starts again goes on where the last one was. The proxy ends with the last record, or, once it
has no connection left, after its agent has ended. Must stay true: a record holds for one guest, one
fence and one source, and at most ``LONGEST_SECONDS``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
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
from compute_agent.verb_context import VerbFailed

log = logging.getLogger(__name__)
#: How long a guest is expected at most: longer than any migration waits for its turn and takes.
LONGEST_SECONDS = 7 * 86400.0
READY = "listens"
#: Where a libvirtd of the machine is, and one that is QEMU's alone.
SOCKETS = ("/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock")
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from compute_agent.virt.libvirt.migration.incoming import proxy; proxy.main(sys.argv[2])"
)
#: What the proxy learns of the agent's environment.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A guest that may come. source: the address that its host's certificate names; xml: the domain
    as this host describes it; address: where QEMU takes it in; encrypted: it comes by QEMU's TLS
    alone; until: seconds since the epoch."""

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
    """Of the proxy. folder: of the records; address and port: where it listens; socket: the local
    libvirtd's; name: as what that is opened; uri: where libvirt's own library finds it."""

    folder: str
    address: str
    port: int
    socket: str
    name: str
    uri: str
    tls: Tls | None = None

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Settings:
        fields = json.loads(text)
        return cls(**{**fields, "tls": Tls(**fields["tls"]) if fields["tls"] else None})


def settings(state_dir: Path, uri: str, address: str, port: int, tls: Tls | None) -> Settings:
    """Of the proxy of an agent whose libvirtd is at ``uri``."""
    where = urlsplit(uri)
    named = parse_qs(where.query).get("socket", [])
    path = named[0] if named else next((one for one in SOCKETS if os.path.exists(one)), SOCKETS[0])
    return Settings(
        str(state_dir / "arrivals"), address, port, path, f"qemu://{where.path}", uri, tls
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
        return [found for name in names if (found := self.find(name))]

    def find(self, server: str) -> Arrival | None:
        """The record of this server, unless its time is over; an id that is not a UUID never
        becomes a path."""
        if not _is_id(server):
            return None
        try:
            found = Arrival(**json.loads((self.folder / server).read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as problem:
            log.warning(
                "what is written of the expected server %s cannot be read: %s", server, problem
            )
            return None
        return found if time.time() < found.until else None

    def write(self, arrival: Arrival) -> None:
        if not _is_id(arrival.server):
            raise ValueError(f"no id of a server: {arrival.server!r}")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        part = self.folder / f"{arrival.server}.new"
        part.write_text(json.dumps(asdict(arrival)))
        part.replace(self.folder / arrival.server)

    def remove(self, server: str) -> None:
        (self.folder / server).unlink(missing_ok=True)


class Incoming:
    """What the agent has of it. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._records = settings, Records(Path(settings.folder))
        self._lock = threading.Lock()
        self._proxy: subprocess.Popen[str] | None = None
        #: Those that come to their end; asked for it now and then, so that the system forgets them.
        self._ending: list[subprocess.Popen[str]] = []

    def expect(self, arrival: Arrival) -> None:
        """Let this guest in from now on. VerbFailed when nothing can listen."""
        self._records.write(dataclasses.replace(arrival, until=time.time() + LONGEST_SECONDS))
        self.keep()

    def withdraw(self, server: str) -> None:
        """It is not let in any more; harmless when it never was. With the last one ``keep`` ends
        the proxy."""
        self._records.remove(server)

    def keep(self) -> None:
        """The proxy runs if and only if a guest is expected. VerbFailed when it does not start."""
        with self._lock:
            self._ending = [one for one in self._ending if one.poll() is None]
            if not self._records.all():
                self._end()
            elif self._proxy is None or self._proxy.poll() is not None:
                self._end()
                self._proxy = self._started()

    def close(self) -> None:
        """Nobody new is let in; a migration that is under way comes to its end."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _START, json.dumps(sys.path), self._settings.written()]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        # In a session of its own: what kills the agent with all that it started lets a guest come
        # whole.
        made = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert made.stdout is not None
        said = made.stdout.readline().strip()
        if said == READY:
            return made
        made.kill()
        made.wait()
        where = f"[migration] live_migration_port {self._settings.port}"
        raise VerbFailed(
            "The host cannot take servers in while they run.",
            retryable=True,
            details=f"{where}: {said or 'nothing listens'}",
        )

    def _end(self) -> None:
        """Its input ends: it stops listening, and ends with its last connection."""
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
