# SPDX-License-Identifier: Apache-2.0
"""File systems of shares that a host mounts for its guests, and whether it can.

Called by ``virt.libvirt.shares``. Where systemd rules the host it is asked to mount: the agent
itself may not, and what it mounted in its own namespace no guest would see. Elsewhere mount(8) does
it. Programs are given arguments, never a shell's text. What is mounted is read from the kernel: a
look at the folder would wait for a file server that is dead. Must stay true: nothing here removes a
file; a folder that is not empty stays.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compute_agent.verb_context import VerbFailed

PROGRAM_TIMEOUT_SECONDS = 60.0
#: Nothing on a tenant's share is a device, a program or another user's right here.
OPTIONS = "nosuid,nodev,noexec"
#: Protocol of a share -> type of its file system.
TYPES = {"NFS": "nfs"}
#: HOST:/PATH, where a host may be an address of IPv6 in brackets.
LOCATION = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):/[\x21-\x2b\x2d-\x7e]*")
MOUNTED, SYSTEMD = Path("/proc/self/mountinfo"), Path("/run/systemd/system")
Program = Callable[[Sequence[str]], None]


def run(arguments: Sequence[str]) -> None:
    """Run a program to its end. VerbFailed when it fails."""
    try:
        done = subprocess.run(
            list(arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VerbFailed(
            "The host could not mount or unmount a share.", details=f"{arguments[0]}: {error}"
        ) from error
    if done.returncode != 0:
        raise VerbFailed(
            "The host could not mount or unmount a share.",
            details=f"{arguments[0]} ended with {done.returncode}: {done.stderr.strip()[:1000]}",
        )


@dataclass(frozen=True)
class Mounts:
    """``by_systemd``: does systemd mount here? ``run`` and ``mounted`` are the host's own unless a
    test says so."""

    by_systemd: bool = False
    run: Program = run
    table: Path = MOUNTED

    def mount(self, protocol: str, location: str, folder: Path) -> None:
        """Have it mounted there. Repeatable. VerbFailed: it cannot be."""
        kind = TYPES.get(protocol)
        if kind is None:
            raise VerbFailed(f"This host mounts no shares of protocol {protocol}.")
        if not LOCATION.fullmatch(location):
            raise VerbFailed(
                "The share's export location is none that a host could mount.",
                details=location[:200],
            )
        folder.mkdir(parents=True, exist_ok=True)
        if folder in self.mounted():
            return
        if self.by_systemd:
            self.run(
                [
                    "systemd-mount",
                    "--quiet",
                    "--collect",
                    f"--type={kind}",
                    f"--options={OPTIONS}",
                    "--",
                    location,
                    str(folder),
                ]
            )
        else:
            self.run(["mount", "-t", kind, "-o", OPTIONS, "--", location, str(folder)])

    def unmount(self, folder: Path) -> None:
        """Have nothing mounted there; whatever still uses it keeps it until it ends. Repeatable."""
        if folder in self.mounted():
            try:
                self.run(
                    ["systemd-umount", "--quiet", "--", str(folder)]
                    if self.by_systemd
                    else ["umount", "--", str(folder)]
                )
            except VerbFailed:
                if folder in self.mounted():
                    self.run(["umount", "--lazy", "--", str(folder)])
        with suppress(FileNotFoundError):
            folder.rmdir()

    def mounted(self) -> set[Path]:
        """Where file systems are mounted."""
        return {Path(_plain(line.split(" ")[4])) for line in self.table.read_text().splitlines()}


def host_mounts() -> Mounts:
    """As this host mounts."""
    return Mounts(by_systemd=SYSTEMD.is_dir())


def _plain(name: str) -> str:
    """A path as the kernel writes it: blanks and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)
