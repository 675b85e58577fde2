# SPDX-License-Identifier: Apache-2.0
"""Become a process of a host on this machine.

``python deploy/one_machine/machine/inside.py NETWORK HOST BOOT_ID [HIDDEN …] -- COMMAND …``

deploy/one_machine/cloud/processes.py starts libvirtds with this program, and agents too if the
supervisor cannot fork them. The process enters the host's network and makes private mounts. Then
the process becomes COMMAND, with the same process id. Invariant: the mounts are invisible to other
processes.

* NETWORK is the file of the host's network namespace.
* HOST is the host name of the process.
* BOOT_ID is a file that replaces /proc/sys/kernel/random/boot_id. A host boots and loses power
while the kernel, which all hosts share, runs on. Programs that read the boot id must notice this.
* HIDDEN are folders of other hosts. The process sees empty folders in their place.
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
ADVICE = "Run ./deploy/up, or ./deploy/lab up, again."
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter_network(network: Path) -> None:
    """Move this process into the network namespace of this file.

    Raises:
        OSError: The namespace does not exist, or the process may not enter a namespace.
    """
    with network.open("rb") as file:
        _check(_LIBC.setns(file.fileno(), CLONE_NEWNET), f"cannot enter {network}")


def become(network: Path, host: str, boot_id: Path, hidden: list[str]) -> None:
    """Move this process into the host's network, and give it private mounts and a host name.

    Args:
        network: The file of the host's network namespace.
        host: The name of the host.
        boot_id: The file with the host's boot id, which replaces the kernel's.
        hidden: Folders of other hosts, which are empty for this process.

    Raises:
        OSError: The namespace does not exist, or the process may not enter or make a namespace.
        CalledProcessError: A mount fails.
    """
    enter_network(network)
    _check(
        _LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS),
        "cannot make namespaces for mounts and host name, which needs root",
    )
    socket.sethostname(host)
    # Unmounts outside also happen here. Otherwise this process would keep removed namespaces alive.
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    # systemd-nspawn mounts a deleted file there, and no file can be mounted over that.
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
        sys.exit(f"A process of host {sys.argv[2]} cannot start: {problem}. {ADVICE}")
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])
