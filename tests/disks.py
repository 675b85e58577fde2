# SPDX-License-Identifier: Apache-2.0
"""Helpers for the disk files in a server's folder, and for cached images."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from compute_agent.virt.libvirt.disks.images import CachedImage

#: The checksum in the name of a base image.
CHECKSUM = re.compile(r"(?<=base)\.sha\d+-[0-9a-f]+\.(qcow2|raw)")


def plain(name: str) -> str:
    """Return the name of a file in a server's folder without the checksum of a base image."""
    return CHECKSUM.sub("", name)


def names(folder: Path) -> list[str]:
    """Return the sorted names of the files in a server's folder, without checksums."""
    return sorted(plain(path.name) for path in folder.iterdir())


def base(folder: Path) -> Path:
    """Return the base image, the file below the server's own disk."""
    [path_of_base] = [path for path in folder.iterdir() if plain(path.name) == "base"]
    return path_of_base


def cache_image(path: Path, disk_format: str, virtual_size: int) -> CachedImage:
    """Rename a file to its name in the image cache and return it as a cached image."""
    checksum = hashlib.sha512(path.read_bytes()).hexdigest()
    return CachedImage(
        path.rename(path.with_name(f"sha512-{checksum}.{disk_format}")), disk_format, virtual_size
    )
