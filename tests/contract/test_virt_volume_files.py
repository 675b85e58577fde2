# SPDX-License-Identifier: Apache-2.0
"""Volumes that are files of an export, and a guest that writes on one all the time: while snapshots
of it are taken and merged, and while its guest moves. What it says that it has written is there.
The export is a folder that both hosts see."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.domain import ids
from common.domain.models import AttachedVolume
from common.security.tls import Tls
from compute_agent.virt import volumes
from compute_agent.virt.driver import RUNNING, VolumeMerge
from compute_agent.virt.libvirt.volumes import connectors
from compute_agent.virt.libvirt.volumes.host_connectors import NfsConnector
from compute_agent.virt.libvirt.xml import volume_xml
from compute_agent.virt.mounts import Mounts
from tests.contract.conftest import FOR_HOSTS, NEEDED
from tests.contract.test_virt_volume_exports import GIBIBYTE, ServingWorld
from tests.contract.virt_rigs import QUIET, Rig, guests_folder
from tests.services import demand

pytestmark = [pytest.mark.kvm_or_tcg, pytest.mark.slice("moves")]

EXPORT = "192.0.2.9:/volumes"


class FileWorld(ServingWorld):
    """Two hosts that have mounted the same export."""

    def reaching(self, at: int, proof: Tls) -> connectors.Connectors:
        exports = self.folder / "mounted"
        exports.mkdir(exist_ok=True)
        exports.chmod(0o711)
        mounts = Mounts(run=lambda command: None, table=Path("/dev/null"))
        self.connector = NfsConnector(exports, mounts)
        return connectors.Connectors({volumes.NFS: self.connector})

    def path(self, volume_id: str) -> Path:
        file = self.file(volume_id)
        return Path(self.connector.source(file, volumes.link(file, [volumes.NFS])).path)

    def file(self, volume_id: str, name: str = "", form: str = "raw") -> AttachedVolume:
        """The volume in one of its files."""
        data = {"export": EXPORT, "name": name or f"volume-{volume_id}", "format": form}
        return AttachedVolume(
            volume_id, "/dev/vdb", 1, {"driver_volume_type": volumes.NFS, "data": data}
        )

    def served(self, volume_id: str = "", key: str = "", **changed: Any) -> AttachedVolume:
        volume_id = volume_id or ids.new()
        self.path(volume_id).parent.mkdir(exist_ok=True)
        self.path(volume_id).parent.chmod(0o711)
        with self.path(volume_id).open("wb") as file:
            file.truncate(GIBIBYTE)
        return replace(self.file(volume_id), **changed)

    def snapshot_of(self, volume: AttachedVolume) -> AttachedVolume:
        """A new file upon the one in which the volume is, as its service makes it."""
        below = volume.connection["data"]
        made = f"volume-{volume.volume_id}.{ids.new()}"
        self._image("create", "-f", "qcow2", "-b", below["name"], "-F", below["format"], made)
        return self.file(volume.volume_id, made, "qcow2")

    def flatten(self, volume: AttachedVolume) -> None:
        """What the volume has is in its first file."""
        given, first = volume.connection["data"]["name"], self.path(volume.volume_id)
        self._image("convert", "-f", "qcow2", "-O", "raw", given, f"{first}.flat")
        first.with_name(f"{first.name}.flat").replace(first)

    def _image(self, command: str, *rest: str) -> None:
        program = ["qemu-img", command, "-q", *rest]
        subprocess.run(program, cwd=self.path(ids.new()).parent, check=True, timeout=120)

    def files(self, rig: Rig, volume: AttachedVolume, stored: bool = False) -> list[str]:
        """Those of the guest's disk, its own first."""
        disk = volume_xml.find_disks(rig.describe(self.guest.server, stored))[volume.volume_id]
        return [Path(path).name for path in volume_xml.files(disk)]


@pytest.fixture(scope="module")
def world(bootable: Path) -> Iterator[FileWorld]:
    demand(*FOR_HOSTS, programs=NEEDED)
    made = FileWorld(guests_folder("kn-"), bootable)
    yield made
    made.clean()


def test_a_guest_writes_while_snapshots_come_and_go_and_it_moves(world: FileWorld) -> None:
    guest, volume = world.guest, world.served()
    server, fence = guest.server, guest.spec.fence
    guest.here.driver.attach_volume(server, fence, volume, QUIET)
    world.writes(guest.here)
    taken = world.snapshot_of(volume)
    guest.here.driver.snapshot_volume(server, fence, taken, QUIET)
    frozen = world.path(volume.volume_id).read_bytes()
    world.writes(guest.here)
    to = guest.prepared(volumes=[taken])
    assert set(to["volumes"]) == {volume.volume_id}
    guest.leaves(to)
    source = guest.here
    guest.came()
    source.driver.ensure_absent(server, fence)
    world.writes(guest.here)
    names = [one.connection["data"]["name"] for one in (taken, volume)]
    assert world.files(guest.here, taken) == names
    assert world.path(volume.volume_id).read_bytes() == frozen
    guest.here.driver.merge_volume(server, fence, taken, VolumeMerge(None, None), QUIET)
    assert world.files(guest.here, taken) == world.files(guest.here, taken, True) == names[:1]
    world.writes(guest.here)
    guest.here.driver.detach_volume(server, fence, taken, QUIET)
    count = world.wrote(guest.here)
    assert count > 20
    world.flatten(taken)
    world.holds(volume.volume_id, count)
    assert guest.here.state(server) == (RUNNING, fence)
    guest.counts(guest.here)
