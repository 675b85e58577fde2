# SPDX-License-Identifier: Apache-2.0
"""Disks received from another host and disks kept for a revert, with the real qemu-img."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.libvirt.disks import disks, qcow2
from compute_agent.virt.libvirt.disks.images import CachedImage
from compute_agent.virt.libvirt.xml.domain_xml import Disk
from tests.disks import cache_image
from tests.disks import names as names_in

MIB, GIB = 1 << 20, 1 << 30
#: The name of a base of another image.
CONTENT = f"base.sha256-{64 * 'a'}.raw"
QUIET = VerbContext(report_progress=lambda name: None, cancelled=lambda: False)
pytestmark = pytest.mark.skipif(
    shutil.which("qemu-img") is None, reason="qemu-img (qemu-utils) is not installed"
)


@pytest.fixture
def image(tmp_path: Path) -> CachedImage:
    path = tmp_path / "image.raw"
    path.write_bytes(b"image" * 1000)
    return cache_image(path, "raw", 5000)


@pytest.fixture
def disk(tmp_path: Path, image: CachedImage) -> Disk:
    """Return the plan of a server's disk. The file does not exist."""
    home = tmp_path / "instances" / "server"
    home.mkdir(parents=True)
    return disks.plan(home, image)


def receive_disk(
    disk: Disk,
    *options: str,
    backing: str = "/other/instances/server/BASE",
    backing_format: str = "raw",
) -> Path:
    """Create the file that another host sent. BASE stands for the name of the disk's base."""
    part = disks.aside(disk.path)
    backing = backing.replace("BASE", disk.base.name if disk.base else CONTENT)
    backing_options = ["-u", "-b", backing, "-F", backing_format] if backing else []
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", *backing_options, *options, part, str(GIB)],
        check=True,
    )
    subprocess.run(
        [
            "qemu-io",
            "-c",
            f"write -P 7 {MIB} 512",
            f'json:{{"driver": "qcow2", "backing": null, "file": '
            f'{{"driver": "file", "filename": "{part}"}}}}',
        ],
        check=True,
        capture_output=True,
    )
    return part


def has_pattern(disk: Disk, pattern: int = 7) -> bool:
    output = subprocess.run(
        ["qemu-io", "-r", "-f", "qcow2", "-c", f"read -P {pattern} {MIB} 512", disk.path],
        capture_output=True,
        text=True,
        check=True,
    )
    return "verification failed" not in output.stdout


def names(disk: Disk) -> list[str]:
    return names_in(disk.path.parent)


@pytest.mark.parametrize("backing", ["/other/instances/server/BASE", "own"])
@pytest.mark.parametrize(("root_gb", "size"), [(0, GIB), (1, GIB), (3, 3 * GIB)])
def test_received_disk_gets_base_of_this_host_and_required_size(
    disk: Disk, image: CachedImage, backing: str, root_gb: int, size: int
) -> None:
    receive_disk(disk, backing=str(disk.base) if backing == "own" else backing)
    for _ in range(2):
        disks.take_in(disk, image, root_gb)
    disks.adopt(disk)
    assert names(disk) == ["base", "disk"]
    assert qcow2.read(disk.path) == qcow2.Qcow2Header(size, str(disk.base), "raw")
    assert disk.base is not None and disk.base.samefile(image.path)
    assert has_pattern(disk)
    disks.grow(disk, 1)
    assert qcow2.read(disk.path).virtual_size == size, "it never shrinks"
    disks.grow(disk, 5)
    assert qcow2.read(disk.path).virtual_size == 5 * GIB and has_pattern(disk)


def test_received_disk_without_image_has_no_backing_file(tmp_path: Path) -> None:
    disk = disks.plan(tmp_path, None)
    receive_disk(disk, backing="")
    disks.take_in(disk, None, 2)
    disks.adopt(disk)
    assert qcow2.read(disk.path) == qcow2.Qcow2Header(2 * GIB)
    assert names(disk) == ["disk"] and has_pattern(disk)


