# SPDX-License-Identifier: Apache-2.0
"""Volumes in files of an NFS export.

A guest writes to a volume during snapshots, merges and a live migration. Every write that the guest
reports must be in the volume. A folder that both hosts see acts as the export.
"""

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

    def create_connectors(self, at: int, proof: Tls) -> connectors.Connectors:
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
        """Return the volume as an attachment of one file."""
        data = {"export": EXPORT, "name": name or f"volume-{volume_id}", "format": form}
        return AttachedVolume(
            volume_id, "/dev/vdb", 1, {"driver_volume_type": volumes.NFS, "data": data}
        )

    def serve_volume(self, volume_id: str = "", key: str = "", **changed: Any) -> AttachedVolume:
        volume_id = volume_id or ids.new()
        self.path(volume_id).parent.mkdir(exist_ok=True)
        self.path(volume_id).parent.chmod(0o711)
        with self.path(volume_id).open("wb") as file:
            file.truncate(GIBIBYTE)
        return replace(self.file(volume_id), **changed)

    def create_overlay(self, volume: AttachedVolume) -> AttachedVolume:
        """Create an overlay of the volume's current file, as the volume service does."""
        current = volume.connection["data"]
        name = f"volume-{volume.volume_id}.{ids.new()}"
        self._run_qemu_img(
            "create", "-f", "qcow2", "-b", current["name"], "-F", current["format"], name
        )
        return self.file(volume.volume_id, name, "qcow2")

    def flatten(self, volume: AttachedVolume) -> None:
        """Copy the volume's whole content to the first file."""
        current_name, first_file = volume.connection["data"]["name"], self.path(volume.volume_id)
        self._run_qemu_img(
            "convert", "-f", "qcow2", "-O", "raw", current_name, f"{first_file}.flat"
        )
        first_file.with_name(f"{first_file.name}.flat").replace(first_file)

    def _run_qemu_img(self, command: str, *rest: str) -> None:
        program = ["qemu-img", command, "-q", *rest]
        subprocess.run(program, cwd=self.path(ids.new()).parent, check=True, timeout=120)

    def list_files(self, rig: Rig, volume: AttachedVolume, stored: bool = False) -> list[str]:
        """Return the names of the files of the guest's disk, the top one first."""
        disk = volume_xml.find_disks(rig.describe(self.guest.server, stored))[volume.volume_id]
        return [Path(path).name for path in volume_xml.files(disk)]


@pytest.fixture(scope="module")
def world(bootable: Path) -> Iterator[FileWorld]:
    demand(*FOR_HOSTS, programs=NEEDED)
    file_world = FileWorld(guests_folder("kn-"), bootable)
    yield file_world
    file_world.clean()


def test_writing_guest_loses_no_data_in_volume_snapshot_and_migration(world: FileWorld) -> None:
    guest, volume = world.guest, world.serve_volume()
    server, fence = guest.server, guest.spec.fence
    guest.here.driver.attach_volume(server, fence, volume, QUIET)
    world.await_more_writes(guest.here)
    overlay = world.create_overlay(volume)
    guest.here.driver.snapshot_volume(server, fence, overlay, QUIET)
    frozen = world.path(volume.volume_id).read_bytes()
    world.await_more_writes(guest.here)
    destination = guest.prepare(volumes=[overlay])
    assert set(destination["volumes"]) == {volume.volume_id}
    guest.migrate(destination)
    source = guest.here
    guest.check_arrived()
    source.driver.ensure_absent(server, fence)
    world.await_more_writes(guest.here)
    names = [attached.connection["data"]["name"] for attached in (overlay, volume)]
    assert world.list_files(guest.here, overlay) == names
    assert world.path(volume.volume_id).read_bytes() == frozen
    guest.here.driver.merge_volume(server, fence, overlay, VolumeMerge(None, None), QUIET)
    assert (
        world.list_files(guest.here, overlay)
        == world.list_files(guest.here, overlay, True)
        == names[:1]
    )
    world.await_more_writes(guest.here)
    guest.here.driver.detach_volume(server, fence, overlay, QUIET)
    count = world.count_written(guest.here)
    assert count > 20
    world.flatten(overlay)
    world.check_blocks(volume.volume_id, count)
    assert guest.here.state(server) == (RUNNING, fence)
    guest.check_counts(guest.here)
