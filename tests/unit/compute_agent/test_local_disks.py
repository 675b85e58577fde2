# SPDX-License-Identifier: Apache-2.0
"""Ephemeral and swap disks, formatted by the real programs of this machine.

A disk is complete or absent, and an existing disk is never replaced.
"""

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
def test_local_disk_has_requested_file_system_and_label(tmp_path: Path, kind: str) -> None:
    demand(programs=PROGRAMS[kind][:1], ring="unit")
    disk = LocalDisk("swap", 64, "swap") if kind == "swap" else ephemeral(kind)
    LocalDisks().make(tmp_path, spec(disk))
    assert read_file_system(tmp_path / disk.name) == {"TYPE": kind, "LABEL": disk.name}
    assert names(tmp_path) == [disk.name]
    assert (tmp_path / disk.name).stat().st_mode & 0o777 == 0o600


def test_windows_local_disk_is_ntfs_when_mkfs_ntfs_exists(tmp_path: Path) -> None:
    demand(programs=["mkfs.ntfs"], ring="unit")
    LocalDisks().make(tmp_path, spec(ephemeral(), os_type="windows"))
    assert read_local_disks(tmp_path) == {"ephemeral0": (1024, "ntfs")}


@pytest.mark.parametrize("kind", ["xfs", "ntfs"])
def test_local_disk_with_xfs_or_ntfs_grows_and_keeps_content(tmp_path: Path, kind: str) -> None:
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
def test_local_disk_default_file_system_follows_option_and_os_type(
    tmp_path: Path, os_type: str, default: str, kind: str
) -> None:
    LocalDisks(default).make(tmp_path, spec(ephemeral(), os_type=os_type))
    assert read_local_disks(tmp_path) == {"ephemeral0": (1024, kind)}


def hide(monkeypatch: pytest.MonkeyPatch, folder: Path, hidden: str) -> None:
    """Set a PATH without this program."""
    (folder / "bin").mkdir()
    for program in (*NEEDED, "prlimit", "setpriv", "mkfs.ext2"):
        if program != hidden:
            (folder / "bin" / program).symlink_to(shutil.which(program) or "")
    monkeypatch.setenv("PATH", str(folder / "bin"))


def test_windows_local_disk_is_vfat_when_mkfs_ntfs_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, tmp_path, "mkfs.ntfs")
    LocalDisks().make(tmp_path, spec(ephemeral(), os_type="windows"))
    assert read_local_disks(tmp_path) == {"ephemeral0": (1024, "vfat")}


@pytest.mark.parametrize(
    ("requested", "default"), [("xfs", ""), ("", "xfs"), ("ntfs", ""), ("", "ntfs")]
)
def test_local_disk_fails_when_mkfs_of_chosen_file_system_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: str, default: str
) -> None:
    kind = requested or default
    hide(monkeypatch, tmp_path, f"mkfs.{kind}")
    with pytest.raises(VerbFailed, match=f"file systems of kind {kind}") as failed:
        LocalDisks(default).make(tmp_path, spec(ephemeral(requested)))
    assert f"no program mkfs.{kind}; install it" in failed.value.details
    assert failed.value.retryable and names(tmp_path) == ["bin"]


def test_make_local_disks_leaves_no_file_when_program_fails(tmp_path: Path) -> None:
    with pytest.raises(VerbFailed, match="could not make a disk") as failed:
        LocalDisks().make(
            tmp_path, spec(LocalDisk("ephemeral0", 1024, "ext2"), LocalDisk("swap", 0, "swap"))
        )
    assert "mkswap" in failed.value.details and names(tmp_path) == []


def test_make_local_disks_replaces_leftover_parts_and_keeps_complete_disks(tmp_path: Path) -> None:
    guest = spec(ephemeral(), LocalDisk("swap", 64, "swap"))
    for left_over in ("ephemeral0.raw.part", "ephemeral0.part", "swap.part"):
        (tmp_path / left_over).write_bytes(b"half")
    LocalDisks().make(tmp_path, guest)
    assert names(tmp_path) == ["ephemeral0", "swap"]
    write(tmp_path / "ephemeral0")
    LocalDisks().make(tmp_path, guest)
    assert is_written(tmp_path / "ephemeral0"), "what is there stays"


def test_fit_local_disks_grows_disks_and_resizes_swap(tmp_path: Path) -> None:
    LocalDisks().make(tmp_path, spec(ephemeral(), LocalDisk("swap", 64, "swap")))
    write(tmp_path / "ephemeral0")
    LocalDisks().fit(tmp_path, spec(ephemeral(size_mb=2048), LocalDisk("swap", 32, "swap")))
    assert read_local_disks(tmp_path) == {"ephemeral0": (2048, "ext4"), "swap": (32, "swap")}
    LocalDisks().fit(tmp_path, spec(ephemeral()))
    assert read_local_disks(tmp_path)["ephemeral0"] == (2048, "ext4"), "it never shrinks"
    assert is_written(tmp_path / "ephemeral0")
    local_disks.drop_others(tmp_path, spec(ephemeral()))
    assert names(tmp_path) == ["ephemeral0"]


def test_fit_local_disks_creates_missing_disk_only_when_new(tmp_path: Path) -> None:
    with pytest.raises(VerbFailed, match="not on this host's storage"):
        LocalDisks().fit(tmp_path, spec(ephemeral()))
    LocalDisks().fit(tmp_path, spec(ephemeral()), new=True)
    assert read_local_disks(tmp_path) == {"ephemeral0": (1024, "ext4")}


def test_large_local_disks_are_sparse(tmp_path: Path) -> None:
    LocalDisks().make(
        tmp_path, spec(ephemeral(size_mb=500 << 10), LocalDisk("swap", 16 << 10, "swap"))
    )
    size = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert size < 200 << 20
