# SPDX-License-Identifier: Apache-2.0
"""Config drives, as read by isoinfo and mcopy. A failed build leaves no file."""

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
EXPECTED_FILES = InstanceData(SPEC, VENDOR).drive(b"")


def check_file(path: str, content: bytes) -> None:
    if not path.endswith("/meta_data.json"):
        assert content == EXPECTED_FILES[path], path
    elif "2012-08-10" not in path:
        assert len(base64.b64decode(json.loads(content)["random_seed"])) == 512


def build_drive(folder: Path, drive_format: str) -> Path:
    disk = folder / "config"
    ConfigDrives(drive_format, VENDOR).build(SPEC, disk)
    assert [path.name for path in folder.iterdir()] == ["config"]
    assert disk.stat().st_mode & 0o777 == 0o600
    return disk


@pytest.mark.skipif(
    shutil.which("isoinfo") is None, reason="isoinfo (package genisoimage) is not installed"
)
@pytest.mark.parametrize("names", ["-R", "-J"], ids=["rock-ridge", "joliet"])
def test_iso9660_config_drive_is_readable_by_isoinfo(tmp_path: Path, names: str) -> None:
    disk = build_drive(tmp_path, ISO9660)
    about = subprocess.run(
        ["isoinfo", "-d", "-i", disk], capture_output=True, text=True, check=True
    ).stdout
    assert "Volume id: config-2" in about and "Joliet" in about and "Rock Ridge" in about
    listed = subprocess.run(
        ["isoinfo", names, "-f", "-i", disk], capture_output=True, text=True, check=True
    ).stdout
    assert {line[1:] for line in listed.splitlines()} >= set(EXPECTED_FILES)
    for path in EXPECTED_FILES:
        read = subprocess.run(
            ["isoinfo", names, "-x", f"/{path}", "-i", disk], capture_output=True, check=True
        )
        check_file(path, read.stdout)


@pytest.mark.skipif(shutil.which("mcopy") is None, reason="mcopy (package mtools) is not installed")
def test_vfat_config_drive_is_readable_by_mcopy(tmp_path: Path) -> None:
    disk = build_drive(tmp_path, VFAT)
    label = subprocess.run(
        ["blkid", "-p", "-o", "export", disk], capture_output=True, text=True, check=True
    ).stdout
    assert {"LABEL=config-2", "TYPE=vfat"} <= set(label.splitlines())
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["mcopy", "-s", "-i", disk, "::", out], check=True)
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == set(
        EXPECTED_FILES
    )
    for path in EXPECTED_FILES:
        check_file(path, (out / path).read_bytes())


class Services:
    """Vendor data services of the operator."""

    def __init__(self, failing: bool = False) -> None:
        self.requests: list[dict[str, Any]] = []
        self.failing = failing

    def of(self, facts: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(facts)
        if self.failing:
            raise errors.Unavailable("The vendor data of cmdb cannot be read.")
        return {"cmdb": {"rack": len(self.requests)}}


def test_config_drive_requests_vendor_data_once_per_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, bytes] = {}
    monkeypatch.setattr(config_drive, "_write_iso9660", lambda files, part: written.update(files))
    services = Services()
    ConfigDrives(ISO9660, VENDOR, cast(Dynamic, services)).build(SPEC, tmp_path / "config")
    vendor_files = {
        path: content for path, content in written.items() if path.endswith("/vendor_data2.json")
    }
    assert len(vendor_files) > 3 and {
        json.loads(content)["cmdb"]["rack"] for content in vendor_files.values()
    } == {1}
    assert [facts["instance-id"] for facts in services.requests] == [SERVER]


def test_config_drive_is_not_built_when_required_vendor_data_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="vendor data of cmdb cannot be read"):
        ConfigDrives(ISO9660, VENDOR, cast(Dynamic, Services(failing=True))).build(
            SPEC, tmp_path / "config"
        )
    assert list(tmp_path.iterdir()) == []


def test_config_drive_build_replaces_leftover_files(tmp_path: Path) -> None:
    (tmp_path / "config.part").write_bytes(b"half")
    (tmp_path / "config").write_bytes(b"old")
    assert build_drive(tmp_path, ISO9660).stat().st_size > 65535


@pytest.mark.skipif(shutil.which("mcopy") is None, reason="mcopy (package mtools) is not installed")
def test_config_drive_too_large_for_vfat_raises_error_with_reason(tmp_path: Path) -> None:
    big = base64.b64encode(b"x" * 6 * 1024**2).decode()
    with pytest.raises(OSError, match=r"mcopy failed: .*[Ff]ull"):
        ConfigDrives(VFAT).build(
            GuestSpec(SERVER, 1, "vm", SPEC.flavor, user_data=big), tmp_path / "config"
        )
    assert not (tmp_path / "config").exists()


def test_open_config_drives_names_missing_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert open_config_drives(ISO9660, VENDOR) == ConfigDrives(ISO9660, VENDOR)
    with pytest.raises(ConfigError, match=r"mkfs.vfat, mcopy; install dosfstools, mtools"):
        open_config_drives(VFAT, {})


@pytest.mark.parametrize(
    ("is_disk", "expected"), [(False, ("cdrom", "hda", "ide")), (True, ("disk", "vdz", "virtio"))]
)
def test_domain_xml_attaches_config_drive_as_cdrom_unless_it_is_a_disk(
    is_disk: bool, expected: tuple[str, str, str]
) -> None:
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
    assert (drive.get("device"), target.get("dev"), target.get("bus")) == expected
