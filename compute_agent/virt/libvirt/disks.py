# SPDX-License-Identifier: Apache-2.0
"""The disks of a server: a qcow2 overlay on its image, and the only place that runs qemu-img.

Called by ``virt.libvirt.driver``. The server's folder holds a hard link ``base`` to the cached image and the
overlay ``disk`` on it. qemu-img is told every format and size, never opens the image itself, has limits on memory
and CPU, and dies with the agent; it writes ``disk.part``, which is renamed when it is whole.
Must stay true: a file named ``disk`` is complete, and once it exists it is never made again.
"""
from __future__ import annotations

import os
import subprocess
from pathlib import Path

from compute_agent.virt.driver import VerbFailed
from compute_agent.virt.libvirt.domain_xml import Disk
from compute_agent.virt.libvirt.images import GIBIBYTE, Cached

LIMITS = ("prlimit", "--as=2147483648", "--cpu=60", "setpriv", "--pdeathsig", "KILL", "--")
SECONDS = 120


def make(folder: Path, image: Cached | None, root_gb: int) -> Disk:
    """The server's root disk of ``root_gb`` GiB (0: as large as the image), made unless it exists.

    VerbFailed (another host may do) when it cannot be written.
    """
    disk = folder / "disk"
    base = folder / "base" if image else None
    if not disk.exists():
        if image and base:
            _link(image.path, base)
        size = root_gb * GIBIBYTE or (image.virtual_size if image else 0)
        if size == 0:
            raise VerbFailed("A server without an image needs a flavor with a root disk.")
        _create(disk, base, image.format if image else "", size)
    return Disk(disk, base, image.format if image else "qcow2")


def _create(disk: Path, base: Path | None, base_format: str, size: int) -> None:
    part = disk.with_name("disk.part")
    part.unlink(missing_ok=True)
    # -u: the inspector has already read the image's size, so that qemu-img need not open it.
    backing = ["-u", "-b", str(base), "-F", base_format] if base else []
    _qemu_img("create", "-q", "-f", "qcow2", *backing, str(part), str(size))
    part.chmod(0o600)
    _sync(part)
    os.replace(part, disk)
    _sync(disk.parent)


def _link(image: Path, base: Path) -> None:
    """Give the image a second name, which also tells the cache that it is used."""
    part = base.with_name("base.part")
    part.unlink(missing_ok=True)
    os.link(image, part)
    os.replace(part, base)
    # Renaming onto another name of the same file leaves both, by POSIX.
    part.unlink(missing_ok=True)


def _qemu_img(*arguments: str) -> None:
    try:
        done = subprocess.run([*LIMITS, "qemu-img", *arguments], capture_output=True, text=True, errors="replace",
                              stdin=subprocess.DEVNULL, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VerbFailed("The host could not make the disk.", details=f"qemu-img: {error}", retryable=True) from error
    if done.returncode != 0:
        raise VerbFailed("The host could not make the disk.", retryable=True,
                         details=f"qemu-img {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[:1000]}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
