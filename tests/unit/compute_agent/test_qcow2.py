# SPDX-License-Identifier: Apache-2.0
"""The header of a qcow2 file, and what a hostile one meets."""
from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from compute_agent.virt.libvirt import qcow2

GIB = 1 << 30
needs_qemu_img = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img (qemu-utils) is not installed")


def header(*, magic: bytes = b"QFI\xfb", version: int = 3, name: bytes = b"", name_at: int | None = None,
           name_length: int | None = None, cluster_bits: int = 16, size: int = GIB, encryption: int = 0,
           features: int = 0, length: int = 104, extensions: bytes = bytes(8)) -> bytes:
    """A header with extensions behind it, and the backing file's name behind them."""
    at = (length + len(extensions)) if name_at is None else name_at
    fixed = struct.pack(">4sIQIIQIIQQIIQQQQII", magic, version, at if name or name_at else 0,
                        len(name) if name_length is None else name_length, cluster_bits, size, encryption, 1, 196608,
                        65536, 1, 0, 0, features, 0, 0, 4, length)
    return (fixed[:length].ljust(length, b"\0") + extensions + name).ljust(1 << 16, b"\0")


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", kind, len(data)) + data.ljust(-(-len(data) // 8) * 8, b"\0")


def written(folder: Path, content: bytes) -> Path:
    path = folder / "disk"
    path.write_bytes(content)
    return path


@needs_qemu_img
@pytest.mark.parametrize("options", [[], ["-o", "compat=0.10"], ["-o", "extended_l2=on,cluster_size=128k"],
                                     ["-o", "compression_type=zstd"], ["-o", "lazy_refcounts=on"]])
@pytest.mark.parametrize("base", ["", "raw", "qcow2"])
def test_what_qemu_img_writes_is_read_as_it_is(tmp_path: Path, options: list[str], base: str) -> None:
    path, named = tmp_path / "disk", ["-u", "-b", "/somewhere/base", "-F", base] if base else []
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options, *named, path, str(3 * GIB)], check=True)
    assert qcow2.read(path) == qcow2.Header(3 * GIB, "/somewhere/base" if base else "", base)


def test_made_by_hand_it_is_read_too(tmp_path: Path) -> None:
    told = extension(0x6803f857, bytes(16)) + extension(0xE2792ACA, b"raw") + bytes(8)
    made = written(tmp_path, header(name=b"/a/base", extensions=told))
    assert qcow2.read(made) == qcow2.Header(GIB, "/a/base", "raw")
    assert qcow2.read(written(tmp_path, header(version=2, length=72))) == qcow2.Header(GIB)


@pytest.mark.parametrize(("made", "reason"), [
    (b"", "ends within"), (header()[:100], "ends within"), (header(magic=b"QFI\0"), "not qcow2"),
    (b"just bytes" * 100, "not qcow2"), (header(version=4), "not qcow2"), (header(cluster_bits=63), "not qcow2"),
    (header(encryption=2), "encrypted"), (header(features=1 << 1), "features"), (header(features=1 << 2), "features"),
    (header(features=1 << 40), "features"), (header(length=96), "bytes long"),
    (header(name_at=1 << 40, name_length=5), "not in its header"),
    (header(name_at=8, name_length=5), "not in its header"),
    (header(name=b"x" * 2000), "not in its header"), (header(name_at=65530, name_length=100), "cut off"),
    (header(name=b"/a/base\0/etc/passwd"), "cut off"), (header(name_at=4096, name_length=0), "not in its header"),
    (header(extensions=extension(0x44415441, b"/etc/shadow") + bytes(8)), "another file"),
    (header(name=b"/a", extensions=extension(0xE2792ACA, b"raw") * 2), "cannot be read"),
    (header(extensions=struct.pack(">II", 0xE2792ACA, 1 << 31)), "cannot be read")])
def test_what_is_not_understood_is_refused(tmp_path: Path, made: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        qcow2.read(written(tmp_path, made))
