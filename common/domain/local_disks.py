# SPDX-License-Identifier: Apache-2.0
"""The disks of a server beside its root disk: which it has, and with which file system they begin.

Pure. The API asks what a flavor lets a server have, ``instance_data`` what a guest is told of its
disks, hosts what to make. A server has what its flavor says unless its request asked for something
else; that stands in its row as {"ephemeral": [{"gb", "format"}], "swap_mb"}, either of which may be
missing, and "gb" 0 is all that the flavor has.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.domain import device_names
from common.domain.json_types import JsonObject
from common.domain.models import Flavor, LocalDisk

SWAP, EPHEMERAL = "swap", "ephemeral"
FORMATS = ("ext2", "ext3", "ext4", "xfs", "vfat", "ntfs")
#: The image's os_type -> the file system of its guests, and the one of all others.
BY_OS, OTHERWISE = {"linux": "ext4", "windows": "ntfs"}, "vfat"


def of(flavor: Flavor, requested: JsonObject | None) -> list[LocalDisk]:
    """The disks of a server of this flavor. What was asked for follows another flavor only as far
    as it must: an ephemeral disk keeps its size, swap is never more than the flavor has."""
    disks = [
        LocalDisk(f"{EPHEMERAL}{number}", gb * 1024, kind)
        for number, (gb, kind) in enumerate(_ephemeral(flavor, requested))
    ]
    swap_mb = min((requested or {}).get("swap_mb", flavor.swap_mb), flavor.swap_mb)
    return [*disks, LocalDisk(SWAP, swap_mb, SWAP)] if swap_mb else disks


def ephemeral_gb(flavor: Flavor, requested: JsonObject | None) -> int:
    """GiB of the ephemeral disks that a server of this flavor has whatever its next flavor says."""
    return sum(gb for gb, _ in _ephemeral(flavor, requested))


def _ephemeral(flavor: Flavor, requested: JsonObject | None) -> list[tuple[int, str]]:
    """(GiB, file system) of each."""
    parts = (requested or {}).get("ephemeral") or ([{}] if flavor.ephemeral_gb else [])
    return [(part.get("gb") or flavor.ephemeral_gb, part.get("format") or "") for part in parts]


def format_of(disk: LocalDisk, os_type: str, default: str = "") -> str:
    """The file system that a disk begins with; ``default``: the host's, where nobody asked for
    one."""
    return disk.format or default or BY_OS.get(os_type.lower(), OTHERWISE)


def devices(disks: Sequence[LocalDisk], root: str, bus: str | None) -> dict[str, str]:
    """Return the device name of each disk on the image's disk bus; ``root`` comes before them."""
    names = device_names.count([root], [bus] * len(disks))
    return {disk.name: name for disk, name in zip(disks, names, strict=True)}
