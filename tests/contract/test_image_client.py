# SPDX-License-Identifier: Apache-2.0
"""The image client and the conductor's image service, against the embedded image service.

The image service is a real process that validates tokens with keystonemiddleware.
"""

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
    """Return a connection of Kilonova's user, which creates images for projects of servers."""
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


def new_record(**more: Any) -> dict[str, Any]:
    """Return the record that the conductor creates for a snapshot."""
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


def test_image_client_creates_uploads_downloads_and_deletes_snapshot(
    client: ImageClient, token: str
) -> None:
    record = new_record()
    client.create(record, token)
    client.create(record, token)
    with pytest.raises(errors.Conflict):
        client.create({**record, "instance_uuid": "another"}, token)
    client.upload(record["id"], token, (b"x" * 100_000 for _ in range(30)))
    image = client.show(record["id"], token)
    assert (
        image.status,
        image.ref.size,
        image.min_disk,
        image.ref.properties["instance_uuid"],
    ) == ("active", 3_000_000, 1, "i")
    assert sum(map(len, client.download(record["id"], token))) == 3_000_000
    with pytest.raises(errors.Conflict):
        client.upload(record["id"], token, [b"again"])
    for _ in range(2):
        client.delete(record["id"], token)
    with pytest.raises(errors.NotFound):
        client.upload(record["id"], token, [b"x"])


def test_image_client_leave_empty_activates_image_without_data(
    client: ImageClient, token: str
) -> None:
    record = new_record(block_device_mapping="[]", bdm_v2="True")
    client.create(record, token)
    for _ in range(2):
        client.leave_empty(record["id"], token)
    image = client.show(record["id"], token)
    assert (image.status, image.ref.size) == ("active", 0)
    assert image.ref.properties["block_device_mapping"] == "[]"
    full = new_record()
    client.create(full, token)
    client.upload(full["id"], token, [b"x"])
    with pytest.raises(errors.Conflict):
        client.leave_empty(full["id"], token)
    for image_record in (record, full):
        client.delete(image_record["id"], token)


def test_image_client_find_returns_backups_newest_first(client: ImageClient, token: str) -> None:
    server = str(uuid.uuid4())
    ids = []
    for _ in range(3):
        record = new_record(instance_uuid=server)
        client.create(record, token)
        ids.append(record["id"])
    client.create(new_record(instance_uuid=server, image_type="snapshot"), token)
    filters = {"owner": "p" * 32, "instance_uuid": server, "image_type": "backup"}
    images = client.find(filters, token)
    assert {image["id"] for image in images} == set(ids)
    assert [image["created_at"] for image in images] == sorted(
        (image["created_at"] for image in images), reverse=True
    )
    for image in images:
        client.delete(image["id"], token)
    assert client.find(filters, token) == []


def test_image_client_change_sets_and_removes_properties(client: ImageClient, token: str) -> None:
    record = new_record(old="1", **{"a/b~c": "2"})
    client.create(record, token)
    client.change(record["id"], {"old": None, "a/b~c": "3", "new": "4"}, token)
    client.change(record["id"], {}, token)
    stored = client.record(record["id"], token)
    assert "old" not in stored and (stored["a/b~c"], stored["new"], stored["min_disk"]) == (
        "3",
        "4",
        1,
    )
    assert [image["id"] for image in client.page({"new": "4", "limit": "1"}, token)] == [
        record["id"]
    ]
    client.delete(record["id"], token)
    for image_id in (record["id"], "none", "../images"):
        with pytest.raises(errors.NotFound):
            client.record(image_id, token)
    with pytest.raises(errors.NotFound):
        client.change(record["id"], {"new": "5"}, token)
    with pytest.raises(errors.BadRequest):
        client.page({"limit": "x"}, token)


def test_image_client_create_with_bad_format_or_token_fails(
    client: ImageClient, token: str
) -> None:
    with pytest.raises(errors.BadRequest):
        client.create(new_record(disk_format="papyrus"), token)
    with pytest.raises(errors.Unauthorized):
        client.create(new_record(), "no such token")


def test_image_client_interrupted_upload_leaves_image_inactive(
    client: ImageClient, token: str
) -> None:
    class Cancelled(Exception):
        """Raised by a cancelled verb."""

    def chunks() -> Iterator[bytes]:
        yield b"x" * 1_000_000
        raise Cancelled

    record = new_record()
    client.create(record, token)
    with pytest.raises(Cancelled):
        client.upload(record["id"], token, chunks())
    assert client.show(record["id"], token).status != "active"
    client.delete(record["id"], token)


def test_image_service_of_conductor_reads_catalogue_and_replaces_token(
    cloud: Cloud, tmp_path: Path
) -> None:
    """The URL comes from the catalogue. A token that is refused is replaced by a new one."""
    conf = tmp_path / "kilonova.conf"
    conf.write_text(
        f"[identity]\nallow_plain_text = true\nauth_url = {cloud.auth_url}\n"
        "username = kilonova\nproject_name = service\n"
        f"password = {cloud.service_password}\n"
    )
    identity = IdentityClient(config.load(str(conf)))
    service, record = ImageService(identity), new_record()
    assert identity.image_url().startswith(cloud.image_url)
    service.create(record)
    with pytest.raises(errors.NotFound):
        service.show(str(uuid.uuid4()))
    before = identity.token()
    identity._access_info._auth_token = "no such token"
    with pytest.raises(errors.Unavailable, match="does not accept"):
        service.delete(record["id"])
    service.delete(record["id"])
    assert identity.token() != before
