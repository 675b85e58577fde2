# SPDX-License-Identifier: Apache-2.0
"""The image of a guest without an operating system, which boots in 0.2 seconds of CPU time.

An emulated guest with an operating system needs ten CPU-seconds to boot. Many tests only need a
guest that runs, reacts to the power button, and keeps its memory and disk. mini_image.S counts in
memory and on the disk, and writes both to the console. The guest has no network protocol and does
not release devices that are unplugged.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".S")
#: Where a BIOS loads the first sector of a disk.
LOADED_AT = 0x7C00
#: The guest writes each fourth count to the disk, so the last counts are lost in a boot.
UNWRITTEN = 4
NUMBER = "([0-9a-f]{8})"
LINE = re.compile(
    f"run {NUMBER} canary {NUMBER} sectors {NUMBER} was {NUMBER} {NUMBER} count {NUMBER}\\r?\\n"
)


@cache
def assemble() -> bytes:
    """Return the guest's disk image: 1 MiB in the format qcow2."""
    with tempfile.TemporaryDirectory() as folder:
        part, program, image = (Path(folder, name) for name in ("part", "program", "image"))
        subprocess.run(["gcc", "-c", "-m32", "-o", part, SOURCE], check=True)
        link = ["ld", "-m", "elf_i386", "-Ttext", hex(LOADED_AT), "--oformat", "binary"]
        subprocess.run([*link, "-o", program, part], check=True)
        with program.open("ab") as file:
            file.truncate(1 << 20)
        subprocess.run(
            ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", program, image], check=True
        )
        return image.read_bytes()


@dataclass(frozen=True)
class MiniGuestState:
    """The state of a mini guest.

    Attributes:
        run: Random name of the boot, in memory.
        canary: The name of the first boot of this disk, read from the disk.
        sectors: Size of the disk at the boot, in units of 512 bytes.
        was: ``run`` and ``count`` that the boot before wrote last. Zero at the first boot.
        count: The count in memory, which rises four times per second.
    """

    run: str
    canary: str
    sectors: int
    was: tuple[str, int]
    count: int

    @classmethod
    def of(cls, console: str) -> MiniGuestState | None:
        """Return the state of the last complete line of the console, or None without a line."""
        lines = LINE.findall(console)
        if not lines:
            return None
        run, canary, sectors, was_run, was_count, count = lines[-1]
        return cls(run, canary, int(sectors, 16), (was_run, int(was_count, 16)), int(count, 16))
