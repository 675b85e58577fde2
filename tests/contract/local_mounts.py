# SPDX-License-Identifier: Apache-2.0
"""A fake host for mounts.

A mounted share is a folder with one file, and the kernel's table is a file of the test.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.mounts import Mounts

FILE, TEXT = "hello", "from the share\n"
ROOT = Path("/")


class LocalMounts:
    """Mounts with a ``run`` that replaces mount and umount.

    Attributes:
        commands: The commands so far.
        refuses: Locations of missing shares.
        busy: True if only a lazy unmount succeeds.
    """

    def __init__(self, table: Path, by_systemd: bool = False) -> None:
        self.table, self.commands = table, []  # type: tuple[Path, list[list[str]]]
        self.refuses: set[str] = set()
        self.busy = False
        self._keep([])
        self.mounts = Mounts(by_systemd, self.run, table)

    @property
    def folders(self) -> list[Path]:
        return sorted(self.mounts.mounted() - {ROOT})

    def run(self, arguments: Sequence[str]) -> None:
        self.commands.append(list(arguments))
        *_, location, name = arguments
        folder = Path(name)
        if "umount" in arguments[0]:
            if self.busy and "--lazy" not in arguments:
                raise VerbFailed("It is busy.")
            for file in folder.iterdir():
                file.unlink()
            self._keep([other for other in self.folders if other != folder])
            return
        if location in self.refuses:
            raise VerbFailed(
                "The host could not mount or unmount a share.", details="no such share"
            )
        (folder / FILE).write_text(TEXT)
        self._keep([*self.folders, folder])

    def reboot(self) -> None:
        """Remove all mounts, as a reboot does."""
        for folder in self.folders:
            (folder / FILE).unlink()
        self._keep([])

    def _keep(self, folders: list[Path]) -> None:
        lines = ["22 1 0:21 / / rw - ext4 /dev/vda rw\n"]
        for folder in folders:
            name = str(folder).replace("\\", r"\134").replace(" ", r"\040")
            lines.append(f"40 22 0:50 / {name} rw shared:1 - nfs x rw\n")
        self.table.write_text("".join(lines))
