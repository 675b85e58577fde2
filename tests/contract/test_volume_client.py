# SPDX-License-Identifier: Apache-2.0
"""The block storage service as API and conductor use it: our client against the embedded one.

It can be run at a real Cinder, with the token of an admin who is a service, and of somebody else:
KILONOVA_VOLUME_URL=http://…/v3 KILONOVA_VOLUME_TOKEN=… KILONOVA_VOLUME_OTHER=… pytest
tests/contract/test_volume_client.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import errors, ids
from common.clients.volumes import Volume, VolumeClient
from common.json_types import JsonObject
from tests.contract.volume_rig import HOST, Rig, image, person, qcow2, volume_rig
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


class Service:
    """A service, the token of who may do all there, and that of somebody who may see nothing of
    theirs."""

    def __init__(self, url: str, token: str, other: str) -> None:
        self.url, self.token, self.other = url, token, other
        self.client = VolumeClient(url, 60)

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
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with volume_rig(tmp_path_factory.mktemp("client"), "--export-address", "127.0.0.1") as made:
        yield made


@pytest.fixture(scope="module", params=["embedded", "real"])
def service(request: pytest.FixtureRequest) -> Service:
    if request.param == "real":
        if "KILONOVA_VOLUME_URL" not in os.environ:
            pytest.skip("KILONOVA_VOLUME_URL names no Cinder")
        of = os.environ
        tokens = of["KILONOVA_VOLUME_TOKEN"], of["KILONOVA_VOLUME_OTHER"]
        return Service(of["KILONOVA_VOLUME_URL"], *tokens)
    rig: Rig = request.getfixturevalue("embedded")
    other = person(rig, "member").session.get_token()
    return Service(rig.url, rig.service.session.get_token(), other)


def test_a_volume_is_made_and_told_and_deleted(service: Service) -> None:
    volume = service.make()
    assert (volume.size_gb, volume.status, volume.bootable) == (1, "available", False)
    assert not (volume.multiattach or volume.read_only or volume.encrypted)
    assert volume.image_metadata == {} and volume.availability_zone and volume.project_id
    service.client.delete(service.token, volume.id)
    for _ in range(2):
        await_true(lambda: _is_gone(service, volume.id), 60, "the volume is still there")
        service.client.delete(service.token, volume.id)


def _is_gone(service: Service, volume_id: str) -> bool:
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
    assert client.attachments(token, server) == client.attachments(token, server, volume.id)
    assert client.attachments(token, server) == [connected]
    assert client.attachment(token, reserved.id) == connected
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
    new = client.attach(token, volume.id, server)
    there = client.connect(token, new.id, CONNECTOR | {"host": "another"}, "/dev/vdb")
    assert there.connection["driver_volume_type"]
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


def test_volumes_are_made_of_snapshots_and_images(
    service: Service, embedded: Rig, tmp_path: Path
) -> None:
    client, token = service.client, service.token
    if service.url != embedded.url:
        pytest.skip("the real one needs an image service beside it")
    source = service.make()
    snapshot = embedded.snapshot(embedded.service, source.id)
    told = client.snapshot(token, snapshot)
    assert (told.volume_id, told.size_gb, told.status) == (source.id, 1, "available")
    copy = client.create(token, size_gb=2, snapshot_id=snapshot)
    assert service.until(copy.id, "available").size_gb == 2
    made = image(embedded, embedded.service, qcow2(tmp_path), "qcow2", os_type="linux", min_ram=64)
    booted = client.create(token, size_gb=1, image_id=made, zone=copy.availability_zone)
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
