# SPDX-License-Identifier: Apache-2.0
"""The parser of qcow2 headers: files of the real qemu-img, and hostile headers."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from compute_agent.virt.libvirt.disks import qcow2

GIB = 1 << 30
needs_qemu_img = pytest.mark.skipif(
    shutil.which("qemu-img") is None, reason="qemu-img (qemu-utils) is not installed"
)


def header(
    *,
    magic: bytes = b"QFI\xfb",
    version: int = 3,
    name: bytes = b"",
    name_at: int | None = None,
    name_length: int | None = None,
    cluster_bits: int = 16,
    size: int = GIB,
    encryption: int = 0,
    features: int = 0,
    length: int = 104,
    extensions: bytes = bytes(8),
) -> bytes:
    """Return a qcow2 header, followed by extensions and the backing file's name."""
    at = (length + len(extensions)) if name_at is None else name_at
    fixed = struct.pack(
        ">4sIQIIQIIQQIIQQQQII",
        magic,
        version,
        at if name or name_at else 0,
        len(name) if name_length is None else name_length,
        cluster_bits,
        size,
        encryption,
        1,
        196608,
        65536,
        1,
        0,
        0,
        features,
        0,
        0,
        4,
        length,
    )
    return (fixed[:length].ljust(length, b"\0") + extensions + name).ljust(1 << 16, b"\0")


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", kind, len(data)) + data.ljust(-(-len(data) // 8) * 8, b"\0")


def write_disk(folder: Path, content: bytes) -> Path:
    path = folder / "disk"
    path.write_bytes(content)
    return path


@needs_qemu_img
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-o", "compat=0.10"],
        ["-o", "extended_l2=on,cluster_size=128k"],
        ["-o", "compression_type=zstd"],
        ["-o", "lazy_refcounts=on"],
    ],
)
@pytest.mark.parametrize("base", ["", "raw", "qcow2"])
def test_qcow2_read_returns_header_written_by_qemu_img(
    tmp_path: Path, options: list[str], base: str
) -> None:
    path, backing = tmp_path / "disk", ["-u", "-b", "/somewhere/base", "-F", base] if base else []
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", *options, *backing, path, str(3 * GIB)],
        check=True,
    )
    assert qcow2.read(path) == qcow2.Qcow2Header(3 * GIB, "/somewhere/base" if base else "", base)


