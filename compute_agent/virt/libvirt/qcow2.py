# SPDX-License-Identifier: Apache-2.0
"""The header of a qcow2 file, read by ourselves before any other program opens the file.

Called by ``disks`` for a disk that another host sent. A header can make QEMU open other files, so nothing is passed
over: what is not understood is refused.
"""
from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC, VERSIONS, CLUSTER_BITS = b"QFI\xfb", (2, 3), range(9, 22)
HEADER_BYTES, LONGEST_NAME, V2_LENGTH, V3_LENGTH = 64 << 10, 1023, 72, 104
#: magic, version, where and how long the backing file's name is, cluster bits, virtual size, encryption.
FIXED, FEATURES, LENGTH, EXTENSION = (struct.Struct(form) for form in (">4sIQIIQI", ">Q", ">I", ">II"))
FEATURES_AT, LENGTH_AT = 72, 100
#: Features that change how the file is read, and that we know: dirty (it is repaired when opened), how clusters are
#: compressed, extended L2 entries. Not among them: a corrupt file, data in another file.
KNOWN_FEATURES = 1 << 0 | 1 << 3 | 1 << 4
END_OF_EXTENSIONS, BACKING_FORMAT, DATA_FILE = 0, 0xE2792ACA, 0x44415441


@dataclass(frozen=True, slots=True)
class Header:
    """``virtual_size`` is in bytes; ``backing`` is empty when the file refers to no other."""

    virtual_size: int
    backing: str = ""
    backing_format: str = ""


def read(path: Path) -> Header:
    """ValueError says what is wrong with the header. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    try:
        return _header(head)
    except struct.error as error:
        raise ValueError("it ends within its header") from error


def _header(head: bytes) -> Header:
    magic, version, name_at, name_length, cluster_bits, size, encryption = FIXED.unpack_from(head)
    if magic != MAGIC or version not in VERSIONS or cluster_bits not in CLUSTER_BITS:
        raise ValueError("it is not qcow2")
    if encryption:
        raise ValueError("it is encrypted")
    length = V2_LENGTH
    if version == max(VERSIONS):
        features, length = FEATURES.unpack_from(head, FEATURES_AT)[0], LENGTH.unpack_from(head, LENGTH_AT)[0]
        if features & ~KNOWN_FEATURES:
            raise ValueError(f"it has features {features:#x}, some of which are not known here")
        if not V3_LENGTH <= length <= HEADER_BYTES:
            raise ValueError(f"its header is {length} bytes long")
    backing = b""
    if name_at:
        if not length <= name_at <= HEADER_BYTES or not 0 < name_length <= LONGEST_NAME:
            raise ValueError("the name of its backing file is not in its header")
        backing = head[name_at:name_at + name_length]
        if len(backing) != name_length or b"\0" in backing:
            raise ValueError("the name of its backing file is cut off")
    found = _extensions(head, length, name_at or min(len(head), 1 << cluster_bits))
    return Header(size, backing.decode(errors="replace"), found.get(BACKING_FORMAT, b"").decode(errors="replace"))


def _extensions(head: bytes, at: int, end: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while at + EXTENSION.size <= end:
        kind, length = EXTENSION.unpack_from(head, at)
        at += EXTENSION.size
        if kind == END_OF_EXTENSIONS:
            return found
        if kind == DATA_FILE:
            raise ValueError("its data is in another file")
        if kind in found or at + length > end:
            raise ValueError("its header's extensions cannot be read")
        found[kind] = head[at:at + length]
        at += (length + 7) & ~7
    return found
