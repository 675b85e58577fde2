# SPDX-License-Identifier: Apache-2.0
"""What a server's disks are called: /dev/vdb. Pure.

The name is how its user and the API tell a server's disks apart; a guest may call them otherwise,
and finds a volume by its serial.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from string import ascii_lowercase

from common import errors

#: Disk bus -> what names of its disks begin with; what is not said is virtio's.
PREFIXES = {"virtio": "vd", "scsi": "sd", "sata": "sd", "usb": "sd", "ide": "hd", "fdc": "fd"}
VIRTIO = "virtio"
_NAME = re.compile("(?:/dev/)?((?:vd|sd|hd|xvd|fd)[a-z])")


def canonical(name: str) -> str:
    """A name as it is kept: /dev/vdb. Raises BadRequest: no disk can have this one."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise errors.BadRequest(f"The supplied device path ({name[:80]}) is invalid.")
    return "/dev/" + found[1]


def next_free(used: Collection[str], bus: str | None) -> str:
    """The first name that no other disk of the server has.

    Raises:
        Forbidden: there is none left.
    """
    prefix = PREFIXES.get(bus or VIRTIO, PREFIXES[VIRTIO])
    for letter in ascii_lowercase:
        if (name := f"/dev/{prefix}{letter}") not in used:
            return name
    raise errors.Forbidden(
        f"The maximum allowed number of disk devices ({len(ascii_lowercase)}) to attach to a single "
        "instance has been exceeded."
    )
