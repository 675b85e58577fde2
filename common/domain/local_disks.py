# SPDX-License-Identifier: Apache-2.0
"""The ephemeral and swap disks of a server, and their file systems. Pure.

The API checks a request against the flavor, ``instance_data`` describes the disks to the guest, and
hosts create the disks. A server has the disks of the flavor unless the request chose others. The
server's row stores that choice as {"ephemeral": [{"gb", "format"}], "swap_mb"}. Either key may be
missing. "gb" 0 means all ephemeral GiB of the flavor.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.domain import device_names
from common.domain.json_types import JsonObject
from common.domain.models import Flavor, LocalDisk

SWAP, EPHEMERAL = "swap", "ephemeral"
FORMATS = ("ext2", "ext3", "ext4", "xfs", "vfat", "ntfs")
#: The image's os_type -> the file system of its guests, and that of all other guests.
BY_OS, OTHERWISE = {"linux": "ext4", "windows": "ntfs"}, "vfat"


def of(flavor: Flavor, requested: JsonObject | None) -> list[LocalDisk]:
    """Return the ephemeral disks of a server, and then the swap disk if the server has swap.

    ``requested`` is the choice in the server's row. None, or a missing key, means the disks of
    ``flavor``. A requested ephemeral size is kept, even if ``flavor`` is smaller after a resize.
    Swap is at most that of ``flavor``.
    """
    disks = [
        LocalDisk(f"{EPHEMERAL}{number}", gb * 1024, kind)
        for number, (gb, kind) in enumerate(_ephemeral(flavor, requested))
    ]
    swap_mb = min((requested or {}).get("swap_mb", flavor.swap_mb), flavor.swap_mb)
    return [*disks, LocalDisk(SWAP, swap_mb, SWAP)] if swap_mb else disks


def ephemeral_gb(flavor: Flavor, requested: JsonObject | None) -> int:
    """Return the GiB of all ephemeral disks together: the requested disks, else the flavor's."""
    return sum(gb for gb, _ in _ephemeral(flavor, requested))


def _ephemeral(flavor: Flavor, requested: JsonObject | None) -> list[tuple[int, str]]:
    """Return (GiB, file system) of each ephemeral disk, with "" if no file system is requested."""
    parts = (requested or {}).get("ephemeral") or ([{}] if flavor.ephemeral_gb else [])
    return [(part.get("gb") or flavor.ephemeral_gb, part.get("format") or "") for part in parts]


def format_of(disk: LocalDisk, os_type: str, default: str = "") -> str:
    """Return the file system that a host makes on a new disk.

    This is ``disk.format`` (the requested file system, or "swap" for the swap disk), else
    ``default`` (the host's option, which may be ""), else the usual file system of the image's
    ``os_type``. A host that cannot make this usual file system makes vfat instead.
    """
    return disk.format or default or BY_OS.get(os_type.lower(), OTHERWISE)


def devices(disks: Sequence[LocalDisk], root: str, bus: str | None) -> dict[str, str]:
    """Return disk name -> device name of each disk, on the disk bus of the image.

    ``root`` is the device name of the root disk, which no other disk gets. A ``bus`` of None is
    virtio.

    Raises:
        Forbidden: With the root disk, the bus has more disks than the 26 names.
    """
    names = device_names.assign_names([root], [bus] * len(disks))
    return {disk.name: name for disk, name in zip(disks, names, strict=True)}
