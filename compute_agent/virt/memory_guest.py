# SPDX-License-Identifier: Apache-2.0
"""One guest in memory: its record, its disk as an image, its counters, and the file that keeps it.

Used by ``virt.memory`` only. A disk is a table of files, name -> text, so that a test sees what an action keeps
and what it gives up. As an image it is the header of an empty qcow2 with that table behind it: the image service
takes it for what it is called, and a guest made of it has the files again.
"""
from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from common import local_disks
from common.models import Fitting, GuestSpec, Interface, LocalDisk
from common.wire import from_wire
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.wanted import wanted

#: Version 2, no backing file, clusters of 64 KiB, a virtual size of 1 GiB, no table of clusters.
HEADER = struct.pack(">4sIQIIQIIQQIIQ", b"QFI\xfb", 2, 0, 0, 16, 1 << 30, 0, 0, 0, 0, 0, 0, 0).ljust(512, b"\0")
MARK = b'{"kilonova memory disk": '
HASH_ROUNDS = 1000
BOOT_ID, HOST_ID = "boot_id", "host_id"
#: Stands before a server whose files are here without a domain.
FILES = "files of "
NIC_COUNTERS = tuple(f"{way}_{what}" for way in ("rx", "tx") for what in ("octets", "packets", "errors", "drop"))
STATES = {RUNNING: "running", PAUSED: "paused"}


@dataclass(slots=True)
class Guest:
    """``saved``: its memory is saved. ``made`` and ``rescue`` are the fences of the last rebuild and of the rescue
    that lasts (0: none). ``passwords``: user -> salt and hash. ``options``: of its hardware; ``fitting``: the parts of
    the host that are its own. ``root_gb``: the size of its disk; ``local``: the disks beside it, each {"size_mb",
    "format", "files"}; ``memory``: what its programs hold, until it is off.
    ``offered``: the hash of the secret that opens its files; ``received``: the fence under which they came here;
    ``left``: the host that it went to while it ran. ``resized``: the fence under which it was resized here; ``aside``:
    what it was before. ``has_agent``, ``ignores_acpi`` and ``holds_interfaces`` (it lets
    go of none while it runs) are what a test says of the guest."""

    power_state: int
    fence: int
    boots: int = 0
    console: str = ""
    ignores_acpi: bool = False
    saved: bool = False
    made: int = 0
    rescue: int = 0
    image: str = ""
    rescue_image: str = ""
    disk: dict[str, str] = field(default_factory=dict)
    passwords: dict[str, str] = field(default_factory=dict)
    has_agent: bool = True
    nmis: int = 0
    vcpus: int = 1
    memory_mb: int = 0
    config_drive: bool = False
    interfaces: list[Interface] = field(default_factory=list)
    holds_interfaces: bool = False
    started: float = 0.0
    options: dict[str, str] = field(default_factory=dict)
    fitting: Fitting | None = None
    root_gb: int = 0
    memory: dict[str, str] = field(default_factory=dict)
    offered: str = ""
    received: int = 0
    left: str = ""
    resized: int = 0
    aside: dict[str, Any] | None = None
    local: dict[str, dict[str, Any]] = field(default_factory=dict)

    def dress(self, spec: GuestSpec) -> None:
        """Give it the hardware of ``spec``; its disks only grow."""
        self.vcpus, self.memory_mb = spec.flavor.vcpus, spec.flavor.memory_mb
        self.root_gb = max(self.root_gb, spec.flavor.root_gb)
        self.local = {disk.name: self._fitted(disk, spec) for disk in spec.disks}
        self.config_drive, self.interfaces = spec.config_drive, list(spec.interfaces)
        self.options, self.fitting = dict(wanted(spec).options), spec.fitting

    def _fitted(self, disk: LocalDisk, spec: GuestSpec) -> dict[str, Any]:
        """A disk as large as ``spec`` says: a new one, or the ephemeral one that was there, which never shrinks."""
        old = self.local.get(disk.name)
        if old is not None and disk.name != local_disks.SWAP:
            return {**old, "size_mb": max(old["size_mb"], disk.size_mb)}
        if old is not None and old["size_mb"] == disk.size_mb:
            return old
        os_type = spec.image.properties.get("os_type", "") if spec.image else ""
        return {"size_mb": disk.size_mb, "format": local_disks.format_of(disk, os_type), "files": {}}

    @property
    def num_disks(self) -> int:
        """Those that it has now: a rescue disk has only the own one beside it."""
        return 2 if self.rescue else 1 + len(self.local)

    @property
    def ephemeral(self) -> dict[str, dict[str, Any]]:
        """The disks beside its own one that keep what was written while it is off."""
        return {name: disk for name, disk in self.local.items() if name != local_disks.SWAP}

    @property
    def booted_from(self) -> str:
        """The id of the image that the disk it boots from was made of; empty for a blank disk."""
        return self.rescue_image if self.rescue else self.image

    @property
    def can_be_still(self) -> bool:
        """For a snapshot, as its image may demand."""
        return self.options.get("require_quiesce") != "yes" or (self.has_agent and self.power_state == RUNNING)

    def set_password(self, user: str, password: str) -> None:
        salt = secrets.token_hex(8)
        self.passwords[user] = f"{salt}${_hash(password, salt)}"

    def knows_password(self, user: str, password: str) -> bool:
        salt, _, kept = self.passwords.get(user, "").partition("$")
        return bool(kept) and secrets.compare_digest(kept, _hash(password, salt))

    def disk_image(self) -> bytes:
        """The disk as bytes that ``read_disk`` understands."""
        return HEADER + MARK + json.dumps(self.disk).encode() + b"}"

    def diagnostics(self) -> dict[str, Any]:
        """The shape of the API's 2.48. Its clients know a closed list of drivers, and memory is not on it."""
        return {
            "state": STATES[self.power_state], "driver": "libvirt", "hypervisor": "memory", "hypervisor_os": "linux",
            "uptime": max(0, int(time.time() - self.started)), "config_drive": self.config_drive,
            "num_cpus": self.vcpus, "num_disks": self.num_disks, "num_nics": len(self.interfaces),
            "memory_details": {"maximum": self.memory_mb, "used": self.memory_mb},
            "cpu_details": [{"id": number, "time": 0, "utilisation": None} for number in range(self.vcpus)],
            "disk_details": [{"read_bytes": 0, "read_requests": 0, "write_bytes": 0, "write_requests": 0,
                              "errors_count": None} for _ in range(self.num_disks)],
            "nic_details": [{"mac_address": interface.mac, "rx_rate": None, "tx_rate": None,
                             **dict.fromkeys(NIC_COUNTERS, 0)} for interface in self.interfaces]}


