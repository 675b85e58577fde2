# SPDX-License-Identifier: Apache-2.0
"""Volumes for other hosts: a qemu-nbd process for each connection, which ends with it.

The processes go on when the service is killed, and are found again by their files in one folder; a
thread makes them what the rows say, so that one that died is back on the same port. With
certificates only a host that shows one of the same authority is let in.
"""

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

LOG = logging.getLogger("standalone.volume")
START_SECONDS, END_SECONDS = 20, 10
#: So many times a host may connect at once: QEMU does it once for each channel of a move.
CLIENTS = 16


@dataclass(frozen=True)
class Export:
    """What one process serves: the file, under the volume's name, at a port."""

    key: str  #: the attachment's
    volume_id: str
    path: Path
    port: int
    readonly: bool


class Exports:
    """The processes; `folder` has a file with the number of each. No `address`: none."""

    def __init__(self, folder: Path, address: str, ports: tuple[int, int], tls: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.address, self._ports, self.tls = folder, address, ports, tls
        self.lock = threading.RLock()
        """Held while rows and processes are made to agree."""

    def free_port(self, taken: Iterable[int]) -> int | None:
        """A port that neither a row nor another program has."""
        used = set(taken)
        for port in range(self._ports[0], self._ports[1] + 1):
            if port not in used and _is_free(self.address, port):
                return port
        return None

    def start(self, export: Export) -> bool:
        """Serve it, unless it is served; False, and a line in the log, when that fails."""
        with self.lock:
            if self._pid(export.key):
                return True
            try:
                done = subprocess.run(
                    self._command(export),
                    env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    timeout=START_SECONDS,
                    check=False,
                    start_new_session=True,  # it goes on when the service ends
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                LOG.error("qemu-nbd for volume %s: %s", export.volume_id, error)
                return False
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip()[:300]
                LOG.error("qemu-nbd for volume %s: %s", export.volume_id, said)
            return done.returncode == 0

    def end(self, key: str) -> None:
        """End the process of an attachment, with its connections."""
        with self.lock:
            for number in (signal.SIGTERM, signal.SIGKILL):
                pid = self._pid(key)
                if pid is None:
                    break
                os.kill(pid, number)
                until = time.monotonic() + END_SECONDS
                while self._pid(key) and time.monotonic() < until:
                    time.sleep(0.02)
            self._file(key).unlink(missing_ok=True)

    def settle(self, wanted: Mapping[str, Export]) -> None:
        """Make the processes those of `wanted`, by the attachments' ids."""
        with self.lock:
            for key in self.known():
                if key not in wanted:
                    self.end(key)
            for key, export in wanted.items():
                if self._pid(key) is None:
                    LOG.warning("volume %s is served again to its host", export.volume_id)
                    self.start(export)

    def known(self) -> list[str]:
        """The attachments whose processes have been started."""
        return [path.stem for path in self.folder.glob("*.pid")]

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.pid"

    def _pid(self, key: str) -> int | None:
        """Of the living process: its command names its file, which no other process has."""
        try:
            pid = int(self._file(key).read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if os.fsencode(self._file(key)) in words else None

    def _command(self, export: Export) -> list[str]:
        name = str(export.path).replace(",", ",,")
        tls = str(self.tls).replace(",", ",,")
        return [
            "qemu-nbd",
            "--fork",
            "--persistent",
            f"--shared={CLIENTS}",
            f"--bind={self.address}",
            f"--port={export.port}",
            f"--export-name={export.volume_id}",
            "--pid-file",
            str(self._file(export.key)),
            *(["--read-only"] if export.readonly else ["--discard=unmap"]),
            *(
                [
                    "--object",
                    f"tls-creds-x509,id=tls,endpoint=server,dir={tls},verify-peer=yes",
                    "--tls-creds=tls",
                ]
                if self.tls
                else []
            ),
            "--image-opts",
            # The two hosts of a server that moves have the same file open.
            f"driver=raw,file.driver=file,file.locking=off,file.filename={name}",
        ]


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
