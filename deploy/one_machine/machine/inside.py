# SPDX-License-Identifier: Apache-2.0
"""Become a process of a host on this machine:
``python deploy/one_machine/machine/inside.py NETWORK HOST BOOT_ID [HIDDEN …] -- COMMAND …``.

Made for agents and libvirtds in deploy/one_machine/cloud/processes.py. NETWORK is the file of the
host's network namespace, HOST the name that it gives itself, BOOT_ID a file whose content stands in
/proc/sys/kernel/random/boot_id there: such a host boots and loses its power while the machine,
whose kernel it shares, runs on, and what asks the kernel must learn of it. HIDDEN are folders that
are other hosts': they are empty there. Then the process becomes COMMAND, with the same process id.
Must stay true: what it mounts, nobody else sees.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def become(network: Path, host: str, boot_id: Path, hidden: list[str]) -> None:
    """Enter the host's network, and mounts and a name of its own. Raises OSError,
    CalledProcessError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with network.open("rb") as file:
        _check(libc.setns(file.fileno(), CLONE_NEWNET), f"cannot enter {network}")
    _check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS), "no namespace can be made; it takes root")
    socket.sethostname(host)
    # What is unmounted outside is unmounted here too: else this process would keep namespaces that
    # were removed.
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    # systemd-nspawn mounts a deleted file there, over which nothing else can be mounted.
    subprocess.run(["umount", BOOT_ID], check=False, stderr=subprocess.DEVNULL)
    for arguments in (
        ["--bind", str(boot_id), BOOT_ID],
        *(["-t", "tmpfs", "-o", "ro", "none", folder] for folder in hidden),
    ):
        subprocess.run(["mount", *arguments], check=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    end = sys.argv.index("--")
    try:
        become(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:end])
    except (OSError, subprocess.CalledProcessError) as problem:
        sys.exit(f"{sys.argv[2]}: {problem}; run ./deploy/up, or ./deploy/lab up, again")
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])
