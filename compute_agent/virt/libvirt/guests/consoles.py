# SPDX-License-Identifier: Apache-2.0
"""The serial console's socket and log in a server's folder, and the choice of a guest's screen.

Called by ``virt.libvirt.driver``. QEMU serves one reader of a serial console at a time. A second
reader waits until the first one has gone, which ``compute_agent.consoles.consoles`` ensures. The
path of a socket has at most 107 bytes on Linux. The agent therefore refuses to start with a state
folder whose path is too long, before a guest fails to start.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.xml import running_domain
from compute_agent.virt.libvirt.xml.domain_xml import SERIAL_SOCKETS

MAX_PATH_BYTES, ID_BYTES = 107, 36
CONNECT_TIMEOUT_SECONDS = 5.0


def check_length(instances: Path) -> None:
    """Raise ValueError if the sockets of guests below ``instances`` would have too long a path."""
    excess = len(bytes(instances)) + ID_BYTES + max(map(len, SERIAL_SOCKETS)) + 2 - MAX_PATH_BYTES
    if excess > 0:
        raise ValueError(
            f"[agent] state_dir {instances.parent} is too long by {excess} bytes for the sockets of guests in this "
            "folder; use a folder with a shorter path"
        )


def screen(described: str, kind: str) -> int:
    """Return libvirt's index of the guest's screen of this kind.

    Args:
        described: The running domain's XML.
        kind: ``VNC`` or ``SPICE``.

    Raises:
        VerbFailed: The guest has no such screen.
    """
    try:
        return running_domain.screens(described).index(kind)
    except ValueError:
        raise VerbFailed(
            f"The server's guest has no {kind} console. If the guest is older than this feature of its host, rebuild "
            "the server to add the console.",
        ) from None


def open_serial(path: str) -> socket.socket:
    """Return a connection to the running guest's serial console, whose socket is at ``path``.

    Raises:
        VerbFailed: The connection fails, or ``path`` is "" because the guest has no such console.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_TIMEOUT_SECONDS)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise VerbFailed(
            "The host cannot connect to the server's serial console. If the guest was made without a serial console, "
            "rebuild the server to add one.",
            details=f"{path or 'no socket'}: {error}",
        ) from error
    connection.settimeout(None)
    return connection


def output(folder: Path, limit: int) -> str:
    """Return the last ``limit`` bytes of the console log, decoded with replacement characters.

    If the log was rotated and is shorter, the result begins in the older part.

    Args:
        folder: Folder of the server.
        limit: Number of bytes.

    Raises:
        VerbFailed: There is no console log on this host.
    """
    log = folder / "console.log"
    # virtlogd rotates a long log. The end of the older part is in ".0".
    text = _read_tail(log, limit)
    if text is None:
        raise VerbFailed("The server has no console log on this host.", details=f"no file {log}")
    if len(text) < limit:
        text = (_read_tail(log.with_name("console.log.0"), limit - len(text)) or b"") + text
    return text.decode(errors="replace")


def _read_tail(path: Path, limit: int) -> bytes | None:
    """Return the last ``limit`` bytes of a file, or None if the file does not exist."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            return file.read(max(0, limit))
    except FileNotFoundError:
        return None
