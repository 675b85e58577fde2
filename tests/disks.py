# SPDX-License-Identifier: Apache-2.0
"""Disks of servers as tests look at them: which files a folder has, and images that are cached."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from compute_agent.virt.libvirt.disks.images import CachedImage

#: The checksum in the name of a base.
CHECKSUM = re.compile(r"(?<=base)\.sha\d+-[0-9a-f]+\.(qcow2|raw)")


def plain(name: str) -> str:
    """The name of a file in a server's folder, without the checksum of a base."""
    return CHECKSUM.sub("", name)


def names(folder: Path) -> list[str]:
    """The files in a server's folder."""
    return sorted(plain(path.name) for path in folder.iterdir())


def base(folder: Path) -> Path:
    """What lies under the server's own disk."""
    [found] = [path for path in folder.iterdir() if plain(path.name) == "base"]
    return found


def cached(path: Path, disk_format: str, virtual_size: int) -> CachedImage:
    """A file as the cache has it."""
    checksum = hashlib.sha512(path.read_bytes()).hexdigest()
    return CachedImage(
        path.rename(path.with_name(f"sha512-{checksum}.{disk_format}")), disk_format, virtual_size
    )
