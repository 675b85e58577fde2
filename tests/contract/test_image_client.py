# SPDX-License-Identifier: Apache-2.0
"""Our client of the image service against the standalone one, as a real process behind
keystonemiddleware."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openstack
import pytest

from common.clients.identity import IdentityClient
from common.clients.image import ImageClient
from common.domain import errors
from common.service import config
from conductor.steps.service_clients import ImageService
from tests.standalone import Cloud


@pytest.fixture(scope="module")
def cloud(standalone_cloud: Cloud) -> Cloud:
    return standalone_cloud


@pytest.fixture(scope="module")
def kilonova(cloud: Cloud) -> Any:
    """Kilonova's own user, who makes images for the projects of servers."""
    return openstack.connect(
        load_yaml_config=False,
        load_envvars=False,
        region_name="RegionOne",
        auth={
            "auth_url": cloud.auth_url,
            "username": "kilonova",
            "password": cloud.service_password,
            "project_name": "service",
            "user_domain_id": "default",
            "project_domain_id": "default",
        },
    )


@pytest.fixture
def client(kilonova: Any) -> ImageClient:
    return ImageClient(kilonova.session.get_endpoint(service_type="image"))


@pytest.fixture
def token(kilonova: Any) -> str:
    return str(kilonova.session.get_token())


def record(**more: Any) -> dict[str, Any]:
    """As the conductor makes one for a snapshot."""
    return {
        "id": str(uuid.uuid4()),
        "name": "snap",
        "owner": "p" * 32,
        "disk_format": "qcow2",
        "container_format": "bare",
        "visibility": "private",
        "min_disk": 1,
        "min_ram": 0,
        "instance_uuid": "i",
        "image_type": "backup",
        **more,
    }


def test_a_snapshot_from_its_record_to_its_end(client: ImageClient, token: str) -> None:
    made = record()
    client.create(made, token)
    client.create(made, token)
    with pytest.raises(errors.Conflict):
        client.create({**made, "instance_uuid": "another"}, token)
    client.upload(made["id"], token, (b"x" * 100_000 for _ in range(30)))
    found = client.show(made["id"], token)
    assert (
        found.status,
        found.ref.size,
        found.min_disk,
        found.ref.properties["instance_uuid"],
    ) == ("active", 3_000_000, 1, "i")
    assert sum(map(len, client.download(made["id"], token))) == 3_000_000
    with pytest.raises(errors.Conflict):
        client.upload(made["id"], token, [b"again"])
    for _ in range(2):
        client.delete(made["id"], token)
    with pytest.raises(errors.NotFound):
        client.upload(made["id"], token, [b"x"])


def test_an_image_that_is_what_its_properties_say(client: ImageClient, token: str) -> None:
    made = record(block_device_mapping="[]", bdm_v2="True")
    client.create(made, token)
    for _ in range(2):
        client.leave_empty(made["id"], token)
    found = client.show(made["id"], token)
    assert (found.status, found.ref.size) == ("active", 0)
    assert found.ref.properties["block_device_mapping"] == "[]"
    full = record()
    client.create(full, token)
    client.upload(full["id"], token, [b"x"])
    with pytest.raises(errors.Conflict):
        client.leave_empty(full["id"], token)
    for one in (made, full):
        client.delete(one["id"], token)


def test_backups_are_found_newest_first(client: ImageClient, token: str) -> None:
    server = str(uuid.uuid4())
    ids = []
    for _ in range(3):
        made = record(instance_uuid=server)
        client.create(made, token)
        ids.append(made["id"])
    client.create(record(instance_uuid=server, image_type="snapshot"), token)
    filters = {"owner": "p" * 32, "instance_uuid": server, "image_type": "backup"}
    found = client.find(filters, token)
    assert {image["id"] for image in found} == set(ids)
    assert [image["created_at"] for image in found] == sorted(
        (image["created_at"] for image in found), reverse=True
    )
    for image in found:
        client.delete(image["id"], token)
    assert client.find(filters, token) == []


def test_properties_are_set_and_taken_out(client: ImageClient, token: str) -> None:
    made = record(old="1", **{"a/b~c": "2"})
    client.create(made, token)
    client.change(made["id"], {"old": None, "a/b~c": "3", "new": "4"}, token)
    client.change(made["id"], {}, token)
    found = client.record(made["id"], token)
    assert "old" not in found and (found["a/b~c"], found["new"], found["min_disk"]) == ("3", "4", 1)
    assert [one["id"] for one in client.page({"new": "4", "limit": "1"}, token)] == [made["id"]]
    client.delete(made["id"], token)
    for gone in (made["id"], "none", "../images"):
        with pytest.raises(errors.NotFound):
            client.record(gone, token)
    with pytest.raises(errors.NotFound):
        client.change(made["id"], {"new": "5"}, token)
    with pytest.raises(errors.BadRequest):
        client.page({"limit": "x"}, token)


def test_what_it_refuses(client: ImageClient, token: str) -> None:
    with pytest.raises(errors.BadRequest):
        client.create(record(disk_format="papyrus"), token)
    with pytest.raises(errors.Unauthorized):
        client.create(record(), "no such token")


def test_an_upload_that_breaks_off_leaves_no_data(client: ImageClient, token: str) -> None:
    class Cancelled(Exception):
        """What a verb that is cancelled raises."""

    def chunks() -> Iterator[bytes]:
        yield b"x" * 1_000_000
        raise Cancelled

    made = record()
    client.create(made, token)
    with pytest.raises(Cancelled):
        client.upload(made["id"], token, chunks())
    assert client.show(made["id"], token).status != "active"
    client.delete(made["id"], token)


def test_the_conductor_finds_the_service_and_its_token_by_itself(
    cloud: Cloud, tmp_path: Path
) -> None:
    """From the catalogue; a token that is not accepted any more is followed by another."""
    conf = tmp_path / "kilonova.conf"
    conf.write_text(
        f"[identity]\nallow_plain_text = true\nauth_url = {cloud.auth_url}\n"
        "username = kilonova\nproject_name = service\n"
        f"password = {cloud.service_password}\n"
    )
    identity = IdentityClient(config.load(str(conf)))
    service, made = ImageService(identity), record()
    assert identity.image_url().startswith(cloud.image_url)
    service.create(made)
    with pytest.raises(errors.NotFound):
        service.show(str(uuid.uuid4()))
    before = identity.token()
    identity._access_info._auth_token = "no such token"
    with pytest.raises(errors.Unavailable, match="does not accept"):
        service.delete(made["id"])
    service.delete(made["id"])
    assert identity.token() != before
