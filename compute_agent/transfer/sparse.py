# SPDX-License-Identifier: Apache-2.0
"""Files with holes, read and written without them.

Called by ``virt.libvirt.cold_migration``. What a file system calls a hole is neither read nor sent
nor written, so that a disk costs what it holds and not what it is large.
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
    """(offset, data) of the first ``size`` bytes, in rising order, at most a MiB each. Raises
    OSError."""
    with path.open("rb", buffering=0) as file:
        for begin, end in _extents(file.fileno(), size):
            while begin < end:
                data = os.pread(file.fileno(), min(MEBIBYTE, end - begin), begin)
                if not data:
                    return  # cut off meanwhile: what is missing is for the reader to notice
                yield begin, data
                begin += len(data)


def data_bytes(path: Path) -> int:
    """How much of a file is data. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return sum(
            end - begin for begin, end in _extents(file.fileno(), os.fstat(file.fileno()).st_size)
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """A piece that was written: where, how many bytes, and their SHA-256."""

    offset: int
    length: int
    digest: bytes


def write(path: Path, size: int, data: Iterable[tuple[int, bytes]]) -> list[Stored]:
    """Make a file of ``size`` bytes from pieces, safe on the disk; returns what was written, for
    ``proved``. ValueError when a piece lies outside. Raises OSError; then and when ``data`` raises
    a part of the file is left."""
    stored: list[Stored] = []
    written = 0
    with path.open("wb", buffering=0) as file:
        os.fchmod(file.fileno(), 0o600)
        os.ftruncate(file.fileno(), size)
        for offset, piece in data:
            if offset < 0 or offset + len(piece) > size:
                raise ValueError(f"{len(piece)} bytes at {offset} lie outside of {size}")
            stored.append(Stored(offset, len(piece), hashlib.sha256(piece).digest()))
            view = memoryview(piece)
            while view:
                done = os.pwrite(file.fileno(), view, offset)
                offset, view = offset + done, view[done:]
            written += len(piece)
            if written // SYNC_BYTES != (written - len(piece)) // SYNC_BYTES:
                # All at the end would take longer than a cancel may.
                os.fdatasync(file.fileno())
        os.fsync(file.fileno())
    return stored


def proved(path: Path, stored: Iterable[Stored]) -> Iterator[int]:
    """Read back from the disk what was written; yields how many bytes of it were the same, piece by
    piece. ValueError at the first that are not. Raises OSError."""
    same = 0
    with path.open("rb", buffering=0) as file:
        # What the kernel still has in memory proves nothing of the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for piece in stored:
            if (
                hashlib.sha256(os.pread(file.fileno(), piece.length, piece.offset)).digest()
                != piece.digest
            ):
                raise ValueError(f"{piece.length} bytes at {piece.offset} are not what was written")
            same += piece.length
            yield same


def filled(size: int, data: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """The whole of a file from its pieces: zeros where holes are."""
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
    """(begin, end) of what holds data."""
    at = 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == ENXIO:  # a hole up to the end
                return
            raise
        if begin >= size:
            return
        at = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        yield begin, at
