# SPDX-License-Identifier: Apache-2.0
"""Snapshots and merges of volumes in files while a guest has the volumes.

The tests run on a host in memory and with real QEMU guests. Plain folders act as mounted shares.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.domain import ids
from common.domain.models import AttachedVolume, DomainState
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import RUNNING, SHUTDOWN
from compute_agent.virt.driver import VolumeMerge as Merge
from compute_agent.virt.libvirt.xml import volume_xml
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.mounts import Mounts
from tests.contract import virt_rigs
from tests.contract.conftest import QEMU
from tests.contract.test_virt_volumes import GIBIBYTE, virsh
from tests.contract.virt_rigs import QUIET, Rig

EXPORT = "192.0.2.9:/volumes"
KIB = 1024


def connectors(folder: Path) -> dict[str, Any]:
    """Return the options of a driver with mounted shares."""
    from compute_agent.virt.libvirt.volumes.connectors import Connectors
    from compute_agent.virt.libvirt.volumes.host_connectors import NfsConnector

    exports = folder / "exports"
    exports.mkdir(exist_ok=True)
    exports.chmod(0o711)
    mounts = Mounts(run=lambda command: None, table=Path("/dev/null"))
    return {"connectors": Connectors({"nfs": NfsConnector(exports, mounts)})}


@pytest.fixture(params=["memory", QEMU])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from virt_rigs.of_kind(request, tmp_path, connectors)


class Volume:
    """A volume of 1 GiB, with files as the volume service creates them."""

    def __init__(self, rig: Rig, server: str) -> None:
        self.rig, self.server, self.key = rig, server, ids.new()
        self.is_real = not isinstance(rig.driver, MemoryDriver)
        self.name = f"volume-{self.key}"
        if self.is_real:
            link = connectors(rig.folder)["connectors"]
            self.folder = Path(link.source(self.describe(self.name, "raw")).path).parent
            self.folder.mkdir(exist_ok=True)
            self.folder.chmod(0o711)
            with (self.folder / self.name).open("wb") as file:
                file.truncate(GIBIBYTE)

    def describe(self, name: str, form: str) -> AttachedVolume:
        data = {"export": EXPORT, "name": name, "format": form}
        return AttachedVolume(self.key, "/dev/vdb", 1, {"driver_volume_type": "nfs", "data": data})

    def create_overlay(self, upon: str, form: str, name: str = "") -> AttachedVolume:
        """Create an overlay of another file, as the volume service does."""
        name = name or f"{self.name}.{ids.new()}"
        if self.is_real:
            subprocess.run(
                ["qemu-img", "create", "-q", "-f", "qcow2", "-b", upon, "-F", form, name],
                cwd=self.folder,
                check=True,
                timeout=60,
            )
        return self.describe(name, "qcow2")

    def list_files(self, stored: bool = False) -> list[str]:
        """Return the names of the files of the guest's disk, the top one first."""
        if isinstance(self.rig.driver, MemoryDriver):
            return [
                attached.connection["data"]["name"]
                for attached in self.rig.driver.host.guests[self.server].volumes
            ]
        disk = volume_xml.find_disks(self.rig.describe(self.server, stored))[self.key]
        driver = disk.find("driver")
        names = [Path(path).name for path in volume_xml.files(disk)]
        assert driver is not None
        assert driver.get("type") == ("raw" if names[0] == self.name else "qcow2")
        return names

    def run_io(self, command: str) -> None:
        """Run a qemu-io command on the guest's device. A read fails if the pattern is missing."""
        if not self.is_real:
            return
        disk = volume_xml.find_disks(self.rig.describe(self.server))[self.key]
        device = f"/machine/peripheral/{volume_xml.alias(disk)}/virtio-backend"
        output = virsh(
            self.rig,
            "qemu-monitor-command",
            self.server,
            "--hmp",
            f'qemu-io -d {device} "{command}"',
        )
        assert "failed" not in output.lower() and "error" not in output.lower(), output

    def check_patterns(self, *patterns: int) -> None:
        """Check that the volume contains these patterns in order."""
        for at, pattern in enumerate(patterns):
            self.run_io(f"read -P {pattern} {at * 64 * KIB} {64 * KIB}")

    def write(self, at: int, pattern: int) -> None:
        self.run_io(f"write -P {pattern} {at * 64 * KIB} {64 * KIB}")


def file_name(volume: AttachedVolume) -> str:
    return str(volume.connection["data"]["name"])


