# SPDX-License-Identifier: Apache-2.0
"""Bridges of networks, where the network's agent leaves them to the compute service, as Neutron's
Linux bridge agents do: made by a process that has this one right, for the agent, which has none.

    python -m compute_agent.privileged.bridges  # kilonova-bridges.service; systemd opens the socket

A bridge is asked for by its name, which is made of its network's id; nothing of another name is
made. One that is there and up is left alone, whoever made it. One that is there and down is
half made, by a helper that was killed or by the network's agent in the same moment: both take the
same steps, so whoever comes second completes it. None is removed: the network's agent does that
with the network, and its own devices may be in it. It imports nothing of ours, so that it is small.
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
SYSTEMD_DESCRIPTOR = 3  # the first that systemd passes (sd_listen_fds)
#: A caller says a name and closes its end; a step may wait for the kernel's lock of networks.
MOST_BYTES, CALL_SECONDS, STEP_SECONDS = 64, 5.0, 20.0


class NotMade(Exception):
    """There is no bridge of that name; the text says why."""


class BridgeHelper:
    """The helper, as the agent sees it."""

    def __init__(self, path: Path = SOCKET) -> None:
        self._path = path

    def ensure(self, names: Iterable[str]) -> None:
        """The bridges of networks among ``names`` are there, where this host has a helper. One
        that cannot be made is logged: whoever needs it fails for the want of it."""
        for name in sorted({name for name in names if NAME.fullmatch(name)}):
            try:
                refusal = self._ask(name)
            except FileNotFoundError:
                return  # another makes bridges on this host
            except OSError as error:
                refusal = str(error)
            if refusal:
                LOG.warning("kilonova-bridges did not make the bridge %s: %s", name, refusal)

    def _ask(self, name: str) -> str:
        """Why there is no bridge; empty when there is one."""
        with socket.socket(socket.AF_UNIX) as helper:
            helper.settimeout(CALL_SECONDS + 2 * STEP_SECONDS)
            helper.connect(str(self._path))
            helper.sendall(name.encode())
            helper.shutdown(socket.SHUT_WR)
            return _read(helper, 4096).decode(errors="replace")


def serve(where: socket.socket) -> None:
    """Answer one caller after the other, until the process ends."""
    while True:
        caller, _ = where.accept()
        with caller, contextlib.suppress(OSError):
            caller.settimeout(CALL_SECONDS)
            try:
                make(_read(caller, MOST_BYTES).decode(errors="replace"))
            except NotMade as error:
                LOG.warning("%s", error)
                caller.sendall(str(error).encode())


def make(name: str) -> None:
    """Raises NotMade."""
    if not NAME.fullmatch(name):
        raise NotMade(f"{name!r} is no name of a network's bridge")
    device = DEVICES / name
    if not device.exists():
        # As Neutron makes it: no spanning tree, and a port forwards as soon as it is up.
        refusal = _ip("link", "add", name, "type", "bridge", "stp_state", "0", "forward_delay", "0")
        if refusal and not device.exists():
            raise NotMade(f"the bridge {name} cannot be made: {refusal}")
    elif int((device / "flags").read_text(), 16) & IFF_UP:
        return
    if not (device / "bridge").is_dir():
        raise NotMade(f"{name} is there, and is no bridge; remove it: ip link delete {name}")
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        # The host itself must not be reached on a tenant's network.
        (IPV6 / name / "disable_ipv6").write_text("1")
    if refusal := _ip("link", "set", name, "up"):
        raise NotMade(f"the bridge {name} does not come up: {refusal}")


def _ip(*arguments: str) -> str:
    """What iproute2 has against it; empty: it is done."""
    try:
        done = subprocess.run(
            ["ip", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=STEP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.decode(errors="replace").strip() or "no reason") if done.returncode else ""


def _read(by: socket.socket, most: int) -> bytes:
    """All that the other end says, if it is not more than that."""
    data = b""
    while len(data) <= most and (piece := by.recv(most)):
        data += piece
    return data


def main() -> int:
    """Serve on the socket that systemd gives."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        sys.exit("There is no socket: start it by kilonova-bridges.socket.")
    serve(socket.socket(fileno=SYSTEMD_DESCRIPTOR))
    return 0


if __name__ == "__main__":
    sys.exit(main())
