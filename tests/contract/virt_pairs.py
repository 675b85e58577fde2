# SPDX-License-Identifier: Apache-2.0
"""Pairs of hosts for moves of guests: memory driver, libvirt's test driver, and real QEMU.

A pair has two rigs of ``virt_rigs``. The destination reads the source's files through a ``Road``,
which may delay or interrupt the data. Real hosts have a network namespace and a libvirtd each, and
a wire between them.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from common.domain.models import Flavor, GuestSpec
from compute_agent.transfer.service import TransferService
from compute_agent.verb_context import Part, VerbContext, VerbFailed
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import Slow
from deploy.one_machine.machine import libvirtd
from tests.contract.virt_rigs import BOOT_SECONDS, MIGRATING_TICKS, QUIET, Rig, guests_folder
from tests.waiting import await_true

if TYPE_CHECKING:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

SECRET = "the right one"
#: The port at which real hosts accept live migrations.
PORT = 16598
LARGER = Flavor("2", "m1.micro", 1, 160, 2)
GIBIBYTE = 1 << 30
#: A libvirt test node without guests, separate from other connections.
NODE = (
    "<node><cpu><mhz>1000</mhz><model>x86_64</model><active>2</active><nodes>1</nodes><sockets>1</sockets>"
    "<cores>2</cores><threads>1</threads></cpu><memory>8388608</memory></node>"
)
Road = Callable[[Iterator[tuple[int, bytes]]], Iterator[tuple[int, bytes]]]


def pass_unchanged(data: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Return the data unchanged, as the default road."""
    return data


class Reader:
    """A ``Peer`` that reads the files of the source's driver through a road."""

    def __init__(self, rig: Rig, server: str, secret: str, road: Road) -> None:
        self._rig, self._server, self._secret, self._road = rig, server, secret, road

    def parts(self) -> list[Part]:
        return self._rig.driver.parts(self._server, self._secret)

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        return self._road(self._rig.driver.read_part(self._server, self._secret, name))


class Pair:
    """A source and a destination.

    Args:
        source: The rig of the source host.
        destination: The rig of the destination host.
        shared: True if both hosts have their disks on the same storage.
        limits: Migration options of the source's next real driver.
        listening: The address at which the source serves files, and the network namespace with that
            address, or None for this process's namespace.
    """

    def __init__(
        self,
        source: Rig,
        destination: Rig,
        shared: bool,
        limits: dict[str, int] | None = None,
        listening: tuple[str, Path | None] = ("127.0.0.1", None),
    ) -> None:
        self.source, self.destination, self.shared = source, destination, shared
        self._limits, self._listening = limits or {}, listening

    @property
    def rigs(self) -> tuple[Rig, Rig]:
        return self.source, self.destination

    def peer(self, server: str, secret: str = SECRET, road: Road = pass_unchanged) -> Reader:
        return Reader(self.source, server, secret, road)

    def transfer_service(self, **options: Any) -> TransferService:
        """Return the source's transfer service, which the destination can reach."""
        address, host = self._listening
        with inside(host) if host else nullcontext():
            return TransferService(self.source.driver, address, **options)

    def slow_migrations_down(self) -> None:
        """Slow live migrations down until the source's next restart."""
        if isinstance(self.source.driver, MemoryDriver):
            self.source.driver.host.script["live_migrate"] = [Slow(60)]
        else:
            before = dict(self._limits)
            self._limits["bandwidth"] = 2
            self.source.restart()
            self._limits.update(before)

    # --- stopped guests ---
    def off_with_canary(self, *, has_run: bool = False) -> GuestSpec:
        """Return a stopped and offered guest at the source with a canary on its disk.

        The next fence is 2. With ``has_run``, the guest booted, wrote the canary and was powered
        off. Otherwise the guest never ran.
        """
        if has_run:
            spec = self.source.boot_with_canary()
            self.source.driver.ensure_stopped(spec.server, 1, BOOT_SECONDS, QUIET)
        else:
            spec = self.source.off_with_canary()
        self.source.driver.offer(spec.server, 1, SECRET, QUIET)
        return replace(spec, fence=2)

    def transfer(
        self, spec: GuestSpec, road: Road = pass_unchanged, run: VerbContext = QUIET
    ) -> int:
        """Transfer the files to the destination and return the number of bytes."""
        peer = None if self.shared else self.peer(spec.server, road=road)
        result = self.destination.driver.receive(spec, peer, self.destination.read_image, run)
        return int(result["bytes"])

    def boot_at_destination(self, spec: GuestSpec) -> bool:
        """Install and start the guest at the destination. True if the canary is on the disk."""
        before = read_console(self.destination, spec.server).count("guest: booting")
        self.destination.driver.install(spec, True, QUIET)
        return self.destination.has_canary(spec.server, before + 1)

    # --- running guests ---
    def start_counting_guest(self) -> GuestSpec:
        """Return a running, offered guest at the source that counts in memory.

        The next fence is 2.
        """
        spec = self.source.ready(MIGRATING_TICKS)
        if isinstance(self.source.driver, MemoryDriver):
            self.source.driver.host.write_memory(spec.server, "tick", "7")
            self.source.driver.host.write_file(spec.server, "canary", "canary")
        elif self.source.real:
            before = ticks(self.source, spec.server)
            await_true(
                lambda: ticks(self.source, spec.server) > before + 3,
                BOOT_SECONDS,
                lambda: self.source.console(spec.server)[-500:],
            )
        self.source.driver.offer(spec.server, 1, SECRET, QUIET)
        return replace(spec, fence=2)

    def check_continues(self, spec: GuestSpec, ticked: int) -> None:
        """Check that the memory continues to count at the destination, without a boot there."""
        assert read_console(self.destination, spec.server).count("guest: booting") <= (
            1 if self.shared or not self.source.real else 0
        )
        if isinstance(self.destination.driver, MemoryDriver):
            guest = self.destination.driver.host.guests[spec.server]
            assert (guest.memory, guest.disk, guest.boots) == (
                {"tick": "7"},
                {"canary": "canary"},
                1,
            )
        else:
            await_true(
                lambda: ticks(self.destination, spec.server) > ticked + 3,
                BOOT_SECONDS,
                lambda: read_console(self.destination, spec.server)[-500:],
            )

    def clean(self) -> None:
        self.destination.servers = self.source.servers
        for rig in self.rigs:
            rig.clean()


