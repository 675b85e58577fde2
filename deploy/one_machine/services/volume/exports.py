# SPDX-License-Identifier: Apache-2.0
"""Exports of volumes to other hosts: a qemu-nbd process for each connection.

The processes survive the service, which finds them by their pid files in one folder. A thread
compares the processes with the rows, so a dead process is restarted on the same port. With
certificates, only hosts with a certificate of the same authority can connect.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.service.log import get_logger

LOG = get_logger("standalone.volume")
START_SECONDS, END_SECONDS = 20, 10
#: Connections of a host at a time. QEMU opens one for each channel of a migration.
CLIENTS = 16


@dataclass(frozen=True)
class Export:
    """A volume's file that one process serves at a port, under the volume's id."""

    #: The id of the attachment.
    key: str
    volume_id: str
    path: Path
    port: int
    readonly: bool


class Exports:
    """The qemu-nbd processes.

    Args:
        folder: The folder with the pid file of each process.
        address: The address at which hosts connect. "" means no exports.
        ports: The first and last port.
        tls: The folder with the certificates, or "" for plain text.
    """

    def __init__(self, folder: Path, address: str, ports: tuple[int, int], tls: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.address, self._ports, self.tls = folder, address, ports, tls
        self.lock = threading.RLock()
        """Held by threads that change attachments with connections, or the processes."""

    def free_port(self, taken: Iterable[int]) -> int | None:
        """Return a port of the range that is not in `taken` and that no program uses, or None."""
        used = set(taken)
        for port in range(self._ports[0], self._ports[1] + 1):
            if port not in used and _is_free(self.address, port):
                return port
        return None

    def start(self, export: Export) -> bool:
        """Start the process of an export unless it runs.

        Returns:
            False if the start failed. The reason is logged.
        """
        with self.lock:
            if self._pid(export.key):
                return True
            try:
                result = subprocess.run(
                    self._command(export),
                    env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    timeout=START_SECONDS,
                    check=False,
                    # The process continues when the service ends.
                    start_new_session=True,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                LOG.error(
                    "qemu-nbd for a volume cannot start", volume=export.volume_id, problem=error
                )
                return False
            if result.returncode:
                errors = result.stderr.decode(errors="replace").strip()[:300]
                LOG.error(
                    "qemu-nbd for a volume cannot start", volume=export.volume_id, problem=errors
                )
            return result.returncode == 0

    def end(self, key: str) -> None:
        """End the process of an attachment, which closes all connections to it.

        A process that still runs ``END_SECONDS`` after SIGTERM is killed. Without a process only
        the pid file is removed.
        """
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

    def settle(self, expected: Mapping[str, Export]) -> None:
        """Run exactly the processes of ``expected``: end others, and start missing processes.

        A failed start is logged.

        Args:
            expected: Id of the attachment -> the export.
        """
        with self.lock:
            for key in self.known():
                if key not in expected:
                    self.end(key)
            for key, export in expected.items():
                if self._pid(key) is None:
                    LOG.warning("the export of a volume is started again", volume=export.volume_id)
                    self.start(export)

    def known(self) -> list[str]:
        """Return the ids of the attachments with a pid file, whose process may have died."""
        return [path.stem for path in self.folder.glob("*.pid")]

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.pid"

    def _pid(self, key: str) -> int | None:
        """Return the id of the attachment's running process, or None.

        The process's command line contains the path of its pid file, so recycled ids do not match.
        """
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
            # Both hosts of a moving server open the same file.
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
