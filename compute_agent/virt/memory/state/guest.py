# SPDX-License-Identifier: Apache-2.0
"""One guest in memory: the record, the disk as an image, and counters.

A disk is a table of files (name -> text), so that a test sees which files an action keeps. As an
image the disk is the header of an empty qcow2, followed by this table. The image service accepts
this as qcow2, and a guest made from the image has the same files.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
import time
from dataclasses import dataclass, field

from common.domain import device_names, local_disks
from common.domain.json_types import JsonObject
from common.domain.models import (
    AttachedShare,
    AttachedVolume,
    Belongings,
    GuestSpec,
    HardwareAssignment,
    Interface,
    LocalDisk,
)
from common.domain.server_facts import HostedServer, facts_of
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN, required_hardware
from compute_agent.virt.volumes import EVERY_PROTOCOL, boots_from_volume, foreign, links

#: Version 2, no backing file, clusters of 64 KiB, a virtual size of 1 GiB, no table of clusters.
HEADER = struct.pack(
    ">4sIQIIQIIQQIIQ", b"QFI\xfb", 2, 0, 0, 16, 1 << 30, 0, 0, 0, 0, 0, 0, 0
).ljust(512, b"\0")
MARK = b'{"kilonova memory disk": '
HASH_ROUNDS = 1000
NIC_COUNTERS = tuple(
    f"{way}_{what}" for way in ("rx", "tx") for what in ("octets", "packets", "errors", "drop")
)
STATES = {RUNNING: "running", PAUSED: "paused"}


@dataclass(slots=True)
class MemoryGuest:
    """A guest of a host in memory."""

    #: One of the power states of ``common.domain.states``.
    power_state: int
    #: The fence in the metadata of the domain.
    fence: int
    #: How many times the guest was booted.
    boots: int = 0
    #: The output on the serial console.
    console: str = ""
    #: True if the guest does not power off when asked. Set by tests.
    ignores_acpi: bool = False
    #: True if the guest is suspended: the memory is saved.
    saved: bool = False
    #: The fence of the last rebuild. 0: none.
    made: int = 0
    #: The fence of the rescue in force. 0: none.
    rescue: int = 0
    #: The id of the image of the root disk. Empty: none.
    image: str = ""
    #: The files on the root disk: name -> text.
    disk: dict[str, str] = field(default_factory=dict)
    #: The salt and hash of each user's password.
    passwords: dict[str, str] = field(default_factory=dict)
    #: True if the guest agent answers. Set by tests.
    has_agent: bool = True
    #: How many NMIs the guest has received.
    nmis: int = 0
    vcpus: int = 1
    memory_mb: int = 0
    #: True if the guest has a config drive.
    config_drive: bool = False
    interfaces: list[Interface] = field(default_factory=list)
    #: True if the screen speaks SPICE beside VNC.
    spice: bool = False
    #: True if the guest releases no interface while running. Set by tests.
    holds_interfaces: bool = False
    #: When the guest was started, in seconds since the epoch.
    started: float = 0.0
    #: The options of the hardware.
    options: dict[str, str] = field(default_factory=dict)
    #: The parts of the host that the guest has to itself.
    assignment: HardwareAssignment | None = None
    #: GiB of the root disk.
    root_gb: int = 0
    #: Texts that programs of the guest keep until power-off, by name.
    memory: dict[str, str] = field(default_factory=dict)
    #: The hash of the secret with which another host may read the files. Empty: no host may.
    offered: str = ""
    #: The fence under which the guest came to this host. 0: made on this host.
    received: int = 0
    #: The URI of the host that received the guest by live migration. Empty: none.
    left: str = ""
    #: The fence of the last resize on this host. 0: none.
    resized: int = 0
    #: The disks before that resize. None: no disks are kept.
    aside: JsonObject | None = None
    #: Ephemeral and swap disks: name -> {"size_mb", "format", "files"}.
    local: dict[str, JsonObject] = field(default_factory=dict)
    shares: list[AttachedShare] = field(default_factory=list)
    #: The ids of the shares that the host has mounted for the guest.
    mounted: list[str] = field(default_factory=list)
    volumes: list[AttachedVolume] = field(default_factory=list)
    #: The ids of the volumes that the host has connected for the guest.
    connected: list[str] = field(default_factory=list)
    #: The guest's device of each volume, by the id of the volume.
    names: dict[str, str] = field(default_factory=dict)
    #: A volume of the guest with the connection of its copy. None: no volume has a copy.
    copied: AttachedVolume | None = None
    #: True if the guest releases no volume while running. Set by tests.
    holds_volumes: bool = False
    #: End of the freeze of the file systems, on the monotonic clock.
    still_until: float = 0.0
    #: Facts about the server. The ports are in ``interfaces``.
    facts: HostedServer = field(default_factory=HostedServer)

    def dress(self, spec: GuestSpec, spice: bool) -> None:
        """Change the guest to the hardware, disks, interfaces and facts of ``spec``.

        Root and ephemeral disks never shrink. Ephemeral and swap disks that ``spec`` does not
        contain are dropped. The guest has a SPICE screen if ``spice``. Volumes are not changed.

        Raises:
            VerbFailed: The requirements are invalid, or need an assignment that ``spec`` lacks.
        """
        self.spice = spice
        self.vcpus, self.memory_mb = spec.flavor.vcpus, spec.flavor.memory_mb
        if not (spec.volumes and boots_from_volume(spec.volumes)):
            self.root_gb = max(self.root_gb, spec.flavor.root_gb)
        self.local = {disk.name: self._fit_disk(disk, spec) for disk in spec.disks}
        self.config_drive, self.interfaces = spec.config_drive, list(spec.interfaces)
        self.options, self.assignment = dict(required_hardware(spec).options), spec.assignment
        self.facts = facts_of(spec)

    def take_volumes(self, spec: GuestSpec) -> None:
        """Give the guest exactly the volumes of ``spec``, and drop shares that ``spec`` lacks.

        The volumes are recorded as connected.

        Raises:
            VerbFailed: A volume is refused by ``volumes.link``. The guest is unchanged.
        """
        if spec.volumes:
            links(spec.volumes, EVERY_PROTOCOL)
        self.volumes = list(spec.volumes)
        self.names = {volume.volume_id: volume.device for volume in spec.volumes}
        self.connect()
        self.shares = [share for share in self.shares if share.share_id in spec.shares]

    def keep_only(self, has: Belongings) -> None:
        """Make the volumes and shares of a guest that does not run agree with ``has``.

        Volumes and shares that are not in ``has`` are removed. A guest that is off, and not
        suspended, also gets the missing volumes of ``has.needed``. A running guest is not changed.
        A paused guest keeps its shares.

        Raises:
            VerbFailed: The guest is paused or suspended and has a volume that is not in ``has``, or
                a needed volume is refused by ``volumes.link``.
        """
        others = {volume.volume_id for volume in self.volumes} - set(has.volumes)
        if self.power_state == RUNNING:
            return
        if others and (self.saved or self.power_state == PAUSED):
            raise foreign(others)
        self.volumes = [volume for volume in self.volumes if volume.volume_id not in others]
        if not self.is_active:
            self.shares = [share for share in self.shares if share.share_id in has.shares]
        self.connected = [volume_id for volume_id in self.connected if volume_id not in others]
        if self.power_state == SHUTDOWN and not self.saved:
            attached_ids = {volume.volume_id for volume in self.volumes}
            missing_volumes = [
                volume for volume in has.needed if volume.volume_id not in attached_ids
            ]
            links(missing_volumes, EVERY_PROTOCOL)
            self.volumes += missing_volumes

    def name_new_volume(self, volume: AttachedVolume) -> None:
        """Give a volume without a device name the first free name, as Linux does at hot plug.

        A volume with a name keeps it.

        Raises:
            Forbidden: All names for the volume's bus are in use.
        """
        used = {*self._local_names(), *self.names.values()}
        self.names.setdefault(volume.volume_id, device_names.next_free(used, volume.bus))

    def name_volumes(self) -> None:
        """Name all volumes again in the order of their names, as Linux does at boot.

        The volume with boot index 0 gets the name of the root disk.

        Raises:
            Forbidden: No name is free for a volume. Disks of buses with one prefix, including the
                local disks, share 26 names.
        """
        volumes = sorted(
            (volume for volume in self.volumes if volume.boot_index != 0),
            key=lambda volume: self.names.get(volume.volume_id, volume.device),
        )
        names = device_names.assign_names(self._local_names(), [volume.bus for volume in volumes])
        self.names = {volume.volume_id: name for volume, name in zip(volumes, names, strict=True)}
        self.names |= {
            volume.volume_id: self._root() for volume in self.volumes if volume.boot_index == 0
        }

    def _root(self) -> str:
        buses = [volume.bus for volume in self.volumes if volume.boot_index == 0]
        return device_names.root_name(buses[0] if buses else self.options.get("disk_bus"))

    def _local_names(self) -> list[str]:
        bus = self.options.get("disk_bus")
        return [self._root(), *device_names.assign_names([self._root()], [bus] * len(self.local))]

    def connect(self) -> None:
        """Record all volumes of the guest as connected, and no others."""
        self.connected = [volume.volume_id for volume in self.volumes]

    def _fit_disk(self, disk: LocalDisk, spec: GuestSpec) -> JsonObject:
        """Return the existing local disk with the requested size, or a new empty disk.

        Ephemeral disks never shrink. A swap disk of another size is made anew.
        """
        old = self.local.get(disk.name)
        if old is not None and disk.name != local_disks.SWAP:
            return {**old, "size_mb": max(old["size_mb"], disk.size_mb)}
        if old is not None and old["size_mb"] == disk.size_mb:
            return old
        os_type = spec.image.properties.get("os_type", "") if spec.image else ""
        return {
            "size_mb": disk.size_mb,
            "format": local_disks.format_of(disk, os_type),
            "files": {},
        }

    @property
    def is_active(self) -> bool:
        """True if the guest runs or is paused."""
        return self.power_state in (RUNNING, PAUSED)

    @property
    def num_disks(self) -> int:
        """The number of root, ephemeral and swap disks and volumes, without the config drive.

        In a rescue the rescue disk counts instead of the ephemeral and swap disks.
        """
        own = 0 if boots_from_volume(self.volumes) else 1
        return own + len(self.volumes) + (1 if self.rescue else len(self.local))

    @property
    def ephemeral(self) -> dict[str, JsonObject]:
        """The local disks that keep their data while the guest is off, which excludes swap."""
        return {name: disk for name, disk in self.local.items() if name != local_disks.SWAP}

    @property
    def can_be_still(self) -> bool:
        """True if the image property os_require_quiesce permits a snapshot of this active guest.

        With the value "yes" the guest must run and have an agent, so the result is False for a
        paused guest. Callers do not use the result for a guest that is off.
        """
        return self.options.get("require_quiesce") != "yes" or (
            self.has_agent and self.power_state == RUNNING
        )

    def set_password(self, user: str, password: str) -> None:
        salt = secrets.token_hex(8)
        self.passwords[user] = f"{salt}${_hash(password, salt)}"

    def knows_password(self, user: str, password: str) -> bool:
        salt, _, kept = self.passwords.get(user, "").partition("$")
        return bool(kept) and secrets.compare_digest(kept, _hash(password, salt))

    def disk_image(self) -> bytes:
        """Return the disk as an image for ``read_disk``."""
        return HEADER + MARK + json.dumps(self.disk).encode() + b"}"

    def diagnostics(self) -> JsonObject:
        """Return the counters in the format of API microversion 2.48.

        All counters of disks and interfaces are 0. The guest must be active. The driver is
        "libvirt", because clients accept only certain drivers, and memory is not among them.
        """
        return {
            "state": STATES[self.power_state],
            "driver": "libvirt",
            "hypervisor": "memory",
            "hypervisor_os": "linux",
            "uptime": max(0, int(time.time() - self.started)),
            "config_drive": self.config_drive,
            "num_cpus": self.vcpus,
            "num_disks": self.num_disks,
            "num_nics": len(self.interfaces),
            "memory_details": {"maximum": self.memory_mb, "used": self.memory_mb},
            "cpu_details": [
                {"id": number, "time": 0, "utilisation": None} for number in range(self.vcpus)
            ],
            "disk_details": [
                {
                    "read_bytes": 0,
                    "read_requests": 0,
                    "write_bytes": 0,
                    "write_requests": 0,
                    "errors_count": None,
                }
                for _ in range(self.num_disks)
            ],
            "nic_details": [
                {
                    "mac_address": interface.mac,
                    "rx_rate": None,
                    "tx_rate": None,
                    **dict.fromkeys(NIC_COUNTERS, 0),
                }
                for interface in self.interfaces
            ],
        }


def make_guest(spec: GuestSpec, disk: dict[str, str], spice: bool) -> MemoryGuest:
    """Return a new guest that is off, with the hardware, disks, interfaces and volumes of ``spec``.

    ``disk`` contains the files of the root disk. The image property hw_qemu_guest_agent "no" means
    that the guest has no agent.

    Raises:
        VerbFailed: The hardware is not supported, or a volume is refused by ``volumes.link``.
    """
    image = spec.image
    guest = MemoryGuest(
        SHUTDOWN,
        spec.fence,
        image=image.id if image else "",
        disk=dict(disk),
        has_agent=image is None or image.properties.get("hw_qemu_guest_agent") != "no",
    )
    guest.dress(spec, spice)
    guest.take_volumes(spec)
    return guest


def _hash(password: str, salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", password.encode(), salt.encode(), HASH_ROUNDS).hex()


def read_disk(image: bytes) -> dict[str, str]:
    """Return the files of a disk made from this image, or {} for an image of another origin.

    Images made by ``disk_image`` contain files.

    Raises:
        ValueError: The image of ``disk_image`` is incomplete.
    """
    if not image.startswith(HEADER + MARK):
        return {}
    files: dict[str, str] = next(iter(json.loads(image[len(HEADER) :]).values()))
    return files


class MemoryStorage(dict[str, MemoryGuest]):
    """A storage that hosts share: id of a server -> the guest with the server's disks."""
