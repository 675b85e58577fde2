# SPDX-License-Identifier: Apache-2.0
"""Mounts of shared file systems for the guests of a host.

The libvirt driver uses this. On a host with systemd, systemd mounts the file system, because the
agent has no such right, and guests do not see mounts in the agent's own namespace. Other hosts use
mount(8). Programs run without a shell. The list of mounts comes from the kernel, because access to
the folder would block if the file server is dead.

Invariant: this module deletes no file. A folder that is not empty remains.
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
#: Mount options. On this host a tenant's share provides no devices, programs or setuid rights.
OPTIONS = "nosuid,nodev,noexec"
#: Protocol of a share -> type of the file system.
TYPES = {"NFS": "nfs"}
#: HOST:/PATH. The host may be an IPv6 address in brackets.
LOCATION = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):/[\x21-\x2b\x2d-\x7e]*")
MOUNTED, SYSTEMD = Path("/proc/self/mountinfo"), Path("/run/systemd/system")
Program = Callable[[Sequence[str]], None]


def run(arguments: Sequence[str]) -> None:
    """Run a mount program and wait for its end, for at most ``PROGRAM_TIMEOUT_SECONDS``.

    Raises:
        VerbFailed: The program fails, cannot be started, or takes too long.
    """
    try:
        process = subprocess.run(
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
    if process.returncode != 0:
        raise VerbFailed(
            "The host could not mount or unmount a share.",
            details=f"{arguments[0]} ended with {process.returncode}: {process.stderr.strip()[:1000]}",
        )


@dataclass(frozen=True)
class Mounts:
    """Mounts and unmounts shared file systems on this host.

    Attributes:
        by_systemd: True if systemd mounts the file systems, False for mount(8).
        run: Runs a program. Tests replace this.
        table: Path of the kernel's table of mounts. Tests replace this.
    """

    by_systemd: bool = False
    run: Program = run
    table: Path = MOUNTED

    def mount(self, protocol: str, location: str, folder: Path) -> None:
        """Mount a share at ``folder``, unless the folder is a mount point already.

        A missing folder is made.

        Args:
            protocol: Protocol of the share, a key of ``TYPES``.
            location: Export location, for example "10.0.0.5:/shares/7".
            folder: The mount point.

        Raises:
            VerbFailed: The protocol or the location is not supported, or the mount fails.
        """
        kind = TYPES.get(protocol)
        if kind is None:
            raise VerbFailed(
                f"Hosts cannot mount shares of protocol {protocol}, only of {', '.join(TYPES)}."
            )
        if not LOCATION.fullmatch(location):
            raise VerbFailed(
                "The share's export location is not valid; it must have the form HOST:/PATH.",
                details=f"export location {location[:200]!r}",
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
        """Unmount and remove ``folder``. A folder that is no mount point is only removed.

        A file system that cannot be unmounted, for example while in use, is detached from the
        folder at once, and unmounted when the last user ends. A missing folder is ignored.

        Raises:
            VerbFailed: The file system cannot be detached either.
            OSError: The folder is not empty, or cannot be removed.
        """
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
        """Return all mount points of this host, from the kernel's table."""
        return {Path(_unescape(line.split(" ")[4])) for line in self.table.read_text().splitlines()}


def host_mounts() -> Mounts:
    """Return a ``Mounts`` for this host, which uses systemd if systemd runs here."""
    return Mounts(by_systemd=SYSTEMD.is_dir())


def _unescape(name: str) -> str:
    """Decode the octal escapes in a path from the kernel's table, for example those of spaces."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
