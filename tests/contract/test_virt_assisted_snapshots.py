# SPDX-License-Identifier: Apache-2.0
"""A host takes snapshots of volumes that are files while a guest has them, and merges them: on the
same hypervisors. The shares are folders here."""

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
    """The options of a driver whose shares are mounted already."""
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
    """A volume of 1 GiB, with the files that its service makes."""

    def __init__(self, rig: Rig, server: str) -> None:
        self.rig, self.server, self.key = rig, server, ids.new()
        self.is_real = not isinstance(rig.driver, MemoryDriver)
        self.name = f"volume-{self.key}"
        if self.is_real:
            link = connectors(rig.folder)["connectors"]
            self.folder = Path(link.source(self.attached(self.name, "raw")).path).parent
            self.folder.mkdir(exist_ok=True)
            self.folder.chmod(0o711)
            with (self.folder / self.name).open("wb") as file:
                file.truncate(GIBIBYTE)

    def attached(self, name: str, form: str) -> AttachedVolume:
        data = {"export": EXPORT, "name": name, "format": form}
        return AttachedVolume(self.key, "/dev/vdb", 1, {"driver_volume_type": "nfs", "data": data})

    def file(self, upon: str, form: str, name: str = "") -> AttachedVolume:
        """A new file upon another one, as the service makes it."""
        name = name or f"{self.name}.{ids.new()}"
        if self.is_real:
            subprocess.run(
                ["qemu-img", "create", "-q", "-f", "qcow2", "-b", upon, "-F", form, name],
                cwd=self.folder,
                check=True,
                timeout=60,
            )
        return self.attached(name, "qcow2")

    def files(self, stored: bool = False) -> list[str]:
        """Those of the guest's disk, its own first."""
        if isinstance(self.rig.driver, MemoryDriver):
            return [
                one.connection["data"]["name"]
                for one in self.rig.driver.host.guests[self.server].volumes
            ]
        disk = volume_xml.find_disks(self.rig.describe(self.server, stored))[self.key]
        driver = disk.find("driver")
        found = [Path(path).name for path in volume_xml.files(disk)]
        assert driver is not None
        assert driver.get("type") == ("raw" if found[0] == self.name else "qcow2")
        return found

    def io(self, command: str) -> None:
        """Through the guest's device; the command's pattern must be there when it reads."""
        if not self.is_real:
            return
        disk = volume_xml.find_disks(self.rig.describe(self.server))[self.key]
        device = f"/machine/peripheral/{volume_xml.alias(disk)}/virtio-backend"
        said = virsh(
            self.rig,
            "qemu-monitor-command",
            self.server,
            "--hmp",
            f'qemu-io -d {device} "{command}"',
        )
        assert "failed" not in said.lower() and "error" not in said.lower(), said

    def holds(self, *patterns: int) -> None:
        """Each in a place of its own."""
        for at, pattern in enumerate(patterns):
            self.io(f"read -P {pattern} {at * 64 * KIB} {64 * KIB}")

    def write(self, at: int, pattern: int) -> None:
        self.io(f"write -P {pattern} {at * 64 * KIB} {64 * KIB}")


def name_of(volume: AttachedVolume) -> str:
    return str(volume.connection["data"]["name"])


def test_a_guest_goes_on_in_a_new_file_and_keeps_all_data(rig: Rig) -> None:
    server = rig.boot().server
    volume, driver = Volume(rig, server), rig.driver
    driver.attach_volume(server, 2, volume.attached(volume.name, "raw"), QUIET)
    volume.write(0, 0x11)
    first = volume.file(volume.name, "raw")
    for _ in range(2):
        assert driver.snapshot_volume(server, 3, first, QUIET) == DomainState(server, RUNNING, 3)
        assert volume.files()[0] == volume.files(stored=True)[0] == name_of(first)
    volume.write(1, 0x22)
    second = volume.file(name_of(first), "qcow2")
    driver.snapshot_volume(server, 4, second, QUIET)
    volume.write(2, 0x33)
    merge = Merge(name_of(first), volume.name)  # the first snapshot is deleted
    for _ in range(2):
        assert driver.merge_volume(server, 5, second, merge, QUIET) == DomainState(
            server, RUNNING, 5
        )
        assert volume.files() in ([name_of(second)], [name_of(second), volume.name])
    volume.holds(0x11, 0x22, 0x33)
    for _ in range(2):  # the second one is deleted
        driver.merge_volume(server, 6, second, Merge(None, None), QUIET)
        assert volume.files() == [name_of(second)]
    driver.ensure_stopped(server, 7, 0, QUIET)
    driver.ensure_running(server, 8, QUIET)
    assert volume.files() == [name_of(second)]
    volume.holds(0x11, 0x22, 0x33)


def test_a_guest_that_is_off_begins_in_the_new_file(rig: Rig) -> None:
    server = rig.boot().server
    volume, driver = Volume(rig, server), rig.driver
    driver.attach_volume(server, 2, volume.attached(volume.name, "raw"), QUIET)
    volume.write(0, 0x11)
    driver.ensure_stopped(server, 3, 0, QUIET)
    taken = volume.file(volume.name, "raw")
    assert driver.snapshot_volume(server, 4, taken, QUIET) == DomainState(server, SHUTDOWN, 4)
    with pytest.raises(VerbFailed, match="is off"):
        driver.merge_volume(server, 5, taken, Merge(None, None), QUIET)
    driver.ensure_running(server, 6, QUIET)
    assert volume.files() in ([name_of(taken)], [name_of(taken), volume.name])
    volume.holds(0x11)


def test_what_is_no_file_of_the_volume_is_refused(rig: Rig) -> None:
    server = rig.boot().server
    volume, driver = Volume(rig, server), rig.driver
    attached = volume.attached(volume.name, "raw")
    with pytest.raises(VerbFailed, match="does not have volume"):
        driver.snapshot_volume(server, 2, attached, QUIET)
    driver.attach_volume(server, 2, attached, QUIET)
    if not volume.is_real:
        other = replace(attached, volume_id=ids.new(), connection={"driver_volume_type": "nbd"})
        driver.host.guests[server].volumes.append(other)  # type: ignore[attr-defined]
        with pytest.raises(VerbFailed, match="it is served by nbd"):
            driver.snapshot_volume(server, 3, other, QUIET)
        return
    strange = volume.file(volume.name, "raw")
    subprocess.run(
        ["qemu-img", "rebase", "-u", "-b", "/etc/passwd", "-F", "raw", name_of(strange)],
        cwd=volume.folder,
        check=True,
        timeout=60,
    )
    with pytest.raises(VerbFailed, match="does not find volume"):
        driver.snapshot_volume(server, 3, strange, QUIET)
    upon_another = volume.file(name_of(volume.file(volume.name, "raw")), "qcow2")
    with pytest.raises(VerbFailed, match="is not one for its snapshot"):
        driver.snapshot_volume(server, 3, upon_another, QUIET)
    assert volume.files() == volume.files(stored=True) == [volume.name]
    with pytest.raises(VerbFailed, match="are not such that they could be merged"):
        driver.merge_volume(server, 3, attached, Merge(volume.name, "volume-x"), QUIET)
    taken = volume.file(volume.name, "raw")
    driver.snapshot_volume(server, 4, taken, QUIET)
    stop = VerbContext(report_progress=lambda progress: None, cancelled=lambda: True)
    with pytest.raises(Cancelled):
        driver.merge_volume(server, 5, taken, Merge(None, None), stop)
    assert volume.files() == [name_of(taken), volume.name]
