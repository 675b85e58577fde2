# SPDX-License-Identifier: Apache-2.0
"""Proxies to the block storage service until 2.35: volumes and their snapshots."""

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


def ask(cloud: Cloud, route: Any, **more: Any) -> Any:
    path = "/".join(NOWHERE if part.startswith("{") else part for part in route.path.split("/"))
    body = BODIES[path.split("/")[1]] if route.method == "POST" else None
    return cloud.call(route.method, path, body, **more)


@pytest.mark.parametrize("route", PROXIES, ids=lambda route: f"{route.method} {route.path}")
def test_every_proxy_of_volumes(cloud: Cloud, volumes: Volumes, route: Any) -> None:
    assert ask(cloud, route, mv="2.36").status_code == 404
    assert ask(cloud, route, token="reader").status_code == (
        403 if route.method != "GET" else 404 if "{" in route.path else 200
    )
    assert ask(cloud, route, mv="2.35").status_code == (404 if "{" in route.path else 200)
    volumes.there = False
    without = ask(cloud, route)
    if route.method == "POST":
        assert without.status_code == 501
        assert "no block storage service" in without.json["notImplemented"]["message"]
    elif "{" in route.path:
        assert without.status_code == 404
    else:
        assert (without.status_code, list(without.json.values())) == (200, [[]])


def make(cloud: Cloud, noun: str, **values: Any) -> Any:
    return cloud.call("POST", f"/os-{noun}s", {noun: values})


def test_life_of_a_volume_by_its_proxy(cloud: Cloud, volumes: Volumes) -> None:
    made = make(cloud, "volume", size="2", display_name="data", metadata={"a": "b"})
    assert made.status_code == 200
    shown = made.json["volume"]
    assert shown == {
        "id": shown["id"],
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
    path = f"/os-volumes/{shown['id']}"
    assert cloud.call("GET", path).json == made.json
    attached = [{"server_id": SERVER, "device": "/dev/vdb"}, {"server_id": NOWHERE}]
    volumes.shown["volumes"][shown["id"]]["attachments"] = attached
    [of_the_list] = cloud.call("GET", "/os-volumes/detail").json["volumes"]
    assert of_the_list["attachments"] == [
        {"id": shown["id"], "volumeId": shown["id"], "serverId": SERVER, "device": "/dev/vdb"}
    ]
    assert cloud.call("DELETE", path).status_code == 202
    assert cloud.call("DELETE", path).status_code == 404


def test_life_of_a_snapshot_by_its_proxy(cloud: Cloud, volumes: Volumes) -> None:
    made = make(cloud, "snapshot", volume_id=VOLUME, display_name="then", force="True")
    shown = made.json["snapshot"]
    assert volumes.shown["snapshots"][shown["id"]]["force"] is True
    assert shown == {
        "id": shown["id"],
        "status": "creating",
        "size": 1,
        "createdAt": "2026-11-23T10:00:00.000001",
        "displayName": "then",
        "displayDescription": None,
        "volumeId": VOLUME,
    }
    assert cloud.call("GET", "/os-snapshots").json == {"snapshots": [shown]}
    assert cloud.call("DELETE", f"/os-snapshots/{shown['id']}").status_code == 202


@pytest.mark.parametrize(
    "values", [{}, {"size": ""}, {"size": "#$%"}, {"size": 0}, {"size": 1, "more": 1}]
)
def test_a_volume_that_is_no_volume_is_refused(
    cloud: Cloud, volumes: Volumes, values: dict[str, Any]
) -> None:
    assert make(cloud, "volume", **values).status_code == 400


def test_pages_of_volumes_and_the_quota_of_their_service(cloud: Cloud, volumes: Volumes) -> None:
    known = [make(cloud, "volume", size=1).json["volume"]["id"] for _ in range(3)]
    page = cloud.call("GET", "/os-volumes?limit=1&offset=1").json["volumes"]
    assert [one["id"] for one in page] == known[1:2]
    volumes.allowed = 3
    refused = make(cloud, "volume", size=1)
    assert refused.status_code == 403 and "LimitExceeded" in refused.text
