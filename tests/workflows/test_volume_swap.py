# SPDX-License-Identifier: Apache-2.0
"""A volume that is migrated while its server runs: the server has the one that has the data."""

from __future__ import annotations

import pytest

from common.store.servers import actions
from compute_agent.virt.memory.state.script import Fail
from tests.workflows import volumes as volume_service
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud
from tests.workflows.test_volumes import attached, last


@pytest.fixture
def server(cloud: Cloud) -> str:
    register(cloud)
    [server] = cloud.create(host="h1")
    cloud.settle()
    return server


def place(cloud: Cloud, server: str) -> str:
    """Where its guest has its volume."""
    [one] = cloud.hosts["h1"].driver.host.guests[server].volumes
    return one.stored_id


def swaps_until(cloud: Cloud, server: str, volume: str, verb: str) -> None:
    """The action is at this verb, which the host does not get done."""
    if verb == "copy_volume":
        cloud.hosts["h1"].power_cut()
    cloud.hosts["h1"].driver.host.script[verb] = [Fail("Not now.")] * 99
    action = volume_service.swap(cloud, server, volume)
    for _ in range(40):
        found = cloud.store.read(lambda tx: actions.show_by_id(tx, action))
        if found is not None and (found.state, found.verb) == ("waiting", verb):
            return
        cloud.round()
        cloud.time.pass_by(1)
    raise AssertionError(found)


def test_the_data_goes_into_another_volume(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    [old] = cloud.volumes.state.held
    volume_service.swap(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[:2] == ("swap_volume", "done")
    assert volume_service.of(cloud, server) == {volume: "attached"}
    [(new, held)] = cloud.volumes.state.held.items()
    assert new != old and (held.attachment.volume_id, held.host) == (volume, "h1")
    assert place(cloud, server) == cloud.volumes.state.name_ids[volume] != volume
    found = cloud.volumes.state.volumes
    assert (list(found), found[volume].migration) == ([volume], "success")


def test_a_copy_that_fails_leaves_the_old_volume(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    before = dict(cloud.volumes.state.held)
    cloud.hosts["h1"].driver.host.script["copy_volume"] = [Fail("The disk is full.")]
    volume_service.swap(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server) == ("swap_volume", "failed", "The disk is full.")
    assert cloud.volumes.state.held == before and place(cloud, server) == volume
    found = cloud.volumes.state.volumes
    assert (list(found), found[volume].migration) == ([volume], "error")


@pytest.mark.parametrize("verb", ["copy_volume", "switch_volume"])
def test_a_delete_keeps_the_volume_with_the_data(cloud: Cloud, server: str, verb: str) -> None:
    """Before the decision that is the old one, after it the new one."""
    volume = attached(cloud, server)
    swaps_until(cloud, server, volume, verb)
    cloud.ask(server, "delete")
    cloud.settle()
    if verb == "copy_volume":
        cloud.force_down("h1")
    cloud.clean_up()
    assert cloud.volumes.state.held == {}
    state = cloud.volumes.state
    assert (list(state.volumes), state.volumes[volume].status) == ([volume], "available")
    assert (volume in state.name_ids) == (verb == "switch_volume")


def test_a_host_that_dies_after_the_decision_had_the_new_volume(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    swaps_until(cloud, server, volume, "switch_volume")
    cloud.kill("h1")
    cloud.settle()
    assert last(cloud, server)[:2] == ("swap_volume", "done")
    assert volume in cloud.volumes.state.name_ids and len(cloud.volumes.state.held) == 1
