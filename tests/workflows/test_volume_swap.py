# SPDX-License-Identifier: Apache-2.0
"""Tests of the migration of a volume to a new volume while a server uses the volume."""

from __future__ import annotations

import pytest

from common.store.servers import actions
from compute_agent.virt.memory.state.script import Fail
from tests.workflows import volumes as volume_service
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud
from tests.workflows.test_volumes import attach_new_volume, last


@pytest.fixture
def server(cloud: Cloud) -> str:
    register(cloud)
    [server] = cloud.create(host="h1")
    cloud.settle()
    return server


def read_stored_id(cloud: Cloud, server: str) -> str:
    """Return the id under which the service stores the guest's volume."""
    [volume] = cloud.hosts["h1"].driver.host.guests[server].volumes
    return volume.stored_id


def swap_until(cloud: Cloud, server: str, volume: str, verb: str) -> None:
    """Begin a swap and run rounds until the action waits for this verb, which cannot succeed."""
    if verb == "copy_volume":
        cloud.hosts["h1"].power_cut()
    cloud.hosts["h1"].driver.host.script[verb] = [Fail("Not now.")] * 99
    action = volume_service.swap(cloud, server, volume)
    for _ in range(40):
        row = cloud.store.read(lambda tx: actions.show_by_id(tx, action))
        if row is not None and (row.state, row.verb) == ("waiting", verb):
            return
        cloud.round()
        cloud.time.pass_by(1)
    raise AssertionError(row)


def test_swap_volume_connects_guest_to_new_volume_and_keeps_volume_id(
    cloud: Cloud, server: str
) -> None:
    volume = attach_new_volume(cloud, server)
    [old] = cloud.volumes.state.held
    volume_service.swap(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[:2] == ("swap_volume", "done")
    assert volume_service.of(cloud, server) == {volume: "attached"}
    [(new, held)] = cloud.volumes.state.held.items()
    assert new != old and (held.attachment.volume_id, held.host) == (volume, "h1")
    assert read_stored_id(cloud, server) == cloud.volumes.state.name_ids[volume] != volume
    volumes = cloud.volumes.state.volumes
    assert (list(volumes), volumes[volume].migration) == ([volume], "success")


def test_swap_volume_keeps_old_volume_when_copy_fails(cloud: Cloud, server: str) -> None:
    volume = attach_new_volume(cloud, server)
    before = dict(cloud.volumes.state.held)
    cloud.hosts["h1"].driver.host.script["copy_volume"] = [Fail("The disk is full.")]
    volume_service.swap(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server) == ("swap_volume", "failed", "The disk is full.")
    assert cloud.volumes.state.held == before and read_stored_id(cloud, server) == volume
    volumes = cloud.volumes.state.volumes
    assert (list(volumes), volumes[volume].migration) == ([volume], "error")


@pytest.mark.parametrize("verb", ["copy_volume", "switch_volume"])
def test_delete_during_swap_volume_keeps_volume_with_data(
    cloud: Cloud, server: str, verb: str
) -> None:
    """The data is on the old volume before the switch, and on the new volume after the switch."""
    volume = attach_new_volume(cloud, server)
    swap_until(cloud, server, volume, verb)
    cloud.ask(server, "delete")
    cloud.settle()
    if verb == "copy_volume":
        cloud.force_down("h1")
    cloud.clean_up()
    assert cloud.volumes.state.held == {}
    state = cloud.volumes.state
    assert (list(state.volumes), state.volumes[volume].status) == ([volume], "available")
    assert (volume in state.name_ids) == (verb == "switch_volume")


def test_swap_volume_ends_with_new_volume_if_host_forced_down_at_switch(
    cloud: Cloud, server: str
) -> None:
    volume = attach_new_volume(cloud, server)
    swap_until(cloud, server, volume, "switch_volume")
    cloud.kill("h1")
    cloud.settle()
    assert last(cloud, server)[:2] == ("swap_volume", "done")
    assert volume in cloud.volumes.state.name_ids and len(cloud.volumes.state.held) == 1
