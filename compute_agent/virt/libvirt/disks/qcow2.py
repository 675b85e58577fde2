# SPDX-License-Identifier: Apache-2.0
"""Parses and checks the header and tables of qcow2 files, before any other program opens them.

Called by ``disks`` for the header of a server's disk, with one read of limited size. Called by
``inspector`` in a helper process for complete files of tenants and other hosts. A header can make
QEMU open other files or fail to start. Therefore unknown fields are refused, and the error names
the field.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

MAGIC, VERSIONS, CLUSTER_BITS = b"QFI\xfb", (2, 3), range(9, 22)
HEADER_BYTES, LONGEST_NAME, V2_LENGTH, V3_LENGTH = 64 << 10, 1023, 72, 104
#: Fields: magic, version, offset and length of the backing file's name, cluster bits, virtual size,
#: encryption.
FIXED, LENGTH, EXTENSION = (struct.Struct(form) for form in (">4sIQIIQI", ">I", ">II"))
#: Fields: L1 entries, L1 offset, refcount table offset, refcount table clusters, number of
#: snapshots, snapshots offset.
TABLES, TABLES_AT = struct.Struct(">IQQIIQ"), 36
#: Fields: incompatible, compatible and autoclear features, refcount order, header length.
FEATURES, FEATURES_AT = struct.Struct(">QQQII"), 72
COMPRESSION_AT, ZSTD = 104, 1
#: Incompatible features that are permitted: dirty (QEMU repairs the file when opening), the
#: compression type, and extended L2 entries. Not permitted are a corrupt file and data in another
#: file.
DIRTY, COMPRESSION, EXTENDED_L2 = 1 << 0, 1 << 3, 1 << 4
#: An autoclear feature.
RAW_DATA_FILE = 1 << 1
KNOWN_FEATURES = DIRTY | COMPRESSION | EXTENDED_L2
END_OF_EXTENSIONS, BACKING_FORMAT, DATA_FILE, ENCRYPTION, BITMAPS = (
    0,
    0xE2792ACA,
    0x44415441,
    0x0537BE77,
    0x23852875,
)
MAX_FORMAT_BYTES, MAX_REFCOUNT_ORDER, EXTENDED_CLUSTER_BITS = 15, 6, 14
#: Limits in bytes, the same as QEMU's.
LARGEST_L1, LARGEST_REFCOUNTS, LARGEST_SNAPSHOTS, LARGEST_BITMAPS = (
    32 << 20,
    8 << 20,
    64 << 20,
    64 << 20,
)
MAX_SNAPSHOTS, MAX_BITMAPS, MAX_EXTRA_BYTES = 65536, 65535, 1024
#: The bits of a table entry with the offset, and the bits that must be zero in L1 and refcount
#: table entries.
OFFSET, L1_RESERVED, REFCOUNTS_RESERVED = 0x00FFFFFFFFFFFE00, 0x7F000000000001FF, 0x1FF
#: Bitmap directory: number of bitmaps, reserved, size, offset. Snapshot entry: L1 offset, L1
#: entries, lengths of id and name, times, state size, and length of the extra data.
BITMAP_DIRECTORY, SNAPSHOT = struct.Struct(">IIQQ"), struct.Struct(">QIHHIIQII")
PIECE_BYTES, MAX_OFFSET = 1 << 20, 1 << 62


@dataclass(frozen=True, slots=True)
class Qcow2Header:
    """Values of a qcow2 header.

    ``virtual_size`` is in bytes. ``backing`` is "" without a backing file. ``backing_format`` is ""
    if the header does not record the format.
    """

    virtual_size: int
    backing: str = ""
    backing_format: str = ""


@dataclass(frozen=True, slots=True)
class _Parsed:
    header: Qcow2Header
    cluster_bits: int
    extended: bool = False
    extensions: dict[int, bytes] = field(default_factory=dict)


def read(path: Path) -> Qcow2Header:
    """Read and parse the header of a file.

    Raises:
        ValueError: The header is malformed, or uses a feature that is not permitted.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return header(file.read(HEADER_BYTES))


def header(head: bytes) -> Qcow2Header:
    """Parse a header from the first bytes of a file.

    Raises:
        ValueError: The header is malformed, or uses a feature that is not permitted.
    """
    return _parse(head).header


