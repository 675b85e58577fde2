# SPDX-License-Identifier: Apache-2.0
"""Tests of volume snapshots taken by a host for the block storage service.

They check the guest's file, the server's record and the status sent to the service.
"""

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
from tests.workflows.test_volumes import attach_new_volume, last


@pytest.fixture
def server(cloud: Cloud) -> str:
    register(cloud)
    [server] = cloud.create(host="h1")
    cloud.settle()
    return server


def read_volume_file(cloud: Cloud, server: str, host: str = "h1") -> object:
    """Return the file behind the only volume of the guest."""
    [volume] = cloud.hosts[host].driver.host.guests[server].volumes
    return read_connection_file(volume.connection)[0]


def read_statuses(cloud: Cloud) -> list[str]:
    return [snapshot.status for snapshot in cloud.volumes.state.assisted.values()]


def read_calls(cloud: Cloud) -> list[str]:
    return [name for name, _ in cloud.volumes.asked]


def test_volume_snapshot_create_switches_guest_and_record_to_new_file(
    cloud: Cloud, server: str
) -> None:
    volume = attach_new_volume(cloud, server)
    volume_service.take_snapshot(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[:2] == ("volume_snapshot_create", "done")
    [snapshot] = cloud.volumes.state.assisted
    new_file = f"volume-{volume}.{snapshot}"
    assert (read_statuses(cloud), read_volume_file(cloud, server)) == ([AVAILABLE], new_file)
    [row] = cloud.store.read(lambda tx: volume_service.volumes.list_of(tx, server))
    assert read_connection_file(cloud.engine.vault.open(str(row.connection))) == (new_file, "qcow2")
    assert read_calls(cloud)[-1] == "attachments"


def test_volume_snapshot_delete_removes_snapshot_and_keeps_file_of_guest(
    cloud: Cloud, server: str
) -> None:
    volume = attach_new_volume(cloud, server)
    before = read_volume_file(cloud, server)
    volume_service.merge_snapshot(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[:2] == ("volume_snapshot_delete", "done")
    assert cloud.volumes.state.assisted == {} and read_volume_file(cloud, server) == before


@pytest.mark.parametrize(
    ("begin_action", "verb", "status"),
    [
        (volume_service.take_snapshot, "snapshot_volume", ERROR),
        (volume_service.merge_snapshot, "merge_volume", ERROR_DELETING),
    ],
)
def test_volume_snapshot_failed_on_host_sends_error_status_to_service(
    cloud: Cloud,
    server: str,
    begin_action: Callable[[Cloud, str, str], str],
    verb: str,
    status: str,
) -> None:
    volume = attach_new_volume(cloud, server)
    before = read_volume_file(cloud, server)
    cloud.hosts["h1"].driver.host.script[verb] = [Fail("The disk is full.")]
    begin_action(cloud, server, volume)
    cloud.settle()
    assert last(cloud, server)[1:] == ("failed", "The disk is full.")
    assert (read_statuses(cloud), read_volume_file(cloud, server)) == ([status], before)
    assert volume_service.of(cloud, server) == {volume: "attached"}


@pytest.mark.parametrize(
    ("begin_action", "step", "remaining"),
    [
        (volume_service.take_snapshot, "snapshot", [AVAILABLE]),
        (volume_service.merge_snapshot, "merge", [ERROR_DELETING]),
        (volume_service.merge_snapshot, "report_merged", []),
    ],
)
def test_server_delete_during_volume_snapshot_reports_status_before_detach(
    cloud: Cloud,
    server: str,
    begin_action: Callable[[Cloud, str, str], str],
    step: str,
    remaining: list[str],
) -> None:
    """The service has the status before the volume is detached.

    After an unfinished merge the service can delete the snapshot again.
    """
    volume = attach_new_volume(cloud, server)
    action = begin_action(cloud, server, volume)
    if step != "report_merged":
        cloud.hosts["h1"].power_cut()
    else:
        [snapshot] = cloud.volumes.state.assisted
        call = ("update_snapshot_status", snapshot)
        cloud.volumes.refusing[call] = errors.Unavailable("The service is silent.")
    for _ in range(3):
        cloud.round()
    row = cloud.store.read(lambda tx: actions.show_by_id(tx, action))
    assert row is not None and row.step == step
    cloud.volumes.well()
    cloud.ask(server, "delete")
    cloud.settle()
    if step != "report_merged":
        cloud.force_down("h1")
        cloud.time.pass_by(3600)
        cloud.round()  # The service receives the status before it has completed its work.
    cloud.clean_up()
    names = read_calls(cloud)
    assert names[::-1].index("detach") < names[::-1].index("update_snapshot_status")
    assert (read_statuses(cloud), cloud.volumes.list_awaited()) == (remaining, [])
    assert cloud.volumes.state.volumes[volume].status == AVAILABLE


def test_volume_snapshot_of_nbd_volume_fails_with_volume_id_in_message(
    cloud: Cloud, server: str
) -> None:
    volume = attach_new_volume(cloud, server)
    [attached_volume] = cloud.hosts["h1"].driver.host.guests[server].volumes
    attached_volume.connection["driver_volume_type"] = "nbd"
    volume_service.take_snapshot(cloud, server, volume)
    cloud.settle()
    message = last(cloud, server)[2] or ""
    assert (
        volume in message and "is connected over nbd" in message and read_statuses(cloud) == [ERROR]
    )


def test_volume_snapshot_in_error_at_service_is_not_taken(cloud: Cloud, server: str) -> None:
    volume = attach_new_volume(cloud, server)
    volume_service.take_snapshot(cloud, server, volume)
    [snapshot] = cloud.volumes.state.assisted.values()
    snapshot.status = ERROR
    before = read_volume_file(cloud, server)
    cloud.settle()
    assert "shows the status error" in (last(cloud, server)[2] or "")
    assert (read_statuses(cloud), read_volume_file(cloud, server)) == ([ERROR], before)


def test_volume_snapshot_create_succeeds_when_service_refuses_new_status(
    cloud: Cloud, server: str
) -> None:
    volume = attach_new_volume(cloud, server)
    volume_service.take_snapshot(cloud, server, volume)
    [snapshot] = cloud.volumes.state.assisted
    cloud.volumes.refusing["update_snapshot_status", snapshot] = errors.BadRequest("It is over.")
    cloud.settle()
    name, state, message = last(cloud, server)
    assert (name, state) == ("volume_snapshot_create", "done") and "names another file" in str(
        message
    )
    assert read_volume_file(cloud, server) == f"volume-{volume}.{snapshot}"


def test_set_connection_file_changes_file_at_top_level_or_in_data() -> None:
    for before in ({"name": "a"}, {"data": {"name": "a", "export": "x"}, "b": 1}):
        after = set_connection_file(before, "c")
        assert read_connection_file(after) == ("c", "qcow2") and read_connection_file(before) == (
            "a",
            None,
        )
