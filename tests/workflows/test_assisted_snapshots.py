# SPDX-License-Identifier: Apache-2.0
"""Snapshots of volumes that hosts take for the block storage service: what the server has, and what
the service hears."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.clients.volumes import AVAILABLE, ERROR, ERROR_DELETING
from common.domain import errors
from common.store.servers import actions
from compute_agent.virt.memory.state.script import Fail
from conductor.workflows.assisted_snapshots import read_connection_file, set_connection_file
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


def file(cloud: Cloud, server: str, host: str = "h1") -> object:
    """In which file its guest has its volume."""
    [one] = cloud.hosts[host].driver.host.guests[server].volumes
    return read_connection_file(one.connection)[0]


def snapshots(cloud: Cloud) -> list[str]:
    return [one.status for one in cloud.volumes.state.assisted.values()]


def asked(cloud: Cloud) -> list[str]:
    return [name for name, _ in cloud.volumes.asked]


def test_the_guest_goes_on_in_the_new_file_and_stays_there(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    volume_service.take_snapshot(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[:2] == ("volume_snapshot_create", "done")
    [snapshot] = cloud.volumes.state.assisted
    there = f"volume-{volume}.{snapshot}"
    assert (snapshots(cloud), file(cloud, server)) == ([AVAILABLE], there)
    [row] = cloud.store.read(lambda tx: volume_service.volumes.list_of(tx, server))
    assert read_connection_file(cloud.engine.vault.open(str(row.connection))) == (there, "qcow2")
    assert asked(cloud)[-1] == "attachments"  # what the service says is what counts


def test_a_merge_leaves_the_guest_where_it_is(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    before = file(cloud, server)
    volume_service.merge_snapshot(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[:2] == ("volume_snapshot_delete", "done")
    assert cloud.volumes.state.assisted == {} and file(cloud, server) == before


@pytest.mark.parametrize(
    ("ask", "verb", "status"),
    [
        (volume_service.take_snapshot, "snapshot_volume", ERROR),
        (volume_service.merge_snapshot, "merge_volume", ERROR_DELETING),
    ],
)
def test_what_fails_is_reported(
    cloud: Cloud, server: str, ask: Callable[[Cloud, str, str], str], verb: str, status: str
) -> None:
    volume = attached(cloud, server)
    before = file(cloud, server)
    cloud.hosts["h1"].driver.host.script[verb] = [Fail("The disk is full.")]
    ask(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[1:] == ("failed", "The disk is full.")
    assert (snapshots(cloud), file(cloud, server)) == ([status], before)
    assert volume_service.of(cloud, server) == {volume: "attached"}


@pytest.mark.parametrize(
    ("ask", "step", "left"),
    [
        (volume_service.take_snapshot, "snapshot", [AVAILABLE]),
        (volume_service.merge_snapshot, "merge", [ERROR_DELETING]),
        (volume_service.merge_snapshot, "report_merged", []),
    ],
)
def test_a_delete_meanwhile_is_reported(
    cloud: Cloud, server: str, ask: Callable[[Cloud, str, str], str], step: str, left: list[str]
) -> None:
    """Files that were not merged are merged when the snapshot is deleted again. The attachment
    stays until the service is done."""
    volume = attached(cloud, server)
    action = ask(cloud, server, volume)
    if step != "report_merged":
        cloud.hosts["h1"].power_cut()
    else:
        [snapshot] = cloud.volumes.state.assisted
        call = ("update_snapshot_status", snapshot)
        cloud.volumes.refusing[call] = errors.Unavailable("The service is silent.")
    for _ in range(3):
        cloud.round()
    found = cloud.store.read(lambda tx: actions.show_by_id(tx, action))
    assert found is not None and found.step == step
    cloud.volumes.well()
    cloud.ask(server, "delete")
    cloud.settle()
    if step != "report_merged":
        cloud.force_down("h1")
        cloud.time.pass_by(3600)
        cloud.round()  # the service hears of it, and is not done yet
    cloud.clean_up()
    names = asked(cloud)
    assert names[::-1].index("detach") < names[::-1].index("update_snapshot_status")
    assert (snapshots(cloud), cloud.volumes.awaited()) == (left, [])
    assert cloud.volumes.state.volumes[volume].status == AVAILABLE


def test_a_volume_that_is_no_file_is_refused_by_name(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    [one] = cloud.hosts["h1"].driver.host.guests[server].volumes
    one.connection["driver_volume_type"] = "nbd"
    volume_service.take_snapshot(cloud, server, volume)
    cloud.settle()
    said = last(cloud, server)[2] or ""
    assert volume in said and "it is served by nbd" in said and snapshots(cloud) == [ERROR]


def test_what_the_service_gave_up_is_not_begun(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    volume_service.take_snapshot(cloud, server, volume)
    [snapshot] = cloud.volumes.state.assisted.values()
    snapshot.status = ERROR
    before = file(cloud, server)
    cloud.settle()
    assert "is error at the block storage service" in (last(cloud, server)[2] or "")
    assert (snapshots(cloud), file(cloud, server)) == ([ERROR], before)


def test_a_service_that_refuses_to_hear_of_it_is_named(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    volume_service.take_snapshot(cloud, server, volume)
    [snapshot] = cloud.volumes.state.assisted
    cloud.volumes.refusing["update_snapshot_status", snapshot] = errors.BadRequest("It is over.")
    cloud.settle()
    name, state, said = last(cloud, server)
    assert (name, state) == ("volume_snapshot_create", "done") and "does not say so" in str(said)
    assert file(cloud, server) == f"volume-{volume}.{snapshot}"  # what was written there counts


def test_the_file_stands_where_the_connection_has_it() -> None:
    for before in ({"name": "a"}, {"data": {"name": "a", "export": "x"}, "b": 1}):
        after = set_connection_file(before, "c")
        assert read_connection_file(after) == ("c", "qcow2") and read_connection_file(before) == (
            "a",
            None,
        )
