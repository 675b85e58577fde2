# SPDX-License-Identifier: Apache-2.0
"""Disks of a server, built with the real qemu-img, and the KVM probe with the real QEMU."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.libvirt.disks import disks
from compute_agent.virt.libvirt.disks.images import CachedImage
from compute_agent.virt.libvirt.host import host
from compute_agent.virt.libvirt.xml.domain_xml import Disk
from tests import disks as disks_seen
from tests.disks import base, names
from tests.phases import Phases

MIB, GIB = 1 << 20, 1 << 30
needs_qemu_img = pytest.mark.skipif(
    shutil.which("qemu-img") is None, reason="qemu-img (qemu-utils) is not installed"
)


def create_cached_image(folder: Path, disk_format: str = "raw", size: int = 3 * MIB) -> CachedImage:
    path = folder / f"image.{disk_format}"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", disk_format, str(path), str(size)], check=True
    )
    return disks_seen.cache_image(path, disk_format, size)


def read_info(path: Path) -> dict[str, Any]:
    output = subprocess.run(
        ["qemu-img", "info", "--output=json", "-f", "qcow2", str(path)],
        capture_output=True,
        check=True,
    )
    loaded: dict[str, Any] = json.loads(output.stdout)
    return loaded


@needs_qemu_img
@pytest.mark.parametrize(
    ("disk_format", "root_gb", "size"),
    [("raw", 1, GIB), ("qcow2", 2, 2 * GIB), ("qcow2", 0, 3 * MIB)],
)
def test_disk_overlay_names_base_and_has_flavor_size_or_image_size_if_zero(
    tmp_path: Path, disk_format: str, root_gb: int, size: int
) -> None:
    home = tmp_path / "server"
    home.mkdir()
    image = create_cached_image(tmp_path, disk_format)
    disk = disks.make(home, image, root_gb)
    about = read_info(home / "disk")
    assert about["virtual-size"] == size
    assert (about["backing-filename"], about["backing-filename-format"]) == (
        str(base(home)),
        disk_format,
    )
    assert disk == disks.existing(home) == Disk(home / "disk", base(home), disk_format)
    assert base(home).name == f"base.{image.path.name}" and base(home).samefile(image.path)
    assert names(home) == ["base", "disk"]


@needs_qemu_img
def test_make_disk_replaces_leftover_parts_and_keeps_complete_disk(tmp_path: Path) -> None:
    home = tmp_path / "server"
    home.mkdir()
    image = create_cached_image(tmp_path)
    for left_over in (f"base.{image.path.name}.part", "disk.part"):
        (home / left_over).write_bytes(b"half")
    disks.make(home, image, 1)
    first = (home / "disk").stat().st_ino
    disks.make(home, image, 1)
    assert (home / "disk").stat().st_ino == first
    (home / "disk").unlink()
    disks.make(home, image, 1)
    assert names(home) == ["base", "disk"]


@needs_qemu_img
def test_disk_without_image_is_blank(tmp_path: Path) -> None:
    disks.make(tmp_path, None, 1)
    assert read_info(tmp_path / "disk")["virtual-size"] == GIB
    assert "backing-filename" not in read_info(tmp_path / "disk")


@needs_qemu_img
@pytest.mark.parametrize("disk_format", ["raw", "qcow2"])
def test_disk_is_replaced_only_by_adopt_and_not_by_prepare_or_abandon(
    tmp_path: Path, disk_format: str
) -> None:
    home = tmp_path / "server"
    home.mkdir()
    own = disks.make(home, create_cached_image(tmp_path), 1)
    first = (home / "disk").stat().st_ino
    image = create_cached_image(tmp_path, disk_format, 5 * MIB)
    successor = disks.plan(home, image)
    for _ in range(2):
        disks.prepare(successor, image, 2)
    assert own.path.stat().st_ino == first and read_info(own.path)["virtual-size"] == GIB
    disks.abandon(home)
    assert names(home) == ["base", "disk"]
    disks.prepare(successor, image, 2)
    disks.adopt(successor)
    assert names(home) == ["base", "disk"]
    assert base(home).samefile(image.path) and read_info(own.path)["virtual-size"] == 2 * GIB
    disks.make(home, image, 1, "rescue")
    disks.discard(home, "rescue")
    assert names(home) == ["base", "disk"]


@needs_qemu_img
@pytest.mark.parametrize("disk_format", ["raw", "qcow2", None])
def test_disk_copy_has_no_backing_file_and_ignores_forged_one(
    tmp_path: Path, disk_format: str | None
) -> None:
    image = create_cached_image(tmp_path, disk_format) if disk_format else None
    disk = disks.make(tmp_path, image, 1)
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", "write -P 7 64M 4k", str(disk.path)],
        check=True,
        capture_output=True,
    )
    # A hijacked QEMU could write another backing file into its own disk.
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 1000)
    subprocess.run(
        ["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", str(secret), "-F", "raw", str(disk.path)],
        check=True,
    )
    phases = Phases()
    disks.convert(disk, tmp_path / "copy", VerbContext(phases, lambda: False))
    assert "backing-filename" not in read_info(tmp_path / "copy")
    assert phases[-1] == "copying disk 100 %"
    assert b"secret" not in (tmp_path / "copy").read_bytes()
    output = subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", "read -P 7 64M 4k", str(tmp_path / "copy")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "read 4096/4096" in output.stdout and "failed" not in output.stdout


@needs_qemu_img
def test_disk_copy_can_be_cancelled_and_fails_if_target_folder_is_missing(tmp_path: Path) -> None:
    disk = disks.make(tmp_path, None, 1)
    with pytest.raises(Cancelled):
        disks.convert(disk, tmp_path / "copy", VerbContext(lambda name: None, lambda: True))
    with pytest.raises(VerbFailed, match="could not copy") as caught:
        disks.convert(
            disk, tmp_path / "no folder" / "copy", VerbContext(lambda name: None, lambda: False)
        )
    assert "no folder" in caught.value.details


def test_make_disk_fails_without_image_and_size(tmp_path: Path) -> None:
    with pytest.raises(VerbFailed, match="needs a flavor with a root disk"):
        disks.make(tmp_path, None, 0)


def test_make_disk_fails_retryably_when_qemu_img_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tool = Path(folder, "qemu-img")
        tool.write_text("#!/bin/sh\necho 'No space left on device' >&2\nexit 1\n")
        for path in (tool, tool.parent):  # the sandbox runs the tool as another user
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
        with pytest.raises(VerbFailed) as caught:
            disks.make(tmp_path, None, 1)
    assert caught.value.retryable and "No space left" in caught.value.details
    assert not (tmp_path / "disk").exists()


@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed")
def test_kvm_probe_succeeds_with_tcg_and_fails_with_unknown_accelerator() -> None:
    assert host.probe("tcg", seconds=20)
    assert not host.probe("no-such-accelerator")


@pytest.mark.skipif(shutil.which("as") is None or shutil.which("ld") is None, reason="no assembler")
def test_kvm_probe_bytes_equal_assembled_source(tmp_path: Path) -> None:
    source = Path(host.__file__).with_name("probe.S")
    subprocess.run(["as", str(source), "-o", str(tmp_path / "probe.o")], check=True)
    subprocess.run(
        [
            "ld",
            "-Ttext",
            "0x7c00",
            "--oformat",
            "binary",
            "-o",
            str(tmp_path / "probe"),
            str(tmp_path / "probe.o"),
        ],
        check=True,
    )
    assert (tmp_path / "probe").read_bytes() == host.PROBE


def test_cached_kvm_probe_answer_is_valid_for_one_boot(tmp_path: Path) -> None:
    answer = tmp_path / "kvm.json"
    for works in (True, False):
        answer.write_text(json.dumps({"boot_id": host.boot_id(), "works": works}))
        assert host.kvm_works(tmp_path) is works
    answer.write_text(json.dumps({"boot_id": "another", "works": "unbelievable"}))
    assert host.kvm_works(tmp_path) in (True, False)
    assert json.loads(answer.read_text())["boot_id"] == host.boot_id()
