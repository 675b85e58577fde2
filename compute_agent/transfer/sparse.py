# SPDX-License-Identifier: Apache-2.0
"""Read and write sparse files without their holes.

The libvirt driver uses this for cold migration. Holes are not read, sent or written, so the cost of
a disk depends on the data and not on the size.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from errno import ENXIO
from pathlib import Path

MEBIBYTE = 1 << 20
SYNC_BYTES = 128 * MEBIBYTE


def pieces(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, data) of a file's first ``size`` bytes, in rising order, at most 1 MiB each.

    Gaps between the pieces are holes. If the file is truncated meanwhile, the pieces end early
    without an error.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        for begin, end in _extents(file.fileno(), size):
            while begin < end:
                data = os.pread(file.fileno(), min(MEBIBYTE, end - begin), begin)
                if not data:
                    # The file was truncated meanwhile. The reader detects the missing data.
                    return
                yield begin, data
                begin += len(data)


def data_bytes(path: Path) -> int:
    """Return the number of bytes of data in a file, without its holes.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        return sum(
            end - begin for begin, end in _extents(file.fileno(), os.fstat(file.fileno()).st_size)
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """A piece that was written.

    Attributes:
        offset: Offset in the file.
        length: Length in bytes.
        digest: SHA-256 of the data.
    """

    offset: int
    length: int
    digest: bytes


def write(path: Path, size: int, data: Iterable[tuple[int, bytes]]) -> list[Stored]:
    """Write a file of ``size`` bytes from pieces, and sync it to the disk. Gaps become holes.

    An existing file is replaced.

    Returns:
        The pieces, for ``verify``.

    Raises:
        ValueError: A piece exceeds the size. A part of the file remains.
        OSError: The file cannot be written. A part of the file remains.
    """
    stored: list[Stored] = []
    written = 0
    with path.open("wb", buffering=0) as file:
        os.fchmod(file.fileno(), 0o600)
        os.ftruncate(file.fileno(), size)
        for offset, piece in data:
            if offset < 0 or offset + len(piece) > size:
                raise ValueError(
                    f"{len(piece)} bytes at offset {offset} exceed the file's size of {size} bytes"
                )
            stored.append(Stored(offset, len(piece), hashlib.sha256(piece).digest()))
            view = memoryview(piece)
            while view:
                length_written = os.pwrite(file.fileno(), view, offset)
                offset, view = offset + length_written, view[length_written:]
            written += len(piece)
            if written // SYNC_BYTES != (written - len(piece)) // SYNC_BYTES:
                # A single sync at the end would take longer than a cancellation may.
                os.fdatasync(file.fileno())
        os.fsync(file.fileno())
    return stored


def verify(path: Path, stored: Iterable[Stored]) -> Iterator[int]:
    """Read written pieces back from the disk and compare their digests with those of ``write``.

    Each piece is verified only when the caller iterates to it.

    Yields:
        The number of bytes verified so far, after each piece.

    Raises:
        ValueError: A piece differs.
        OSError: The file cannot be read.
    """
    verified_bytes = 0
    with path.open("rb", buffering=0) as file:
        # Drop the page cache, so that the data is read from the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for piece in stored:
            if (
                hashlib.sha256(os.pread(file.fileno(), piece.length, piece.offset)).digest()
                != piece.digest
            ):
                raise ValueError(
                    f"the disk returned other data than was written: {piece.length} bytes at offset {piece.offset}"
                )
            verified_bytes += piece.length
            yield verified_bytes


def fill_holes(size: int, data: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield the whole content of a file of ``size`` bytes from pieces, with zeros for holes.

    The pieces must be in rising order.
    """
    at = 0
    for offset, piece in data:
        yield from _zeros(offset - at)
        yield piece
        at = offset + len(piece)
    yield from _zeros(size - at)


def _zeros(count: int) -> Iterator[bytes]:
    for at in range(0, count, MEBIBYTE):
        yield bytes(min(MEBIBYTE, count - at))


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the extents with data in the first ``size`` bytes of an open file."""
    at = 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            # ENXIO: the rest of the file is a hole.
            if error.errno == ENXIO:
                return
            raise
        if begin >= size:
            return
        at = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        yield begin, at
