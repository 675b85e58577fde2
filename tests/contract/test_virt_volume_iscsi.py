# SPDX-License-Identifier: Apache-2.0
"""Volumes of an iSCSI target, which QEMU reaches by itself, and a guest that writes on one all the
time: while it comes, while its guest moves, until it goes. What it says that it has written is
there."""

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
    """Two hosts; the first one has a target for both."""

    def __init__(self, folder: Path, image: Path) -> None:
        super().__init__(folder, image)
        self._ends = ExitStack()
        with inside(Path("/run/netns", self.machines.names[0])):
            self.target = self._ends.enter_context(running_target(folder / "target", self.address))

    def reaching(self, at: int, proof: Tls) -> connectors.Connectors:
        return connectors.of_host(
            connectors.Protocols(by_qemu=["iscsi"]), proof, False, {"host": f"h{at}"}
        )

    def served(self, volume_id: str = "", key: str = "", **changed: Any) -> AttachedVolume:
        volume_id = volume_id or ids.new()
        with self.path(volume_id).open("wb") as file:
            file.truncate(GIBIBYTE)
        connection = self.target.serve(volume_id, self.path(volume_id), PASSWORD)
        return replace(AttachedVolume(volume_id, "/dev/vdb", 1, connection), **changed)

    def secrets(self, rig: Rig) -> str:
        """What libvirt keeps."""
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
    made = IscsiWorld(guests_folder("kn-"), bootable)
    yield made
    made.clean()


def test_a_guest_writes_on_a_unit_while_it_moves(world: IscsiWorld) -> None:
    guest, volume = world.guest, world.served()
    key = volume.volume_id
    guest.here.driver.attach_volume(guest.server, guest.spec.fence, volume, QUIET)
    world.writes(guest.here)
    assert PASSWORD not in guest.here.describe(guest.server) and key in world.secrets(guest.here)
    to = guest.prepared(volumes=[volume])
    assert set(to["volumes"]) == {key} and PASSWORD not in str(to)
    guest.leaves(to)
    source = guest.here
    guest.came()
    source.driver.ensure_absent(guest.server, guest.spec.fence)
    assert key not in world.secrets(source)
    world.writes(guest.here)
    assert set(volume_xml.find_disks(guest.here.describe(guest.server, stored=True))) == {key}
    guest.here.driver.detach_volume(guest.server, guest.spec.fence, volume, QUIET)
    count = world.wrote(guest.here)
    assert count > 10
    world.holds(key, count)
    assert world.target.sessions(key) == [] and key not in world.secrets(guest.here)
    assert guest.here.state(guest.server) == (RUNNING, guest.spec.fence)
    guest.counts(guest.here)


def test_another_password_or_target_is_no_volume(world: IscsiWorld) -> None:
    guest, volume = world.guest, world.served()
    for changed, said in (
        ({"auth_password": "another"}, "does not give it to this host"),
        ({"target_iqn": f"{volume.connection['target_iqn']}0"}, "does not give it to this host"),
        ({"target_lun": 7}, "does not give it to this host"),
        ({"target_portal": f"{world.address}:1"}, "does not find volume"),
    ):
        bad = replace(volume, connection={**volume.connection, **changed})
        with pytest.raises(VerbFailed, match=said):
            guest.here.driver.attach_volume(guest.server, guest.spec.fence, bad, QUIET)
    assert volume.volume_id not in volume_xml.find_disks(guest.here.describe(guest.server))
    assert volume.volume_id not in world.secrets(guest.here)
    assert world.target.sessions(volume.volume_id) == []


def test_a_unit_that_became_another_keeps_its_guest_off(world: IscsiWorld) -> None:
    guest, volume = world.guest, world.served()
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
    world.writes(guest.here)
