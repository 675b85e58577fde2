# SPDX-License-Identifier: Apache-2.0
"""The host that guests in memory live on: its size, its power, its script, and what it remembers.

``virt.memory`` adds the verbs. ``script`` makes any verb slow or fail, one behaviour for each call; ``calls`` tells
what was asked. With ``state_file`` the guests outlive the process, as real ones do when an agent is killed: each
change is a line written before the verb returns. Tests do here what happens to a real host: its power goes, a guest
powers itself off, writes to its disk or remembers something.
"""
from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary

import os_traits

from common import errors
from common.models import Cell, DomainState, HostInventory, ImageRef, Interface
from compute_agent.cpu_sets import CpuSets
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN, Cancelled, ImageReader, Run, VerbFailed
from compute_agent.virt.fetches import FETCHES, Fetches
from compute_agent.virt.interfaces import no_bridge, plugs, when_bridged
from compute_agent.virt.memory_arrivals import Folder, uri_of
from compute_agent.virt.memory_console import Consoles
from compute_agent.virt.memory_guest import BOOT_ID, FILES, HOST_ID, Guest, GuestFile, Storage, read_disk
from compute_agent.virt.memory_script import QUIET, Fail, Slow, wait
from compute_agent.virt.traits import COMMON, OURS

#: Bytes of an image that are looked at for a disk's files.
MOST_KEPT = 1 << 20
ALL_SHARED = CpuSets()