def test_qcow2_read_skips_unknown_extensions_and_reads_version_2(tmp_path: Path) -> None:
    extensions = extension(0x6803F857, bytes(16)) + extension(0xE2792ACA, b"raw") + bytes(8)
    path = write_disk(tmp_path, header(name=b"/a/base", extensions=extensions))
    assert qcow2.read(path) == qcow2.Qcow2Header(GIB, "/a/base", "raw")
    assert qcow2.read(write_disk(tmp_path, header(version=2, length=72))) == qcow2.Qcow2Header(GIB)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "ends within"),
        (header()[:100], "ends within"),
        (header(length=112)[:104], "ends within"),
        (header(magic=b"QFI\0"), "not qcow2"),
        (b"just bytes" * 100, "not qcow2"),
        (header(version=4), "not qcow2"),
        (header(cluster_bits=63), "not qcow2"),
        (header(encryption=2), "encrypted"),
        (header(features=1 << 1), "features"),
        (header(features=1 << 2), "features"),
        (header(features=1 << 40), "features"),
        (header(length=96), "invalid length"),
        (header(name_at=1 << 40, name_length=5), "not inside the header"),
        (header(name_at=8, name_length=5), "not inside the header"),
        (header(name=b"x" * 2000), "not inside the header"),
        (header(name_at=65530, name_length=100), "cut off"),
        (header(name=b"/a/base\0/etc/passwd"), "cut off"),
        (header(name_at=4096, name_length=0), "not inside the header"),
        (header(extensions=extension(0x44415441, b"/etc/shadow") + bytes(8)), "another file"),
        (header(name=b"/a", extensions=extension(0xE2792ACA, b"raw") * 2), "repeated or too long"),
        (header(extensions=struct.pack(">II", 0xE2792ACA, 1 << 31)), "repeated or too long"),
    ],
)
def test_qcow2_read_refuses_malformed_or_unsupported_header(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        qcow2.read(write_disk(tmp_path, content))


#: Offset and length of each field of the header.
FIELDS = {
    "version": (4, 4),
    "backing_file_offset": (8, 8),
    "cluster_bits": (20, 4),
    "size": (24, 8),
    "crypt_method": (32, 4),
    "l1_size": (36, 4),
    "l1_table_offset": (40, 8),
    "refcount_table_offset": (48, 8),
    "refcount_table_clusters": (56, 4),
    "nb_snapshots": (60, 4),
    "snapshots_offset": (64, 8),
    "incompatible_features": (72, 8),
    "autoclear_features": (88, 8),
    "refcount_order": (96, 4),
    "header_length": (100, 4),
    "compression_type": (104, 1),
    "first extension": (112, 4),
    "its length": (116, 4),
    "l1_table[0]": (0x30000, 8),
    "refcount_table[0]": (0x10000, 8),
}
#: (field, value, message): a sound file with this value in one field is refused with the message.
MALFORMED = [
    ("version", 4, "version 4"),
    ("cluster_bits", 8, "cluster_bits 8"),
    ("cluster_bits", 22, "cluster_bits 22"),
    ("cluster_bits", 17, "l1_table_offset"),
    ("cluster_bits", 9, "l1_size 1 is too small"),
    ("backing_file_offset", 1 << 17, "backing_file_offset"),
    ("crypt_method", 1, "crypt_method 1"),
    ("crypt_method", 0x70, "crypt_method 112"),
    ("size", 1 << 40, "l1_size 1 is too small"),
    ("size", 1 << 63, "l1_size 1 is too small"),
    ("l1_size", 0, "l1_size 0 is too small"),
    ("l1_size", 1 << 31, "l1_table_offset: the table of"),
    ("l1_size", 1 << 20, "l1_table_offset 0x30000 is not in the file"),
    ("l1_table_offset", 3, "l1_table_offset 0x3"),
    ("l1_table_offset", 0, "l1_table_offset 0x0"),
    ("l1_table_offset", 1 << 40, "l1_table_offset 0x10000000000"),
    ("l1_table_offset", 1 << 63, "l1_table_offset"),
    ("refcount_table_offset", 0x10001, "refcount_table_offset 0x10001"),
    ("refcount_table_offset", 1 << 63, "refcount_table_offset"),
    ("refcount_table_clusters", 0, "refcount_table_clusters"),
    ("refcount_table_clusters", 1 << 20, "refcount_table_offset: the table of"),
    ("refcount_table_clusters", 9, "refcount_table_offset 0x10000 is not in the file"),
    ("nb_snapshots", 65537, "nb_snapshots is 65537"),
    ("nb_snapshots", 5, "snapshots_offset 0x0"),
    ("snapshots_offset", 4, "snapshots_offset 0x4"),
    ("snapshots_offset", 1 << 63, "snapshots_offset"),
    ("incompatible_features", 1 << 1, "incompatible_features 0x2"),
    ("incompatible_features", 1 << 3, "compression_type is 0"),
    ("incompatible_features", 1 << 63, "incompatible_features"),
    ("autoclear_features", 1 << 1, "autoclear_features 0x2"),
    ("refcount_order", 7, "refcount_order is 7"),
    ("header_length", 96, "header_length"),
    ("header_length", 105, "header_length"),
    ("header_length", 1 << 17, "header_length"),
    ("compression_type", 1, "compression_type is 1"),
    ("compression_type", 9, "compression_type is 9"),
    ("first extension", 0x44415441, "another file"),
    ("first extension", 0x0537BE77, "encrypted"),
    ("first extension", 0x23852875, "extension of bitmaps"),
    ("first extension", 0xE2792ACA, "header extension"),
    ("its length", 1 << 31, "header extension"),
    ("l1_table[0]", 8, "l1_table.0. 0x8"),
    ("l1_table[0]", 1 << 40, "l1_table.0."),
    ("l1_table[0]", 0xFF << 56, "l1_table.0."),
    ("refcount_table[0]", 0x200, "refcount_table.0. 0x200"),
    ("refcount_table[0]", 1 << 40, "refcount_table.0."),
]


def sound() -> bytearray:
    """Return a file as qemu-img creates, with a virtual size of 64 MiB and one L2 table."""
    content = bytearray(0x50000)
    content[:112] = struct.pack(
        ">4sIQIIQIIQQIIQQQQIIQ",
        b"QFI\xfb",
        3,
        0,
        0,
        16,
        64 << 20,
        0,
        1,
        0x30000,
        0x10000,
        1,
        0,
        0,
        0,
        0,
        0,
        4,
        112,
        0,
    )
    content[112 : 112 + 24] = extension(0x6803F857, b"a name of sixteen")[:16] + bytes(8)
    content[116:120] = (16).to_bytes(4, "big")
    content[0x10000:0x10008], content[0x30000:0x30008] = (
        struct.pack(">Q", 0x20000),
        struct.pack(">Q", 1 << 63 | 0x40000),
    )
    content[0x20000:0x2000A] = struct.pack(">5H", 1, 1, 1, 1, 1)
    return content


def check_file(path: Path) -> qcow2.Qcow2Header:
    file = os.open(path, os.O_RDONLY)
    try:
        return qcow2.check(file)
    finally:
        os.close(file)


@pytest.mark.parametrize(("name", "value", "reason"), MALFORMED)
def test_qcow2_check_refuses_malformed_field_with_reason(
    tmp_path: Path, name: str, value: int, reason: str
) -> None:
    content = sound()
    assert check_file(write_disk(tmp_path, bytes(content))) == qcow2.Qcow2Header(64 << 20)
    at, size = FIELDS[name]
    content[at : at + size] = value.to_bytes(size, "big")
    with pytest.raises(ValueError, match=reason):
        check_file(write_disk(tmp_path, bytes(content)))


@pytest.mark.parametrize("length", [0, 3, 71, 103, 111, 0x10000, 0x30000, 0x40000])
def test_qcow2_check_refuses_truncated_file(tmp_path: Path, length: int) -> None:
    with pytest.raises(
        ValueError, match=r"ends within its header|is not in the file|does not point into the file"
    ):
        check_file(write_disk(tmp_path, bytes(sound()[:length])))


@needs_qemu_img
@pytest.mark.parametrize(
    "commands",
    [
        [],
        ["snapshot -c one", "snapshot -c two"],
        ["bitmap --add {} one"],
        ["resize -f qcow2 {} 128M"],
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-o", "compat=0.10"],
        ["-o", "cluster_size=512"],
        ["-o", "preallocation=metadata"],
        ["-o", "extended_l2=on,cluster_size=128k,compression_type=zstd"],
    ],
)
def test_qcow2_check_accepts_files_of_qemu_img(
    tmp_path: Path, options: list[str], commands: list[str]
) -> None:
    path = tmp_path / "disk"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options, path, "64M"], check=True)
    if "compat=0.10" in options and commands and commands[0].startswith("bitmap"):
        return  # qcow2 version 2 has no bitmaps
    for command in commands:
        words = command.split()
        arguments = [str(path) if word == "{}" else word for word in words]
        subprocess.run(
            ["qemu-img", *arguments, *([] if "{}" in words else [path])],
            check=True,
            capture_output=True,
        )
    assert check_file(path).virtual_size == (
        128 << 20 if commands[:1] == ["resize -f qcow2 {} 128M"] else 64 << 20
    )


@needs_qemu_img
def test_qcow2_check_refuses_malformed_snapshot_entry(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, "64M"], check=True)
    for name in ("one", "two"):
        subprocess.run(["qemu-img", "snapshot", "-c", name, path], check=True)
    content = bytearray(path.read_bytes())
    at = struct.unpack_from(">Q", content, 64)[0]
    for offset, size, value, reason in (
        (0, 8, 3, "snapshot 0: l1_table_offset 0x3"),
        (36, 4, 4096, "extra_data_size is 4096"),
        (8, 4, 1 << 30, "snapshot 0: l1_table_offset: the table"),
    ):
        broken = bytearray(content)
        broken[at + offset : at + offset + size] = value.to_bytes(size, "big")
        with pytest.raises(ValueError, match=reason):
            check_file(write_disk(tmp_path, bytes(broken)))
