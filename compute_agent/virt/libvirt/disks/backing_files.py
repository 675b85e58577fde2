# SPDX-License-Identifier: Apache-2.0
"""Backing files of disks. The name of a backing file contains the checksum of its content.

Called by ``images``, ``disks`` and ``cold_migration``. For example, a disk's header names
``base.sha512-….qcow2``. So every disk records the content of the backing file, also after a move to
another host, and no host has to resolve an image a second time.

Invariant: a backing file is never changed. No guest starts on a backing file whose content does not
have the checksum in the name.
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
#: The algorithm for images without a checksum.
OWN_HASH = "sha256"
CONTENT = re.compile(rf"({'|'.join(HASHES)})-([0-9a-f]{{64,128}})\.({'|'.join(FORMATS)})")
MEBIBYTE = 1 << 20
#: Extended attribute with size and modification time of the file at the last verification.
VERIFIED = "user.kilonova.verified"


def content_name(image: ImageRef) -> str:
    """Return the name for an image's content: algorithm, checksum and format.

    For example, ``sha512-….qcow2``.

    Raises:
        VerbFailed: ``HASHES`` lacks the algorithm, ``FORMATS`` lacks the format, or the checksum is
            malformed.
    """
    if image.hash_algo not in HASHES:
        raise VerbFailed(
            f"The image's checksum has the algorithm {image.hash_algo!r}; use one of {', '.join(HASHES)}."
        )
    name = f"{image.hash_algo}-{image.hash_value.lower()}.{image.disk_format}"
    if not CONTENT.fullmatch(name):
        raise VerbFailed(
            "The image's checksum or format is not valid: the checksum must be a hexadecimal number.",
            details=f"checksum {image.hash_value!r}, format {image.disk_format!r}",
        )
    return name


def image_of(name: str) -> ImageRef | None:
    """Return format and checksum from the name of a backing file or cached image.

    The result has no image id. None if the name contains no valid ``content_name``.
    """
    match = CONTENT.fullmatch(name.rpartition("base.")[2])
    if match is None:
        return None
    algorithm, value, kind = match.groups()
    return ImageRef("", kind, hash_algo=algorithm, hash_value=value)


def path_for(base: Path, disk: str) -> Path:
    """Return the path of a disk's backing file, in the folder of ``base``.

    Args:
        base: Path whose name is a ``content_name``.
        disk: Name of the disk, for example "disk" for the root disk.
    """
    return base.with_name(f"base.{base.name}" if disk == "disk" else f"{disk}.base.{base.name}")


def belongs(base: Path, disk: str) -> bool:
    """Return True if ``base`` has a name that ``path_for`` makes for the disk named ``disk``."""
    prefix = "base." if disk == "disk" else f"{disk}.base."
    return base.name.startswith(prefix) and image_of(base.name) is not None


def same_content(one: ImageRef, other: ImageRef) -> bool:
    """Return True if two images have the same format and checksum."""
    return (one.disk_format, one.hash_algo, one.hash_value.lower()) == (
        other.disk_format,
        other.hash_algo,
        other.hash_value.lower(),
    )


def verify(base: Path, context: VerbContext) -> None:
    """Check that the content of a backing file has the checksum in the file's name.

    A file that ``is_verified`` is not read again. A file whose name has no checksum is not checked.

    Raises:
        VerbFailed: The content has another checksum, or the file is missing or cannot be read.
        Cancelled: The verb was cancelled while the file was read.
    """
    expected = image_of(base.name)
    try:
        if expected is None or is_verified(base):
            return
        context.phase(CommandPhase.VERIFYING_DISKS)
        stamp = _read_stamp(base)
        digest = _compute_digest(base, expected.hash_algo, context)
    except OSError as error:
        raise VerbFailed(
            "The backing file of the server's disk cannot be read, so the server is not started.",
            details=f"{base}: {error}",
        ) from error
    if digest != expected.hash_value:
        raise VerbFailed(
            "The backing file of the server's disk has changed, so the server is not started.",
            details=f"{base} has the {expected.hash_algo} checksum {digest}; restore the file with the "
            "checksum in its name, then start the server again",
        )
    _write_stamp(base, stamp)


def is_verified(base: Path) -> bool:
    """Return True if the file was verified, and size and modification time have not changed since.

    False on file systems without extended attributes.

    Raises:
        OSError: The file does not exist.
    """
    stamp = _read_stamp(base)
    try:
        return os.getxattr(base, VERIFIED) == stamp
    except OSError:
        # The file was never verified, or the file system does not support attributes.
        return False


def mark_verified(base: Path) -> None:
    """Record the file as verified, for ``is_verified``. The caller wrote it from verified data."""
    _write_stamp(base, _read_stamp(base))


def _write_stamp(base: Path, stamp: bytes) -> None:
    """Record ``stamp``, from ``_read_stamp``, in the extended attribute of verified files.

    A failure is ignored. Then ``verify`` reads the file again next time.
    """
    with contextlib.suppress(OSError):
        os.setxattr(base, VERIFIED, stamp)


def _read_stamp(base: Path) -> bytes:
    status = base.stat()
    return f"{status.st_size} {status.st_mtime_ns}".encode()


def _compute_digest(path: Path, algorithm: str, context: VerbContext | None) -> str:
    digest = hashlib.new(algorithm)
    with path.open("rb", buffering=0) as file:
        while piece := file.read(4 * MEBIBYTE):
            if context is not None and context.cancelled():
                raise Cancelled
            digest.update(piece)
    return digest.hexdigest()
