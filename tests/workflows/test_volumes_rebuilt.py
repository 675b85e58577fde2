# SPDX-License-Identifier: Apache-2.0
"""Tests of servers with a boot volume: rebuild of the volume, images of snapshots, and claims."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.store import cleanups, schema
from compute_agent.virt.memory.state.script import Fail
from tests.workflows import volumes as volume_service
from tests.workflows.scenarios import KILL, ask
from tests.workflows.simulator import Cloud
from tests.workflows.test_volumes import boot_from_new_volume, last, read_connected

IMAGE = {"id": "77777777-7777-4777-8777-777777777777"}


def begin_rebuild(cloud: Cloud, stopped: bool = False) -> tuple[str, str]:
    """Begin a rebuild of a server with a boot volume. Return the server and the volume."""
    server, volume = boot_from_new_volume(cloud)
    cloud.settle()
    if stopped:
        cloud.ask(server, "os-stop")
        cloud.settle()
    args = {"reimage": IMAGE["id"], "before": {"name": "before"}}
    cloud.ask(server, "rebuild", args=args)
    return server, volume


@pytest.mark.parametrize("stopped", [False, True])
def test_rebuild_writes_image_to_boot_volume_and_keeps_attachment(
    cloud: Cloud, stopped: bool
) -> None:
    server, volume = begin_rebuild(cloud, stopped)
    cloud.settle()
    assert last(cloud, server)[:2] == ("rebuild", "done")
    assert cloud.show(server).vm_state == (states.STOPPED if stopped else states.ACTIVE)
    assert cloud.volumes.state.images == {volume: IMAGE["id"]}
    assert volume_service.of(cloud, server) == {volume: "attached"}
    assert read_connected(cloud, server) == [volume] and cloud.findings() == []


def test_rebuild_refused_by_volume_service_restores_server(cloud: Cloud) -> None:
    cloud.volumes.make()
    server, volume = begin_rebuild(cloud)
    cloud.volumes.refusing["reimage", volume] = errors.BadRequest("It is too small.")
    cloud.settle()
    assert last(cloud, server) == ("rebuild", "failed", "It is too small.")
    row = cloud.show(server)
    assert (row.vm_state, row.name) == (states.ACTIVE, "before")
    guest = cloud.hosts[row.host].driver.host.guests[server]
    assert guest.power_state == states.RUNNING
    assert read_connected(cloud, server) == [volume] and cloud.findings() == []


@pytest.mark.parametrize("verb", ["ensure_stopped", "disconnect_volumes"])
def test_rebuild_fails_when_host_does_not_release_volume(cloud: Cloud, verb: str) -> None:
    server, volume = begin_rebuild(cloud)
    cloud.hosts[cloud.show(server).host].driver.host.script[verb] = [Fail("Stays.")]
    cloud.settle()
    assert last(cloud, server) == ("rebuild", "failed", "Stays.")
    assert cloud.show(server).vm_state == states.ACTIVE and cloud.volumes.state.images == {}
    assert volume_service.of(cloud, server) == {volume: "attached"} and cloud.findings() == []


def test_rebuild_sets_error_when_volume_ends_in_error(cloud: Cloud) -> None:
    cloud.volumes.writes_to = "error"
    server, _volume = begin_rebuild(cloud)
    cloud.settle()
    row = cloud.show(server)
    assert row.vm_state == states.ERROR and "service is error" in row.fault["message"]
    assert row.name == "s", "the row keeps the values of the rebuild"
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.show(server).deleted and cloud.volumes.state.held == {}


def test_rebuild_sets_error_when_boot_volume_is_not_written_in_time(cloud: Cloud) -> None:
    cloud.engine.volume_timeout = 20
    cloud.volumes.writes_to = "downloading"
    server, _ = begin_rebuild(cloud)
    cloud.settle()
    assert "was not written within 20 seconds" in (last(cloud, server)[2] or "")
    assert cloud.show(server).vm_state == states.ERROR


def begin_create_image(cloud: Cloud) -> tuple[str, list[str]]:
    """Request an image of a server with a boot volume. Return the server and the snapshots."""
    server, volume = boot_from_new_volume(cloud)
    cloud.settle()
    snapshots = [cloud.volumes.make_snapshot(volume)]
    args = {"image_id": "11111111-1111-4111-8111-111111111111", "snapshots": snapshots}
    cloud.ask(server, "createImage", args=args)
    return server, snapshots


def test_image_of_volume_booted_server_has_no_data_and_keeps_snapshots(cloud: Cloud) -> None:
    server, snapshots = begin_create_image(cloud)
    cloud.settle()
    [record] = cloud.images.records.values()
    assert (record["status"], record["data"], record["min_disk"]) == ("active", b"", 0)
    assert list(cloud.volumes.state.snapshots) == snapshots
    assert cloud.show(server).vm_state == states.ACTIVE


@pytest.mark.parametrize("method", ["create", "leave_empty"])
def test_create_image_refused_by_image_service_deletes_volume_snapshots(
    cloud: Cloud, method: str
) -> None:
    image = "11111111-1111-4111-8111-111111111111"
    cloud.images.refusing[method, image] = errors.Forbidden("No.")
    server, snapshots = begin_create_image(cloud)
    cloud.volumes.refusing["delete_snapshot", snapshots[0]] = errors.BadRequest(
        "It is being snapshots."
    )
    cloud.settle()
    assert cloud.images.records == {} and last(cloud, server)[:2] == ("createImage", "failed")
    assert cloud.pending() == [(cleanups.SNAPSHOT, snapshots[0])]
    cloud.volumes.well()
    cloud.clean_up()
    assert cloud.volumes.state.snapshots == {} and cloud.pending() == []


@pytest.mark.parametrize("key", ["resize", "migrate", "os-migrateLive", "shelve", "evacuate"])
def test_server_on_boot_volume_claims_no_disk_after_each_move(cloud: Cloud, key: str) -> None:
    """The root disk of the flavor is not counted, because the boot volume contains this disk."""
    server, _ = boot_from_new_volume(cloud)
    cloud.settle()
    classes = [{"VCPU", "MEMORY_MB"}]
    assert read_claimed_classes(cloud, server) == classes
    ask(cloud, server, KILL) if key == "evacuate" else None
    ask(cloud, server, key)
    cloud.settle()
    if key == "shelve":
        ask(cloud, server, "unshelve")
    elif key in ("resize", "migrate"):
        ask(cloud, server, "confirmResize")
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    assert read_claimed_classes(cloud, server) == classes and cloud.show(server).disk_gb == 0


def read_claimed_classes(cloud: Cloud, server: str) -> list[set[str]]:
    """Return the resource classes that the server has claimed."""
    table = schema.allocations
    with cloud.store.engine.connect() as tx:
        rows = tx.execute(sa.select(table).where(table.c.consumer_id == server)).all()
    return [{row.resource_class for row in rows}] if rows else []
