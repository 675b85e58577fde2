# SPDX-License-Identifier: Apache-2.0
"""Names of a server's disks, for example /dev/vdb. Pure.

Guests name their disks by position, so users cannot choose names. A booting guest numbers the disks
per bus. A running guest gives a new disk the first free name. The API, the metadata service and the
host's domain all use these names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from string import ascii_lowercase

from common.domain import errors

#: Disk bus -> prefix of the disks' names. Disks without a bus are on virtio.
PREFIXES = {"virtio": "vd", "scsi": "sd", "sata": "sd", "usb": "sd", "ide": "hd", "fdc": "fd"}
VIRTIO = "virtio"


def root_name(bus: str | None) -> str:
    """Return the name of the disk from which a guest boots on this bus, for example /dev/vda.

    A bus that is None or unknown counts as virtio.
    """
    return f"/dev/{PREFIXES.get(bus or VIRTIO, PREFIXES[VIRTIO])}a"


def assign_names(local: Collection[str], buses: Iterable[str | None]) -> list[str]:
    """Return the names that a booting guest gives to further disks, in the order of the disks.

    Args:
        local: Names that the guest's first disks already have.
        buses: Bus of each further disk. None or an unknown bus: virtio.

    Raises:
        Forbidden: No name is free for a disk. Buses with one prefix share 26 names.
    """
    used, names = set(local), []
    for bus in buses:
        names.append(next_free(used, bus))
        used.add(names[-1])
    return names


def next_free(used: Collection[str], bus: str | None) -> str:
    """Return the first name of a disk on this bus that is not in ``used``, for example /dev/vdb.

    A bus that is None or unknown counts as virtio.

    Raises:
        Forbidden: All 26 names are in use.
    """
    prefix = PREFIXES.get(bus or VIRTIO, PREFIXES[VIRTIO])
    for letter in ascii_lowercase:
        if (name := f"/dev/{prefix}{letter}") not in used:
            return name
    raise errors.Forbidden(
        f"The maximum allowed number of disk devices ({len(ascii_lowercase)}) to attach to a single "
        "instance has been exceeded."
    )