class MemoryHost:
    """``guests`` may be shared by two of them: the same host, restarted. ``inventory``: in place of one made of the
    three sizes; ``size`` may be replaced at any time, as a host that is changed. ``storage``: the id of what its disks
    are on; hosts of this process with the same one share it, and without one a host has its own."""

    #: The hosts that a running guest can go to: all of this process, unless a simulator gives a host others.
    reachable: MutableMapping[str, MemoryHost] = WeakValueDictionary()
    #: What the hosts of this process have their disks on.
    storages: ClassVar[WeakValueDictionary[str, Storage]] = WeakValueDictionary()

    def __init__(self, host: str = "memory", *, vcpus: int = 64, memory_mb: int = 262144, disk_gb: int = 4096,
                 state_file: str | Path | None = None, script: dict[str, list[Slow | Fail]] | None = None,
                 guests: dict[str, Guest] | None = None, read_images: bool = False,
                 inventory: HostInventory | None = None, image_fetches: int = FETCHES, storage: str = "") -> None:
        self.name, self.size = host, inventory or described(host, vcpus, memory_mb, disk_gb)
        self.script = script if script is not None else {}
        self.calls: deque[tuple[str, str]] = deque(maxlen=100_000)
        self.guests: dict[str, Guest] = guests if guests is not None else {}
        #: Guests of which only the files are here.
        self.files: dict[str, Guest] = {}
        #: Bridges that the network's part on this host has not made.
        self.missing_bridges: set[str] = set()
        self._boot_id, self._host_id = str(uuid.uuid4()), str(uuid.uuid4())
        self._read_images = read_images
        self._fetches = Fetches(image_fetches)
        #: Ids of the images that are here.
        self.images: set[str] = set()
        self._watchers: list[Callable[[str], None]] = []
        self._changed: deque[str] = deque()
        self._consoles = Consoles()
        self._lock = threading.RLock()
        self._file = self._restored(GuestFile(Path(state_file))) if state_file else None
        folder = Folder(Path(state_file).resolve().with_name("arrivals")) if state_file else None
        #: Guests that come while they run.
        self.arrivals: MutableMapping[str, bytes] = {} if folder is None else folder
        self.uri = uri_of(host, str(folder.path) if folder is not None else self._host_id)
        self._join(storage or self._host_id)

    def _join(self, storage: str) -> None:
        """Be found by other hosts, and find one's disks on the storage."""
        self.reachable[self.uri] = self
        self.storage = self.storages.setdefault(storage, Storage())
        for server, guest in (self.files | self.guests).items():
            there = self.storage.setdefault(server, guest)
            guest.disk, guest.local = there.disk, there.local
        self.size = dataclasses.replace(self.size, facts=self.size.facts | {
            "storage": storage, "migration": {"uri": self.uri, "address": self.name}})

    def boot_id(self) -> str:
        return self._boot_id

    def watch(self, changed: Callable[[str], None]) -> None:
        self._watchers.append(changed)

    def close(self) -> None:
        self._watchers.clear()
        if self._file is not None:
            self._file.close()

    def power_off(self, server: str) -> None:
        """The guest stops by itself, as after ``poweroff`` inside it."""
        with self._lock:
            self._power(server, self._guest(server), SHUTDOWN)
        self._tell()

    def write_file(self, server: str, name: str, text: str, disk: str = "") -> None:
        """The guest writes a file to its own disk, or to this one beside it."""
        with self._lock:
            guest = self._guest(server)
            files = guest.local[disk]["files"] if disk else guest.disk
            files[name] = text
            self._write(server, guest)

    def write_memory(self, server: str, name: str, text: str) -> None:
        """A program in the guest remembers something, until the guest is off."""
        with self._lock:
            guest = self._active(server)
            guest.memory[name] = text
            self._write(server, guest)

    def reboot_host(self) -> None:
        """The host loses its power and comes back: another boot id, and no guest runs."""
        with self._lock:
            self._boot_id = str(uuid.uuid4())
            if self._file is not None:
                self._file.write(BOOT_ID, self._boot_id)
            for server, guest in self.guests.items():
                guest.power_state = SHUTDOWN
                self._consoles.end(server)
                self._write(server, guest)

    def _begin(self, verb: str, server: str = "", run: Run = QUIET, pass_by: Callable[[float, Run], None] | None = None
               ) -> float:
        """Record the call and act the next scripted behaviour; returns the seconds to wait at the end. ``pass_by``:
        how the verb waits."""
        self.calls.append((verb, server))
        with self._lock:
            behaviours = self.script.get(verb)
            behaviour = behaviours.pop(0) if behaviours else None
        if isinstance(behaviour, Fail):
            raise VerbFailed(behaviour.text, details=behaviour.details, retryable=behaviour.retryable)
        if isinstance(behaviour, Slow):
            if behaviour.after:
                return behaviour.seconds
            (pass_by or wait)(behaviour.seconds, run)
        return 0.0

    def _end(self, state: DomainState, after: float, run: Run) -> DomainState:
        self._tell()
        if after:
            wait(after, run)
        return state

    def _guest(self, server: str) -> Guest:
        with self._lock:
            if server not in self.guests:
                raise VerbFailed("The server has no guest on this host.", details=f"no record of {server}")
            return self.guests[server]

    def _active(self, server: str) -> Guest:
        guest = self._guest(server)
        if guest.power_state not in (RUNNING, PAUSED):
            raise VerbFailed("The server does not run.", details=f"power state {guest.power_state}")
        return guest

    def _before_start(self, server: str, interfaces: list[Interface], run: Run) -> None:
        """Wait until a guest that is off can be started with these interfaces; whether it may run."""
        guest = self.guests.get(server)
        if guest is None or guest.power_state not in (RUNNING, PAUSED):
            self._await_bridges(interfaces, run)
        if guest is None or guest.power_state != RUNNING:
            run.require_lease()

    def _await_bridges(self, interfaces: list[Interface], run: Run) -> None:
        needed = [plug.bridge for plug in plugs(interfaces)]

        def look() -> None:
            if missing := self.missing_bridges.intersection(needed):
                raise no_bridge(f"no bridge {', '.join(sorted(missing))}")
        when_bridged(run, look)

    def _start(self, server: str, guest: Guest, fence: int, paused: bool = False) -> DomainState:
        """Boot it; one that is paused or saved goes on where it was. ``paused``: its CPUs wait, or go on waiting."""
        guest.fence = fence
        waits = paused and not guest.saved and guest.power_state != RUNNING
        if guest.power_state not in (RUNNING, PAUSED) and not guest.saved:
            guest.boots += 1
            guest.memory = {}
            guest.console += f"kilonova memory guest: booting\nid: {server}\nboot: {guest.boots}\n"
        if guest.power_state not in (RUNNING, PAUSED):
            guest.started = time.time()
        guest.saved, guest.offered = False, ""
        self._power(server, guest, PAUSED if waits else RUNNING)
        return state_of(server, guest)

    def _power(self, server: str, guest: Guest, power_state: int) -> None:
        if guest.power_state != power_state:
            self._changed.append(server)
        guest.power_state = power_state
        if power_state not in (RUNNING, PAUSED):
            self._consoles.end(server)
        self._write(server, guest)

    def _tell(self) -> None:
        """Watchers are called without the lock: they may take locks of their own."""
        while self._changed:
            server = self._changed.popleft()
            for watcher in self._watchers:
                watcher(server)

    def _await_shutdown(self, server: str, timeout: float, run: Run) -> None:
        """A guest that ignores ACPI costs the whole ``timeout``; any other powers off at once."""
        guest = self._guest(server)
        if guest.power_state == RUNNING and guest.ignores_acpi:
            wait(timeout, run)

    def _keep(self, server: str, guest: Guest) -> None:
        """A domain is made of these files."""
        self.arrivals.pop(server, None)
        if self.files.pop(server, None) is not None:
            self._write(FILES + server, None)
        self.guests[server] = self.storage[server] = guest

    def _lay(self, server: str, guest: Guest) -> None:
        """These files have no domain."""
        self.files[server] = guest
        self._write(FILES + server, guest)

    def _forget(self, server: str, keep_files: bool) -> None:
        """Neither a domain nor files; ``keep_files``: what lies on the storage stays there."""
        self.arrivals.pop(server, None)
        for whose, key in ((self.guests, server), (self.files, FILES + server)):
            if whose.pop(server, None) is not None:
                self._write(key, None)
        if not keep_files and (lost := self.storage.pop(server, None)) is not None:
            lost.disk.clear()

    def _write(self, server: str, guest: Guest | None) -> None:
        if self._file is not None:
            self._file.write(server, guest)

    def _restored(self, file: GuestFile) -> GuestFile:
        for key, value in file.read():
            whose, server = (self.files, key.removeprefix(FILES)) if key.startswith(FILES) else (self.guests, key)
            if key == BOOT_ID:
                self._boot_id = value
            elif key == HOST_ID:
                self._host_id = value
            elif value is None:
                whose.pop(server, None)
            else:
                whose[server] = value
        files = {FILES + server: guest for server, guest in self.files.items()}
        file.begin({BOOT_ID: self._boot_id, HOST_ID: self._host_id, **self.guests, **files})
        return file

    def _fetch(self, image: ImageRef | None, read_image: ImageReader, run: Run) -> dict[str, str]:
        """The files of a disk made of the image."""
        if image is None or not self._read_images:
            return {}
        with self._fetches.one(run):
            run.phase("fetching image")
            content = _read(image, read_image, run)
        self.images.add(image.id)
        return read_disk(content)


