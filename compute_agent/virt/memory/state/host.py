# SPDX-License-Identifier: Apache-2.0
"""A host in memory: its size, its guests, its storage, and the behaviour that a test scripts for
its verbs.

The modules beside this one do the work of the verbs on a ``MemoryHost``; ``memory.driver`` calls
them. With a state file the guests outlive the process, as those of a real host do: each change is
written before the verb returns. Tests do to this object what happens to a real host: it loses
power, a guest powers off or writes to its disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary

import os_traits

from common.domain.json_types import JsonObject
from common.domain.models import DomainState, HostInventory, NumaNode
from common.domain.wire import from_wire
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.cpu_sets import CpuSets
from compute_agent.virt.download_limit import MAX_DOWNLOADS, DownloadLimit
from compute_agent.virt.driver import SHUTDOWN
from compute_agent.virt.memory.state.consoles import EchoConsoles
from compute_agent.virt.memory.state.guest import MemoryGuest, MemoryStorage
from compute_agent.virt.memory.state.incoming import EMPTY, IncomingFolder, uri_of
from compute_agent.virt.memory.state.script import QUIET, Fail, Slow, wait
from compute_agent.virt.memory.state.state_file import BOOT_ID, FILES, HOST_ID, StateFile
from compute_agent.virt.traits import COMMON, SHARES, VOLUMES
from compute_agent.virt.volumes import EVERY_PROTOCOL

ALL_SHARED = CpuSets()
#: Guests in memory can have every device.
TRAITS = COMMON.union(
    SHARES,
    VOLUMES,
    *map(
        os_traits.get_traits,
        ("COMPUTE_STORAGE_BUS_", "COMPUTE_GRAPHICS_MODEL_", "COMPUTE_NET_VIF_MODEL_"),
    ),
)


class MemoryHost:
    """``guests`` may be given to a second object: the same host, restarted. ``inventory`` replaces
    the one that is made of the three sizes; a test may change ``size`` at any time. Hosts of this
    process with the same ``storage`` share it; without one a host has its own. Thread-safe with
    ``lock``."""

    #: URI -> host of this process that a running guest can migrate to; a simulator may set another
    #: mapping.
    reachable: MutableMapping[str, MemoryHost] = WeakValueDictionary()
    #: Id -> storage of hosts of this process.
    storages: ClassVar[WeakValueDictionary[str, MemoryStorage]] = WeakValueDictionary()

    def __init__(
        self,
        host: str = "memory",
        *,
        vcpus: int = 64,
        memory_mb: int = 262144,
        disk_gb: int = 4096,
        state_file: str | Path | None = None,
        script: dict[str, list[Slow | Fail]] | None = None,
        guests: dict[str, MemoryGuest] | None = None,
        read_images: bool = False,
        inventory: HostInventory | None = None,
        image_fetches: int = MAX_DOWNLOADS,
        storage: str = "",
        spice: bool = False,
        makes_bridges: bool = False,
    ) -> None:
        self.name = host
        self.spice = spice
        self.size: HostInventory = inventory or described(host, vcpus, memory_mb, disk_gb)
        self.script = script if script is not None else {}
        #: The last calls: verb and server.
        self.calls: deque[tuple[str, str]] = deque(maxlen=100_000)
        self.guests: dict[str, MemoryGuest] = guests if guests is not None else {}
        #: Guests whose files are here without a domain.
        self.files: dict[str, MemoryGuest] = {}
        #: Bridges that the network agent of this host has not made.
        self.missing_bridges: set[str] = set()
        #: Does this host make those of networks itself, as ``BridgeHelper`` does?
        self.makes_bridges = makes_bridges
        #: Ids of the images that are here.
        self.images: set[str] = set()
        self.read_images = read_images
        self.fetches = DownloadLimit(image_fetches)
        self.consoles = EchoConsoles()
        self.watchers: list[Callable[[str], None]] = []
        self.lock = threading.RLock()
        self.boot_id, self._host_id = str(uuid.uuid4()), str(uuid.uuid4())
        self._changed: deque[str] = deque()
        self._file = self._restored(StateFile(Path(state_file))) if state_file else None
        folder = (
            IncomingFolder(Path(state_file).resolve().with_name("arrivals")) if state_file else None
        )
        #: Server -> record of an incoming live migration.
        self.incoming: MutableMapping[str, bytes] = {} if folder is None else folder
        self.uri = uri_of(host, str(folder.path) if folder is not None else self._host_id)
        self._join(storage or self._host_id)

    def _join(self, storage: str) -> None:
        """Let other hosts find this one, and find the disks of its guests on the storage."""
        self.reachable[self.uri] = self
        self.storage = self.storages.setdefault(storage, MemoryStorage())
        for server, guest in (self.files | self.guests).items():
            there = self.storage.setdefault(server, guest)
            guest.disk, guest.local = there.disk, there.local
        self.size = dataclasses.replace(
            self.size,
            facts=self.size.facts
            | {"storage": storage, "migration": {"uri": self.uri, "address": self.name}}
            | {"spice": self.spice}
            | {"connector": self._connector(), "volume_protocols": sorted(EVERY_PROTOCOL)},
        )

    def _connector(self) -> JsonObject:
        """Who the host is to the volume service."""
        return {
            "host": self.name,
            "ip": self.size.host_ip or "127.0.0.1",
            "platform": "x86_64",
            "os_type": "linux",
            "multipath": False,
            "initiator": f"iqn.2004-10.memory:{self.name}",
        }

    def close(self) -> None:
        self.watchers.clear()
        if self._file is not None:
            self._file.close()

    # --- what happens to a real host ---
    def power_off(self, server: str) -> None:
        """The guest stops by itself, as after ``poweroff`` inside it."""
        with self.lock:
            self.set_power(server, self.guest(server), SHUTDOWN)
        self.notify_watchers()

    def write_file(self, server: str, name: str, text: str, disk: str = "") -> None:
        """The guest writes a file to its root disk, or to the named local disk."""
        with self.lock:
            guest = self.guest(server)
            files = guest.local[disk]["files"] if disk else guest.disk
            files[name] = text
            self.write(server, guest)

    def write_memory(self, server: str, name: str, text: str) -> None:
        """A program in the guest remembers a text until the guest is off."""
        with self.lock:
            guest = self.active_guest(server)
            guest.memory[name] = text
            self.write(server, guest)

    def reboot(self) -> None:
        """The host loses its power and comes back with another boot id; no guest runs."""
        with self.lock:
            self.boot_id = str(uuid.uuid4())
            if self._file is not None:
                self._file.write(BOOT_ID, self.boot_id)
            for server, guest in self.guests.items():
                guest.power_state, guest.mounted, guest.connected = SHUTDOWN, [], []
                self.consoles.end(server)
                self.write(server, guest)

    # --- for the verbs ---
    @contextlib.contextmanager
    def call(
        self,
        verb: str,
        server: str = "",
        context: VerbContext = QUIET,
        pass_by: Callable[[float, VerbContext], None] = wait,
    ) -> Iterator[None]:
        """A verb is carried out inside: record the call, do what is scripted for it before and
        after, and notify the watchers. ``pass_by``: how the verb waits."""
        self.receive_guests()
        self.calls.append((verb, server))
        with self.lock:
            behaviours = self.script.get(verb)
            behaviour = behaviours.pop(0) if behaviours else None
        if isinstance(behaviour, Fail):
            raise VerbFailed(
                behaviour.text,
                details=behaviour.details,
                retryable=behaviour.retryable,
                reason=behaviour.reason,
            )
        if isinstance(behaviour, Slow) and not behaviour.after:
            pass_by(behaviour.seconds, context)
        yield
        self.notify_watchers()
        if isinstance(behaviour, Slow) and behaviour.after:
            wait(behaviour.seconds, context)

    def guest(self, server: str) -> MemoryGuest:
        """The server's guest. VerbFailed: there is none."""
        with self.lock:
            if server not in self.guests:
                raise VerbFailed(
                    "The server has no guest on this host.", details=f"no record of {server}"
                )
            return self.guests[server]

    def active_guest(self, server: str) -> MemoryGuest:
        """The server's guest, which runs or is paused. VerbFailed: it does not."""
        guest = self.guest(server)
        if not guest.is_active:
            raise VerbFailed("The server does not run.", details=f"power state {guest.power_state}")
        return guest

    def set_power(self, server: str, guest: MemoryGuest, power_state: int) -> DomainState:
        """The guest changes its power state; returns its state."""
        if guest.power_state != power_state:
            self._changed.append(server)
        guest.power_state = power_state
        if not guest.is_active:
            self.consoles.end(server)
        guest.mounted = [share.share_id for share in guest.shares] if guest.is_active else []
        if guest.is_active:
            guest.connect()
        self.write(server, guest)
        return state_of(server, guest)

    def notify_watchers(self) -> None:
        """Call the watchers for each changed guest, without the lock: they may take locks of their
        own."""
        while self._changed:
            server = self._changed.popleft()
            for watcher in self.watchers:
                watcher(server)

    def keep_guest(self, server: str, guest: MemoryGuest) -> None:
        """A domain is made of these files."""
        self.incoming.pop(server, None)
        self.guests[server] = self.storage[server] = guest
        if server in self.files:
            self.write(server, guest)  # first: who is killed in between has lost nothing
            del self.files[server]
            self.write(FILES + server, None)

    def keep_files(self, server: str, guest: MemoryGuest) -> None:
        """These files are here without a domain."""
        self.files[server] = guest
        self.write(FILES + server, guest)

    def drop_domain(self, server: str) -> None:
        """The domain goes, its files stay where they are."""
        if self.guests.pop(server, None) is not None:
            self.write(server, None)

    def release_guest(self, server: str, guest: MemoryGuest, uri: str) -> None:
        """The guest, which runs, was handed over to the host at ``uri``: here only its files
        stay."""
        with self.lock:
            self.active_guest(server)
            guest.left = uri
            self.keep_files(server, guest)
            self.drop_domain(server)
            self._changed.append(server)
            self.consoles.end(server)

    def receive_guests(self) -> None:
        """Guests that were handed over to this host go on here."""
        with self.lock:
            records = {
                server: record for server, record in self.incoming.items() if record != EMPTY
            }
            for server, record in records.items():
                sent = json.loads(record)
                guest = from_wire(MemoryGuest, sent["guest"])
                if sent["shared"]:
                    guest.disk, guest.local = self.storage[server].disk, self.storage[server].local
                guest.fence = guest.received = sent["fence"]
                if (prepared := self.files.get(server)) is not None:
                    guest.volumes, guest.connected = prepared.volumes, prepared.connected
                self.guests[server] = guest
                self.write(server, guest)
                self.keep_guest(server, guest)
                self._changed.append(server)
        self.notify_watchers()

    def remove(self, server: str, keep_files: bool) -> None:
        """Neither domain nor files stay; ``keep_files``: those on the storage do."""
        self.incoming.pop(server, None)
        self.drop_domain(server)
        if self.files.pop(server, None) is not None:
            self.write(FILES + server, None)
        if not keep_files and (lost := self.storage.pop(server, None)) is not None:
            lost.disk.clear()
        self.consoles.end(server)

    def write(self, key: str, guest: MemoryGuest | None) -> None:
        """Keep a change in the state file, where there is one; None: the key is removed."""
        if self._file is not None:
            self._file.write(key, guest)

    def _restored(self, file: StateFile) -> StateFile:
        for key, value in file.read():
            whose, server = (
                (self.files, key.removeprefix(FILES))
                if key.startswith(FILES)
                else (self.guests, key)
            )
            if isinstance(value, MemoryGuest):
                whose[server] = value
            elif value is None:
                whose.pop(server, None)
            elif key == BOOT_ID:
                self.boot_id = value
            else:
                self._host_id = value
        files = {FILES + server: guest for server, guest in self.files.items()}
        file.begin({BOOT_ID: self.boot_id, HOST_ID: self._host_id, **self.guests, **files})
        return file


def described(
    host: str, cpus: int, memory_mb: int, disk_gb: int, sets: CpuSets = ALL_SHARED
) -> HostInventory:
    """The inventory of a host of this size. With dedicated CPUs it has one NUMA node with all of
    them."""
    shared, dedicated = sets.split(range(cpus))
    return HostInventory(
        "memory",
        1,
        host,
        len(shared),
        memory_mb,
        disk_gb,
        traits=sorted(TRAITS),
        pcpus=len(dedicated),
        numa_nodes=[NumaNode(0, shared, dedicated, memory_mb)] if dedicated else [],
        facts={"supported_instances": [["x86_64", "qemu", "hvm"], ["i686", "qemu", "hvm"]]},
    )


def state_of(server: str, guest: MemoryGuest) -> DomainState:
    return DomainState(server, guest.power_state, guest.fence)
