# SPDX-License-Identifier: Apache-2.0
"""Never two running domains of one server: a watcher that looks at all hosts as long as the lab
lives.

Made by the fixture ``lab_up`` in conftest.py; the fixture ``lab`` fails a test in which it saw two.
It looks in two ways that know nothing of each other: each host's libvirtd tells which domains run
(one that waits for a migration is paused there), and the kernel tells how much time each QEMU's
CPUs have had, whatever libvirt believes. One look at one host after the other cannot tell that two
ran at the same moment: a live migration ends here and goes on there between two looks. So two ran
when one was seen running here, then there, then here again, all within ``MOMENT``. Must stay true:
``Sightings`` is pure; a host that cannot be asked proves nothing; a watcher that did not look in
one of the two ways, or that failed, says so.
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

#: Seconds: the pause between two looks; within which three sightings count as one moment, in which
#: no guest can be moved there and back; of CPU time between two looks that no guest has used which
#: is only being made ready.
PAUSE, MOMENT, WORK = 0.1, 1.0, 0.005
RUNNING = {libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_BLOCKED, libvirt.VIR_DOMAIN_SHUTDOWN}
#: Looks a second in each way, the hosts' together: a proof takes three within ``MOMENT``.
LEAST = 3
WAYS = ("libvirt's word", "the CPUs' time")
KERNEL = "kernel"


@dataclass(frozen=True)
class Sighting:
    """At some moment from ``began`` to ``ended`` the server ran on this host."""

    host: str
    began: float
    ended: float


@dataclass
class Sightings:
    """What was seen in one way. ``note`` returns what it proves: two of a server at the same
    moment, or ""."""

    way: str
    _seen: dict[str, deque[Sighting]] = field(default_factory=lambda: defaultdict(deque))

    def note(self, server: str, new: Sighting) -> str:
        """A server was seen running."""
        seen = self._seen[server]
        while seen and seen[0].began < new.ended - MOMENT:
            seen.popleft()
        for first in seen:
            between = [
                one
                for one in seen
                if one.host != new.host and one.began >= first.ended and one.ended <= new.began
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

    def rested(self, server: str, host: str) -> None:
        """It was seen there, and did not run: what came before is another story."""
        seen = self._seen[server]
        self._seen[server] = deque(one for one in seen if one.host != host)


class Watcher:
    """Of the hosts: name -> libvirt's URI, name -> their QEMUs' network namespace. ``violations``
    only grows; ``ignored`` are servers that a test lets run twice to see whether another watcher
    sees it."""

    def __init__(self, uris: Mapping[str, str], spaces: Mapping[str, Path]) -> None:
        self.violations: list[str] = []
        self.ignored: set[str] = set()
        self.looks = dict.fromkeys([*uris, KERNEL], 0)
        self._stop = threading.Event()
        told, kernel = map(Sightings, WAYS)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._repeat,
                args=(host, Host(host, uri, self._noting(told)).look),
                daemon=True,
                name=f"watch-{host}",
            )
            for host, uri in uris.items()
        ]
        self._threads.append(
            threading.Thread(
                target=self._repeat,
                args=(KERNEL, Kernel(spaces, self._noting(kernel)).look),
                daemon=True,
                name="watch-kernel",
            )
        )
        self._began = time.monotonic()

    def start(self) -> Watcher:
        # they are raised too, and hosts go away
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
        """For a block that fails when two were seen in it, or when nobody looked."""
        before, looks, began = len(self.violations), self._looks_by_way(), time.monotonic()
        yield self
        took = time.monotonic() - began
        assert self.violations[before:] == [], "\n".join(self.violations[before:])
        for way, seen in self._looks_by_way().items():
            assert took < 1 or (seen - looks[way]) / took >= LEAST, (
                f"the watcher looked {seen - looks[way]} times by {way} in {took:.1f} s: {self.looks}"
            )

    def _looks_by_way(self) -> dict[str, int]:
        """How often it looked so far; of the hosts some may be off, so these count together."""
        kernel = self.looks[KERNEL]
        return dict(zip(WAYS, (sum(self.looks.values()) - kernel, kernel), strict=True))

    def _noting(self, sightings: Sightings) -> Callable[[str, Sighting | str], None]:
        def note(server: str, what: Sighting | str) -> None:
            with self._lock:
                if isinstance(what, str):
                    sightings.rested(server, what)
                elif (proof := sightings.note(server, what)) and server not in self.ignored:
                    self.violations.append(f"{time.strftime('%H:%M:%S')} {proof}")

        return note

    def _repeat(self, name: str, look: Callable[[], bool]) -> None:
        """A look that fails fails the test, and is not the last one."""
        while not self._stop.wait(PAUSE):
            try:
                self.looks[name] += look()
            except Exception as problem:  # noqa: BLE001  # it is told, and fails the test
                self._complain(name, problem)

    def _complain(self, name: str, problem: Exception) -> None:
        """Once; while it goes on, looks are missing."""
        text = f"the watcher of {name} failed: {problem!r}"
        with self._lock:
            if not any(text in one for one in self.violations):
                self.violations.append(f"{time.strftime('%H:%M:%S')} {text}")


class Host:
    """What a host's libvirtd says runs; asked anew each time it was away."""

    def __init__(self, name: str, uri: str, note: Callable[[str, Sighting | str], None]) -> None:
        self._name, self._uri, self._note = name, uri, note
        self._connection: libvirt.virConnect | None = None
        self._ran: set[str] = set()

    def look(self) -> bool:
        """Was it asked, and did it answer?"""
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
    """Which QEMUs' CPUs worked since the last look, by their threads' own clocks."""

    def __init__(
        self, spaces: Mapping[str, Path], note: Callable[[str, Sighting | str], None]
    ) -> None:
        self._spaces, self._note = spaces, note
        self._worked: dict[
            tuple[str, str], tuple[float, float]
        ] = {}  # (process, server): when, seconds

    def look(self) -> bool:
        """Always answered: the kernel is there."""
        hosts = {
            identity: host for host, space in self._spaces.items() if (identity := identify(space))
        }
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            began = time.monotonic()
            server, host = server_of(process), hosts.get(identify(process / "ns/net"))
            if server is None or host is None:
                continue
            worked = work(process)
            key = (process.name, server)
            if key in self._worked and worked - self._worked[key][1] >= WORK:
                self._note(server, Sighting(host, self._worked[key][0], time.monotonic()))
            found[key] = (began, worked)
        self._worked = found
        return True


def server_of(process: Path) -> str | None:
    """The uuid that a QEMU was started with."""
    try:
        if not (process / "comm").read_text().startswith("qemu-system"):
            return None
        found = re.search(rb"\0-uuid\0([0-9a-f-]{36})\0", (process / "cmdline").read_bytes())
    except OSError:
        return None
    return found[1].decode() if found else None


def work(process: Path) -> float:
    """Seconds that its guest's CPUs have had; a process that ends meanwhile has what was read so
    far."""
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
    """What tells a namespace from others."""
    try:
        found = space.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
