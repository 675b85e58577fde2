# SPDX-License-Identifier: Apache-2.0
"""What lies under a disk: a file whose name is the checksum of its content.

Called by ``images``, ``disks`` and ``cold_migration``. The header of a qcow2 overlay names its
base, and the name of the base says which bytes it holds: ``base.sha512-….qcow2``. So a disk itself
records what it was made on, that record goes wherever the disk goes, and no host has to find an
image a second time. Must stay true: a base is never written again; content that is not what the
name says is under no guest that starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

from common.domain.command_progress import CommandPhase
from common.domain.models import ImageRef
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed

FORMATS = ("qcow2", "raw")
HASHES = ("sha512", "sha256", "sha384", "blake2b")
#: What the image cache computes where the image service knows no checksum, or one of a kind that is
#: not safe.
OWN_HASH = "sha256"
CONTENT = re.compile(rf"({'|'.join(HASHES)})-([0-9a-f]{{64,128}})\.({'|'.join(FORMATS)})")
MEBIBYTE = 1 << 20
#: Size and time of the last change of a file when its content was last verified.
VERIFIED = "user.kilonova.verified"


def content_name(image: ImageRef) -> str:
    """The name that says an image's content. VerbFailed when its checksum is not one that can be
    relied on."""
    if image.hash_algo not in HASHES:
        raise VerbFailed(
            f"The image's checksum is of kind {image.hash_algo!r}; use one of {', '.join(HASHES)}."
        )
    name = f"{image.hash_algo}-{image.hash_value.lower()}.{image.disk_format}"
    if not CONTENT.fullmatch(name):
        raise VerbFailed(
            "The image's checksum is not a hexadecimal number.", details=repr(image.hash_value)
        )
    return name


def image_of(name: str) -> ImageRef | None:
    """The content that the name of a base, or of a file in the image cache, says; None when it says
    none."""
    found = CONTENT.fullmatch(name.rpartition("base.")[2])
    if found is None:
        return None
    algorithm, value, kind = found.groups()
    return ImageRef("", kind, hash_algo=algorithm, hash_value=value)


def named(base: Path, disk: str) -> Path:
    """A base's path for a disk of this name, from the name of its content."""
    return base.with_name(f"base.{base.name}" if disk == "disk" else f"{disk}.base.{base.name}")


def belongs(base: Path, disk: str) -> bool:
    """Is this the name of a base of the disk of that name?"""
    prefix = "base." if disk == "disk" else f"{disk}.base."
    return base.name.startswith(prefix) and image_of(base.name) is not None


def same_content(one: ImageRef, other: ImageRef) -> bool:
    """Have two images the same bytes, as far as their checksums say?"""
    return (one.disk_format, one.hash_algo, one.hash_value.lower()) == (
        other.disk_format,
        other.hash_algo,
        other.hash_value.lower(),
    )


def verify(base: Path, context: VerbContext) -> None:
    """VerbFailed unless the file holds what its name says. All of it is read when it has changed
    since it was verified last, or nobody knows; Cancelled within seconds."""
    expected = image_of(base.name)
    try:
        if expected is None or is_verified(base):
            return
        context.phase(CommandPhase.VERIFYING_DISKS)
        stamp = _stamp(base)
        found = _digest(base, expected.hash_algo, context)
    except OSError as error:
        raise VerbFailed(
            "What lies under the server's disk cannot be read; the server is not started.",
            details=f"{base}: {error}",
        ) from error
    if found != expected.hash_value:
        raise VerbFailed(
            "What lies under the server's disk is not what the disk was made on; the server is not "
            "started.",
            details=f"{base} has the {expected.hash_algo} checksum {found}; put the file "
            "with the checksum of its name back, then start the server again",
        )
    _mark(base, stamp)


def is_verified(base: Path) -> bool:
    """Has the file been verified, and not changed since? Raises OSError when it is not there."""
    stamp = _stamp(base)
    try:
        return os.getxattr(base, VERIFIED) == stamp
    except OSError:  # never verified, or on a file system that keeps no attributes
        return False


def mark_verified(base: Path) -> None:
    """The file was verified while it was written."""
    _mark(base, _stamp(base))


def _mark(base: Path, stamp: bytes) -> None:
    """Where the file system keeps no attributes the file is read again next time."""
    with contextlib.suppress(OSError):
        os.setxattr(base, VERIFIED, stamp)


def _stamp(base: Path) -> bytes:
    about = base.stat()
    return f"{about.st_size} {about.st_mtime_ns}".encode()


def _digest(path: Path, algorithm: str, context: VerbContext | None) -> str:
    digest = hashlib.new(algorithm)
    with path.open("rb", buffering=0) as file:
        while piece := file.read(4 * MEBIBYTE):
            if context is not None and context.cancelled():
                raise Cancelled
            digest.update(piece)
    return digest.hexdigest()