def test_snapshot_volume_and_merge_volume_of_running_guest_keep_all_data(rig: Rig) -> None:
    server = rig.boot().server
    volume, driver = Volume(rig, server), rig.driver
    driver.attach_volume(server, 2, volume.describe(volume.name, "raw"), QUIET)
    volume.write(0, 0x11)
    first = volume.create_overlay(volume.name, "raw")
    for _ in range(2):
        assert driver.snapshot_volume(server, 3, first, QUIET) == DomainState(server, RUNNING, 3)
        assert volume.list_files()[0] == volume.list_files(stored=True)[0] == file_name(first)
    volume.write(1, 0x22)
    second = volume.create_overlay(file_name(first), "qcow2")
    driver.snapshot_volume(server, 4, second, QUIET)
    volume.write(2, 0x33)
    # The first snapshot is deleted.
    merge = Merge(file_name(first), volume.name)
    for _ in range(2):
        assert driver.merge_volume(server, 5, second, merge, QUIET) == DomainState(
            server, RUNNING, 5
        )
        assert volume.list_files() in ([file_name(second)], [file_name(second), volume.name])
    volume.check_patterns(0x11, 0x22, 0x33)
    # The second snapshot is deleted.
    for _ in range(2):
        driver.merge_volume(server, 6, second, Merge(None, None), QUIET)
        assert volume.list_files() == [file_name(second)]
    driver.ensure_stopped(server, 7, 0, QUIET)
    driver.ensure_running(server, 8, QUIET)
    assert volume.list_files() == [file_name(second)]
    volume.check_patterns(0x11, 0x22, 0x33)


def test_snapshot_volume_of_stopped_guest_is_used_at_next_start(rig: Rig) -> None:
    server = rig.boot().server
    volume, driver = Volume(rig, server), rig.driver
    driver.attach_volume(server, 2, volume.describe(volume.name, "raw"), QUIET)
    volume.write(0, 0x11)
    driver.ensure_stopped(server, 3, 0, QUIET)
    overlay = volume.create_overlay(volume.name, "raw")
    assert driver.snapshot_volume(server, 4, overlay, QUIET) == DomainState(server, SHUTDOWN, 4)
    with pytest.raises(VerbFailed, match="is off"):
        driver.merge_volume(server, 5, overlay, Merge(None, None), QUIET)
    driver.ensure_running(server, 6, QUIET)
    assert volume.list_files() in ([file_name(overlay)], [file_name(overlay), volume.name])
    volume.check_patterns(0x11)


def test_snapshot_volume_and_merge_volume_refuse_foreign_files(rig: Rig) -> None:
    server = rig.boot().server
    volume, driver = Volume(rig, server), rig.driver
    attached = volume.describe(volume.name, "raw")
    with pytest.raises(VerbFailed, match="does not have volume"):
        driver.snapshot_volume(server, 2, attached, QUIET)
    driver.attach_volume(server, 2, attached, QUIET)
    if not volume.is_real:
        other = replace(attached, volume_id=ids.new(), connection={"driver_volume_type": "nbd"})
        driver.host.guests[server].volumes.append(other)  # type: ignore[attr-defined]
        with pytest.raises(VerbFailed, match="is connected over nbd"):
            driver.snapshot_volume(server, 3, other, QUIET)
        return
    foreign_overlay = volume.create_overlay(volume.name, "raw")
    subprocess.run(
        ["qemu-img", "rebase", "-u", "-b", "/etc/passwd", "-F", "raw", file_name(foreign_overlay)],
        cwd=volume.folder,
        check=True,
        timeout=60,
    )
    with pytest.raises(VerbFailed, match="does not find volume"):
        driver.snapshot_volume(server, 3, foreign_overlay, QUIET)
    overlay_of_overlay = volume.create_overlay(
        file_name(volume.create_overlay(volume.name, "raw")), "qcow2"
    )
    with pytest.raises(VerbFailed, match="is missing or not based on"):
        driver.snapshot_volume(server, 3, overlay_of_overlay, QUIET)
    assert volume.list_files() == volume.list_files(stored=True) == [volume.name]
    with pytest.raises(VerbFailed, match="merge does not fit the files"):
        driver.merge_volume(server, 3, attached, Merge(volume.name, "volume-x"), QUIET)
    overlay = volume.create_overlay(volume.name, "raw")
    driver.snapshot_volume(server, 4, overlay, QUIET)
    stop = VerbContext(report_progress=lambda progress: None, cancelled=lambda: True)
    with pytest.raises(Cancelled):
        driver.merge_volume(server, 5, overlay, Merge(None, None), stop)
    assert volume.list_files() == [file_name(overlay), volume.name]
