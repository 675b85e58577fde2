# SPDX-License-Identifier: Apache-2.0
"""Disks beside a root disk as this machine's programs make them: formatted, whole or absent, and
never in place of one that is there."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from common.domain.models import Flavor, GuestSpec, ImageRef, LocalDisk
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.disks import local_disks
from compute_agent.virt.libvirt.disks.local_disks import PROGRAMS, LocalDisks
from tests.disks import names
from tests.local_disks import is_written, read_file_system, read_local_disks, write
from tests.services import demand

NEEDED = ("qemu-img", "qemu-io", "blkid", "mkfs.ext4", "mkfs.vfat", "mkswap")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, NEEDED)), reason=f"one of {', '.join(NEEDED)} is missing"
)


def spec(*disks: LocalDisk, os_type: str = "linux", **changed: Any) -> GuestSpec:
    image = ImageRef("i", properties={"os_type": os_type} if os_type else {})
    return GuestSpec(
        str(uuid.uuid4()), 1, "n", Flavor("1", "m1", 1, 128, 1), image, disks=list(disks), **changed
    )


def ephemeral(kind: str = "", size_mb: int = 1024) -> LocalDisk:
    return LocalDisk("ephemeral0", size_mb, kind)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_each_file_system_is_made_with_its_name(tmp_path: Path, kind: str) -> None:
    demand(programs=PROGRAMS[kind][:1], ring="unit")
    given = LocalDisk("swap", 64, "swap") if kind == "swap" else ephemeral(kind)
    LocalDisks().make(tmp_path, spec(given))
    assert read_file_system(tmp_path / given.name) == {"TYPE": kind, "LABEL": given.name}
    assert names(tmp_path) == [given.name]
    assert (tmp_path / given.name).stat().st_mode & 0o777 == 0o600


def test_windows_gets_ntfs_where_it_can_be_made(tmp_path: Path) -> None:
    demand(programs=["mkfs.ntfs"], ring="unit")
    LocalDisks().make(tmp_path, spec(ephemeral(), os_type="windows"))
    assert read_local_disks(tmp_path) == {"ephemeral0": (1024, "ntfs")}


@pytest.mark.parametrize("kind", ["xfs", "ntfs"])
def test_disk_of_another_file_system_grows_and_stays(tmp_path: Path, kind: str) -> None:
    demand(programs=[f"mkfs.{kind}"], ring="unit")
    LocalDisks().make(tmp_path, spec(ephemeral(kind)))
    write(tmp_path / "ephemeral0")
    LocalDisks().fit(tmp_path, spec(ephemeral(kind, 2048)))
    assert read_local_disks(tmp_path) == {"ephemeral0": (2048, kind)} and is_written(
        tmp_path / "ephemeral0"
    )


@pytest.mark.parametrize(
    ("os_type", "default", "kind"), [("linux", "", "ext4"), ("", "", "vfat"), ("", "ext3", "ext3")]
)
def test_file_system_of_a_disk_that_says_none(
    tmp_path: Path, os_type: str, default: str, kind: str
) -> None:
    LocalDisks(default).make(tmp_path, spec(ephemeral(), os_type=os_type))
    assert read_local_disks(tmp_path) == {"ephemeral0": (1024, kind)}


def hide(monkeypatch: pytest.MonkeyPatch, folder: Path, hidden: str) -> None:
    """This machine has not that program."""
    (folder / "bin").mkdir()
    for program in (*NEEDED, "prlimit", "setpriv", "mkfs.ext2"):
        if program != hidden:
            (folder / "bin" / program).symlink_to(shutil.which(program) or "")
    monkeypatch.setenv("PATH", str(folder / "bin"))


def test_windows_gets_what_it_reads_where_ntfs_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, tmp_path, "mkfs.ntfs")
    LocalDisks().make(tmp_path, spec(ephemeral(), os_type="windows"))
    assert read_local_disks(tmp_path) == {"ephemeral0": (1024, "vfat")}


@pytest.mark.parametrize(
    ("asked", "default"), [("xfs", ""), ("", "xfs"), ("ntfs", ""), ("", "ntfs")]
)
def test_file_system_that_was_asked_for_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, default: str
) -> None:
    kind = asked or default
    hide(monkeypatch, tmp_path, f"mkfs.{kind}")
    with pytest.raises(VerbFailed, match=f"file systems of kind {kind}") as failed:
        LocalDisks(default).make(tmp_path, spec(ephemeral(asked)))
    assert f"no program mkfs.{kind}; install it" in failed.value.details
    assert failed.value.retryable and names(tmp_path) == ["bin"]


def test_program_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(VerbFailed, match="could not make the disk") as failed:
        LocalDisks().make(
            tmp_path, spec(LocalDisk("ephemeral0", 1024, "ext2"), LocalDisk("swap", 0, "swap"))
        )
    assert "mkswap" in failed.value.details and names(tmp_path) == []


def test_made_again_after_a_crash_at_any_line(tmp_path: Path) -> None:
    given = spec(ephemeral(), LocalDisk("swap", 64, "swap"))
    for left_over in ("ephemeral0.raw.part", "ephemeral0.part", "swap.part"):
        (tmp_path / left_over).write_bytes(b"half")
    LocalDisks().make(tmp_path, given)
    assert names(tmp_path) == ["ephemeral0", "swap"]
    write(tmp_path / "ephemeral0")
    LocalDisks().make(tmp_path, given)
    assert is_written(tmp_path / "ephemeral0"), "what is there stays"


def test_fitted_disks_grow_and_swap_is_of_its_size(tmp_path: Path) -> None:
    LocalDisks().make(tmp_path, spec(ephemeral(), LocalDisk("swap", 64, "swap")))
    write(tmp_path / "ephemeral0")
    LocalDisks().fit(tmp_path, spec(ephemeral(size_mb=2048), LocalDisk("swap", 32, "swap")))
    assert read_local_disks(tmp_path) == {"ephemeral0": (2048, "ext4"), "swap": (32, "swap")}
    LocalDisks().fit(tmp_path, spec(ephemeral()))
    assert read_local_disks(tmp_path)["ephemeral0"] == (2048, "ext4"), "it never shrinks"
    assert is_written(tmp_path / "ephemeral0")
    local_disks.drop_others(tmp_path, spec(ephemeral()))
    assert names(tmp_path) == ["ephemeral0"]


def test_disk_that_is_not_there_is_made_only_where_it_may_be_new(tmp_path: Path) -> None:
    with pytest.raises(VerbFailed, match="not on this host's storage"):
        LocalDisks().fit(tmp_path, spec(ephemeral()))
    LocalDisks().fit(tmp_path, spec(ephemeral()), new=True)
    assert read_local_disks(tmp_path) == {"ephemeral0": (1024, "ext4")}


def test_large_disks_take_next_to_nothing(tmp_path: Path) -> None:
    LocalDisks().make(
        tmp_path, spec(ephemeral(size_mb=500 << 10), LocalDisk("swap", 16 << 10, "swap"))
    )
    taken = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert taken < 200 << 20
