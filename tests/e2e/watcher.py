# SPDX-License-Identifier: Apache-2.0
"""A watcher of all hosts of a lab that proves if two domains of one server run at the same time.

The fixture ``lab_up`` in conftest.py starts the watcher. The fixture ``lab`` fails a test if the
watcher saw two. The watcher looks in two independent ways. Each host's libvirtd lists the running
domains, where a domain that waits for a migration is paused. The kernel has the CPU time of
each QEMU, whatever libvirt reports.

One look at each host proves no overlap, because a live migration may switch between two looks. The
proof is a server that runs on one host, then on another, then on the first again, all within
``MOMENT``.

Invariant: ``Sightings`` is pure, and a host that does not answer proves no overlap. A test fails if
the watcher fails, or if libvirt or the kernel had too few looks.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import libvirt

#: Three durations in seconds. PAUSE is the time between two looks. MOMENT is too short to move a
#: guest to another host and back. WORK is the CPU time between two looks that a running guest has
#: used at least, but not a guest in preparation.
PAUSE, MOMENT, WORK = 0.1, 1.0, 0.005
RUNNING = {libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_BLOCKED, libvirt.VIR_DOMAIN_SHUTDOWN}
#: Required looks per second in each way, for all hosts together. A proof needs three within MOMENT.
LEAST = 3
WAYS = ("libvirt's word", "the CPUs' time")
KERNEL = "kernel"


@dataclass(frozen=True)
class Sighting:
    """The server ran on this host at some moment between ``began`` and ``ended``."""

    host: str
    began: float
    ended: float


@dataclass
class Sightings:
    """The recent sightings in one way, by server."""

    way: str
    _seen: dict[str, deque[Sighting]] = field(default_factory=lambda: defaultdict(deque))

    def note(self, server: str, new: Sighting) -> str:
        """Record a running server.

        Returns:
            The proof of two running domains of the server at the same moment, or "".
        """
        seen = self._seen[server]
        while seen and seen[0].began < new.ended - MOMENT:
            seen.popleft()
        for first in seen:
            between = [
                sighting
                for sighting in seen
                if sighting.host != new.host
                and sighting.began >= first.ended
                and sighting.ended <= new.began
            ]
            if first.host == new.host and between:
                seen.append(new)
                other = between[0]
                return (
                    f"server {server} ran on {new.host} and {other.host} at the same moment, by {self.way}: there "
                    f"{other.began - new.ended:+.3f} s to {other.ended - new.ended:+.3f} s before it was seen here "
                    f"again, and {first.began - new.ended:+.3f} s here before"
                )
        seen.append(new)
        return ""

    def note_idle(self, server: str, host: str) -> None:
        """Record that a server does not run on a host, which ends its earlier sightings there."""
        seen = self._seen[server]
        self._seen[server] = deque(sighting for sighting in seen if sighting.host != host)


class Watcher:
    """Watches the hosts in threads.

    Args:
        uris: Host -> URI of its libvirtd.
        spaces: Host -> network namespace of its QEMU processes.

    Attributes:
        violations: All proofs and failures so far.
        ignored: Servers that a test runs twice on purpose, to test another watcher.
        looks: Number of looks so far, by host and for the kernel.
    """

    def __init__(self, uris: Mapping[str, str], spaces: Mapping[str, Path]) -> None:
        self.violations: list[str] = []
        self.ignored: set[str] = set()
        self.looks = dict.fromkeys([*uris, KERNEL], 0)
        self._stop = threading.Event()
        by_libvirt, by_kernel = map(Sightings, WAYS)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._repeat,
                args=(host, Host(host, uri, self._recorder(by_libvirt)).look),
                daemon=True,
                name=f"watch-{host}",
            )
            for host, uri in uris.items()
        ]
        self._threads.append(
            threading.Thread(
                target=self._repeat,
                args=(KERNEL, Kernel(spaces, self._recorder(by_kernel)).look),
                daemon=True,
                name="watch-kernel",
            )
        )
        self._began = time.monotonic()

    def start(self) -> Watcher:
        # libvirt prints its errors by default, but raises them too. Hosts that stop are expected.
        libvirt.registerErrorHandler(lambda context, error: None, None)
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Fail if the block has a violation, or too few looks at libvirt or the kernel."""
        before, looks, began = len(self.violations), self._looks_by_way(), time.monotonic()
        yield self
        took = time.monotonic() - began
        assert self.violations[before:] == [], "\n".join(self.violations[before:])
        for way, seen in self._looks_by_way().items():
            assert took < 1 or (seen - looks[way]) / took >= LEAST, (
                f"the watcher looked {seen - looks[way]} times by {way} in {took:.1f} s: {self.looks}"
            )

    def _looks_by_way(self) -> dict[str, int]:
        """Return the number of looks by way. Some hosts may be off, so all hosts are one sum."""
        kernel = self.looks[KERNEL]
        return dict(zip(WAYS, (sum(self.looks.values()) - kernel, kernel), strict=True))

    def _recorder(self, sightings: Sightings) -> Callable[[str, Sighting | str], None]:
        """Return a function that records a sighting, or the host on which a server is idle."""

        def note(server: str, sighting: Sighting | str) -> None:
            with self._lock:
                if isinstance(sighting, str):
                    sightings.note_idle(server, sighting)
                elif (proof := sightings.note(server, sighting)) and server not in self.ignored:
                    self.violations.append(f"{time.strftime('%H:%M:%S')} {proof}")

        return note

    def _repeat(self, name: str, look: Callable[[], bool]) -> None:
        """Look until the watcher stops. A failed look is a violation, and the loop continues."""
        while not self._stop.wait(PAUSE):
            try:
                self.looks[name] += look()
            # The problem is a violation and fails the test.
            except Exception as problem:  # noqa: BLE001
                self._complain(name, problem)

    def _complain(self, name: str, problem: Exception) -> None:
        """Record a failure, and ignore repetitions."""
        text = f"the watcher of {name} failed: {problem!r}"
        with self._lock:
            if not any(text in violation for violation in self.violations):
                self.violations.append(f"{time.strftime('%H:%M:%S')} {text}")


