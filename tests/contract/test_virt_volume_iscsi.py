# SPDX-License-Identifier: Apache-2.0
"""Volumes of an iSCSI target that QEMU connects itself.

A guest writes to a volume during attach, live migration and detach. Every write that the guest
reports must be in the volume.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.domain import ids
from common.domain.models import AttachedVolume
from common.security.tls import Tls
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING, SHUTDOWN
from compute_agent.virt.libvirt.volumes import connectors
from compute_agent.virt.libvirt.xml import volume_xml
from tests.contract.conftest import FOR_HOSTS, NEEDED
from tests.contract.iscsi_target import PASSWORD, running_target
from tests.contract.test_virt_volume_exports import GIBIBYTE, ServingWorld
from tests.contract.virt_pairs import inside
from tests.contract.virt_rigs import QUIET, Rig, guests_folder
from tests.services import demand

pytestmark = [pytest.mark.kvm_or_tcg, pytest.mark.slice("moves")]


class IscsiWorld(ServingWorld):
    """Two hosts. The first one runs a target for both."""

    def __init__(self, folder: Path, image: Path) -> None:
        super().__init__(folder, image)
        self._ends = ExitStack()
        with inside(Path("/run/netns", self.machines.names[0])):
            self.target = self._ends.enter_context(running_target(folder / "target", self.address))

    def create_connectors(self, at: int, proof: Tls) -> connectors.Connectors:
        return connectors.of_host(
            connectors.Protocols(by_qemu=["iscsi"]), proof, False, {"host": f"h{at}"}
        )

    def serve_volume(self, volume_id: str = "", key: str = "", **changed: Any) -> AttachedVolume:
        volume_id = volume_id or ids.new()
        with self.path(volume_id).open("wb") as file:
            file.truncate(GIBIBYTE)
        connection = self.target.serve(volume_id, self.path(volume_id), PASSWORD)
        return replace(AttachedVolume(volume_id, "/dev/vdb", 1, connection), **changed)

    def secrets(self, rig: Rig) -> str:
        """Return libvirt's list of secrets."""
        command = ["virsh", "-c", rig.uri, "secret-list"]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def clean(self) -> None:
        self._ends.close()
        super().clean()


@pytest.fixture(scope="module")
def world(bootable: Path) -> Iterator[IscsiWorld]:
    demand(*FOR_HOSTS, programs=(*NEEDED, "tgtd", "tgtadm"))
    iscsi_world = IscsiWorld(guests_folder("kn-"), bootable)
    yield iscsi_world
    iscsi_world.clean()


def test_live_migration_of_writing_guest_with_iscsi_volume_loses_no_data(world: IscsiWorld) -> None:
    guest, volume = world.guest, world.serve_volume()
    key = volume.volume_id
    guest.here.driver.attach_volume(guest.server, guest.spec.fence, volume, QUIET)
    world.await_more_writes(guest.here)
    assert PASSWORD not in guest.here.describe(guest.server) and key in world.secrets(guest.here)
    destination = guest.prepare(volumes=[volume])
    assert set(destination["volumes"]) == {key} and PASSWORD not in str(destination)
    guest.migrate(destination)
    source = guest.here
    guest.check_arrived()
    source.driver.ensure_absent(guest.server, guest.spec.fence)
    assert key not in world.secrets(source)
    world.await_more_writes(guest.here)
    assert set(volume_xml.find_disks(guest.here.describe(guest.server, stored=True))) == {key}
    guest.here.driver.detach_volume(guest.server, guest.spec.fence, volume, QUIET)
    count = world.count_written(guest.here)
    assert count > 10
    world.check_blocks(key, count)
    assert world.target.sessions(key) == [] and key not in world.secrets(guest.here)
    assert guest.here.state(guest.server) == (RUNNING, guest.spec.fence)
    guest.check_counts(guest.here)


def test_attach_iscsi_volume_with_wrong_password_or_target_is_refused(world: IscsiWorld) -> None:
    guest, volume = world.guest, world.serve_volume()
    for changed, message in (
        ({"auth_password": "another"}, "refuses this host"),
        ({"target_iqn": f"{volume.connection['target_iqn']}0"}, "refuses this host"),
        ({"target_lun": 7}, "refuses this host"),
        ({"target_portal": f"{world.address}:1"}, "does not find volume"),
    ):
        bad = replace(volume, connection={**volume.connection, **changed})
        with pytest.raises(VerbFailed, match=message):
            guest.here.driver.attach_volume(guest.server, guest.spec.fence, bad, QUIET)
    assert volume.volume_id not in volume_xml.find_disks(guest.here.describe(guest.server))
    assert volume.volume_id not in world.secrets(guest.here)
    assert world.target.sessions(volume.volume_id) == []


def test_start_fails_when_iscsi_unit_has_another_size(world: IscsiWorld) -> None:
    guest, volume = world.guest, world.serve_volume()
    driver, fence = guest.here.driver, guest.spec.fence
    driver.attach_volume(guest.server, fence, volume, QUIET)
    driver.ensure_stopped(guest.server, fence, 0, QUIET)
    small = world.folder / "small"
    with small.open("wb") as file:
        file.truncate(1 << 20)
    world.target.exchange(volume.volume_id, small)
    with pytest.raises(VerbFailed, match="is not that volume: it has 1048576 bytes"):
        driver.ensure_running(guest.server, fence, QUIET)
    assert guest.here.state(guest.server) == (SHUTDOWN, fence)
    world.target.exchange(volume.volume_id, world.path(volume.volume_id))
    driver.ensure_running(guest.server, fence, QUIET)
    assert guest.here.state(guest.server) == (RUNNING, fence)
    world.await_more_writes(guest.here)