def check(file: int) -> Qcow2Header:
    """Check header and tables that QEMU reads when opening the file, and return the header.

    Args:
        file: Descriptor of the open file.

    Raises:
        ValueError: A field or a table is not acceptable.
        OSError: The file cannot be read.
    """
    head = os.pread(file, HEADER_BYTES, 0)
    parsed = _parse(head)
    length, cluster = os.fstat(file).st_size, 1 << parsed.cluster_bits
    l1_size, l1_at, refcounts_at, refcount_clusters, snapshots, snapshots_at = TABLES.unpack_from(
        head, TABLES_AT
    )
    per_table = cluster // (16 if parsed.extended else 8)
    if l1_size < -(-parsed.header.virtual_size // (cluster * per_table)):
        raise ValueError(f"l1_size {l1_size} is too small for {parsed.header.virtual_size} bytes")
    _check_table("l1_table_offset", l1_at, l1_size * 8, LARGEST_L1, cluster, length)
    if not refcount_clusters:
        raise ValueError("refcount_table_clusters is 0")
    _check_table(
        "refcount_table_offset",
        refcounts_at,
        refcount_clusters * cluster,
        LARGEST_REFCOUNTS,
        cluster,
        length,
    )
    _check_entries(file, "l1_table", l1_at, l1_size, L1_RESERVED, cluster, length)
    _check_entries(
        file,
        "refcount_table",
        refcounts_at,
        refcount_clusters * cluster // 8,
        REFCOUNTS_RESERVED,
        cluster,
        length,
    )
    _check_snapshots(file, snapshots, snapshots_at, cluster, length)
    if BITMAPS in parsed.extensions:
        _check_bitmaps(parsed.extensions[BITMAPS], cluster, length)
    return parsed.header


def _parse(head: bytes) -> _Parsed:
    try:
        return _parse_header(head)
    except (struct.error, IndexError) as error:
        raise ValueError("the file ends within its header") from error


def _parse_header(head: bytes) -> _Parsed:
    magic, version, name_at, name_length, cluster_bits, size, encryption = FIXED.unpack_from(head)
    TABLES.unpack_from(head, TABLES_AT)
    if magic != MAGIC or version not in VERSIONS or cluster_bits not in CLUSTER_BITS:
        raise ValueError(
            f"the file is not qcow2, or its version {version} or cluster_bits {cluster_bits} is not supported"
        )
    if encryption:
        raise ValueError(f"the file is encrypted: crypt_method {encryption}")
    length, features = V2_LENGTH, 0
    if version == max(VERSIONS):
        features, length = _parse_features(head, cluster_bits)
    backing = b""
    if name_at:
        if (
            not length <= name_at <= min(HEADER_BYTES, 1 << cluster_bits)
            or not 0 < name_length <= LONGEST_NAME
        ):
            raise ValueError(
                "the name of the backing file is not inside the header: backing_file_offset"
            )
        backing = head[name_at : name_at + name_length]
        if len(backing) != name_length or b"\0" in backing:
            raise ValueError("the name of the backing file is cut off: backing_file_size")
    extensions = _parse_extensions(head, length, name_at or min(len(head), 1 << cluster_bits))
    values = Qcow2Header(
        size,
        backing.decode(errors="replace"),
        extensions.get(BACKING_FORMAT, b"").decode(errors="replace"),
    )
    return _Parsed(values, cluster_bits, bool(features & EXTENDED_L2), extensions)


def _parse_features(head: bytes, cluster_bits: int) -> tuple[int, int]:
    """Check a version 3 header, and return (incompatible features, length of the header).

    Raises:
        ValueError: A feature or field is not permitted.
        struct.error: ``head`` ends within these fields.
    """
    features, _, autoclear, refcount_order, length = FEATURES.unpack_from(head, FEATURES_AT)
    if features & ~KNOWN_FEATURES:
        raise ValueError(
            f"the file has unknown incompatible features: incompatible_features {features:#x}"
        )
    if autoclear & RAW_DATA_FILE:
        raise ValueError(f"the data is in another file: autoclear_features {autoclear:#x}")
    if not V3_LENGTH <= length <= min(HEADER_BYTES, 1 << cluster_bits) or length % 8:
        raise ValueError(f"the header has an invalid length of {length} bytes: header_length")
    if refcount_order > MAX_REFCOUNT_ORDER:
        raise ValueError(f"refcount_order is {refcount_order}, more than {MAX_REFCOUNT_ORDER}")
    if features & EXTENDED_L2 and cluster_bits < EXTENDED_CLUSTER_BITS:
        raise ValueError(f"cluster_bits {cluster_bits} are too few for extended L2 entries")
    kind = head[COMPRESSION_AT] if length > COMPRESSION_AT else 0
    if kind != (ZSTD if features & COMPRESSION else 0):
        raise ValueError(f"compression_type is {kind}, which does not fit incompatible_features")
    return features, length


def _parse_extensions(head: bytes, at: int, end: int) -> dict[int, bytes]:
    extensions: dict[int, bytes] = {}
    while at + EXTENSION.size <= end:
        kind, length = EXTENSION.unpack_from(head, at)
        at += EXTENSION.size
        if kind == END_OF_EXTENSIONS:
            return extensions
        if kind == DATA_FILE:
            raise ValueError("the data is in another file: header extension")
        if kind == ENCRYPTION:
            raise ValueError("the file is encrypted: header extension")
        if (
            kind in extensions
            or at + length > end
            or (kind == BACKING_FORMAT and length > MAX_FORMAT_BYTES)
        ):
            raise ValueError(
                f"the header extension {kind:#x} of {length} bytes is repeated or too long"
            )
        extensions[kind] = head[at : at + length]
        at += (length + 7) & ~7
    return extensions


def _check_table(name: str, at: int, size: int, max_bytes: int, cluster: int, length: int) -> None:
    """Raise ValueError unless the table is aligned to a cluster, in the file, and not too large.

    An empty table need not be in the file. All numbers are bytes: the table's offset ``at`` and
    size, the size of a ``cluster``, and the ``length`` of the file. ``name`` is for the error.
    """
    if size > max_bytes:
        raise ValueError(f"{name}: the table of {size} bytes is larger than {max_bytes} bytes")
    if at % cluster or at > MAX_OFFSET or (size and not cluster <= at <= length - size):
        raise ValueError(f"{name} {at:#x} is not in the file, or not at the beginning of a cluster")


def _check_entries(
    file: int, name: str, at: int, count: int, reserved: int, cluster: int, length: int
) -> None:
    """Raise ValueError unless all entries of the table are valid.

    A valid entry has no reserved bits, and its offset is 0 or that of a cluster in the file.

    Args:
        file: Descriptor of the file.
        name: Name of the table for the error.
        at: Offset of the table in bytes.
        count: Number of entries.
        reserved: The bits of an entry that must be 0.
        cluster: Size of a cluster in bytes.
        length: Length of the file in bytes.
    """
    for start in range(0, count * 8, PIECE_BYTES):
        piece = os.pread(file, min(PIECE_BYTES, count * 8 - start), at + start)
        for number, (entry,) in enumerate(
            struct.iter_unpack(">Q", piece[: len(piece) & ~7]), start // 8
        ):
            if entry and (
                entry & reserved
                or (entry & OFFSET) % cluster
                or not (entry & OFFSET == 0 or cluster <= entry & OFFSET < length)
            ):
                raise ValueError(f"{name}[{number}] {entry:#x} does not point into the file")


def _check_snapshots(file: int, count: int, at: int, cluster: int, length: int) -> None:
    if count > MAX_SNAPSHOTS:
        raise ValueError(f"nb_snapshots is {count}, more than {MAX_SNAPSHOTS}")
    _check_table("snapshots_offset", at, count * SNAPSHOT.size, LARGEST_SNAPSHOTS, cluster, length)
    end = min(length, at + LARGEST_SNAPSHOTS)
    for number in range(count):
        entry = os.pread(file, SNAPSHOT.size, at)
        if len(entry) < SNAPSHOT.size:
            raise ValueError(f"snapshot {number} is not in the file")
        l1_at, l1_size, id_length, name_length, _, _, _, _, extra = SNAPSHOT.unpack(entry)
        if extra > MAX_EXTRA_BYTES:
            raise ValueError(
                f"snapshot {number}: extra_data_size is {extra}, more than {MAX_EXTRA_BYTES}"
            )
        _check_table(
            f"snapshot {number}: l1_table_offset", l1_at, l1_size * 8, LARGEST_L1, cluster, length
        )
        at += -(-(SNAPSHOT.size + extra + id_length + name_length) // 8) * 8
        if at > -(-end // 8) * 8:
            raise ValueError(f"snapshot {number} is not in the file")


def _check_bitmaps(extension: bytes, cluster: int, length: int) -> None:
    if len(extension) != BITMAP_DIRECTORY.size:
        raise ValueError(f"the header extension of bitmaps has {len(extension)} bytes")
    count, reserved, size, at = BITMAP_DIRECTORY.unpack(extension)
    if not 0 < count <= MAX_BITMAPS or reserved:
        raise ValueError(f"nb_bitmaps is {count}, or reserved bits of the bitmap extension are set")
    _check_table("bitmap_directory_offset", at, size, LARGEST_BITMAPS, cluster, length)
