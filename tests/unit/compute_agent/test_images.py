# SPDX-License-Identifier: Apache-2.0
"""The image cache with real sandboxed inspection: one verified download, hostile images, eviction.

Uploads of snapshots are tested here, too.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.domain import errors
from common.domain.models import ImageRef
from compute_agent.verb_context import Cancelled, ImageReader, VerbContext, VerbFailed
from compute_agent.virt.libvirt.disks.images import ImageCache, upload
from deploy.one_machine.machine.abilities import FOR_GUESTS
from tests.phases import Phases
from tests.services import demand

GIB = 1 << 30
QUIET = VerbContext(report_progress=lambda name: None, cancelled=lambda: False)
VMDK = (
    b'# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType="monolithicFlat"\n'
    b'RW 2048 FLAT "/etc/shadow" 0\n'
)
TEXT_VMDK, VMDK = VMDK.ljust(4096, b"\n"), VMDK.ljust(4096, b"\0")


def qcow2(size: int = 1 << 20, *, version: int = 3, backing: int = 0, features: int = 0) -> bytes:
    """Return an empty qcow2 file with clusters of 4 KiB: header, refcounts, the L1 table."""
    table = -(-size // (2 << 20))
    header = struct.pack(
        ">4sIQIIQIIQQIIQQQQII",
        b"QFI\xfb",
        version,
        backing,
        16 if backing else 0,
        12,
        size,
        0,
        table,
        12288,
        4096,
        1,
        0,
        0,
        features,
        0,
        0,
        4,
        104 if version > 2 else 0,
    )
    refcounts = struct.pack(">Q", 8192).ljust(4096, b"\0") + (b"\0\1" * 16).ljust(4096, b"\0")
    return (header.ljust(4096, b"\0") + refcounts).ljust(1 << 16, b"\0")


def ref(content: bytes, disk_format: str = "qcow2") -> ImageRef:
    return ImageRef(
        str(uuid.UUID(int=9)),
        disk_format,
        len(content),
        "sha512",
        hashlib.sha512(content).hexdigest(),
    )


def chunks(content: bytes, step: int = 1000) -> Callable[[str], Iterator[bytes]]:
    return lambda image: (content[at : at + step] for at in range(0, len(content), step))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("content", "disk_format", "size"),
    [
        (qcow2(5 * GIB), "qcow2", 5 * GIB),
        (qcow2(version=2), "qcow2", 1 << 20),
        (b"just bytes" * 1000, "raw", 10000),
        (
            bytes(446)
            + b"\x80"
            + bytes(3)
            + b"\x0e"
            + bytes(11)
            + bytes(48)
            + b"\x55\xaa"
            + bytes(99488),
            "raw",
            100000,
        ),
        (b"", "raw", 0),
    ],
    ids=["qcow2", "qcow2-v2", "raw", "raw-partitioned", "raw-empty"],
)
def test_image_cache_fetches_valid_image_once(
    tmp_path: Path, content: bytes, disk_format: str, size: int
) -> None:
    cache, reads = ImageCache(tmp_path), []

    def read(image: str) -> Iterator[bytes]:
        reads.append(image)
        return chunks(content)(image)

    for _ in range(2):
        cached = cache.fetch(ref(content, disk_format), 0, read, QUIET)
        assert (cached.format, cached.virtual_size, cached.path.read_bytes()) == (
            disk_format,
            size,
            content,
        )
    assert len(reads) == 1
    assert names(tmp_path) == {cached.path.name}
    assert cached.path.stat().st_mode & 0o777 == 0o644


def test_image_cache_key_ignores_image_id_and_flavor_size(tmp_path: Path) -> None:
    """Otherwise a tenant could fill the disk with copies of one image (CVE-2013-6437)."""
    cache, content = ImageCache(tmp_path), qcow2(1 << 20)
    for number in range(100):
        cache.fetch(
            replace(ref(content), id=str(uuid.UUID(int=number))),
            number << 20,
            chunks(content),
            QUIET,
        )
    assert len(names(tmp_path)) == 1


def test_image_fetch_reports_progress(tmp_path: Path) -> None:
    phases = Phases()
    content = qcow2()
    ImageCache(tmp_path).fetch(
        ref(content), 0, chunks(content, len(content) // 4), VerbContext(phases, lambda: False)
    )
    assert phases == [
        "fetching image",
        *(f"fetching image {percent} %" for percent in (25, 50, 75, 100)),
    ]


GOOD = qcow2()
HOSTILE = {
    "backing-file": (ref(qcow2(backing=512)), qcow2(backing=512), "backing file"),
    "data-file": (ref(qcow2(features=4)), qcow2(features=4), "data_file"),
    "unknown-feature": (ref(qcow2(features=1 << 40)), qcow2(features=1 << 40), "nknown"),
    "version": (ref(qcow2(version=4)), qcow2(version=4), "version"),
    "vmdk": (ref(VMDK), VMDK, "content is vmdk"),
    "vmdk-as-raw": (ref(VMDK, "raw"), VMDK, "content is vmdk"),
    "text-vmdk": (ref(TEXT_VMDK), TEXT_VMDK, "content is vmdk"),
    "text-vmdk-as-raw": (ref(TEXT_VMDK, "raw"), TEXT_VMDK, "content is vmdk"),
    "vmdk-declared": (ref(VMDK, "vmdk"), VMDK, "'vmdk' are not supported"),
    "qcow2-as-raw": (ref(GOOD, "raw"), GOOD, "declared as raw but its content is qcow2"),
    "raw-as-qcow2": (ref(b"x" * 9000), b"x" * 9000, "declared as qcow2 but its content is raw"),
    "cut-header": (ref(GOOD[:100]), GOOD[:100], "declared as qcow2 but its content is raw"),
    "too-large-inside": (ref(qcow2(2 * GIB)), qcow2(2 * GIB), "2.00 GiB does not fit .* 1 GiB"),
    "wrong-checksum": (ref(GOOD), GOOD[:-1] + b"!", "sha512 checksum"),
    "longer": (ref(GOOD), GOOD + b"x" * 5000, "longer than the 65536 bytes"),
    "shorter": (ref(GOOD), GOOD[:-5000], "ended after 60536 of 65536"),
    "weak-checksum": (
        replace(ref(GOOD), hash_algo="md5", hash_value="0" * 32),
        GOOD,
        "'md5'; use one of",
    ),
    "path-as-checksum": (
        replace(ref(GOOD), hash_value="../../etc/passwd"),
        GOOD,
        "must be a hexadecimal",
    ),
    "path-as-id": (replace(ref(GOOD), hash_value="", id="../../etc/passwd"), GOOD, "not a UUID"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_or_inconsistent_image_is_refused_and_leaves_no_file(
    tmp_path: Path, name: str
) -> None:
    image, content, reason = HOSTILE[name]
    with pytest.raises(VerbFailed, match=reason):
        ImageCache(tmp_path).fetch(image, GIB, chunks(content), QUIET)
    assert names(tmp_path) == set()


def test_image_with_backing_file_is_refused_before_complete_download(tmp_path: Path) -> None:
    content = qcow2(backing=512) + bytes(64 << 20)
    read: list[int] = []

    def reader(image: str) -> Iterator[bytes]:
        for at in range(0, len(content), 1 << 20):
            read.append(at)
            yield content[at : at + (1 << 20)]

    with pytest.raises(VerbFailed, match="backing file"):
        ImageCache(tmp_path).fetch(ref(content), 0, reader, QUIET)
    assert len(read) < 16


def test_cached_image_is_refused_only_for_flavor_with_smaller_disk(tmp_path: Path) -> None:
    content = qcow2(2 * GIB)
    cache = ImageCache(tmp_path)
    assert cache.fetch(ref(content), 0, chunks(content), QUIET).virtual_size == 2 * GIB
    with pytest.raises(VerbFailed, match="does not fit"):
        cache.fetch(ref(content), GIB, chunks(content), QUIET)


def test_image_fetch_is_cancelled_while_image_service_hangs(tmp_path: Path) -> None:
    hang, cancelled = threading.Event(), threading.Event()

    def reader(image: str) -> Iterator[bytes]:
        yield GOOD[:100]
        hang.wait(60)

    threading.Timer(0.1, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        ImageCache(tmp_path).fetch(
            ref(GOOD), 0, reader, VerbContext(lambda name: None, cancelled.is_set)
        )
    assert time.monotonic() - began < 5
    hang.set()
    assert names(tmp_path) == set()


def test_image_fetch_fails_retryably_when_image_service_fails(tmp_path: Path) -> None:
    def reader(image: str) -> Iterator[bytes]:
        yield GOOD[:100]
        raise ConnectionError("404 no such image")

    with pytest.raises(VerbFailed) as caught:
        ImageCache(tmp_path).fetch(ref(GOOD), 0, reader, QUIET)
    assert caught.value.retryable and "404 no such image" in caught.value.details
    assert "404" not in str(caught.value)


def fetch_in_threads(cache: ImageCache, readers: list[ImageReader]) -> list[object]:
    results: list[object] = []

    def fetch(reader: ImageReader) -> None:
        try:
            results.append(cache.fetch(ref(GOOD), 0, reader, QUIET).path)
        except VerbFailed as failure:
            results.append(failure)

    threads = [threading.Thread(target=fetch, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_concurrent_image_fetches_share_one_download(tmp_path: Path) -> None:
    reads: list[str] = []

    def reader(image: str) -> Iterator[bytes]:
        reads.append(image)
        # Time for the other threads to begin to wait. Their waiting cannot be observed.
        time.sleep(0.2)
        yield GOOD

    results = fetch_in_threads(ImageCache(tmp_path), [reader] * 4)
    assert len(set(results)) == 1 and len(results) == 4 and len(reads) == 1


def test_waiting_image_fetches_continue_when_first_fails(tmp_path: Path) -> None:
    fails = [True]

    def reader(image: str) -> Iterator[bytes]:
        if fails and fails.pop():
            raise ConnectionError
        yield GOOD

    results = fetch_in_threads(ImageCache(tmp_path), [reader] * 3)
    assert [type(result) for result in results].count(VerbFailed) == 1 and len(results) == 3


def test_image_cache_removes_partial_files_at_start(tmp_path: Path) -> None:
    (tmp_path / "sha512-00.qcow2.123.part").write_bytes(b"half")
    ImageCache(tmp_path)
    assert names(tmp_path) == set()


def test_image_cache_eviction_spares_used_and_recent_images(tmp_path: Path) -> None:
    folder, user = tmp_path / "images", tmp_path / "base"
    cache = ImageCache(folder, ttl=60)
    path = cache.fetch(ref(GOOD), 0, chunks(GOOD), QUIET).path
    assert cache.evict() == []
    os.link(path, user)
    assert cache.evict(time.time() + 3600) == []
    user.unlink()
    assert cache.evict(time.time() + 3600) == [path.name]
    assert names(folder) == set()


def test_image_without_checksum_is_cached_by_computed_checksum(tmp_path: Path) -> None:
    cache, image = ImageCache(tmp_path), replace(ref(GOOD), hash_algo="", hash_value="")
    reads: list[str] = []

    def reader(image_id: str) -> Iterator[bytes]:
        reads.append(image_id)
        yield GOOD

    for _ in range(2):
        path = cache.fetch(image, 0, reader, QUIET).path
        assert (
            path.name == f"sha256-{hashlib.sha256(GOOD).hexdigest()}.qcow2"
            and path.read_bytes() == GOOD
        )
    assert len(reads) == 1
    assert sorted(cache.evict(time.time() + 3600 * 48)) == sorted(
        [path.name, f"id-{image.id}.qcow2"]
    )


@pytest.mark.parametrize("keeps_attributes", [True, False])
def test_image_changed_in_cache_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_attributes: bool
) -> None:
    if not keeps_attributes:
        monkeypatch.setattr(os, "setxattr", raise_os_error)
        monkeypatch.setattr(os, "getxattr", raise_os_error)
    cache = ImageCache(tmp_path)
    path = cache.fetch(ref(GOOD), 0, chunks(GOOD), QUIET).path
    path.chmod(0o600)
    path.write_bytes(GOOD[:-1] + b"!")
    assert cache.fetch(ref(GOOD), 0, chunks(GOOD), QUIET).path.read_bytes() == GOOD
    cache.fetch(ref(GOOD), 0, raise_os_error, QUIET)


def raise_os_error(*arguments: object) -> Iterator[bytes]:
    raise OSError("not here")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    demand(*FOR_GUESTS)
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
def test_image_fetch_on_full_disk_fails_retryably_and_leaves_no_file(
    tiny_disk: Path, announced: bool
) -> None:
    content = bytes(1 << 20)
    image = ref(content, "raw") if announced else replace(ref(content, "raw"), size=0)
    with pytest.raises(VerbFailed) as caught:
        ImageCache(tiny_disk).fetch(image, 0, chunks(content), QUIET)
    assert caught.value.retryable
    assert names(tiny_disk) == set()


def test_image_upload_sends_all_bytes_in_small_chunks_with_progress(tmp_path: Path) -> None:
    (tmp_path / "copy").write_bytes(bytes(range(256)) * 10_000)
    chunks: list[bytes] = []
    phases = Phases()
    assert upload(tmp_path / "copy", chunks.extend, VerbContext(phases, lambda: False)) == 2_560_000
    assert b"".join(chunks) == (tmp_path / "copy").read_bytes()
    assert max(len(chunk) for chunk in chunks) <= 1 << 20
    assert (phases[0], phases[-1]) == ("uploading 0 %", "uploading 100 %")


def test_image_upload_can_be_cancelled_while_image_service_hangs(tmp_path: Path) -> None:
    (tmp_path / "copy").write_bytes(b"x")
    cancelled, hang = threading.Event(), threading.Event()
    threading.Timer(0.2, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        upload(
            tmp_path / "copy",
            lambda chunks: hang.wait(30) and None,
            VerbContext(lambda name: None, cancelled.is_set),
        )
    hang.set()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (errors.Forbidden("The image quota is used up."), VerbFailed, "image quota"),
        (
            errors.Unavailable("The image service does not answer."),
            errors.Unavailable,
            "does not answer",
        ),
        (OSError("broken"), VerbFailed, "did not accept the image"),
    ],
)
def test_image_upload_raises_verb_failed_unless_service_is_unavailable(
    tmp_path: Path, error: Exception, raised: type[Exception], text: str
) -> None:
    def refuse(chunks: Iterator[bytes]) -> None:
        next(chunks)
        raise error

    (tmp_path / "copy").write_bytes(b"x")
    with pytest.raises(raised, match=text):
        upload(tmp_path / "copy", refuse, VerbContext(lambda name: None, lambda: False))