def made(spec: GuestSpec, disk: dict[str, str]) -> Guest:
    """A guest that is off. The image says by its property when no agent runs in its guests."""
    image = spec.image
    guest = Guest(SHUTDOWN, spec.fence, image=image.id if image else "", disk=dict(disk),
                  has_agent=image is None or image.properties.get("hw_qemu_guest_agent") != "no")
    guest.dress(spec)
    return guest


def _hash(password: str, salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", password.encode(), salt.encode(), HASH_ROUNDS).hex()


def read_disk(image: bytes) -> dict[str, str]:
    """The files of a disk that was made of this image: those of a snapshot, none of any other image."""
    if not image.startswith(HEADER + MARK):
        return {}
    files: dict[str, str] = next(iter(json.loads(image[len(HEADER):]).values()))
    return files


class Storage(dict[str, Guest]):
    """What hosts have their disks on: by server the guest whose disk it is."""


class GuestFile:
    """Keeps guests over the death of their process: one line for each change, which is cheap with a thousand
    guests and whole even when the process is killed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: FileIO | None = None

    def read(self) -> Iterator[tuple[str, Any]]:
        """What was written, oldest first: (server, its guest or None), likewise with ``FILES`` before the server, and
        ids of the host (``BOOT_ID``, ``HOST_ID``)."""
        for line in self._path.read_bytes().splitlines() if self._path.exists() else []:
            key, value = json.loads(line)
            yield key, from_wire(Guest, value) if isinstance(value, dict) else value

    def begin(self, content: dict[str, Guest | str]) -> None:
        """Write all anew, without what is past, and keep the file open for changes."""
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_bytes(b"".join(_line(key, value) for key, value in content.items()))
        os.replace(part, self._path)
        self._file = FileIO(self._path, "a")

    def write(self, key: str, value: Guest | str | None) -> None:
        if self._file is not None:
            self._file.write(_line(key, value))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(key: str, value: Guest | str | None) -> bytes:
    return json.dumps([key, asdict(value) if isinstance(value, Guest) else value]).encode() + b"\n"
