# SPDX-License-Identifier: Apache-2.0
"""Servers that boot from a volume: images of its snapshots, and another image on it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.store import cleanups, schema
from compute_agent.virt.memory.state.script import Fail
from tests.workflows import volumes as volume_service
from tests.workflows.scenarios import KILL, ask
from tests.workflows.simulator import Cloud
from tests.workflows.test_volumes import bootable, connected, last

IMAGE = {"id": "77777777-7777-4777-8777-777777777777"}


def rebuilding(cloud: Cloud, stopped: bool = False) -> tuple[str, str]:
    """A server that boots from a volume, which is to be written from another image."""
    server, volume = bootable(cloud)
    cloud.settle()
    if stopped:
        cloud.ask(server, "os-stop")
        cloud.settle()
    args = {"reimage": IMAGE["id"], "before": {"name": "before"}}
    cloud.ask(server, "rebuild", args=args)
    return server, volume


@pytest.mark.parametrize("stopped", [False, True])
def test_the_service_writes_the_volume_of_a_server(cloud: Cloud, stopped: bool) -> None:
    server, volume = rebuilding(cloud, stopped)
    cloud.settle()
    assert last(cloud, server)[:2] == ("rebuild", "done")
    assert cloud.show(server).vm_state == (states.STOPPED if stopped else states.ACTIVE)
    assert cloud.volumes.state.images == {volume: IMAGE["id"]}
    assert volume_service.of(cloud, server) == {volume: "attached"}
    assert connected(cloud, server) == [volume] and cloud.findings() == []


def test_a_volume_that_cannot_be_written_is_as_before(cloud: Cloud) -> None:
    cloud.volumes.make()
    server, volume = rebuilding(cloud)
    cloud.volumes.refusing["reimage", volume] = errors.BadRequest("It is too small.")
    cloud.settle()
    assert last(cloud, server) == ("rebuild", "failed", "It is too small.")
    found = cloud.show(server)
    assert (found.vm_state, found.name) == (states.ACTIVE, "before")
    guest = cloud.hosts[found.host].driver.host.guests[server]
    assert guest.power_state == states.RUNNING
    assert connected(cloud, server) == [volume] and cloud.findings() == []


@pytest.mark.parametrize("verb", ["ensure_stopped", "disconnect_volumes"])
def test_a_host_that_does_not_let_go_keeps_it(cloud: Cloud, verb: str) -> None:
    server, volume = rebuilding(cloud)
    cloud.hosts[cloud.show(server).host].driver.host.script[verb] = [Fail("Stays.")]
    cloud.settle()
    assert last(cloud, server) == ("rebuild", "failed", "Stays.")
    assert cloud.show(server).vm_state == states.ACTIVE and cloud.volumes.state.images == {}
    assert volume_service.of(cloud, server) == {volume: "attached"} and cloud.findings() == []


def test_a_volume_that_was_written_badly_is_told(cloud: Cloud) -> None:
    cloud.volumes.writes_to = "error"
    server, _volume = rebuilding(cloud)
    cloud.settle()
    found = cloud.show(server)
    assert found.vm_state == states.ERROR and "shows it as error" in found.fault["message"]
    assert found.name == "s", "its row says the new image"
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.show(server).deleted and cloud.volumes.state.held == {}


def test_a_volume_that_is_never_written_is_waited_for_so_long(cloud: Cloud) -> None:
    cloud.engine.volume_timeout = 20
    cloud.volumes.writes_to = "downloading"
    server, _ = rebuilding(cloud)
    cloud.settle()
    assert "was not written within 20 seconds" in (last(cloud, server)[2] or "")
    assert cloud.show(server).vm_state == states.ERROR


def asked_for_image(cloud: Cloud) -> tuple[str, list[str]]:
    """A server that boots from a volume, whose image was asked for, and the snapshots."""
    server, volume = bootable(cloud)
    cloud.settle()
    made = [cloud.volumes.make_snapshot(volume)]
    args = {"image_id": "11111111-1111-4111-8111-111111111111", "snapshots": made}
    cloud.ask(server, "createImage", args=args)
    return server, made


def test_an_image_of_snapshots_has_no_bytes(cloud: Cloud) -> None:
    server, made = asked_for_image(cloud)
    cloud.settle()
    [record] = cloud.images.records.values()
    assert (record["status"], record["data"], record["min_disk"]) == ("active", b"", 0)
    assert list(cloud.volumes.state.snapshots) == made
    assert cloud.show(server).vm_state == states.ACTIVE


@pytest.mark.parametrize("method", ["create", "leave_empty"])
def test_snapshots_go_with_an_image_that_is_refused(cloud: Cloud, method: str) -> None:
    image = "11111111-1111-4111-8111-111111111111"
    cloud.images.refusing[method, image] = errors.Forbidden("No.")
    server, made = asked_for_image(cloud)
    cloud.volumes.refusing["delete_snapshot", made[0]] = errors.BadRequest("It is being made.")
    cloud.settle()
    assert cloud.images.records == {} and last(cloud, server)[:2] == ("createImage", "failed")
    assert cloud.pending() == [(cleanups.SNAPSHOT, made[0])]
    cloud.volumes.well()
    cloud.clean_up()
    assert cloud.volumes.state.snapshots == {} and cloud.pending() == []


@pytest.mark.parametrize("key", ["resize", "migrate", "os-migrateLive", "shelve", "evacuate"])
def test_the_root_disk_is_nobodys_wherever_it_is(cloud: Cloud, key: str) -> None:
    """What its host holds for it, after each of its moves; the doctor compares it with its
    flavor."""
    server, _ = bootable(cloud)
    cloud.settle()
    classes = [{"VCPU", "MEMORY_MB"}]
    assert held(cloud, server) == classes
    ask(cloud, server, KILL) if key == "evacuate" else None
    ask(cloud, server, key)
    cloud.settle()
    if key == "shelve":
        ask(cloud, server, "unshelve")
    elif key in ("resize", "migrate"):
        ask(cloud, server, "confirmResize")
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    assert held(cloud, server) == classes and cloud.show(server).disk_gb == 0


def held(cloud: Cloud, server: str) -> list[set[str]]:
    """The resource classes that are claimed for it."""
    table = schema.allocations
    with cloud.store.engine.connect() as tx:
        found = tx.execute(sa.select(table).where(table.c.consumer_id == server)).all()
    return [{row.resource_class for row in found}] if found else []
