# SPDX-License-Identifier: Apache-2.0
"""Delays of an agent's other work by image bombs: ``python -m tests.bench.bombs``, about a minute.

The helpers of an agent inspect small files that declare large sizes and unpack a compressed file,
several at a time and without a pause. Meanwhile the same process does the work of an exchange (list
the domains, write a result to the journal) and inspects a valid image. The benchmark prints p50 and
p99 of both, with and without bombs. It asserts no limits.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.domain.models import Result
from compute_agent.journal import Journal
from compute_agent.sandbox import client
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.disks import inspection, qemu_img
from compute_agent.virt.libvirt.xml.domain_xml import Disk
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import QUIET
from tests.contract.hostile_images import corpus
from tests.unit.compute_agent.test_qcow2 import sound

SECONDS, PAUSE, UNPACKED = 20.0, 0.01, 256 * 1024**2


class Attack:
    """Threads that inspect or unpack bombs repeatedly until ``end``."""

    def __init__(self, folder: Path, inspecting: int, unpacking: int) -> None:
        self._over = threading.Event()
        self.done = 0
        bombs = [
            folder / f"bomb{number}"
            for number, file in enumerate(
                candidate
                for candidate in corpus(folder / "canary")
                if "bytes" in candidate.name or "4 TiB" in candidate.name
            )
        ]
        works = [
            lambda number=number: self._inspect(bombs[number % len(bombs)])
            for number in range(inspecting)
        ]
        works += [lambda number=number: self._unpack(folder, number) for number in range(unpacking)]
        self._threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]
        for thread in self._threads:
            thread.start()

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._over.is_set():
            with suppress(VerbFailed):
                work()
            self.done += 1

    def _inspect(self, bomb: Path) -> None:
        inspection.inspect_whole(bomb, "qcow2", QUIET)
        inspection.require_opens(bomb, "qcow2", QUIET)

    def _unpack(self, folder: Path, number: int) -> None:
        qemu_img.copy(Disk(folder / "packed"), folder / f"unpacked{number}", UNPACKED, QUIET)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def prepare(folder: Path) -> None:
    """Write the bombs, a valid image, and a compressed image that unpacks to many bytes."""
    for number, file in enumerate(
        candidate
        for candidate in corpus(folder / "canary")
        if "bytes" in candidate.name or "4 TiB" in candidate.name
    ):
        (folder / f"bomb{number}").write_bytes(file.content)
    (folder / "sound").write_bytes(sound())
    with (folder / "raw").open("wb") as raw:
        for _ in range(UNPACKED // 1024**2):
            raw.write(b"x" * 1024**2)
    subprocess.run(
        [
            "qemu-img",
            "convert",
            "-c",
            "-f",
            "raw",
            "-O",
            "qcow2",
            folder / "raw",
            folder / "packed",
        ],
        check=True,
    )
    (folder / "raw").unlink()


def measure(work: Callable[[], object]) -> str:
    """Repeat the work for ``SECONDS`` and return p50 and p99 of the duration."""
    took, until = [], time.monotonic() + SECONDS
    while (start := time.monotonic()) < until:
        work()
        took.append(1000 * (time.monotonic() - start))
        # Real callers pause between requests, too.
        time.sleep(PAUSE)
    took.sort()
    return f"p50 {took[len(took) // 2]:.1f} ms, p99 {took[len(took) * 99 // 100]:.1f} ms of {len(took)}"


def main() -> None:
    """Print two lines for each number of bombs."""
    with tempfile.TemporaryDirectory(prefix="kn-bombs-", dir="/var/tmp") as name:
        folder = Path(name)
        prepare(folder)
        driver, journal = MemoryDriver(MemoryHost("h1")), Journal(folder / "agent.db")
        driver.domains()

        def exchange() -> None:
            driver.domains()
            journal.end(Result("a/s/1", "server", 1, "done"))

        for inspecting, unpacking in ((0, 0), (4, 0), (2, 2)):
            attack = Attack(folder, inspecting, unpacking)
            for title, work in (
                ("exchange", exchange),
                ("sound image", lambda: inspection.inspect_whole(folder / "sound", "qcow2", QUIET)),
            ):
                print(
                    f"{inspecting} inspected, {unpacking} unpacked at a time: {title:12} {measure(work)}",
                    flush=True,
                )
            attack.end()
            print(f"  {attack.done} bombs", flush=True)
        client.helpers().close()


if __name__ == "__main__":
    main()
