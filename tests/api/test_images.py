# SPDX-License-Identifier: Apache-2.0
"""The image proxy: images up to 2.35, and their metadata up to 2.38."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import IMAGE, Cloud

SERVER = "5d9b4a0e-2a37-4d7c-9c5e-0b8e7c3f1a22"
OTHER_IMAGE = "11111111-2a37-4d7c-9c5e-0b8e7c3f1a22"
OWN = {
    "id": IMAGE,
    "name": "debian",
    "status": "active",
    "size": 42,
    "min_ram": 64,
    "min_disk": 1,
    "checksum": "c",
    "created_at": "2026-01-01T00:00:00Z",
    "updated_at": "2026-01-02T00:00:00Z",
    "visibility": "public",
}


@pytest.fixture
def cloud(cloud: Cloud) -> Cloud:
    """Return a cloud with two images. The first is a snapshot of a server."""
    cloud.images.records = {
        IMAGE: {**OWN, "os_type": "linux", "instance_uuid": SERVER, "auto_disk_config": "True"},
        OTHER_IMAGE: {**OWN, "id": OTHER_IMAGE, "name": None, "status": "queued", "size": None},
    }
    return cloud


def call_images(
    cloud: Cloud,
    method: str,
    path: str = "",
    body: Any = None,
    status: int = 200,
    mv: str = "2.35",
    token: str = "user",
) -> Any:
    answer = cloud.call(method, f"/images{path}", body, mv=mv, token=token)
    assert answer.status_code == status, answer.text
    return answer.json if answer.text else None


def test_show_image_returns_record_in_compute_format(cloud: Cloud) -> None:
    image = call_images(cloud, "GET", f"/{IMAGE}")["image"]
    links = image.pop("links")
    assert [link["rel"] for link in links] == ["self", "bookmark", "alternate"]
    assert links[2] == {
        "rel": "alternate",
        "type": "application/vnd.openstack.image",
        "href": f"http://images/v2/images/{IMAGE}",
    }
    assert image.pop("server")["id"] == SERVER
    assert image == {
        "id": IMAGE,
        "name": "debian",
        "minRam": 64,
        "minDisk": 1,
        "status": "ACTIVE",
        "progress": 100,
        "created": "2026-01-01T00:00:00Z",
        "updated": "2026-01-02T00:00:00Z",
        "OS-EXT-IMG-SIZE:size": 42,
        "OS-DCF:diskConfig": "AUTO",
        "metadata": {"os_type": "linux", "instance_uuid": SERVER, "auto_disk_config": "True"},
    }
    other = call_images(cloud, "GET", f"/{OTHER_IMAGE}")["image"]
    assert (other["status"], other["progress"], other["OS-EXT-IMG-SIZE:size"], other["name"]) == (
        "SAVING",
        25,
        0,
        None,
    )
    assert not {"server", "OS-DCF:diskConfig"} & other.keys()


def test_list_images_translates_filters_for_image_service(cloud: Cloud) -> None:
    query = (
        f"?status=ACTIVE&server=http://api/servers/{SERVER}&minRam=64&property-os_type=linux&type=snapshot"
        f"&changes-since=2026-01-01T00:00:00Z&marker={OTHER_IMAGE}&limit=7&colour=red"
    )
    call_images(cloud, "GET", query)
    assert cloud.images.queries[-1] == {
        "status": "active",
        "instance_uuid": SERVER,
        "min_ram": "64",
        "os_type": "linux",
        "image_type": "snapshot",
        "updated_at": "gte:2026-01-01T00:00:00Z",
        "marker": OTHER_IMAGE,
        "limit": "7",
    }


def test_list_images_pages_and_refuses_invalid_limits(cloud: Cloud) -> None:
    assert [set(image) for image in call_images(cloud, "GET")["images"]] == [
        {"id", "name", "links"}
    ] * 2
    assert (
        call_images(cloud, "GET", "/detail")["images"][0]
        == call_images(cloud, "GET", f"/{IMAGE}")["image"]
    )
    page = call_images(cloud, "GET", "/detail?limit=1")
    assert len(page["images"]) == 1 and f"marker={IMAGE}" in page["images_links"][0]["href"]
    for parameter in ("limit=x", "limit=0", "page_size=0", "offset=00"):
        call_images(cloud, "GET", f"?{parameter}", status=400)


def test_image_metadata_is_added_replaced_and_deleted(cloud: Cloud) -> None:
    path = f"/{IMAGE}/metadata"
    before = call_images(cloud, "GET", path, mv="2.38")["metadata"]
    assert call_images(cloud, "POST", path, {"metadata": {"a": "1", "os_type": "bsd"}})[
        "metadata"
    ] == {
        **before,
        "a": "1",
        "os_type": "bsd",
    }
    assert call_images(cloud, "PUT", f"{path}/b", {"meta": {"b": "2"}}) == {"meta": {"b": "2"}}
    assert call_images(cloud, "GET", f"{path}/b") == {"meta": {"b": "2"}}
    call_images(cloud, "DELETE", f"{path}/a", status=204)
    assert call_images(cloud, "GET", path)["metadata"] == {**before, "os_type": "bsd", "b": "2"}
    assert call_images(cloud, "PUT", path, {"metadata": {"only": "this"}})["metadata"] == {
        "only": "this"
    }
    assert cloud.images.records[IMAGE] == {**OWN, "only": "this"}, "other fields are unchanged"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/none", None, 404),
        ("DELETE", "/none", None, 404),
        ("GET", "/none/metadata", None, 404),
        ("GET", f"/{IMAGE}/metadata/none", None, 404),
        ("DELETE", f"/{IMAGE}/metadata/none", None, 404),
        ("PUT", f"/{IMAGE}/metadata/a", {"meta": {"b": "1"}}, 400),
        ("PUT", f"/{IMAGE}/metadata/a", {"meta": {"a": "1", "b": "1"}}, 400),
        ("POST", f"/{IMAGE}/metadata", {"metadata": {"a": 1}}, 400),
        ("POST", f"/{IMAGE}/metadata", {"meta": {}}, 400),
        ("PUT", f"/{IMAGE}/metadata", {"metadata": {str(n): "x" for n in range(129)}}, 403),
    ],
)
def test_image_requests_with_unknown_or_invalid_values_change_no_image(
    cloud: Cloud, method: str, path: str, body: Any, status: int
) -> None:
    before = dict(cloud.images.records)
    call_images(cloud, method, path, body, status)
    assert cloud.images.records == before


def test_image_requests_return_403_when_image_service_forbids(cloud: Cloud) -> None:
    for method, path in (
        ("GET", f"/{IMAGE}"),
        ("DELETE", f"/{IMAGE}"),
        ("GET", f"/{IMAGE}/metadata"),
    ):
        fault = call_images(cloud, method, path, status=403, token="stranger")
        assert "Not authorized for image" in fault["forbidden"]["message"]


def test_delete_image_removes_image(cloud: Cloud) -> None:
    call_images(cloud, "DELETE", f"/{IMAGE}", status=204)
    assert set(cloud.images.records) == {OTHER_IMAGE}


def test_images_return_404_from_2_36_and_image_metadata_from_2_39(cloud: Cloud) -> None:
    call_images(cloud, "GET", f"/{IMAGE}", status=404, mv="2.36")
    call_images(cloud, "GET", f"/{IMAGE}/metadata", mv="2.38")
    call_images(cloud, "GET", f"/{IMAGE}/metadata", status=404, mv="2.39")
