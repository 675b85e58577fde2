# SPDX-License-Identifier: Apache-2.0
"""A host in memory: size, guests and storage, and scripted behaviour for tests.

``memory.driver`` calls the modules that implement the verbs on a ``MemoryHost``. With a state file
the guests survive the process, as those of a real host do: each change is written before the verb
returns. Tests call methods of this class for events of a real host, for example a loss of power, or
a guest that powers off.
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
    """A host in memory. Thread-safe with ``lock``.

    Args:
        host: Name of the host.
        vcpus: Number of CPUs.
        memory_mb: Memory in MiB.
        disk_gb: Disk space in GiB.
        state_file: File that keeps the guests, or None.
        script: Verb -> behaviours of the next calls.
        guests: The guests of another ``MemoryHost``, to simulate a restart of the agent.
        read_images: True to download images and verify their checksums.
        inventory: Replaces the inventory made from the sizes. Tests may change ``size`` at any
            time.
        image_fetches: Limit of simultaneous downloads. 0 means no limit.
        storage: Id of the storage. Hosts of this process with the same id share it. "" gives the
            host a separate storage.
        spice: True if guests have SPICE consoles.
        makes_bridges: True if the host makes bridges itself, as ``BridgeHelper`` does.
    """

    #: URI -> host of this process, as the destination of live migrations. A simulator may set
    #: another mapping.
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
        self.size: HostInventory = inventory or make_inventory(host, vcpus, memory_mb, disk_gb)
        self.script = script if script is not None else {}
        #: The last calls: verb and server.
        self.calls: deque[tuple[str, str]] = deque(maxlen=100_000)
        self.guests: dict[str, MemoryGuest] = guests if guests is not None else {}
        #: Guests with files and no domain, by server.
        self.files: dict[str, MemoryGuest] = {}
        #: Bridges that the network agent of this host has not made.
        self.missing_bridges: set[str] = set()
        self.makes_bridges = makes_bridges
        #: Ids of the images on this host.
        self.images: set[str] = set()
        self.read_images = read_images
        self.fetches = DownloadLimit(image_fetches)
        self.consoles = EchoConsoles()
        self.watchers: list[Callable[[str], None]] = []
        self.lock = threading.RLock()
        self.boot_id, self._host_id = str(uuid.uuid4()), str(uuid.uuid4())
        self._changed: deque[str] = deque()
        self._file = self._restore(StateFile(Path(state_file))) if state_file else None
        folder = (
            IncomingFolder(Path(state_file).resolve().with_name("arrivals")) if state_file else None
        )
        #: Server -> record of an incoming live migration.
        self.incoming: MutableMapping[str, bytes] = {} if folder is None else folder
        self.uri = uri_of(host, str(folder.path) if folder is not None else self._host_id)
        self._join(storage or self._host_id)

    def _join(self, storage: str) -> None:
        """Register this host for live migrations, and use the guests' disks on the storage.

        Disks that the storage lacks are added. The facts in ``size`` get the id of the storage, the
        addresses of this host, and the facts about consoles and volumes.
        """
        self.reachable[self.uri] = self
        self.storage = self.storages.setdefault(storage, MemoryStorage())
        for server, guest in (self.files | self.guests).items():
            stored_guest = self.storage.setdefault(server, guest)
            guest.disk, guest.local = stored_guest.disk, stored_guest.local
        self.size = dataclasses.replace(
            self.size,
            facts=self.size.facts
            | {"storage": storage, "migration": {"uri": self.uri, "address": self.name}}
            | {"spice": self.spice}
            | {"connector": self._connector(), "volume_protocols": sorted(EVERY_PROTOCOL)},
        )

    def _connector(self) -> JsonObject:
        """Return the connector properties for the volume service."""
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

    # --- Events of a real host, for tests ---
    def power_off(self, server: str) -> None:
        """Stop the guest as ``poweroff`` inside the guest does, and notify the watchers.

        Raises:
            VerbFailed: The server has no guest on this host.
        """
        with self.lock:
            self.set_power(server, self.guest(server), SHUTDOWN)
        self.notify_watchers()

    def write_file(self, server: str, name: str, text: str, disk: str = "") -> None:
        """Write a file to the guest's root disk, or to the ephemeral or swap disk named ``disk``.

        Raises:
            VerbFailed: The server has no guest on this host.
        """
        with self.lock:
            guest = self.guest(server)
            files = guest.local[disk]["files"] if disk else guest.disk
            files[name] = text
            self.write(server, guest)

    def write_memory(self, server: str, name: str, text: str) -> None:
        """Store a text in the guest's memory, which is lost at the next boot.

        Raises:
            VerbFailed: The guest is off or does not exist.
        """
        with self.lock:
            guest = self.active_guest(server)
            guest.memory[name] = text
            self.write(server, guest)

    def reboot(self) -> None:
        """Reboot the host after a loss of power: it has a new boot id, and no guest runs.

        The watchers are not notified.
        """
        with self.lock:
            self.boot_id = str(uuid.uuid4())
            if self._file is not None:
                self._file.write(BOOT_ID, self.boot_id)
            for server, guest in self.guests.items():
                guest.power_state, guest.mounted, guest.connected = SHUTDOWN, [], []
                self.consoles.end(server)
                self.write(server, guest)

    # --- For the verbs ---
    @contextlib.contextmanager
    def call(
        self,
        verb: str,
        server: str = "",
        context: VerbContext = QUIET,
        pass_by: Callable[[float, VerbContext], None] = wait,
    ) -> Iterator[None]:
        """Wrap a verb: record the call, apply the scripted behaviour, and notify the watchers.

        First, guests that have arrived by live migration are defined. The watchers are notified if
        the verb raises no exception. ``pass_by`` waits for the time of a ``Slow`` behaviour before
        the effect.

        Raises:
            VerbFailed: The script contains ``Fail`` for this call.
            Cancelled: The verb was cancelled during a ``Slow`` behaviour.
        """
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
        """Return the server's guest.

        Raises:
            VerbFailed: The server has no guest on this host.
        """
        with self.lock:
            if server not in self.guests:
                raise VerbFailed(
                    "The server has no guest on this host.", details=f"no guest of server {server}"
                )
            return self.guests[server]

    def active_guest(self, server: str) -> MemoryGuest:
        """Return the server's guest, which must run or be paused.

        Raises:
            VerbFailed: The guest is off or does not exist.
        """
        guest = self.guest(server)
        if not guest.is_active:
            raise VerbFailed(
                "The server does not run; start the server first.",
                details=f"power state {guest.power_state}",
            )
        return guest

    def set_power(self, server: str, guest: MemoryGuest, power_state: int) -> DomainState:
        """Set the power state of a guest and return the domain's state.

        An active guest gets its shares mounted and its volumes connected. A guest that is not
        active loses its mounts and its consoles, and its volumes stay connected. The caller calls
        ``notify_watchers`` without the lock.
        """
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
        """Call the watchers with each server whose guest changed its power state, left or arrived.

        Each change is reported once. The caller does not hold the lock, because watchers may take
        their own locks.
        """
        while self._changed:
            server = self._changed.popleft()
            for watcher in self.watchers:
                watcher(server)

    def keep_guest(self, server: str, guest: MemoryGuest) -> None:
        """Make the guest the server's domain, and store the guest's disks on the storage.

        The records of ``keep_files`` and of a prepared live migration are deleted. The guest is
        written to the state file only if ``keep_files`` had a record, else by the caller.
        """
        self.incoming.pop(server, None)
        self.guests[server] = self.storage[server] = guest
        if server in self.files:
            # The guest is written before the files are removed, so that a kill loses nothing.
            self.write(server, guest)
            del self.files[server]
            self.write(FILES + server, None)

    def keep_files(self, server: str, guest: MemoryGuest) -> None:
        """Store the guest's files without a domain, in place of earlier files of the server."""
        self.files[server] = guest
        self.write(FILES + server, guest)

    def drop_domain(self, server: str) -> None:
        """Remove the server's domain, if there is one. The disks on the storage remain."""
        if self.guests.pop(server, None) is not None:
            self.write(server, None)

    def release_guest(self, server: str, guest: MemoryGuest, uri: str) -> None:
        """Remove the domain of an active guest from this host, the source of its live migration.

        The guest's files remain on this host. ``uri`` is that of the destination.

        Raises:
            VerbFailed: The guest is off or does not exist.
        """
        with self.lock:
            self.active_guest(server)
            guest.left = uri
            self.keep_files(server, guest)
            self.drop_domain(server)
            self._changed.append(server)
            self.consoles.end(server)

    def receive_guests(self) -> None:
        """Define a domain for each guest that another host has written to ``self.incoming``.

        Then notify the watchers.
        """
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
        """Remove domain and files of a server, if there are any, and end the consoles.

        With ``keep_files`` the server's disks on the storage remain.
        """
        self.incoming.pop(server, None)
        self.drop_domain(server)
        if self.files.pop(server, None) is not None:
            self.write(FILES + server, None)
        if not keep_files and (removed_guest := self.storage.pop(server, None)) is not None:
            removed_guest.disk.clear()
        self.consoles.end(server)

    def write(self, key: str, guest: MemoryGuest | None) -> None:
        """Write a change to the state file, if the host has one. None removes the key."""
        if self._file is not None:
            self._file.write(key, guest)

    def _restore(self, file: StateFile) -> StateFile:
        for key, value in file.read():
            guests, server = (
                (self.files, key.removeprefix(FILES))
                if key.startswith(FILES)
                else (self.guests, key)
            )
            if isinstance(value, MemoryGuest):
                guests[server] = value
            elif value is None:
                guests.pop(server, None)
            elif key == BOOT_ID:
                self.boot_id = value
            else:
                self._host_id = value
        files = {FILES + server: guest for server, guest in self.files.items()}
        file.begin({BOOT_ID: self.boot_id, HOST_ID: self._host_id, **self.guests, **files})
        return file


def make_inventory(
    host: str, cpus: int, memory_mb: int, disk_gb: int, sets: CpuSets = ALL_SHARED
) -> HostInventory:
    """Return the inventory of a host of this size.

    With dedicated CPUs the host has one NUMA node with the CPUs of ``sets`` and the whole memory.
    """
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
    """Return the guest's state for reports and results."""
    return DomainState(server, guest.power_state, guest.fence)