@pytest.mark.parametrize(
    ("backing", "backing_format", "reason"),
    [
        ("/etc/shadow", "raw", "has the backing file"),
        ("/other/instances/another/BASE", "raw", "has the backing file"),
        (f"/other/instances/server/{CONTENT}", "raw", "has the backing file"),
        ("/other/instances/server/rescue.base", "raw", "has the backing file"),
        ("nbd://somewhere/BASE", "raw", "has the backing file"),
        ('json:{"file": "/etc/shadow"}', "raw", "has the backing file"),
        ("/x/server/base.", "raw", "has the backing file"),
        ("/other/instances/server/base", "raw", "has the backing file"),
        ("", "", "has the backing file"),
        ("/other/instances/server/BASE", "qcow2", "format of the backing file"),
    ],
)
def test_received_disk_with_wrong_backing_file_is_refused_unopened(
    disk: Disk, image: CachedImage, backing: str, backing_format: str, reason: str
) -> None:
    part = receive_disk(disk, backing=backing, backing_format=backing_format)
    before = part.read_bytes()
    with pytest.raises(VerbFailed, match="does not open") as failed:
        disks.take_in(disk, image, 3)
    assert reason in failed.value.details
    assert part.read_bytes() == before and not disk.path.exists()


@pytest.mark.parametrize(
    "backing", ["/other/instances/server/BASE", "/other/instances/server/base"]
)
def test_received_disk_with_backing_file_but_no_image_is_refused(
    tmp_path: Path, backing: str
) -> None:
    disk = disks.plan(tmp_path, None)
    receive_disk(disk, backing=backing)
    with pytest.raises(VerbFailed, match="does not open"):
        disks.take_in(disk, None, 3)


def test_received_disk_without_qcow2_header_is_refused(disk: Disk, image: CachedImage) -> None:
    disks.aside(disk.path).write_bytes(os.urandom(4096))
    with pytest.raises(VerbFailed, match="does not open"):
        disks.take_in(disk, image, 3)


@pytest.fixture
def own_disk(disk: Disk, image: CachedImage) -> Disk:
    receive_disk(disk)
    disks.take_in(disk, image, 1)
    disks.adopt(disk)
    return disk


def test_take_back_removes_disk_kept_by_other_resize_without_restoring_it(own_disk: Disk) -> None:
    for _ in range(2):
        disks.keep(own_disk, "7", QUIET)
        disks.grow(own_disk, 2)
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", f"write -P 9 {MIB} 512", own_disk.path],
        check=True,
        capture_output=True,
    )
    disks.take_back(own_disk, "6")
    assert has_pattern(own_disk, 9) and names(own_disk) == ["base", "disk"], (
        "of another resize nothing is taken back"
    )


def test_take_back_restores_kept_disk_once(own_disk: Disk) -> None:
    disks.keep(own_disk, "6", QUIET)
    disks.keep(own_disk, "7", QUIET)
    assert names(own_disk) == ["base", "disk", "disk.7.kept"]
    disks.grow(own_disk, 2)
    for _ in range(2):
        disks.take_back(own_disk, "7")
        assert qcow2.read(own_disk.path).virtual_size == GIB and has_pattern(own_disk)
        assert names(own_disk) == ["base", "disk"]


def test_keep_disk_can_be_cancelled_and_leaves_no_file(own_disk: Disk) -> None:
    with pytest.raises(Cancelled):
        disks.keep(own_disk, "7", VerbContext(lambda name: None, lambda: True))
    assert names(own_disk) == ["base", "disk"] and has_pattern(own_disk)


def test_forget_disk_removes_kept_disk(own_disk: Disk) -> None:
    disks.keep(own_disk, "7", QUIET)
    for _ in range(2):
        disks.forget(own_disk)
        assert names(own_disk) == ["base", "disk"]


def test_require_space_fails_retryably_naming_free_and_required_space(tmp_path: Path) -> None:
    disks.require_space(tmp_path / "not there yet", 1)
    with pytest.raises(
        VerbFailed, match=r"\d GiB of disk free, .* may take up to 1048576\.0 GiB"
    ) as failed:
        disks.require_space(tmp_path, 1 << 50)
    assert failed.value.retryable


@pytest.fixture
def other_file_system() -> Iterator[Path]:
    """Yield a folder on another file system."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no second file system on this machine")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_make_disk_copies_base_to_other_file_system(
    other_file_system: Path, image: CachedImage
) -> None:
    if other_file_system.stat().st_dev == image.path.stat().st_dev:
        pytest.skip("no second file system on this machine")
    disk = disks.make(other_file_system, image, 1)
    assert disk.base is not None and disk.base.read_bytes() == image.path.read_bytes()
    assert names(disk) == ["base", "disk"]
