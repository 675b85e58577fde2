# SPDX-License-Identifier: Apache-2.0
"""A disk that another host sent becomes a server's own; one that is kept aside comes back."""

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
#: The name of another base.
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
    """A server's disk, not made yet."""
    home = tmp_path / "instances" / "server"
    home.mkdir(parents=True)
    return disks.plan(home, image)


def came(
    disk: Disk,
    *options: str,
    backing: str = "/other/instances/server/BASE",
    backing_format: str = "raw",
) -> Path:
    """What another host sent lies aside; BASE stands for the name of what lies under the disk."""
    part = disks.aside(disk.path)
    backing = backing.replace("BASE", disk.base.name if disk.base else CONTENT)
    named = ["-u", "-b", backing, "-F", backing_format] if backing else []
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", *named, *options, part, str(GIB)], check=True
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


def holds(disk: Disk, pattern: int = 7) -> bool:
    told = subprocess.run(
        ["qemu-io", "-r", "-f", "qcow2", "-c", f"read -P {pattern} {MIB} 512", disk.path],
        capture_output=True,
        text=True,
        check=True,
    )
    return "verification failed" not in told.stdout


def names(disk: Disk) -> list[str]:
    return names_in(disk.path.parent)


@pytest.mark.parametrize("backing", ["/other/instances/server/BASE", "own"])
@pytest.mark.parametrize(("root_gb", "size"), [(0, GIB), (1, GIB), (3, 3 * GIB)])
def test_it_stands_on_our_base_and_is_large_enough(
    disk: Disk, image: CachedImage, backing: str, root_gb: int, size: int
) -> None:
    came(disk, backing=str(disk.base) if backing == "own" else backing)
    for _ in range(2):
        disks.take_in(disk, image, root_gb)
    disks.adopt(disk)
    assert names(disk) == ["base", "disk"]
    assert qcow2.read(disk.path) == qcow2.Qcow2Header(size, str(disk.base), "raw")
    assert disk.base is not None and disk.base.samefile(image.path)
    assert holds(disk)
    disks.grow(disk, 1)
    assert qcow2.read(disk.path).virtual_size == size, "it never shrinks"
    disks.grow(disk, 5)
    assert qcow2.read(disk.path).virtual_size == 5 * GIB and holds(disk)


def test_one_without_an_image_stands_on_nothing(tmp_path: Path) -> None:
    disk = disks.plan(tmp_path, None)
    came(disk, backing="")
    disks.take_in(disk, None, 2)
    disks.adopt(disk)
    assert qcow2.read(disk.path) == qcow2.Qcow2Header(2 * GIB)
    assert names(disk) == ["disk"] and holds(disk)


@pytest.mark.parametrize(
    ("backing", "backing_format", "reason"),
    [
        ("/etc/shadow", "raw", "stands on"),
        ("/other/instances/another/BASE", "raw", "stands on"),
        (f"/other/instances/server/{CONTENT}", "raw", "stands on"),
        ("/other/instances/server/rescue.base", "raw", "stands on"),
        ("nbd://somewhere/BASE", "raw", "stands on"),
        ('json:{"file": "/etc/shadow"}', "raw", "stands on"),
        ("/x/server/base.", "raw", "stands on"),
        ("/other/instances/server/base", "raw", "stands on"),
        ("", "", "stands on"),
        ("/other/instances/server/BASE", "qcow2", "said to be"),
    ],
)
def test_hostile_one_is_opened_by_nobody(
    disk: Disk, image: CachedImage, backing: str, backing_format: str, reason: str
) -> None:
    part = came(disk, backing=backing, backing_format=backing_format)
    before = part.read_bytes()
    with pytest.raises(VerbFailed, match="may open") as failed:
        disks.take_in(disk, image, 3)
    assert reason in failed.value.details
    assert part.read_bytes() == before and not disk.path.exists()


@pytest.mark.parametrize(
    "backing", ["/other/instances/server/BASE", "/other/instances/server/base"]
)
def test_hostile_one_without_an_image_is_opened_by_nobody(tmp_path: Path, backing: str) -> None:
    disk = disks.plan(tmp_path, None)
    came(disk, backing=backing)
    with pytest.raises(VerbFailed, match="may open"):
        disks.take_in(disk, None, 3)


def test_bytes_that_are_no_disk_are_refused(disk: Disk, image: CachedImage) -> None:
    disks.aside(disk.path).write_bytes(os.urandom(4096))
    with pytest.raises(VerbFailed, match="may open"):
        disks.take_in(disk, image, 3)


@pytest.fixture
def made(disk: Disk, image: CachedImage) -> Disk:
    came(disk)
    disks.take_in(disk, image, 1)
    disks.adopt(disk)
    return disk


def test_what_is_kept_comes_back(made: Disk) -> None:
    for _ in range(2):
        disks.keep(made, "7", QUIET)
        disks.grow(made, 2)
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", f"write -P 9 {MIB} 512", made.path],
        check=True,
        capture_output=True,
    )
    disks.take_back(made, "6")
    assert holds(made, 9) and names(made) == ["base", "disk"], (
        "of another resize nothing is taken back"
    )


def test_what_is_kept_comes_back_once(made: Disk) -> None:
    disks.keep(made, "6", QUIET)
    disks.keep(made, "7", QUIET)
    assert names(made) == ["base", "disk", "disk.7.kept"]
    disks.grow(made, 2)
    for _ in range(2):
        disks.take_back(made, "7")
        assert qcow2.read(made.path).virtual_size == GIB and holds(made)
        assert names(made) == ["base", "disk"]


def test_keeping_can_be_cancelled_and_leaves_nothing(made: Disk) -> None:
    with pytest.raises(Cancelled):
        disks.keep(made, "7", VerbContext(lambda name: None, lambda: True))
    assert names(made) == ["base", "disk"] and holds(made)


def test_nothing_is_kept_when_it_is_forgotten(made: Disk) -> None:
    disks.keep(made, "7", QUIET)
    for _ in range(2):
        disks.forget(made)
        assert names(made) == ["base", "disk"]


def test_space_is_told_in_numbers(tmp_path: Path) -> None:
    disks.require_space(tmp_path / "not there yet", 1)
    with pytest.raises(
        VerbFailed, match=r"\d GiB of disk free .* may take 1048576\.0 GiB"
    ) as failed:
        disks.require_space(tmp_path, 1 << 50)
    assert failed.value.retryable


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no second file system on this machine")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_base_is_copied_to_another_file_system(elsewhere: Path, image: CachedImage) -> None:
    if elsewhere.stat().st_dev == image.path.stat().st_dev:
        pytest.skip("no second file system on this machine")
    made = disks.make(elsewhere, image, 1)
    assert made.base is not None and made.base.read_bytes() == image.path.read_bytes()
    assert names(made) == ["base", "disk"]
