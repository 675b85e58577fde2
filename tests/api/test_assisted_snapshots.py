# SPDX-License-Identifier: Apache-2.0
"""/os-assisted-volume-snapshots: permitted roles, the actions that begin, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest

from common.store import schema
from tests.api.conftest import Cloud
from tests.api.test_volume_attachments import attach, find_actions
from tests.api.volumes import (
    OTHER,
    SHARED,
    SNAPSHOT,
    VOLUME,
    Volumes,
    add_volume_service,
    finish_attachments,
)

PATH = "/os-assisted-volume-snapshots"
FILE = f"volume-{VOLUME}.{SNAPSHOT}"


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    return make_cloud()


@pytest.fixture
def volumes(cloud: Cloud) -> Volumes:
    return add_volume_service(cloud)


@pytest.fixture
def server(cloud: Cloud, volumes: Volumes) -> str:
    """Return the id of a server with VOLUME attached and connected."""
    server_id = cloud.create()
    cloud.set_state(server_id, host="host1")
    attach(cloud, server_id)
    finish_attachments(cloud, server_id)
    connect_volumes(cloud)
    return server_id


def connect_volumes(cloud: Cloud) -> None:
    every = schema.block_devices.c.uuid.is_not(None)
    cloud.change(schema.block_devices, every, connection="sealed")


def create_snapshot(
    cloud: Cloud, volume: str = VOLUME, token: str = "admin", **changes: Any
) -> Any:
    info = {"snapshot_id": SNAPSHOT, "type": "qcow2", "new_file": FILE, **changes}
    body = {"snapshot": {"volume_id": volume, "create_info": info}}
    return cloud.call("POST", PATH, body, token=token)


def delete_snapshot(cloud: Cloud, token: str = "admin", mv: str = "2.1", **changes: Any) -> Any:
    info = {"volume_id": VOLUME, "type": "qcow2", "file_to_merge": None, **changes}
    query = urlencode({"delete_info": json.dumps(info)})
    return cloud.call("DELETE", f"{PATH}/{SNAPSHOT}?{query}", mv=mv, token=token)


@pytest.mark.parametrize("token", ["admin", "service"])
def test_assisted_snapshot_create_begins_volume_snapshot_create_action(
    cloud: Cloud, server: str, token: str
) -> None:
    answer = create_snapshot(cloud, token=token, id=SNAPSHOT)
    assert (answer.status_code, answer.json) == (
        200,
        {"snapshot": {"id": SNAPSHOT, "volumeId": VOLUME}},
    )
    [row], [action] = (
        cloud.rows(schema.block_devices),
        find_actions(cloud, "volume_snapshot_create"),
    )
    assert (action.server_id, action.args) == (
        server,
        {
            "was": "active",
            "block_device": row.uuid,
            "volume_id": VOLUME,
            "snapshot_id": SNAPSHOT,
            "new_file": FILE,
        },
    )


def test_assisted_snapshot_create_without_id_returns_null_id(cloud: Cloud, server: str) -> None:
    assert create_snapshot(cloud).json == {"snapshot": {"id": None, "volumeId": VOLUME}}


@pytest.mark.parametrize(
    ("merge", "file", "into"),
    [
        ({}, None, None),
        ({"file_to_merge": "a", "merge_target_file": None}, "a", None),
        ({"file_to_merge": "a", "merge_target_file": "b"}, "a", "b"),
    ],
)
def test_assisted_snapshot_delete_begins_volume_snapshot_delete_action(
    cloud: Cloud, server: str, merge: Any, file: str | None, into: str | None
) -> None:
    answer = delete_snapshot(cloud, mv="2.104", **merge)
    assert (answer.status_code, answer.text) == (204, "")
    [action] = find_actions(cloud, "volume_snapshot_delete")
    arguments = (action.args["snapshot_id"], action.args["file"], action.args["into"])
    assert (action.server_id, *arguments) == (server, SNAPSHOT, file, into)


def test_assisted_snapshots_return_403_to_users(cloud: Cloud, server: str) -> None:
    assert (
        create_snapshot(cloud, token="user").status_code,
        delete_snapshot(cloud, token="user").status_code,
    ) == (
        403,
        403,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"new_file": "../x"},
        {"new_file": "/etc/passwd"},
        {"new_file": ".."},
        {"new_file": "a\nb"},
        {"new_file": ""},
        {"type": "raw"},
        {"snapshot_id": "a/b"},
        {"more": "x"},
    ],
)
def test_assisted_snapshot_create_with_invalid_create_info_returns_400(
    cloud: Cloud, server: str, changes: dict[str, str]
) -> None:
    assert create_snapshot(cloud, **changes).status_code == 400
    assert find_actions(cloud, "volume_snapshot_create") == []


@pytest.mark.parametrize(
    "changes",
    [
        {"volume_id": OTHER},
        {"volume_id": 7},
        {"type": "raw"},
        {"file_to_merge": "../x"},
        {"file_to_merge": 7},
        {"merge_target_file": "b"},
    ],
)
def test_assisted_snapshot_delete_with_invalid_delete_info_returns_400(
    cloud: Cloud, server: str, changes: dict[str, Any]
) -> None:
    assert delete_snapshot(cloud, **changes).status_code == 400
    assert find_actions(cloud, "volume_snapshot_delete") == []


@pytest.mark.parametrize("query", ["", "?delete_info=x", "?delete_info=[]", "?delete_info={}"])
def test_assisted_snapshot_delete_with_malformed_delete_info_returns_400(
    cloud: Cloud, server: str, query: str
) -> None:
    answer = cloud.call("DELETE", f"{PATH}/{SNAPSHOT}{query}", token="admin")
    assert answer.status_code == 400 and "delete_info" in answer.text


def test_assisted_snapshot_of_volume_not_connected_to_host_returns_400(
    cloud: Cloud, server: str
) -> None:
    for volume, message in ((OTHER, "No server has volume"), ("x" * 200, "No server has volume")):
        assert message in create_snapshot(cloud, volume).text
    cloud.change(schema.block_devices, schema.block_devices.c.uuid.is_not(None), connection=None)
    answer = create_snapshot(cloud)
    assert answer.status_code == 400 and "is not connected to a host" in answer.text
    connect_volumes(cloud)
    cloud.set_state(server, vm_state="shelved_offloaded")
    assert create_snapshot(cloud).status_code == 400
    cloud.set_state(server, vm_state="stopped")
    assert (delete_snapshot(cloud).status_code, create_snapshot(cloud).status_code) == (400, 200)


def test_assisted_snapshot_of_multiattach_volume_returns_400(cloud: Cloud, server: str) -> None:
    other = cloud.create()
    cloud.set_state(other, host="host1")
    assert attach(cloud, other, SHARED, mv="2.60").status_code == 200
    finish_attachments(cloud, other)
    answer = create_snapshot(cloud, SHARED)
    assert answer.status_code == 400 and "is multiattach" in answer.text
