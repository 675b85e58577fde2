# SPDX-License-Identifier: Apache-2.0
"""Invalid input to the embedded image service: the status, and the field named in the error."""

import json
from typing import Any

import pytest

PATCH = {"Content-Type": "application/openstack-images-v2.1-json-patch"}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ([], 400, "object"),
        ({"name": 5}, 400, "image.name"),
        ({"min_disk": -1}, 400, "image.min_disk"),
        ({"min_ram": 2**31}, 400, "image.min_ram"),
        ({"min_ram": True}, 400, "image.min_ram"),
        ({"disk_format": "exe"}, 400, "image.disk_format"),
        ({"visibility": None}, 400, "image.visibility"),
        ({"tags": [1]}, 400, "image.tags"),
        ({"tags": "x"}, 400, "image.tags"),
        ({"prop": {"a": 1}}, 400, "image.prop"),
        ({"": "x"}, 400, "property"),
        ({"name": "x" * 256}, 400, "image.name"),
        ({"status": "active"}, 403, "status"),
        ({"id": "../../etc/passwd"}, 400, "image.id"),
        ({"id": "A" * 36}, 400, "image.id"),
        ({"id": 7}, 400, "image.id"),
        ({"owner": "somebody"}, 403, "another project"),
        ({f"p{n}": "" for n in range(129)}, 413, "128"),
        ({"locations": []}, 403, "locations"),
    ],
)
def test_create_image_returns_400_if_invalid_403_if_forbidden_413_if_too_many(
    images: Any, body: Any, status: int, message: str
) -> None:
    answer = images.request("POST", "/v2/images", json=body)
    assert answer.status_code == status
    assert message in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("patch", "status"),
    [
        ({}, 400),
        ([1], 400),
        ([{"op": "move", "path": "/a"}], 400),
        ([{"op": "add", "path": "a", "value": ""}], 400),
        ([{"op": "add", "path": "/a/b", "value": ""}], 400),
        ([{"op": "add", "path": "/a"}], 400),
        ([{"op": "add", "path": "/a", "value": 1}], 400),
        ([{"op": "replace", "path": "/none", "value": ""}], 409),
        ([{"op": "remove", "path": "/none"}], 409),
        ([{"op": "remove", "path": "/name"}], 403),
        ([{"op": "replace", "path": "/id", "value": "x"}], 403),
        ([{"op": "add", "path": "/upload", "value": "x"}], 200),
        ([{"op": "replace", "path": "/visibility", "value": "public"}], 403),
        ([], 200),
        ([{"op": "add", "path": "/a~1b", "value": "x"}, {"op": "remove", "path": "/a~1b"}], 200),
    ],
)
def test_image_patch_keeps_owner_and_returns_400_malformed_403_forbidden_409_absent(
    images: Any, patch: Any, status: int
) -> None:
    key = images.create()
    before = images.request("GET", f"/v2/images/{key}").json
    assert (
        images.request(
            "PATCH", f"/v2/images/{key}", headers=PATCH, body=json.dumps(patch)
        ).status_code
        == status
    )
    assert images.request("PATCH", f"/v2/images/{key}", json=[]).status_code == 415
    after = images.request("GET", f"/v2/images/{key}").json
    assert (after["status"], after["owner"], after["name"]) == (
        before["status"],
        before["owner"],
        before["name"],
    )


@pytest.mark.parametrize(
    ("patch", "status"),
    [
        (
            [{"add": "/a", "value": "x"}, {"replace": "/name", "value": "new"}, {"remove": "/a"}],
            200,
        ),
        ([{"replace": "/none", "value": ""}], 409),
        ([{"remove": "/name"}], 403),
        ([{"add": "/a"}], 400),
        ([{"add": 1, "value": ""}], 400),
        ([{"add": "/a", "remove": "/b", "value": ""}], 400),
        ([1], 400),
        ({}, 400),
        ([{"op": "add", "path": "/a", "value": ""}], 400),
        ([{"add": "/a", "path": "/b", "value": ""}], 400),
    ],
)
def test_image_patch_in_format_v2_0_is_applied_if_valid_or_changes_nothing(
    images: Any, patch: Any, status: int
) -> None:
    key = images.create()
    before = images.request("GET", f"/v2/images/{key}").json
    answer = images.request(
        "PATCH",
        f"/v2/images/{key}",
        headers={"Content-Type": PATCH["Content-Type"].replace("v2.1", "v2.0")},
        body=json.dumps(patch),
    )
    after = images.request("GET", f"/v2/images/{key}").json
    assert answer.status_code == status
    assert ("a" in after, after["name"]) == (False, "new" if status == 200 else before["name"])


def test_image_tasks_list_is_empty(images: Any) -> None:
    answer = images.request("GET", f"/v2/images/{images.create()}/tasks")
    assert (answer.status_code, answer.json) == (200, {"tasks": []})
    assert (
        images.request("GET", "/v2/images/00000000-0000-4000-8000-000000000000/tasks").status_code
        == 404
    )


@pytest.mark.parametrize(
    "query",
    [
        "limit=x",
        "limit=-1",
        "sort_key=secret",
        "sort=name:up",
        "visibility=odd",
        "os_hidden=maybe",
        "size_min=9999999999999999999",
        "member_status=x",
    ],
)
def test_image_list_with_invalid_filter_sort_or_limit_returns_400(images: Any, query: str) -> None:
    assert images.request("GET", f"/v2/images?{query}").status_code == 400


@pytest.mark.parametrize(
    "path",
    [
        "/v2/images/..%2F..%2Fimages.db",
        "/v2/images/%00",
        "/v2/images/'%20OR%201=1--/file",
        "/v2/images/%2e%2e/file",
        "/v2/nothing",
        "/v2/schemas/../x",
    ],
)
def test_image_request_with_hostile_or_unknown_path_returns_404(images: Any, path: str) -> None:
    assert images.request("GET", path).status_code == 404
