# SPDX-License-Identifier: Apache-2.0
"""Kilonova's client of the block storage service, against the embedded service.

tests/cinder runs the same tests against Cinder.
"""

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
    """A block storage service of a cloud, with an administrator's token and another project's."""

    def __init__(self, url: str, cloud: Cloud, copies_images: bool = True) -> None:
        self.url, self.cloud, self.copies_images = url, cloud, copies_images
        self.owner = connect(cloud, "kilonova", cloud.service_password, "service")
        admin = connect(cloud, "admin", cloud.admin_password, "admin")
        self.token = self.owner.session.get_token()
        self.other = person(admin, cloud, "member").session.get_token()
        self.client = VolumeClient(url, 60)

    def snapshot(self, volume_id: str) -> str:
        """Create a snapshot, wait until it is available, and return its id."""
        response = requests.post(
            f"{self.url}/snapshots",
            json={"snapshot": {"volume_id": volume_id}},
            headers={"X-Auth-Token": self.token},
            timeout=60,
        )
        key = str(response.json()["snapshot"]["id"])
        await_true(
            lambda: self.client.snapshot(self.token, key).status == "available",
            60,
            f"{key} is there",
        )
        return key

    def make(self) -> Volume:
        """Create a volume of one gigabyte and wait until it is available."""
        created = self.client.create(self.token, size_gb=1, name="of the contract")
        return self.until(created.id, "available")

    def until(self, volume_id: str, status: str) -> Volume:
        await_true(
            lambda: self.client.volume(self.token, volume_id).status == status,
            60,
            lambda: f"{self.client.volume(self.token, volume_id).status}, not {status}",
        )
        return self.client.volume(self.token, volume_id)


