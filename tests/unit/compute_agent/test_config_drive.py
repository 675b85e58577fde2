# SPDX-License-Identifier: Apache-2.0
"""The config drive: that other programs read the disk as we meant it, and that it appears whole or
not at all."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from common.clients.vendor_data import Dynamic
from common.domain import errors
from common.domain.errors import ConfigError
from common.domain.instance_data import InstanceData
from common.domain.models import Flavor, GuestSpec
from compute_agent.virt.libvirt.guests import config_drive
from compute_agent.virt.libvirt.guests.config_drive import (
    ISO9660,
    VFAT,
    ConfigDrives,
    open_config_drives,
)
from compute_agent.virt.libvirt.xml.domain_xml import Disk, Domain, domain_xml

SERVER = str(uuid.UUID(int=5))
SPEC = GuestSpec(
    SERVER,
    1,
    "naïve",
    Flavor("1", "m1.nano", 1, 128, 1),
    None,
    True,
    base64.b64encode(b"\xff" * 65535).decode(),
    {
        "hostname": "web-1",
        "files": [{"path": "/etc/motd", "contents": base64.b64encode(b"x" * 10240).decode()}] * 5,
    },
)
VENDOR = {"ntp": "n1"}
WANTED = InstanceData(SPEC, VENDOR).drive(b"")


def check(path: str, content: bytes) -> None:
    if not path.endswith("/meta_data.json"):
        assert content == WANTED[path], path
    elif "2012-08-10" not in path:
        assert len(base64.b64decode(json.loads(content)["random_seed"])) == 512


def built(folder: Path, drive_format: str) -> Path:
    disk = folder / "config"
    ConfigDrives(drive_format, VENDOR).build(SPEC, disk)
    assert [path.name for path in folder.iterdir()] == ["config"]
    assert disk.stat().st_mode & 0o777 == 0o600
    return disk


@pytest.mark.skipif(
    shutil.which("isoinfo") is None, reason="isoinfo (package genisoimage) is not installed"
)
@pytest.mark.parametrize("names", ["-R", "-J"], ids=["rock-ridge", "joliet"])
def test_another_program_reads_the_same_files_from_iso9660(tmp_path: Path, names: str) -> None:
    disk = built(tmp_path, ISO9660)
    about = subprocess.run(
        ["isoinfo", "-d", "-i", disk], capture_output=True, text=True, check=True
    ).stdout
    assert "Volume id: config-2" in about and "Joliet" in about and "Rock Ridge" in about
    listed = subprocess.run(
        ["isoinfo", names, "-f", "-i", disk], capture_output=True, text=True, check=True
    ).stdout
    assert {line[1:] for line in listed.splitlines()} >= set(WANTED)
    for path in WANTED:
        read = subprocess.run(
            ["isoinfo", names, "-x", f"/{path}", "-i", disk], capture_output=True, check=True
        )
        check(path, read.stdout)


@pytest.mark.skipif(shutil.which("mcopy") is None, reason="mcopy (package mtools) is not installed")
def test_another_program_reads_the_same_files_from_vfat(tmp_path: Path) -> None:
    disk = built(tmp_path, VFAT)
    label = subprocess.run(
        ["blkid", "-p", "-o", "export", disk], capture_output=True, text=True, check=True
    ).stdout
    assert {"LABEL=config-2", "TYPE=vfat"} <= set(label.splitlines())
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["mcopy", "-s", "-i", disk, "::", out], check=True)
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == set(WANTED)
    for path in WANTED:
        check(path, (out / path).read_bytes())


class Services:
    """The operator's services."""

    def __init__(self, failing: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failing = failing

    def of(self, facts: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(facts)
        if self.failing:
            raise errors.Unavailable("The vendor data of cmdb cannot be had.")
        return {"cmdb": {"rack": len(self.asked)}}


def test_the_operators_services_are_asked_once_for_a_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, bytes] = {}
    monkeypatch.setattr(config_drive, "_write_iso9660", lambda files, part: written.update(files))
    services = Services()
    ConfigDrives(ISO9660, VENDOR, cast(Dynamic, services)).build(SPEC, tmp_path / "config")
    told = {
        path: content for path, content in written.items() if path.endswith("/vendor_data2.json")
    }
    assert len(told) > 3 and {json.loads(content)["cmdb"]["rack"] for content in told.values()} == {
        1
    }
    assert [facts["instance-id"] for facts in services.asked] == [SERVER]


def test_a_service_that_must_answer_and_does_not_makes_no_drive(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="vendor data of cmdb cannot be had"):
        ConfigDrives(ISO9660, VENDOR, cast(Dynamic, Services(failing=True))).build(
            SPEC, tmp_path / "config"
        )
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_of_a_drive_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "config.part").write_bytes(b"half")
    (tmp_path / "config").write_bytes(b"old")
    assert built(tmp_path, ISO9660).stat().st_size > 65535


@pytest.mark.skipif(shutil.which("mcopy") is None, reason="mcopy (package mtools) is not installed")
def test_a_drive_that_does_not_fit_is_an_error_that_says_why(tmp_path: Path) -> None:
    big = base64.b64encode(b"x" * 6 * 1024**2).decode()
    with pytest.raises(OSError, match=r"mcopy failed: .*[Ff]ull"):
        ConfigDrives(VFAT).build(
            GuestSpec(SERVER, 1, "vm", SPEC.flavor, user_data=big), tmp_path / "config"
        )
    assert not (tmp_path / "config").exists()


def test_missing_programs_are_said_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert open_config_drives(ISO9660, VENDOR) == ConfigDrives(ISO9660, VENDOR)
    with pytest.raises(ConfigError, match=r"mkfs.vfat, mcopy; install dosfstools, mtools"):
        open_config_drives(VFAT, {})


@pytest.mark.parametrize(
    ("is_disk", "seen"), [(False, ("cdrom", "hda", "ide")), (True, ("disk", "vdz", "virtio"))]
)
def test_the_domain_has_it_as_what_it_is(is_disk: bool, seen: tuple[str, str, str]) -> None:
    xml = domain_xml(
        Domain(
            SERVER,
            1,
            "vm",
            1,
            128,
            "qemu",
            Disk(Path("/i/disk")),
            Path("/i/console.log"),
            Path("/i/config"),
            config_drive_is_disk=is_disk,
        )
    )
    drive = ElementTree.fromstring(xml).findall("devices/disk")[1]
    target = drive.find("target")
    assert target is not None and drive.find("readonly") is not None
    assert (drive.get("device"), target.get("dev"), target.get("bus")) == seen
