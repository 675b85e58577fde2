# SPDX-License-Identifier: Apache-2.0
"""Volumes of guests, on the same hypervisors: who has which, and what the host has connected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common import ids
from common.models import AttachedVolume, DomainState
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN, VerbFailed
from compute_agent.virt.memory.driver import MemoryDriver
from tests.contract import virt_rigs
from tests.contract.virt_rigs import QUIET, Rig


def volume(folder: Path, **changed: Any) -> AttachedVolume:
    """One of 1 GiB that this machine has as a file."""
    key = ids.new()
    path = folder / f"volume-{key}"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    connection = {"driver_volume_type": "local", "data": {"device_path": str(path)}}
    return replace(AttachedVolume(key, "/dev/vdb", 1, connection), **changed)


@pytest.fixture(params=["memory"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = virt_rigs.memory_rig(tmp_path)
    yield made
    made.clean()


def has(rig: Rig, server: str) -> list[str]:
    """The ids of the volumes of a guest, in its order."""
    assert isinstance(rig.driver, MemoryDriver)
    return [one.volume_id for one in rig.driver.host.guests[server].volumes]


def connected(rig: Rig, server: str) -> set[str]:
    """The ids of the volumes that the host has connected for the server."""
    assert isinstance(rig.driver, MemoryDriver)
    found = rig.driver.host.guests.get(server) or rig.driver.host.files.get(server)
    return set(found.connected) if found else set()


def test_volumes_come_and_go_while_a_guest_runs_or_is_off(rig: Rig, tmp_path: Path) -> None:
    server, one, two = rig.boot().server, volume(tmp_path), volume(tmp_path)
    for given in (one, two, one):
        assert rig.driver.attach_volume(server, 2, given, QUIET) == DomainState(server, RUNNING, 2)
    assert sorted(has(rig, server)) == sorted([one.volume_id, two.volume_id])
    for _ in range(2):
        state = rig.driver.detach_volume(server, 3, one, QUIET)
        assert state == DomainState(server, RUNNING, 3)
        assert has(rig, server) == [two.volume_id]
    rig.driver.ensure_stopped(server, 4, 0, QUIET)
    assert connected(rig, server) == {two.volume_id}
    for _ in range(2):
        state = rig.driver.attach_volume(server, 5, one, QUIET)
        assert state == DomainState(server, SHUTDOWN, 5)
    assert has(rig, server) == [two.volume_id, one.volume_id]
    for _ in range(2):
        rig.driver.detach_volume(server, 6, two, QUIET)
    assert has(rig, server) == [one.volume_id]
    assert connected(rig, server) == {one.volume_id}
    assert rig.driver.ensure_running(server, 7, QUIET).power_state == RUNNING
    assert has(rig, server) == [one.volume_id]


def test_a_suspended_or_paused_guest_keeps_its_volumes(rig: Rig, tmp_path: Path) -> None:
    server, one, two = rig.boot().server, volume(tmp_path), volume(tmp_path)
    rig.driver.attach_volume(server, 2, one, QUIET)
    rig.driver.ensure_paused(server, 3, QUIET)
    with pytest.raises(VerbFailed, match="paused; resume it first"):
        rig.driver.detach_volume(server, 4, one, QUIET)
    assert has(rig, server) == [one.volume_id]
    rig.driver.attach_volume(server, 5, two, QUIET)
    assert rig.state(server) == (PAUSED, 5)
    rig.driver.ensure_running(server, 6, QUIET)
    rig.driver.ensure_suspended(server, 7, QUIET)
    for change in (rig.driver.attach_volume, rig.driver.detach_volume):
        with pytest.raises(VerbFailed, match="resume it before its volumes"):
            change(server, 8, one, QUIET)
    assert rig.state(server) == (SHUTDOWN, 7)
    rig.driver.ensure_running(server, 9, QUIET)
    assert sorted(has(rig, server)) == sorted([one.volume_id, two.volume_id])


def test_what_cannot_be_connected_is_refused_by_name(rig: Rig, tmp_path: Path) -> None:
    server, one = rig.boot().server, volume(tmp_path)
    for bad, said in (
        (replace(one, connection={}), "not connected to this host"),
        (replace(one, connection={"driver_volume_type": "smoke"}), "served by smoke"),
        (replace(one, connection={"driver_volume_type": "local"}), "cannot be read"),
        (replace(one, volume_id="../../etc"), "not a UUID"),
        (replace(one, bus="ide"), "only while the server is off"),
        (replace(one, bus="<b>"), "a disk on <b>"),
        (replace(one, device_type="lun"), "a lun on virtio"),
    ):
        with pytest.raises(VerbFailed, match=said):
            rig.driver.attach_volume(server, 2, bad, QUIET)
    assert (has(rig, server), rig.state(server)) == ([], (RUNNING, 1))
    assert connected(rig, server) == set()


def test_a_guest_that_is_not_here_has_no_volume(rig: Rig, tmp_path: Path) -> None:
    server, one = rig.boot().server, volume(tmp_path)
    rig.driver.attach_volume(server, 2, one, QUIET)
    rig.driver.ensure_absent(server, 3)
    assert connected(rig, server) == set()
    assert rig.driver.detach_volume(server, 4, one, QUIET) is None
    rig.driver.disconnect_volumes(server, 4)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        rig.driver.attach_volume(server, 4, one, QUIET)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        rig.driver.extend_volume(server, one, QUIET)


def test_a_host_lets_go_of_what_goes_elsewhere(rig: Rig, tmp_path: Path) -> None:
    server, one, two = rig.boot().server, volume(tmp_path), volume(tmp_path)
    for given in (one, two):
        rig.driver.attach_volume(server, 2, given, QUIET)
    with pytest.raises(VerbFailed, match="stop it before"):
        rig.driver.disconnect_volumes(server, 3)
    assert connected(rig, server) == {one.volume_id, two.volume_id}
    rig.driver.ensure_stopped(server, 3, 0, QUIET)
    for _ in range(2):
        rig.driver.disconnect_volumes(server, 4)
        assert (has(rig, server), connected(rig, server)) == ([], set())
    assert rig.state(server) == (SHUTDOWN, 4)


def test_a_volume_that_grew_is_seen(rig: Rig, tmp_path: Path) -> None:
    server, one = rig.boot().server, volume(tmp_path)
    with pytest.raises(VerbFailed, match="does not have volume"):
        rig.driver.extend_volume(server, one, QUIET)
    rig.driver.attach_volume(server, 2, one, QUIET)
    with Path(one.connection["data"]["device_path"]).open("r+b") as file:
        file.truncate(2 << 30)
    for _ in range(2):
        rig.driver.extend_volume(server, replace(one, size_gb=2), QUIET)
    assert sizes(rig, server) == {one.volume_id: 2}
    rig.driver.ensure_stopped(server, 3, 0, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    assert sizes(rig, server) == {one.volume_id: 2}


def sizes(rig: Rig, server: str) -> dict[str, int]:
    """GiB of a guest's volumes, by id."""
    assert isinstance(rig.driver, MemoryDriver)
    return {one.volume_id: one.size_gb for one in rig.driver.host.guests[server].volumes}


