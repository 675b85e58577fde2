# SPDX-License-Identifier: Apache-2.0
"""The block storage service as API and conductor use it: our client against the embedded one.
tests/cinder runs the same against Cinder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import requests

from common.clients.volumes import Volume, VolumeClient
from common.domain import errors, ids
from common.domain.json_types import JsonObject
from tests.contract.volume_rig import HOST, Rig, image, person, qcow2, volume_rig
from tests.standalone import Cloud, connect
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")
CONNECTOR: JsonObject = {
    "host": HOST,
    "ip": "127.0.0.1",
    "initiator": "iqn.2026-11.org.kilonova:host",
    "multipath": False,
    "platform": "x86_64",
    "os_type": "linux",
}
ELSEWHERE = CONNECTOR | {
    "host": "another",
    "ip": "127.0.0.2",
    "initiator": "iqn.2026-11.org.kilonova:another",
}


class Service:
    """A service in a cloud, with the token of who may do all there, and that of somebody who may
    see nothing of theirs."""

    def __init__(self, url: str, cloud: Cloud, copies_images: bool = True) -> None:
        self.url, self.cloud, self.copies_images = url, cloud, copies_images
        self.owner = connect(cloud, "kilonova", cloud.service_password, "service")
        admin = connect(cloud, "admin", cloud.admin_password, "admin")
        self.token = self.owner.session.get_token()
        self.other = person(admin, cloud, "member").session.get_token()
        self.client = VolumeClient(url, 60)

    def snapshot(self, volume_id: str) -> str:
        """The id of a snapshot that is there."""
        made = requests.post(
            f"{self.url}/snapshots",
            json={"snapshot": {"volume_id": volume_id}},
            headers={"X-Auth-Token": self.token},
            timeout=60,
        )
        key = str(made.json()["snapshot"]["id"])
        await_true(
            lambda: self.client.snapshot(self.token, key).status == "available",
            60,
            f"{key} is there",
        )
        return key

    def make(self) -> Volume:
        """A volume of one gigabyte that is there."""
        made = self.client.create(self.token, size_gb=1, name="of the contract")
        return self.until(made.id, "available")

    def until(self, volume_id: str, status: str) -> Volume:
        await_true(
            lambda: self.client.volume(self.token, volume_id).status == status,
            60,
            lambda: f"{self.client.volume(self.token, volume_id).status}, not {status}",
        )
        return self.client.volume(self.token, volume_id)


@pytest.fixture(scope="module")
def embedded(standalone_cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("client")
    with volume_rig(standalone_cloud, folder, "--export-address", "127.0.0.1") as made:
        yield made


@pytest.fixture(scope="module")
def service(embedded: Rig) -> Service:
    return Service(embedded.url, embedded.cloud)


def test_a_volume_is_made_and_told_and_deleted(service: Service) -> None:
    volume = service.make()
    assert (volume.size_gb, volume.status, volume.bootable) == (1, "available", False)
    assert not (volume.multiattach or volume.read_only or volume.encrypted)
    assert volume.image_metadata == {} and volume.availability_zone and volume.project_id
    service.client.delete(service.token, volume.id)
    for _ in range(2):
        await_true(lambda: is_gone(service, volume.id), 60, "the volume is still there")
        service.client.delete(service.token, volume.id)


def test_a_snapshot_is_made_and_deleted(service: Service) -> None:
    volume = service.make()
    made = service.client.make_snapshot(service.token, volume.id, "of the contract")
    assert (made.volume_id, made.size_gb) == (volume.id, 1)
    await_true(
        lambda: service.client.snapshot(service.token, made.id).status == "available",
        60,
        "it is not taken",
    )
    for _ in range(2):
        service.client.delete_snapshot(service.token, made.id)
    await_true(lambda: _has_no_snapshot(service, made.id), 60, "it is still there")
    service.client.delete_snapshot(service.token, made.id)


def test_a_host_tells_what_it_made_of_a_snapshot(service: Service) -> None:
    client, token = service.client, service.token
    made = client.make_snapshot(token, service.make().id, "taken by a host")
    await_true(lambda: client.snapshot(token, made.id).status == "available", 60, "it is not taken")
    with pytest.raises(errors.BadRequest):  # nobody waits for it
        client.update_snapshot_status(token, made.id, "error")
    for status, told in (("creating", "error"), ("creating", "creating"), ("deleting", "deleting")):
        _reset(service, made.id, status)
        client.update_snapshot_status(token, made.id, told)
        assert client.snapshot(token, made.id).status == told
    shown = client.record(token, "snapshots", made.id)
    assert shown["os-extended-snapshot-attributes:progress"] == "90%"
    with pytest.raises(errors.NotFound):
        client.update_snapshot_status(token, ids.new(), "error")


def _reset(service: Service, snapshot_id: str, status: str) -> None:
    answer = requests.post(
        f"{service.url}/snapshots/{snapshot_id}/action",
        json={"os-reset_status": {"status": status}},
        headers={"X-Auth-Token": service.token},
        timeout=60,
    )
    assert answer.status_code == 202, answer.text


def _has_no_snapshot(service: Service, snapshot_id: str) -> bool:
    try:
        service.client.snapshot(service.token, snapshot_id)
    except errors.NotFound:
        return True
    return False


def test_what_users_see_is_passed_on_as_it_is(service: Service) -> None:
    client, token = service.client, service.token
    made = client.make(token, "volumes", {"size": 1, "name": "by its record"})
    assert (made["name"], made["size"], made["attachments"]) == ("by its record", 1, [])
    service.until(made["id"], "available")
    assert client.record(token, "volumes", made["id"])["created_at"]
    taken = client.make(token, "snapshots", {"volume_id": made["id"], "force": False})
    await_true(
        lambda: client.record(token, "snapshots", taken["id"])["status"] == "available",
        60,
        "the snapshot is there",
    )
    assert taken["id"] in [one["id"] for one in client.records(token, "snapshots")]
    assert made["id"] in [one["id"] for one in client.records(token, "volumes")]
    for resource, key in (("snapshots", taken["id"]), ("volumes", made["id"])):
        client.remove(token, resource, key)
        await_true(partial(_has_no, service, resource, key), 60, f"{resource} without it")
        with pytest.raises(errors.NotFound):
            client.remove(token, resource, key)


def _has_no(service: Service, resource: str, key: str) -> bool:
    return key not in [one["id"] for one in service.client.records(service.token, resource)]


def is_gone(service: Service, volume_id: str) -> bool:
    """The service knows no such volume."""
    try:
        service.client.volume(service.token, volume_id)
    except errors.NotFound as problem:
        return volume_id in problem.text
    return False


def test_what_a_token_may_not_see_is_not_told(service: Service) -> None:
    volume = service.make()
    with pytest.raises(errors.NotFound, match="could not be found"):
        service.client.volume(service.other, volume.id)
    with pytest.raises(errors.Unauthorized):
        service.client.volume("nobody's", volume.id)
    service.client.delete(service.token, volume.id)


def test_a_server_gets_a_volume_and_gives_it_back(service: Service) -> None:
    client, token, volume, server = service.client, service.token, service.make(), ids.new()
    reserved = client.attach(token, volume.id, server)
    assert (reserved.volume_id, reserved.server_id, reserved.status) == (
        volume.id,
        server,
        "reserved",
    )
    assert reserved.connection == {} and service.until(volume.id, "reserved")
    connected = client.connect(token, reserved.id, CONNECTOR, "/dev/vdb", "rw")
    assert connected.id == reserved.id and connected.connection["driver_volume_type"]
    [found] = client.attachments(token, server)
    assert [found] == client.attachments(token, server, volume.id)
    assert found.id in [one.id for one in client.every_attachment(token)]
    assert found == client.attachment(token, reserved.id)
    assert (found.id, found.status) == (reserved.id, "attaching")
    assert found.connection == connected.connection
    client.complete(token, reserved.id)
    assert service.until(volume.id, "in-use")
    for _ in range(2):
        client.detach(token, reserved.id)
    assert service.until(volume.id, "available")
    assert client.attachments(token, server) == []
    client.delete(token, volume.id)


def test_a_volume_is_of_one_server(service: Service) -> None:
    client, token, volume = service.client, service.token, service.make()
    attached = client.attach(token, volume.id, ids.new())
    with pytest.raises((errors.BadRequest, errors.Conflict), match=volume.id):
        client.attach(token, volume.id, ids.new())
    with pytest.raises((errors.BadRequest, errors.Conflict)):
        client.delete(token, volume.id)
    client.detach(token, attached.id)
    client.delete(token, volume.id)


def test_a_server_that_moves_has_two_attachments(service: Service) -> None:
    client, token, volume, server = service.client, service.token, service.make(), ids.new()
    old = client.attach(token, volume.id, server, CONNECTOR, "/dev/vdb")
    client.complete(token, old.id)
    new = client.attach(token, volume.id, server, ELSEWHERE, "/dev/vdb")
    assert new.connection["driver_volume_type"]
    assert {one.id for one in client.attachments(token, server, volume.id)} == {old.id, new.id}
    client.detach(token, old.id)
    client.complete(token, new.id)
    assert service.until(volume.id, "in-use")
    client.detach(token, new.id)
    client.delete(token, volume.id)


def test_what_is_not_there_is_not_found(service: Service) -> None:
    client, token, nowhere = service.client, service.token, ids.new()
    for ask in (
        lambda: client.snapshot(token, nowhere),
        lambda: client.attachment(token, nowhere),
        lambda: client.attach(token, nowhere, ids.new()),
        lambda: client.connect(token, nowhere, CONNECTOR),
        lambda: client.complete(token, nowhere),
        lambda: client.create(token, size_gb=1, volume_type="of nobody"),
    ):
        with pytest.raises(errors.NotFound):
            ask()


def test_types_are_told(service: Service) -> None:
    assert all(
        one.id and one.name for one in service.client.types(service.token)
    ) and service.client.types(service.token)


def test_a_quota_says_what_it_allows(service: Service) -> None:
    with pytest.raises(errors.TooLarge, match="quota|limit"):
        service.client.create(service.token, size_gb=100_000)


def test_volumes_are_made_of_snapshots(service: Service) -> None:
    client, token = service.client, service.token
    source = service.make()
    snapshot = service.snapshot(source.id)
    told = client.snapshot(token, snapshot)
    assert (told.volume_id, told.size_gb, told.status) == (source.id, 1, "available")
    copy = client.create(token, size_gb=2, snapshot_id=snapshot)
    assert service.until(copy.id, "available").size_gb == 2


def test_volumes_are_made_of_images(service: Service, tmp_path: Path) -> None:
    if not service.copies_images:
        pytest.skip("this driver takes no image")
    client, token = service.client, service.token
    made = image(
        service.cloud, service.owner, qcow2(tmp_path), "qcow2", os_type="linux", min_ram=64
    )
    booted = client.create(token, size_gb=1, image_id=made, zone="nova")
    found = service.until(booted.id, "available")
    assert found.bootable and found.image_metadata["image_id"] == made
    assert found.image_metadata["min_ram"] == "64"


@pytest.mark.parametrize("end", ["", "/", "/v3", "/v3/", "/v3/" + "p" * 32])
def test_an_endpoint_may_end_as_catalogues_write_it(service: Service, end: str) -> None:
    base = service.url.removesuffix("/v3")
    assert VolumeClient(base + end).types(service.token)


def test_a_cloud_without_the_service_says_so() -> None:
    assert not VolumeClient(lambda: None).has_service()
    with pytest.raises(errors.Unavailable, match="names no block storage service"):
        VolumeClient(lambda: None).volume("token", ids.new())
    with pytest.raises(errors.Unavailable, match="does not answer"):
        VolumeClient("http://127.0.0.1:1").volume("token", ids.new())