def read_console(rig: Rig, server: str) -> str:
    """Return the guest's console, or "" if there is no console here yet."""
    try:
        return rig.console(server)
    except VerbFailed:
        return ""


def ticks(rig: Rig, server: str) -> int:
    """Return the last number that a real guest printed, or 0.

    Two lines that ran into each other on the console are ignored.
    """
    numbers = re.findall(
        r"^tick (\d+)\n", read_console(rig, server).replace("\r", ""), re.MULTILINE
    )
    return int(numbers[-1]) if numbers else 0


def disk_gb(rig: Rig, server: str) -> int:
    """Return the size of the server's disk in GiB, with or without a domain."""
    if isinstance(rig.driver, MemoryDriver):
        return (rig.driver.host.files | rig.driver.host.guests)[server].root_gb
    output = subprocess.run(
        [
            "qemu-img",
            "info",
            "--force-share",
            "--output=json",
            rig.folder / "instances" / server / "disk",
        ],
        check=True,
        capture_output=True,
    )
    return int(json.loads(output.stdout)["virtual-size"]) // GIBIBYTE


# --- roads ---
def cut(problem: Exception) -> Road:
    """Return a road that raises ``problem`` after the first bytes."""

    def road(data: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        yield next(data)
        raise problem

    return road


def stall_road(letting_go: threading.Event, seconds: float) -> Road:
    """Return a road that stalls after the first bytes, with an empty chunk every ``seconds``."""

    def road(data: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        at, first = next(data)
        yield at, first
        while not letting_go.wait(seconds):
            yield at + len(first), b""

    return road


def trickle(data: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Pass a few bytes at a time, slowly."""
    for at, chunk in data:
        for begin in range(0, len(chunk), 16):
            time.sleep(0.02)  # The slowness under test.
            yield at + begin, chunk[begin : begin + 16]


# --- kinds ---
def memory_pair(folder: Path, shared: bool) -> Pair:
    shelf = str(uuid.uuid4()) if shared else ""

    def rig(name: str) -> Rig:
        return Rig(
            "memory",
            folder / name,
            lambda: MemoryDriver(
                MemoryHost(
                    name, state_file=folder / name / "guests", read_images=True, storage=shelf
                )
            ),
            b"image" * 1000,
            "raw",
        )

    return Pair(rig("h1"), rig("h2"), shared)


def libvirt_test_pair(folder: Path, shared: bool, **options: Any) -> Pair:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    node = folder / "node.xml"
    node.write_text(NODE)

    def rig(name: str) -> Rig:
        home = folder if shared else folder / name
        return Rig(
            "test",
            home,
            lambda: LibvirtDriver(f"test://{node}", home, "test", **options),
            b"image" * 1000,
            "raw",
        )

    return Pair(rig("h1"), rig("h2"), shared)


class Machines:
    """Two real hosts on this machine, joined by a wire.

    Args:
        folder: A folder with a short path, for sockets.
        certified: Called with address and name of each host. Returns the folder of the certificates
            for libvirtd and QEMU. None: no TLS.
    """

    def __init__(self, folder: Path, certified: Callable[[str, str], Path] | None = None) -> None:
        self.folder = folder
        self.names = [f"kv{number}-{uuid.uuid4().hex[:6]}" for number in (1, 2)]
        self.addresses = ["10.251.7.1", "10.251.7.2"]
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run(
            "ip",
            "-n",
            self.names[0],
            "link",
            "add",
            "wire",
            "type",
            "veth",
            "peer",
            "name",
            "wire",
            "netns",
            self.names[1],
        )
        for name, address in zip(self.names, self.addresses, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wire")
            run("ip", "-n", name, "link", "set", "wire", "up")
            libvirtd.start(
                self.home(name),
                host=(Path("/run/netns", name), name),
                address=address,
                certificates=str(certified(address, name[:3])) if certified else "",
            )

    def on(self, name: str, driver: LibvirtDriver) -> LibvirtDriver:
        """Return the driver with all calls made inside this host's network namespace.

        Incoming migrations come from the other host.
        """
        source = self.addresses[1 - self.names.index(name)]
        return cast("LibvirtDriver", _InNamespace(driver, Path("/run/netns", name), source))

    def home(self, name: str) -> Path:
        return self.folder / name[:3]

    def pair(self, image: Path, shared: bool) -> Pair:
        from compute_agent.virt.libvirt.driver import LibvirtDriver
        from compute_agent.virt.libvirt.migration.live_migration import MigrationOptions

        place = guests_folder("p", self.folder)

        # Read once, because another test run on this machine may build the image again.
        limits, content = {"bandwidth": 64}, image.read_bytes()

        def rig(name: str, address: str) -> Rig:
            home, daemon = place if shared else place / name[:3], self.home(name)
            options = MigrationOptions(PORT, address, plain_text=True)
            return Rig(
                "qemu",
                home,
                lambda: self.on(
                    name,
                    LibvirtDriver(libvirtd.uri(daemon), home, migration=replace(options, **limits)),
                ),
                content,
                "qcow2",
                daemon,
            )

        source, destination = (rig(*both) for both in zip(self.names, self.addresses, strict=True))
        host = Path("/run/netns", self.names[0])
        return Pair(source, destination, shared, limits, (self.addresses[0], host))

    def end(self) -> None:
        for name in self.names:
            libvirtd.stop(self.home(name))
            run("ip", "netns", "delete", name)


class _InNamespace:
    """A proxy that runs the calls, threads and processes of a driver in a network namespace."""

    def __init__(self, driver: LibvirtDriver, space: Path, source: str) -> None:
        self._driver, self._space, self._source = driver, space, source

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._driver, name)
        if not callable(attribute):
            return attribute

        if name == "prepare_incoming":
            attribute = partial(attribute, source=self._source)

        def call(*arguments: Any, **more: Any) -> Any:
            with inside(self._space):
                return attribute(*arguments, **more)

        return call


@contextmanager
def inside(space: Path) -> Iterator[None]:
    """Run this thread in the network namespace until the end of the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as home, space.open("rb") as there:
        assert libc.setns(there.fileno(), libvirtd.CLONE_NEWNET) == 0, os.strerror(
            ctypes.get_errno()
        )
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), libvirtd.CLONE_NEWNET) == 0, os.strerror(
                ctypes.get_errno()
            )


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
