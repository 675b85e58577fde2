# SPDX-License-Identifier: Apache-2.0
"""/os-assisted-volume-snapshots: who may, what begins, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest

from common.store import schema
from tests.api.conftest import Cloud
from tests.api.test_volume_attachments import attach, begun
from tests.api.volumes import OTHER, SHARED, SNAPSHOT, VOLUME, Volumes, done, storing

PATH = "/os-assisted-volume-snapshots"
FILE = f"volume-{VOLUME}.{SNAPSHOT}"


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    return make_cloud()


@pytest.fixture
def volumes(cloud: Cloud) -> Volumes:
    return storing(cloud)


@pytest.fixture
def server(cloud: Cloud, volumes: Volumes) -> str:
    """A server that has VOLUME."""
    found = cloud.create()
    cloud.rest(found, host="host1")
    attach(cloud, found)
    done(cloud, found)
    connected(cloud)
    return found


def connected(cloud: Cloud) -> None:
    every = schema.block_devices.c.uuid.is_not(None)
    cloud.change(schema.block_devices, every, connection="sealed")


def take(cloud: Cloud, volume: str = VOLUME, token: str = "admin", **changed: Any) -> Any:
    about = {"snapshot_id": SNAPSHOT, "type": "qcow2", "new_file": FILE, **changed}
    body = {"snapshot": {"volume_id": volume, "create_info": about}}
    return cloud.call("POST", PATH, body, token=token)


def drop(cloud: Cloud, token: str = "admin", mv: str = "2.1", **changed: Any) -> Any:
    about = {"volume_id": VOLUME, "type": "qcow2", "file_to_merge": None, **changed}
    query = urlencode({"delete_info": json.dumps(about)})
    return cloud.call("DELETE", f"{PATH}/{SNAPSHOT}?{query}", mv=mv, token=token)


@pytest.mark.parametrize("token", ["admin", "service"])
def test_a_snapshot_is_being_taken(cloud: Cloud, server: str, token: str) -> None:
    answer = take(cloud, token=token, id=SNAPSHOT)
    assert (answer.status_code, answer.json) == (
        200,
        {"snapshot": {"id": SNAPSHOT, "volumeId": VOLUME}},
    )
    [row], [action] = cloud.rows(schema.block_devices), begun(cloud, "volume_snapshot_create")
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


def test_the_id_is_shown_only_when_it_was_given(cloud: Cloud, server: str) -> None:
    assert take(cloud).json == {"snapshot": {"id": None, "volumeId": VOLUME}}


@pytest.mark.parametrize(
    ("given", "file", "into"),
    [
        ({}, None, None),
        ({"file_to_merge": "a", "merge_target_file": None}, "a", None),
        ({"file_to_merge": "a", "merge_target_file": "b"}, "a", "b"),
    ],
)
def test_a_snapshot_is_being_merged(
    cloud: Cloud, server: str, given: Any, file: str | None, into: str | None
) -> None:
    answer = drop(cloud, mv="2.104", **given)
    assert (answer.status_code, answer.text) == (204, "")
    [action] = begun(cloud, "volume_snapshot_delete")
    found = (action.args["snapshot_id"], action.args["file"], action.args["into"])
    assert (action.server_id, *found) == (server, SNAPSHOT, file, into)


def test_tenants_ask_for_none(cloud: Cloud, server: str) -> None:
    assert (take(cloud, token="user").status_code, drop(cloud, token="user").status_code) == (
        403,
        403,
    )


@pytest.mark.parametrize(
    "changed",
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
def test_what_is_no_file_of_the_volume_is_refused(
    cloud: Cloud, server: str, changed: dict[str, str]
) -> None:
    assert take(cloud, **changed).status_code == 400
    assert begun(cloud, "volume_snapshot_create") == []


@pytest.mark.parametrize(
    "changed",
    [
        {"volume_id": OTHER},
        {"volume_id": 7},
        {"type": "raw"},
        {"file_to_merge": "../x"},
        {"file_to_merge": 7},
        {"merge_target_file": "b"},
    ],
)
def test_what_cannot_be_merged_is_refused(
    cloud: Cloud, server: str, changed: dict[str, Any]
) -> None:
    assert drop(cloud, **changed).status_code == 400
    assert begun(cloud, "volume_snapshot_delete") == []


@pytest.mark.parametrize("query", ["", "?delete_info=x", "?delete_info=[]", "?delete_info={}"])
def test_delete_info_is_an_object_of_json(cloud: Cloud, server: str, query: str) -> None:
    answer = cloud.call("DELETE", f"{PATH}/{SNAPSHOT}{query}", token="admin")
    assert answer.status_code == 400 and "delete_info" in answer.text


def test_a_server_has_the_volume_alone_and_on_a_host(cloud: Cloud, server: str) -> None:
    for volume, said in ((OTHER, "No server has volume"), ("x" * 200, "No server has volume")):
        assert said in take(cloud, volume).text
    cloud.change(schema.block_devices, schema.block_devices.c.uuid.is_not(None), connection=None)
    answer = take(cloud)
    assert answer.status_code == 400 and "on no host just now" in answer.text
    connected(cloud)
    cloud.rest(server, vm_state="shelved_offloaded")
    assert take(cloud).status_code == 400
    cloud.rest(server, vm_state="stopped")
    assert (drop(cloud).status_code, take(cloud).status_code) == (400, 200)


def test_a_volume_of_several_servers_is_refused(cloud: Cloud, server: str) -> None:
    other = cloud.create()
    cloud.rest(other, host="host1")
    assert attach(cloud, other, SHARED, mv="2.60").status_code == 200
    done(cloud, other)
    answer = take(cloud, SHARED)
    assert answer.status_code == 400 and "several servers" in answer.text
