# SPDX-License-Identifier: Apache-2.0
"""Proxies to the block storage service up to 2.35: volumes and snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import ids
from compute_api.compute.routes import ROUTES
from tests.api.conftest import Cloud
from tests.api.volumes import Volumes, add_volume_service

PROXIES = [
    route
    for route in ROUTES
    if route.path.startswith(("/os-volumes", "/os-snapshots"))
    and not route.path.startswith("/os-volumes_boot")
]
NOWHERE, VOLUME, SERVER = ids.new(), ids.new(), ids.new()
BODIES = {
    "os-volumes": {"volume": {"size": 1}},
    "os-snapshots": {"snapshot": {"volume_id": VOLUME}},
}


@pytest.fixture
def volumes(cloud: Cloud) -> Volumes:
    return add_volume_service(cloud)


def call_route(cloud: Cloud, route: Any, **more: Any) -> Any:
    path = "/".join(NOWHERE if part.startswith("{") else part for part in route.path.split("/"))
    body = BODIES[path.split("/")[1]] if route.method == "POST" else None
    return cloud.call(route.method, path, body, **more)


@pytest.mark.parametrize("route", PROXIES, ids=lambda route: f"{route.method} {route.path}")
def test_volume_proxy_returns_404_from_2_36_write_403_to_reader_create_501_if_no_service(
    cloud: Cloud, volumes: Volumes, route: Any
) -> None:
    assert call_route(cloud, route, mv="2.36").status_code == 404
    assert call_route(cloud, route, token="reader").status_code == (
        403 if route.method != "GET" else 404 if "{" in route.path else 200
    )
    assert call_route(cloud, route, mv="2.35").status_code == (404 if "{" in route.path else 200)
    volumes.has_endpoint = False
    answer = call_route(cloud, route)
    if route.method == "POST":
        assert answer.status_code == 501
        assert "no block storage service" in answer.json["notImplemented"]["message"]
    elif "{" in route.path:
        assert answer.status_code == 404
    else:
        assert (answer.status_code, list(answer.json.values())) == (200, [[]])


def create_record(cloud: Cloud, noun: str, **values: Any) -> Any:
    return cloud.call("POST", f"/os-{noun}s", {noun: values})


def test_volume_proxy_creates_shows_and_deletes_volume(cloud: Cloud, volumes: Volumes) -> None:
    answer = create_record(cloud, "volume", size="2", display_name="data", metadata={"a": "b"})
    assert answer.status_code == 200
    volume = answer.json["volume"]
    assert volume == {
        "id": volume["id"],
        "status": "creating",
        "size": 2,
        "availabilityZone": None,
        "createdAt": "2026-11-23T10:00:00.000001",
        "displayName": "data",
        "displayDescription": None,
        "volumeType": None,
        "snapshotId": None,
        "metadata": {"a": "b"},
        "attachments": [{}],
    }
    path = f"/os-volumes/{volume['id']}"
    assert cloud.call("GET", path).json == answer.json
    attachments = [{"server_id": SERVER, "device": "/dev/vdb"}, {"server_id": NOWHERE}]
    volumes.proxy_records["volumes"][volume["id"]]["attachments"] = attachments
    [item] = cloud.call("GET", "/os-volumes/detail").json["volumes"]
    assert item["attachments"] == [
        {"id": volume["id"], "volumeId": volume["id"], "serverId": SERVER, "device": "/dev/vdb"}
    ]
    assert cloud.call("DELETE", path).status_code == 202
    assert cloud.call("DELETE", path).status_code == 404


def test_volume_proxy_creates_lists_and_deletes_snapshot(cloud: Cloud, volumes: Volumes) -> None:
    answer = create_record(cloud, "snapshot", volume_id=VOLUME, display_name="then", force="True")
    snapshot = answer.json["snapshot"]
    assert volumes.proxy_records["snapshots"][snapshot["id"]]["force"] is True
    assert snapshot == {
        "id": snapshot["id"],
        "status": "creating",
        "size": 1,
        "createdAt": "2026-11-23T10:00:00.000001",
        "displayName": "then",
        "displayDescription": None,
        "volumeId": VOLUME,
    }
    assert cloud.call("GET", "/os-snapshots").json == {"snapshots": [snapshot]}
    assert cloud.call("DELETE", f"/os-snapshots/{snapshot['id']}").status_code == 202


@pytest.mark.parametrize(
    "values", [{}, {"size": ""}, {"size": "#$%"}, {"size": 0}, {"size": 1, "more": 1}]
)
def test_volume_proxy_create_with_invalid_body_returns_400(
    cloud: Cloud, volumes: Volumes, values: dict[str, Any]
) -> None:
    assert create_record(cloud, "volume", **values).status_code == 400


def test_volume_proxy_pages_and_returns_403_over_quota(cloud: Cloud, volumes: Volumes) -> None:
    volume_ids = [create_record(cloud, "volume", size=1).json["volume"]["id"] for _ in range(3)]
    page = cloud.call("GET", "/os-volumes?limit=1&offset=1").json["volumes"]
    assert [volume["id"] for volume in page] == volume_ids[1:2]
    volumes.volume_quota = 3
    answer = create_record(cloud, "volume", size=1)
    assert answer.status_code == 403 and "LimitExceeded" in answer.text
