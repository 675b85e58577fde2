# SPDX-License-Identifier: Apache-2.0
"""The helper that creates bridges for networks, and its client in the agent.

    python -m compute_agent.privileged.bridges  # kilonova-bridges.service; systemd opens the socket

A network agent such as Neutron's Linux bridge agent may leave the creation of bridges to the
compute service. Kilonova's agent has no right to create them. This process has this one right.

A request is the name of a bridge, which is derived from the network's id. Other names are
refused. A bridge that is up stays unchanged. A bridge that is down is incomplete: the helper was
killed, or the network agent is creating the bridge now. Both take the same steps, so the helper
completes the bridge. The helper never deletes a bridge. The network agent deletes the bridge with
the network, and may have devices in it.

This module imports no other part of the project, so that it stays small.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

LOG = logging.getLogger(__name__)

SOCKET = Path("/run/kilonova-bridges.socket")
NAME = re.compile(r"brq[0-9a-f]{8}-[0-9a-f]{2}")
DEVICES, IPV6 = Path("/sys/class/net"), Path("/proc/sys/net/ipv6/conf")
IFF_UP = 1
#: The first descriptor that systemd passes (sd_listen_fds).
SYSTEMD_DESCRIPTOR = 3
#: Limits for a request (bytes, seconds), and for one step (seconds), which may wait for a lock of
#: the kernel.
MOST_BYTES, CALL_SECONDS, STEP_SECONDS = 64, 5.0, 20.0


class NotMade(Exception):
    """The bridge could not be created or set up. The text contains the reason."""


class BridgeHelper:
    """The agent's client of the helper."""

    def __init__(self, path: Path = SOCKET) -> None:
        self._path = path

    def ensure(self, names: Iterable[str]) -> None:
        """Let the helper create the bridges of networks in ``names``, and bring them up.

        Names that do not match ``NAME`` are ignored. Without a helper on this host nothing happens.
        A failure is only logged. The start of a guest later fails if its bridge is still missing.
        """
        for name in sorted({name for name in names if NAME.fullmatch(name)}):
            try:
                refusal = self._request(name)
            except FileNotFoundError:
                # Without a helper the network agent makes the bridges of this host.
                return
            except OSError as error:
                refusal = str(error)
            if refusal:
                LOG.warning(
                    "kilonova-bridges did not make a bridge",
                    extra={"parts": {"bridge": name, "problem": refusal}},
                )

    def _request(self, name: str) -> str:
        """Request a bridge from the helper, and return the answer as in ``serve``: "" or a refusal.

        Raises:
            FileNotFoundError: This host has no helper.
            OSError: The helper cannot be reached or does not answer in time.
        """
        with socket.socket(socket.AF_UNIX) as helper:
            helper.settimeout(CALL_SECONDS + 2 * STEP_SECONDS)
            helper.connect(str(self._path))
            helper.sendall(name.encode())
            helper.shutdown(socket.SHUT_WR)
            return _read(helper, 4096).decode(errors="replace")


def serve(where: socket.socket) -> None:
    """Call ``make`` for the name from each caller, one after the other, until the process ends.

    The answer to the caller is the text of a ``NotMade`` or OSError, which is also logged, and
    empty on success.

    Args:
        where: The listening socket.
    """
    while True:
        caller, _ = where.accept()
        with caller, contextlib.suppress(OSError):
            caller.settimeout(CALL_SECONDS)
            name = _read(caller, MOST_BYTES).decode(errors="replace")
            try:
                make(name)
            except (NotMade, OSError) as error:
                LOG.warning("%s", error)
                caller.sendall(str(error).encode())


def make(name: str) -> None:
    """Create a bridge if no device has the name, and bring the bridge up if it is down.

    A device of this name that is up is not changed, whether a bridge or not. The host gets no IPv6
    address on a bridge that this function brings up.

    Raises:
        NotMade: The name is not that of a network's bridge, a device that is down and not a bridge
            has the name, or ip(8) failed.
        OSError: A file of the device cannot be read or written.
    """
    if not NAME.fullmatch(name):
        raise NotMade(f"{name!r} is not the name of a network's bridge")
    device = DEVICES / name
    existed = device.exists()
    if not existed:
        # As in Neutron: no spanning tree, and a port forwards packets as soon as it is up.
        refusal = _ip("link", "add", name, "type", "bridge", "stp_state", "0", "forward_delay", "0")
        if refusal and not device.exists():
            raise NotMade(f"the bridge {name} cannot be created: {refusal}")
    if not (device / "bridge").is_dir():
        raise NotMade(f"the device {name} is not a bridge; delete it: ip link delete {name}")
    if existed and int((device / "flags").read_text(), 16) & IFF_UP:
        return
    # The host itself must not be reachable on a tenant's network. A kernel without IPv6 lacks the
    # file.
    with contextlib.suppress(FileNotFoundError):
        (IPV6 / name / "disable_ipv6").write_text("1")
    if refusal := _ip("link", "set", name, "up"):
        raise NotMade(f"the bridge {name} cannot be set up: {refusal}")


def _ip(*arguments: str) -> str:
    """Run ip(8). Return the reason of a failure, or "" on success.

    A missing program, and a run longer than ``STEP_SECONDS``, are failures too.
    """
    try:
        process = subprocess.run(
            ["ip", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=STEP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (
        (process.stderr.decode(errors="replace").strip() or "ip gave no reason")
        if process.returncode
        else ""
    )


def _read(connection: socket.socket, most: int) -> bytes:
    """Return the bytes that arrive until the other side ends or more than ``most`` have arrived.

    The result has at most twice as many bytes.
    """
    data = b""
    while len(data) <= most and (piece := connection.recv(most)):
        data += piece
    return data


def main() -> int:
    """Serve the socket that systemd passes. Without a socket, exit with an error."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        sys.exit(
            "systemd passed no socket to this process: run systemctl start kilonova-bridges.socket"
        )
    serve(socket.socket(fileno=SYSTEMD_DESCRIPTOR))
    return 0


if __name__ == "__main__":
    sys.exit(main())
