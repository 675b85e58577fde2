# SPDX-License-Identifier: Apache-2.0
"""Malicious or damaged images: references to a file of the host, false formats, damaged headers.

``corpus(canary)`` returns the images, each with a declared format. ``canary`` is a file on the
host. The content of that file must never become visible.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from compute_agent.virt.libvirt.disks import qcow2
from tests.unit.compute_agent.test_qcow2 import FIELDS, MALFORMED, extension, sound

SECTOR, MEBIBYTE = 512, 1 << 20


class Hostile(NamedTuple):
    """An image. If ``opaque``, hosts may use the image as raw bytes."""

    name: str
    content: bytes
    declared: str
    opaque: bool = False


def corpus(canary: Path) -> list[Hostile]:
    """Return all images, each with a unique name."""
    images = [
        *_images_with_references(str(canary)),
        *_images_of_other_formats(str(canary)),
        *_damaged_images(),
        *_images_with_false_size(),
        *_images_within_raw_data(str(canary)),
    ]
    assert len({image.name for image in images}) == len(images) >= 60
    return images


def standing_on(name: str, kind: str = "raw") -> bytes:
    """Return a qcow2 image with a backing file of this name."""
    content = sound()
    content[112 : 112 + 24] = extension(qcow2.BACKING_FORMAT, kind.encode()) + bytes(8)
    content[1024 : 1024 + len(name)] = name.encode()
    content[8:20] = struct.pack(">QI", 1024, len(name))
    return bytes(content)


def _images_with_references(canary: str) -> Iterator[Hostile]:
    for number, name in enumerate(
        (
            canary,
            f"file:{canary}",
            f"nbd:unix:{canary}",
            f"fat:{canary}",
            f'json:{{"driver": "raw", "file": {{"driver": "file", "filename": "{canary}"}}}}',
        )
    ):
        yield Hostile(f"backing file {number}", standing_on(name), "qcow2")
    yield Hostile("backing file of another format", standing_on(canary, "vmdk"), "qcow2")
    yield Hostile("backing file, as raw", standing_on(canary), "raw")
    data = sound()
    data[72:80] = struct.pack(">Q", 1 << 2)
    data[112 : 112 + 8 + len(canary)] = (
        struct.pack(">II", qcow2.DATA_FILE, len(canary)) + canary.encode()
    )
    yield Hostile("data file", bytes(data), "qcow2")
    data[72:80] = bytes(8)
    yield Hostile("data file without its feature", bytes(data), "qcow2")
    data[88:96] = struct.pack(">Q", 1 << 1)
    yield Hostile("raw data file without its feature", bytes(data), "qcow2")
    yield Hostile("data file, as raw", bytes(data), "raw")


def _images_of_other_formats(canary: str) -> Iterator[Hostile]:
    """Yield formats that no host accepts, declared as an accepted format."""
    flat = f'# Disk DescriptorFile\nversion=1\ncreateType="monolithicFlat"\nRW 2048 FLAT "{canary}" 0\n'.encode()
    sparse = struct.pack("<4sIIQQQQ", b"KDMV", 1, 3, 2048, 128, 1, 20).ljust(SECTOR, b"\0")
    stream = flat.replace(b"monolithicFlat", b"streamOptimized").replace(b"FLAT", b"SPARSE")
    iso = bytearray(MEBIBYTE)
    iso[0x8000:0x8006] = b"\1CD001"
    formats = {
        "vmdk descriptor": flat.ljust(MEBIBYTE, b"\0"),
        "vmdk text": flat.ljust(4096, b"\n"),
        "vmdk sparse": (sparse + flat).ljust(MEBIBYTE, b"\0"),
        "vmdk stream": (sparse + stream).ljust(MEBIBYTE, b"\0"),
        "vhd": b"conectix".ljust(MEBIBYTE, b"\0"),
        "qed": b"QED\0".ljust(MEBIBYTE, b"\0"),
        "vdi": (
            b"<<< Oracle VM VirtualBox Disk Image >>>\n".ljust(64, b"\0")
            + struct.pack("<I", 0xBEDA107F)
        ).ljust(MEBIBYTE, b"\0"),
        "iso": bytes(iso),
        "luks": b"LUKS\xba\xbe\0\1".ljust(MEBIBYTE, b"\0"),
    }
    for name, content in formats.items():
        yield Hostile(name, content, "qcow2")
        yield Hostile(f"{name}, as raw", content, "raw")
    yield Hostile("vmdk, as what it is", formats["vmdk sparse"], "vmdk")
    yield Hostile("bytes, as qcow2", b"x" * 100_000, "qcow2")


def _damaged_images() -> Iterator[Hostile]:
    for name, value, _ in MALFORMED:
        content, (at, size) = sound(), FIELDS[name]
        content[at : at + size] = value.to_bytes(size, "big")
        yield Hostile(f"{name} {value:#x}", bytes(content), "qcow2")
    for length in (4, 71, 512, 0x10000, 0x30000):
        yield Hostile(f"cut off after {length}", bytes(sound()[:length]), "qcow2")


def _images_with_false_size() -> Iterator[Hostile]:
    """Yield small files that declare a large size."""
    for bits in (38, 50, 62):
        content = sound()
        content[24:32] = struct.pack(">Q", 1 << bits)
        yield Hostile(f"2^{bits} bytes", bytes(content), "qcow2")
    content = sound() + bytes(MEBIBYTE)
    content[24:32], content[36:48] = struct.pack(">Q", 1 << 42), struct.pack(">IQ", 8192, 0x50000)
    yield Hostile("4 TiB with all its tables", bytes(content), "qcow2")


def _images_within_raw_data(canary: str) -> Iterator[Hostile]:
    """Yield raw images that a careless reader would take for another format."""
    partitioned = bytearray(2 * MEBIBYTE)
    partitioned[446:462] = b"\x80" + bytes(3) + b"\x0e" + bytes(3) + struct.pack("<II", 2048, 2048)
    partitioned[510:512] = b"\x55\xaa"
    partitioned[MEBIBYTE:] = standing_on(canary).ljust(MEBIBYTE, b"\0")[:MEBIBYTE]
    yield Hostile("qcow2 in a partition", bytes(partitioned), "raw", opaque=True)
    yield Hostile("qcow2 behind zeros", bytes(SECTOR) + standing_on(canary), "raw", opaque=True)
    partitioned[:4] = b"QFI\xfb"
    yield Hostile("qcow2 and partitions at once", bytes(partitioned), "raw")
