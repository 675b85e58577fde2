# SPDX-License-Identifier: Apache-2.0
"""Real guests without an operating system, which boot in a fraction of a second of CPU time.

An emulated guest with an operating system needs ten CPU-seconds to boot. Many tests only need a
guest that runs, and keeps its memory and disk. mini_guest.S counts in memory and on the disk, and
writes both to the console, from which ``MiniGuest.read_state`` reads them. The guest has an
interface but no network protocol.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.e2e.guests import LiveServer, create_server
from tests.e2e.live import BOOT, LATE, Live
from tests.waiting import await_true

SOURCE, IMAGE = Path(__file__).with_suffix(".S"), "mini"
#: Where a BIOS loads the first sector of a disk.
LOADED_AT = 0x7C00
#: The guest writes each fourth count to the disk, so the last counts are lost in a boot.
UNWRITTEN = 4
NUMBER = "([0-9a-f]{8})"
LINE = re.compile(
    f"run {NUMBER} canary {NUMBER} sectors {NUMBER} was {NUMBER} {NUMBER} count {NUMBER}\r?\n"
)


@cache
def assemble() -> bytes:
    """Return the content of the guest's disk image, 1 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        part, program = Path(folder, "part"), Path(folder, "program")
        subprocess.run(["gcc", "-c", "-m32", "-o", part, SOURCE], check=True)
        link = ["ld", "-m", "elf_i386", "-Ttext", hex(LOADED_AT), "--oformat", "binary"]
        subprocess.run([*link, "-o", program, part], check=True)
        return program.read_bytes().ljust(1 << 20, b"\0")


def find_image(live: Live) -> str:
    """Return the id of the guest's image. Create the image if the cloud has none."""
    images = live.seed.demo.image
    found = next(iter(images.images(name=IMAGE, status="active")), None)
    return str(
        (
            found
            or images.create_image(
                IMAGE, data=assemble(), disk_format="raw", container_format="bare"
            )
        ).id
    )


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


@dataclass(frozen=True)
class MiniGuest(LiveServer):
    """A guest that runs mini_guest.S."""

    def read_console_state(self) -> MiniGuestState | None:
        """Return the last state on the console. The guest may not run any more."""
        return MiniGuestState.of(self.rest.console(self.server))

    def read_state(self, seconds: float = BOOT) -> MiniGuestState:
        """Wait until the guest counts, and return its state."""
        before = self.read_console_state()

        def read_newer() -> MiniGuestState | None:
            state = self.read_console_state()
            return state if state and state != before else None

        state = await_true(
            read_newer, seconds, lambda: f"{self.name} does not count: {before}", late=LATE
        )
        assert state is not None
        return state


@contextmanager
def mini_guest(live: Live, name: str, host: str | None = None, **more: Any) -> Iterator[MiniGuest]:
    """Create a mini guest for the block, on ``host`` if given, and wait until it counts.

    ``more`` has further fields of the create request.
    """
    full_name, fields = f"{name}-{uuid.uuid4().hex[:6]}", {"image": find_image(live), **more}
    with live.only(live.cloud.hosts.index(host) + 1) if host else nullcontext():
        guest = MiniGuest(live, create_server(live, full_name, **fields), full_name)
    try:
        guest.read_state()
        yield guest
    finally:
        guest.remove()
