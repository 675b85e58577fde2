# SPDX-License-Identifier: Apache-2.0
"""Images of servers that boot from a volume: the snapshots, what the image says, what is undone,
and servers that are made from such an image."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.clients.image import Image
from common.clients.volumes import VolumeSnapshot
from common.domain import errors
from common.domain.models import Flavor, ImageRef
from common.store import schema
from compute_api.compute.servers.disks import volume_snapshots
from tests.api.conftest import IMAGE, Cloud
from tests.api.test_server_volumes import (
    BLANK,
    BOOT,
    LOCAL,
    SWAP,
    create_and_read_volumes,
    post_server,
    read_refusal,
)
from tests.api.volumes import (
    OTHER,
    SNAPSHOT,
    VOLUME,
    Volumes,
    finish_attachments,
    add_volume_service,
)


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    cloud = make_cloud(answer_timeout_seconds=0)
    cloud.add_flavor(Flavor("swap", "m1.swap", 1, 512, 0, swap_mb=64))
    return cloud


@pytest.fixture
def volumes(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Volumes:
    monkeypatch.setattr(volume_snapshots, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(volume_snapshots, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(volume_snapshots, "GIVE_UP_SECONDS", 0.05)
    volumes = add_volume_service(cloud)
    volumes.snapshots.clear()
    return volumes


@pytest.fixture
def server(cloud: Cloud, volumes: Volumes) -> str:
    """One that boots from a volume, and has another."""
    rows = create_and_read_volumes(
        cloud, {**BOOT, "delete_on_termination": True}, {**BOOT, "uuid": OTHER, "boot_index": 1}
    )
    finish_attachments(cloud, rows[0].server_id, host="host1", power_state=1)
    cloud.agents.asked.clear()
    return str(rows[0].server_id)


def ask(cloud: Cloud, server: str, **more: Any) -> Any:
    body = {"createImage": {"name": "i", **more}}
    return cloud.call("POST", f"/servers/{server}/action", body, mv="2.45")


def begun(cloud: Cloud) -> Any:
    [row] = [one for one in cloud.rows(schema.actions) if one.name == "createImage"]
    return row


def test_each_volume_is_snapshotted_for_the_image(
    cloud: Cloud, volumes: Volumes, server: str
) -> None:
    answer = ask(cloud, server, metadata={"a": "b"})
    assert answer.status_code == 202, answer.text
    args = begun(cloud).args
    assert args["image_id"] == answer.json["image_id"]
    assert args["snapshots"] == list(volumes.snapshots)
    assert {one.project_id for one in volumes.snapshots.values()} == {"user"}, "by whose token"
    said = args["properties"]
    assert (said["bdm_v2"], said["root_device_name"], said["a"]) == ("True", "/dev/vda", "b")
    root, other = json.loads(said["block_device_mapping"])
    assert (root["source_type"], root["destination_type"]) == ("snapshot", "volume")
    assert (root["boot_index"], root["delete_on_termination"], root["volume_size"]) == (0, True, 2)
    assert [root["snapshot_id"], other["snapshot_id"]] == args["snapshots"]
    assert [root["device_name"], other["device_name"]] == ["/dev/vda", "/dev/vdb"]


def test_the_guest_is_still_meanwhile(cloud: Cloud, volumes: Volumes, server: str) -> None:
    ask(cloud, server)
    assert [(host, verb, said["server"]) for host, verb, said in cloud.agents.asked] == [
        ("host1", "quiesce", server),
        ("host1", "unquiesce", server),
    ]
    seconds = cloud.agents.asked[0][2]["seconds"]
    assert seconds > volume_snapshots.WAIT_SECONDS


def test_it_is_still_until_the_last_is_taken(
    cloud: Cloud, volumes: Volumes, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service takes its time: it is asked until it has them."""
    volumes.becomes = "creating"
    taken = volumes.snapshot

    def look(token: str, snapshot_id: str) -> VolumeSnapshot:
        cloud.agents.asked.append(("", "looks", {}))
        return replace(taken(token, snapshot_id), status="available")

    monkeypatch.setattr(volumes, "snapshot", look)
    assert ask(cloud, server).status_code == 202
    verbs = [verb for _, verb, _ in cloud.agents.asked]
    assert verbs == ["quiesce", "looks", "looks", "unquiesce"]


def test_one_that_is_off_is_not_held(cloud: Cloud, volumes: Volumes, server: str) -> None:
    cloud.rest(server, "stopped", power_state=4)
    assert ask(cloud, server).status_code == 202
    assert cloud.agents.asked == [] and len(volumes.snapshots) == 2


@pytest.mark.parametrize(("required", "status"), [("yes", 409), ("no", 202)])
def test_a_guest_that_cannot_be_still(
    cloud: Cloud, volumes: Volumes, server: str, required: str, status: int
) -> None:
    said = {"id": "", "properties": {"os_require_quiesce": required}}
    cloud.change(schema.servers, schema.servers.c.id == server, image=said)
    cloud.agents.silent.add("host1")
    answer = ask(cloud, server)
    assert answer.status_code == status, answer.text
    assert len(volumes.snapshots) == (2 if status == 202 else 0)
    if status == 409:
        assert "os_require_quiesce" in answer.text


def test_what_was_made_goes_with_a_refusal(cloud: Cloud, volumes: Volumes, server: str) -> None:
    volumes.allowed_snapshots = 0
    answer = ask(cloud, server)
    assert answer.status_code == 403 and "SnapshotLimitExceeded" in answer.text
    assert volumes.snapshots == {}
    assert cloud.agents.asked[-1][1] == "unquiesce"
    volumes.allowed_snapshots, volumes.becomes = 100, "error"
    answer = ask(cloud, server)
    assert answer.status_code == 409 and "shows it as error" in answer.text
    assert volumes.snapshots == {}