@pytest.fixture(scope="module")
def embedded_service(
    standalone_cloud: Cloud, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("client")
    with volume_rig(standalone_cloud, folder, "--export-address", "127.0.0.1") as volume_service:
        yield volume_service


@pytest.fixture(scope="module")
def service(embedded_service: Rig) -> Service:
    return Service(embedded_service.url, embedded_service.cloud)


def test_volume_is_created_and_shown_and_its_delete_can_be_repeated(service: Service) -> None:
    volume = service.make()
    assert (volume.size_gb, volume.status, volume.bootable) == (1, "available", False)
    assert not (volume.multiattach or volume.read_only or volume.encrypted)
    assert volume.image_metadata == {} and volume.availability_zone and volume.project_id
    service.client.delete(service.token, volume.id)
    for _ in range(2):
        await_true(lambda: is_gone(service, volume.id), 60, "the volume is still there")
        service.client.delete(service.token, volume.id)


def test_snapshot_is_created_and_its_delete_can_be_repeated(service: Service) -> None:
    volume = service.make()
    snapshot = service.client.make_snapshot(service.token, volume.id, "of the contract")
    assert (snapshot.volume_id, snapshot.size_gb) == (volume.id, 1)
    await_true(
        lambda: service.client.snapshot(service.token, snapshot.id).status == "available",
        60,
        "it is not taken",
    )
    for _ in range(2):
        service.client.delete_snapshot(service.token, snapshot.id)
    await_true(lambda: _has_no_snapshot(service, snapshot.id), 60, "it is still there")
    service.client.delete_snapshot(service.token, snapshot.id)


def test_update_snapshot_status_is_accepted_only_during_create_or_delete(service: Service) -> None:
    client, token = service.client, service.token
    snapshot = client.make_snapshot(token, service.make().id, "taken by a host")
    await_true(
        lambda: client.snapshot(token, snapshot.id).status == "available", 60, "it is not taken"
    )
    # The snapshot is not in creation.
    with pytest.raises(errors.BadRequest):
        client.update_snapshot_status(token, snapshot.id, "error")
    for status, report in (
        ("creating", "error"),
        ("creating", "creating"),
        ("deleting", "deleting"),
    ):
        _reset_snapshot_status(service, snapshot.id, status)
        client.update_snapshot_status(token, snapshot.id, report)
        assert client.snapshot(token, snapshot.id).status == report
    record = client.record(token, "snapshots", snapshot.id)
    assert record["os-extended-snapshot-attributes:progress"] == "90%"
    with pytest.raises(errors.NotFound):
        client.update_snapshot_status(token, ids.new(), "error")


def _reset_snapshot_status(service: Service, snapshot_id: str, status: str) -> None:
    response = requests.post(
        f"{service.url}/snapshots/{snapshot_id}/action",
        json={"os-reset_status": {"status": status}},
        headers={"X-Auth-Token": service.token},
        timeout=60,
    )
    assert response.status_code == 202, response.text


def _has_no_snapshot(service: Service, snapshot_id: str) -> bool:
    try:
        service.client.snapshot(service.token, snapshot_id)
    except errors.NotFound:
        return True
    return False


def test_volume_client_makes_reads_lists_and_removes_raw_records(service: Service) -> None:
    client, token = service.client, service.token
    volume = client.make(token, "volumes", {"size": 1, "name": "by its record"})
    assert (volume["name"], volume["size"], volume["attachments"]) == ("by its record", 1, [])
    service.until(volume["id"], "available")
    assert client.record(token, "volumes", volume["id"])["created_at"]
    snapshot = client.make(token, "snapshots", {"volume_id": volume["id"], "force": False})
    await_true(
        lambda: client.record(token, "snapshots", snapshot["id"])["status"] == "available",
        60,
        "the snapshot is there",
    )
    assert snapshot["id"] in [record["id"] for record in client.records(token, "snapshots")]
    assert volume["id"] in [record["id"] for record in client.records(token, "volumes")]
    for resource, key in (("snapshots", snapshot["id"]), ("volumes", volume["id"])):
        client.remove(token, resource, key)
        await_true(partial(_is_unlisted, service, resource, key), 60, f"{resource} without it")
        with pytest.raises(errors.NotFound):
            client.remove(token, resource, key)


def _is_unlisted(service: Service, resource: str, key: str) -> bool:
    return key not in [record["id"] for record in service.client.records(service.token, resource)]


def is_gone(service: Service, volume_id: str) -> bool:
    """Return True if the service does not find the volume."""
    try:
        service.client.volume(service.token, volume_id)
    except errors.NotFound as problem:
        return volume_id in problem.text
    return False


def test_volume_with_foreign_token_is_not_found_and_bad_token_refused(service: Service) -> None:
    volume = service.make()
    with pytest.raises(errors.NotFound, match="could not be found"):
        service.client.volume(service.other, volume.id)
    with pytest.raises(errors.Unauthorized):
        service.client.volume("nobody's", volume.id)
    service.client.delete(service.token, volume.id)


def test_attach_connect_complete_and_detach_change_volume_status(service: Service) -> None:
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
    [listed] = client.attachments(token, server)
    assert [listed] == client.attachments(token, server, volume.id)
    assert listed.id in [attachment.id for attachment in client.every_attachment(token)]
    assert listed == client.attachment(token, reserved.id)
    assert (listed.id, listed.status) == (reserved.id, "attaching")
    assert listed.connection == connected.connection
    client.complete(token, reserved.id)
    assert service.until(volume.id, "in-use")
    for _ in range(2):
        client.detach(token, reserved.id)
    assert service.until(volume.id, "available")
    assert client.attachments(token, server) == []
    client.delete(token, volume.id)


def test_attached_volume_refuses_second_server_and_delete(service: Service) -> None:
    client, token, volume = service.client, service.token, service.make()
    attached = client.attach(token, volume.id, ids.new())
    with pytest.raises((errors.BadRequest, errors.Conflict), match=volume.id):
        client.attach(token, volume.id, ids.new())
    with pytest.raises((errors.BadRequest, errors.Conflict)):
        client.delete(token, volume.id)
    client.detach(token, attached.id)
    client.delete(token, volume.id)


def test_moving_server_has_two_attachments_of_one_volume(service: Service) -> None:
    client, token, volume, server = service.client, service.token, service.make(), ids.new()
    old = client.attach(token, volume.id, server, CONNECTOR, "/dev/vdb")
    client.complete(token, old.id)
    new = client.attach(token, volume.id, server, ELSEWHERE, "/dev/vdb")
    assert new.connection["driver_volume_type"]
    assert {attachment.id for attachment in client.attachments(token, server, volume.id)} == {
        old.id,
        new.id,
    }
    client.detach(token, old.id)
    client.complete(token, new.id)
    assert service.until(volume.id, "in-use")
    client.detach(token, new.id)
    client.delete(token, volume.id)


def test_volume_client_calls_with_unknown_ids_raise_not_found(service: Service) -> None:
    client, token, unknown_id = service.client, service.token, ids.new()
    for call in (
        lambda: client.snapshot(token, unknown_id),
        lambda: client.attachment(token, unknown_id),
        lambda: client.attach(token, unknown_id, ids.new()),
        lambda: client.connect(token, unknown_id, CONNECTOR),
        lambda: client.complete(token, unknown_id),
        lambda: client.create(token, size_gb=1, volume_type="of nobody"),
    ):
        with pytest.raises(errors.NotFound):
            call()


def test_volume_types_have_id_and_name(service: Service) -> None:
    assert all(
        volume_type.id and volume_type.name for volume_type in service.client.types(service.token)
    ) and service.client.types(service.token)


def test_create_volume_above_quota_raises_too_large(service: Service) -> None:
    with pytest.raises(errors.TooLarge, match="quota|limit"):
        service.client.create(service.token, size_gb=100_000)


def test_create_volume_from_snapshot_succeeds_with_larger_size(service: Service) -> None:
    client, token = service.client, service.token
    source = service.make()
    snapshot = service.snapshot(source.id)
    record = client.snapshot(token, snapshot)
    assert (record.volume_id, record.size_gb, record.status) == (source.id, 1, "available")
    copy = client.create(token, size_gb=2, snapshot_id=snapshot)
    assert service.until(copy.id, "available").size_gb == 2


def test_create_volume_from_image_is_bootable_with_image_metadata(
    service: Service, tmp_path: Path
) -> None:
    if not service.copies_images:
        pytest.skip("this driver takes no image")
    client, token = service.client, service.token
    image_id = image(
        service.cloud, service.owner, qcow2(tmp_path), "qcow2", os_type="linux", min_ram=64
    )
    created = client.create(token, size_gb=1, image_id=image_id, zone="nova")
    volume = service.until(created.id, "available")
    assert volume.bootable and volume.image_metadata["image_id"] == image_id
    assert volume.image_metadata["min_ram"] == "64"


@pytest.mark.parametrize("end", ["", "/", "/v3", "/v3/", "/v3/" + "p" * 32])
def test_volume_client_accepts_every_form_of_catalogue_endpoint(service: Service, end: str) -> None:
    base = service.url.removesuffix("/v3")
    assert VolumeClient(base + end).types(service.token)


def test_volume_client_without_service_raises_unavailable() -> None:
    assert not VolumeClient(lambda: None).has_service()
    with pytest.raises(errors.Unavailable, match="names no block storage service"):
        VolumeClient(lambda: None).volume("token", ids.new())
    with pytest.raises(errors.Unavailable, match="does not answer"):
        VolumeClient("http://127.0.0.1:1").volume("token", ids.new())