#: Guests in memory can have every device.
TRAITS = COMMON.union(OURS, *map(os_traits.get_traits, ("COMPUTE_STORAGE_BUS_", "COMPUTE_GRAPHICS_MODEL_",
                                                        "COMPUTE_NET_VIF_MODEL_")))


def described(host: str, cpus: int, memory_mb: int, disk_gb: int, sets: CpuSets = ALL_SHARED) -> HostInventory:
    """The inventory of a host of this size. Where CPUs are dedicated it has one cell with all of them."""
    shared, dedicated = sets.split(range(cpus))
    return HostInventory(
        "memory", 1, host, len(shared), memory_mb, disk_gb, traits=sorted(TRAITS), pcpus=len(dedicated),
        cells=[Cell(0, shared, dedicated, memory_mb)] if dedicated else [],
        facts={"supported_instances": [["x86_64", "qemu", "hvm"], ["i686", "qemu", "hvm"]]})


def state_of(server: str, guest: Guest) -> DomainState:
    return DomainState(server, guest.power_state, guest.fence)


def _read(image: ImageRef, read_image: ImageReader, run: Run) -> bytes:
    digest = hashlib.new(image.hash_algo) if image.hash_algo else None
    content = b""
    try:
        for chunk in read_image(image.id):
            if run.cancelled():
                raise Cancelled
            content += chunk[:MOST_KEPT - len(content)]
            if digest:
                digest.update(chunk)
    except errors.NotFound as gone:
        raise VerbFailed(gone.text, details=f"image {image.id}") from gone
    if digest and digest.hexdigest() != image.hash_value:
        raise VerbFailed("The image does not have the checksum that the image service gave for it.")
    return content