class Host:
    """The running domains of a host by its libvirtd, with a new connection after each failure."""

    def __init__(self, name: str, uri: str, note: Callable[[str, Sighting | str], None]) -> None:
        self._name, self._uri, self._note = name, uri, note
        self._connection: libvirt.virConnect | None = None
        self._ran: set[str] = set()

    def look(self) -> bool:
        """Record the running domains. True if libvirtd answered."""
        began = time.monotonic()
        try:
            if self._connection is None:
                self._connection = libvirt.openReadOnly(self._uri)
            running = {
                domain.UUIDString()
                for domain, state in self._states(self._connection)
                if state in RUNNING
            }
        except libvirt.libvirtError:
            self._connection = None
            return False
        now = time.monotonic()
        for server in running:
            self._note(server, Sighting(self._name, began, now))
        for server in self._ran - running:
            self._note(server, self._name)
        self._ran = running
        return True

    @staticmethod
    def _states(connection: libvirt.virConnect) -> Iterable[tuple[libvirt.virDomain, int]]:
        for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
            try:
                yield domain, domain.state()[0]
            except libvirt.libvirtError as gone:
                if gone.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                    raise


class Kernel:
    """The QEMU processes that used CPU time since the last look, by the clocks of their threads."""

    def __init__(
        self, spaces: Mapping[str, Path], note: Callable[[str, Sighting | str], None]
    ) -> None:
        self._spaces, self._note = spaces, note
        # (process, server) -> time of the look, CPU time in seconds
        self._cpu_times: dict[tuple[str, str], tuple[float, float]] = {}

    def look(self) -> bool:
        """Record the QEMU processes with CPU time since the last look. Always true."""
        hosts = {
            identity: host for host, space in self._spaces.items() if (identity := identify(space))
        }
        cpu_times = {}
        for process in Path("/proc").glob("[0-9]*"):
            began = time.monotonic()
            server, host = server_of(process), hosts.get(identify(process / "ns/net"))
            if server is None or host is None:
                continue
            cpu_time = read_cpu_time(process)
            key = (process.name, server)
            if key in self._cpu_times and cpu_time - self._cpu_times[key][1] >= WORK:
                self._note(server, Sighting(host, self._cpu_times[key][0], time.monotonic()))
            cpu_times[key] = (began, cpu_time)
        self._cpu_times = cpu_times
        return True


def server_of(process: Path) -> str | None:
    """Return the uuid in the command line of a QEMU process, or None for other processes."""
    try:
        if not (process / "comm").read_text().startswith("qemu-system"):
            return None
        match = re.search(rb"\0-uuid\0([0-9a-f-]{36})\0", (process / "cmdline").read_bytes())
    except OSError:
        return None
    return match[1].decode() if match else None


def read_cpu_time(process: Path) -> float:
    """Return the CPU time of a QEMU's virtual CPUs in seconds.

    If the process ends meanwhile, the sum has only the threads that were read until then.
    """
    total = 0
    try:
        threads = os.listdir(process / "task")
    except OSError:
        return 0.0
    for thread in threads:
        try:
            if (process / "task" / thread / "comm").read_text().startswith(("CPU ", "ALL CPUs")):
                total += int((process / "task" / thread / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9


def identify(space: Path) -> tuple[int, int] | None:
    """Return the device and inode of a namespace file, or None if the file does not exist."""
    try:
        status = space.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