def test_a_guest_boots_from_a_volume(rig: Rig, tmp_path: Path) -> None:
    root, data = volume(tmp_path, boot_index=0, device="/dev/vda"), volume(tmp_path)
    spec = rig.boot(image=None, volumes=[root, data])
    assert has(rig, spec.server) == [root.volume_id, data.volume_id]
    assert connected(rig, spec.server) == {root.volume_id, data.volume_id}
    assert rig.driver.ensure_guest(spec, rig.read_image, QUIET).power_state == RUNNING
    rescued = replace(spec, fence=2)
    rig.driver.rescue(rescued, rig.image, rig.read_image, QUIET)
    assert has(rig, spec.server) == [root.volume_id, data.volume_id]
    rig.driver.unrescue(replace(spec, fence=3), QUIET)
    rig.driver.rebuild(replace(spec, fence=4), rig.read_image, True, QUIET)
    assert has(rig, spec.server) == [root.volume_id, data.volume_id]
    rig.driver.ensure_absent(spec.server, 5)
    assert connected(rig, spec.server) == set()


def test_a_guest_whose_volume_cannot_be_had_is_not_made(rig: Rig, tmp_path: Path) -> None:
    spec = rig.spec(volumes=[volume(tmp_path), volume(tmp_path, connection={})])
    with pytest.raises(VerbFailed, match="not connected to this host"):
        rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert (rig.state(spec.server), connected(rig, spec.server)) == (None, set())


def test_an_agent_that_begins_anew_knows_its_volumes(rig: Rig, tmp_path: Path) -> None:
    server, one = rig.boot().server, volume(tmp_path)
    rig.driver.attach_volume(server, 2, one, QUIET)
    assert rig.restart().ensure_running(server, 3, QUIET).power_state == RUNNING
    assert (has(rig, server), connected(rig, server)) == ([one.volume_id], {one.volume_id})


def test_after_a_reboot_of_the_host_they_are_connected_again(tmp_path: Path) -> None:
    rig = virt_rigs.memory_rig(tmp_path)
    server, one = rig.boot().server, volume(tmp_path)
    rig.driver.attach_volume(server, 2, one, QUIET)
    assert isinstance(rig.driver, MemoryDriver)
    rig.driver.host.reboot()
    assert connected(rig, server) == set()
    rig.driver.ensure_running(server, 3, QUIET)
    assert connected(rig, server) == {one.volume_id}
    rig.driver.host.guests[server].holds_volumes = True
    with pytest.raises(VerbFailed, match="did not let go of volume"):
        rig.driver.detach_volume(server, 4, one, QUIET)
    assert has(rig, server) == [one.volume_id]
    rig.clean()