@pytest.mark.parametrize(
    ("problem", "status", "left"),
    [(errors.Busy("Another action has it."), 409, 0), (errors.Unsure("No answer."), 503, 2)],
)
def test_what_was_made_for_an_action_that_cannot_begin(
    cloud: Cloud,
    volumes: Volumes,
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    problem: errors.Problem,
    status: int,
    left: int,
) -> None:
    """It goes; unless the action may have begun all the same."""

    def refuse(*given: Any, **more: Any) -> str:
        raise problem

    monkeypatch.setattr("compute_api.compute.request.request.Request.begin", refuse)
    assert ask(cloud, server).status_code == status
    assert len(volumes.snapshots) == left


def test_a_slow_snapshot_is_named_all_the_same(cloud: Cloud, volumes: Volumes, server: str) -> None:
    volumes.becomes = "creating"
    assert ask(cloud, server).status_code == 202
    assert begun(cloud).args["snapshots"] == list(volumes.snapshots)


def test_a_service_that_is_gone_refuses(cloud: Cloud, volumes: Volumes, server: str) -> None:
    volumes.there = False
    assert ask(cloud, server).status_code == 503


# --- servers that are made from such an image ---
def imaged(cloud: Cloud, volumes: Volumes, *mappings: Any, **more: str) -> None:
    """The image names these mappings."""
    volumes.snapshots[SNAPSHOT] = volume_snapshots.VolumeSnapshot(SNAPSHOT, "available", 3, VOLUME)
    said = {"block_device_mapping": json.dumps(mappings), "bdm_v2": "True", **more}
    cloud.images.images[IMAGE] = Image(ImageRef(IMAGE, "qcow2", 0, properties=said))


OF_SNAPSHOT = {
    "source_type": "snapshot",
    "destination_type": "volume",
    "snapshot_id": SNAPSHOT,
    "boot_index": 0,
    "device_name": "/dev/vda",
    "delete_on_termination": True,
    "volume_size": 3,
    "volume_type": None,
    "guest_format": None,
    "no_device": None,
    "tag": None,
}


@pytest.mark.parametrize("asked", [[], [LOCAL], [LOCAL, BLANK]])
def test_a_server_of_an_image_of_snapshots(cloud: Cloud, volumes: Volumes, asked: Any) -> None:
    imaged(cloud, volumes, OF_SNAPSHOT, root_device_name="/dev/vda", hw_video_model="vga")
    root, *others = create_and_read_volumes(cloud, *asked, image=IMAGE)
    assert (root.source_id, root.source_type, root.boot_index) == (SNAPSHOT, "snapshot", 0)
    assert (root.device_name, root.size_gb, root.delete_on_termination) == ("/dev/vda", 3, True)
    assert len(others) == (BLANK in asked)
    [server] = cloud.rows(schema.servers)
    assert (server.image_id, server.image["id"]) == (None, "")
    assert server.image["properties"] == {"hw_video_model": "vga"}
    assert volumes.made[0]["snapshot_id"] == SNAPSHOT


def test_what_is_asked_for_replaces_what_the_image_names(cloud: Cloud, volumes: Volumes) -> None:
    second = {**OF_SNAPSHOT, "boot_index": -1, "device_name": "/dev/vdb"}
    imaged(cloud, volumes, OF_SNAPSHOT, second)
    rows = create_and_read_volumes(cloud, {**BLANK, "device_name": "vdb"}, image=IMAGE)
    assert [(row.device_name, row.source_type, row.size_gb) for row in rows] == [
        ("/dev/vda", "snapshot", 3),
        ("/dev/vdb", "blank", 5),
    ]


def test_local_disks_that_an_image_names(cloud: Cloud, volumes: Volumes) -> None:
    imaged(cloud, volumes, OF_SNAPSHOT, SWAP)
    create_and_read_volumes(cloud, image=IMAGE, flavorRef="swap")
    [server] = cloud.rows(schema.servers)
    assert server.disks == {"swap_mb": 64}


def test_an_image_of_the_first_version(cloud: Cloud, volumes: Volumes) -> None:
    old = {"snapshot_id": SNAPSHOT, "device_name": "vda", "volume_size": 4}
    imaged(cloud, volumes, old, bdm_v2="")
    [row] = create_and_read_volumes(cloud, image=IMAGE)
    assert (row.source_type, row.boot_index, row.size_gb) == ("snapshot", 0, 4)


@pytest.mark.parametrize("text", ["{", "7", '["x"]'])
def test_mappings_that_cannot_be_read(cloud: Cloud, volumes: Volumes, text: str) -> None:
    imaged(cloud, volumes)
    found = cloud.images.images[IMAGE]
    said = {**found.ref.properties, "block_device_mapping": text}
    cloud.images.images[IMAGE] = replace(found, ref=replace(found.ref, properties=said))
    assert "is no list of mappings" in read_refusal(cloud, image=IMAGE)


def test_a_snapshot_of_another_project_is_refused(cloud: Cloud, volumes: Volumes) -> None:
    imaged(cloud, volumes, OF_SNAPSHOT)
    volumes.snapshots.clear()
    assert f"failed to get snapshot {SNAPSHOT}" in read_refusal(cloud, image=IMAGE)
    assert post_server(cloud, image=IMAGE).status_code == 400
