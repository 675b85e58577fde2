# SPDX-License-Identifier: Apache-2.0
"""Images of servers that boot from a volume, and servers that boot from such an image.

The tests cover the snapshots, the image's properties, the quiescing of the guest, and the rollback.
"""

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
    add_volume_service,
    finish_attachments,
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
    """Return the id of a server that boots from a volume and has a second volume."""
    rows = create_and_read_volumes(
        cloud, {**BOOT, "delete_on_termination": True}, {**BOOT, "uuid": OTHER, "boot_index": 1}
    )
    finish_attachments(cloud, rows[0].server_id, host="host1", power_state=1)
    cloud.agents.queries.clear()
    return str(rows[0].server_id)


def create_image(cloud: Cloud, server: str, **more: Any) -> Any:
    body = {"createImage": {"name": "i", **more}}
    return cloud.call("POST", f"/servers/{server}/action", body, mv="2.45")


def find_action(cloud: Cloud) -> Any:
    [row] = [action for action in cloud.rows(schema.actions) if action.name == "createImage"]
    return row


def test_create_image_of_server_on_volume_snapshots_each_volume(
    cloud: Cloud, volumes: Volumes, server: str
) -> None:
    answer = create_image(cloud, server, metadata={"a": "b"})
    assert answer.status_code == 202, answer.text
    args = find_action(cloud).args
    assert args["image_id"] == answer.json["image_id"]
    assert args["snapshots"] == list(volumes.snapshots)
    assert {snapshot.project_id for snapshot in volumes.snapshots.values()} == {"user"}, (
        "the token of the user"
    )
    properties = args["properties"]
    assert (properties["bdm_v2"], properties["root_device_name"], properties["a"]) == (
        "True",
        "/dev/vda",
        "b",
    )
    root, other = json.loads(properties["block_device_mapping"])
    assert (root["source_type"], root["destination_type"]) == ("snapshot", "volume")
    assert (root["boot_index"], root["delete_on_termination"], root["volume_size"]) == (0, True, 2)
    assert [root["snapshot_id"], other["snapshot_id"]] == args["snapshots"]
    assert [root["device_name"], other["device_name"]] == ["/dev/vda", "/dev/vdb"]


def test_create_image_of_server_on_volume_quiesces_guest(
    cloud: Cloud, volumes: Volumes, server: str
) -> None:
    create_image(cloud, server)
    assert [
        (host, verb, arguments["server"]) for host, verb, arguments in cloud.agents.queries
    ] == [
        ("host1", "quiesce", server),
        ("host1", "unquiesce", server),
    ]
    seconds = cloud.agents.queries[0][2]["seconds"]
    assert seconds > volume_snapshots.WAIT_SECONDS


def test_create_image_unquiesces_guest_after_last_snapshot(
    cloud: Cloud, volumes: Volumes, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API polls the service until all snapshots are available."""
    volumes.new_snapshot_status = "creating"
    get_snapshot = volumes.snapshot

    def record_and_get(token: str, snapshot_id: str) -> VolumeSnapshot:
        cloud.agents.queries.append(("", "looks", {}))
        return replace(get_snapshot(token, snapshot_id), status="available")

    monkeypatch.setattr(volumes, "snapshot", record_and_get)
    assert create_image(cloud, server).status_code == 202
    verbs = [verb for _, verb, _ in cloud.agents.queries]
    assert verbs == ["quiesce", "looks", "looks", "unquiesce"]


def test_create_image_does_not_quiesce_stopped_guest(
    cloud: Cloud, volumes: Volumes, server: str
) -> None:
    cloud.set_state(server, "stopped", power_state=4)
    assert create_image(cloud, server).status_code == 202
    assert cloud.agents.queries == [] and len(volumes.snapshots) == 2


@pytest.mark.parametrize(("required", "status"), [("yes", 409), ("no", 202)])
def test_create_image_with_failed_quiesce_returns_409_only_if_required(
    cloud: Cloud, volumes: Volumes, server: str, required: str, status: int
) -> None:
    image = {"id": "", "properties": {"os_require_quiesce": required}}
    cloud.change(schema.servers, schema.servers.c.id == server, image=image)
    cloud.agents.silent.add("host1")
    answer = create_image(cloud, server)
    assert answer.status_code == status, answer.text
    assert len(volumes.snapshots) == (2 if status == 202 else 0)
    if status == 409:
        assert "os_require_quiesce" in answer.text


def test_create_image_over_snapshot_quota_or_in_error_deletes_snapshots(
    cloud: Cloud, volumes: Volumes, server: str
) -> None:
    volumes.snapshot_quota = 0
    answer = create_image(cloud, server)
    assert answer.status_code == 403 and "SnapshotLimitExceeded" in answer.text
    assert volumes.snapshots == {}
    assert cloud.agents.queries[-1][1] == "unquiesce"
    volumes.snapshot_quota, volumes.new_snapshot_status = 100, "error"
    answer = create_image(cloud, server)
    assert answer.status_code == 409 and "in the block storage service is error" in answer.text
    assert volumes.snapshots == {}


@pytest.mark.parametrize(
    ("problem", "status", "count"),
    [(errors.Busy("Another action has it."), 409, 0), (errors.Unsure("No answer."), 503, 2)],
)
def test_create_image_keeps_snapshots_only_if_action_may_have_begun(
    cloud: Cloud,
    volumes: Volumes,
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    problem: errors.Problem,
    status: int,
    count: int,
) -> None:
    """The snapshots are kept if the action may have begun."""

    def refuse(*arguments: Any, **more: Any) -> str:
        raise problem

    monkeypatch.setattr("compute_api.compute.request.request.Request.begin", refuse)
    assert create_image(cloud, server).status_code == status
    assert len(volumes.snapshots) == count


def test_create_image_includes_snapshot_still_in_creation(
    cloud: Cloud, volumes: Volumes, server: str
) -> None:
    volumes.new_snapshot_status = "creating"
    assert create_image(cloud, server).status_code == 202
    assert find_action(cloud).args["snapshots"] == list(volumes.snapshots)


def test_create_image_of_server_on_volume_returns_503_without_service(
    cloud: Cloud, volumes: Volumes, server: str
) -> None:
    volumes.has_endpoint = False
    assert create_image(cloud, server).status_code == 503


# --- servers from such an image ---
def set_image_mappings(cloud: Cloud, volumes: Volumes, *mappings: Any, **more: str) -> None:
    """Store these block device mappings in the image's properties."""
    volumes.snapshots[SNAPSHOT] = volume_snapshots.VolumeSnapshot(SNAPSHOT, "available", 3, VOLUME)
    properties = {"block_device_mapping": json.dumps(mappings), "bdm_v2": "True", **more}
    cloud.images.images[IMAGE] = Image(ImageRef(IMAGE, "qcow2", 0, properties=properties))


SNAPSHOT_MAPPING = {
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


@pytest.mark.parametrize("mappings", [[], [LOCAL], [LOCAL, BLANK]])
def test_create_server_from_image_of_snapshots_boots_from_volume(
    cloud: Cloud, volumes: Volumes, mappings: Any
) -> None:
    set_image_mappings(
        cloud, volumes, SNAPSHOT_MAPPING, root_device_name="/dev/vda", hw_video_model="vga"
    )
    root, *others = create_and_read_volumes(cloud, *mappings, image=IMAGE)
    assert (root.source_id, root.source_type, root.boot_index) == (SNAPSHOT, "snapshot", 0)
    assert (root.device_name, root.size_gb, root.delete_on_termination) == ("/dev/vda", 3, True)
    assert len(others) == (BLANK in mappings)
    [server] = cloud.rows(schema.servers)
    assert (server.image_id, server.image["id"]) == (None, "")
    assert server.image["properties"] == {"hw_video_model": "vga"}
    assert volumes.created[0]["snapshot_id"] == SNAPSHOT


def test_create_server_mapping_replaces_image_mapping_of_same_device(
    cloud: Cloud, volumes: Volumes
) -> None:
    second = {**SNAPSHOT_MAPPING, "boot_index": -1, "device_name": "/dev/vdb"}
    set_image_mappings(cloud, volumes, SNAPSHOT_MAPPING, second)
    rows = create_and_read_volumes(cloud, {**BLANK, "device_name": "vdb"}, image=IMAGE)
    assert [(row.device_name, row.source_type, row.size_gb) for row in rows] == [
        ("/dev/vda", "snapshot", 3),
        ("/dev/vdb", "blank", 5),
    ]


def test_create_server_gets_local_disks_of_image_mappings(cloud: Cloud, volumes: Volumes) -> None:
    set_image_mappings(cloud, volumes, SNAPSHOT_MAPPING, SWAP)
    create_and_read_volumes(cloud, image=IMAGE, flavorRef="swap")
    [server] = cloud.rows(schema.servers)
    assert server.disks == {"swap_mb": 64}


def test_create_server_from_image_with_legacy_mapping_boots_from_snapshot(
    cloud: Cloud, volumes: Volumes
) -> None:
    legacy = {"snapshot_id": SNAPSHOT, "device_name": "vda", "volume_size": 4}
    set_image_mappings(cloud, volumes, legacy, bdm_v2="")
    [row] = create_and_read_volumes(cloud, image=IMAGE)
    assert (row.source_type, row.boot_index, row.size_gb) == ("snapshot", 0, 4)


@pytest.mark.parametrize("text", ["{", "7", '["x"]'])
def test_create_server_with_malformed_mappings_in_image_returns_400(
    cloud: Cloud, volumes: Volumes, text: str
) -> None:
    set_image_mappings(cloud, volumes)
    image = cloud.images.images[IMAGE]
    properties = {**image.ref.properties, "block_device_mapping": text}
    cloud.images.images[IMAGE] = replace(image, ref=replace(image.ref, properties=properties))
    assert "is not a list of mappings" in read_refusal(cloud, image=IMAGE)


def test_create_server_from_image_with_two_boot_disks_returns_400(
    cloud: Cloud, volumes: Volumes
) -> None:
    second = {**SNAPSHOT_MAPPING, "device_name": "/dev/vdb"}
    set_image_mappings(cloud, volumes, SNAPSHOT_MAPPING, second)
    assert "Boot sequence" in read_refusal(cloud, image=IMAGE)
    set_image_mappings(cloud, volumes, SNAPSHOT_MAPPING, {**second, "boot_index": 2})
    assert len(create_and_read_volumes(cloud, image=IMAGE)) == 2, "gaps are allowed"


def test_create_server_from_image_with_missing_snapshot_returns_400(
    cloud: Cloud, volumes: Volumes
) -> None:
    set_image_mappings(cloud, volumes, SNAPSHOT_MAPPING)
    volumes.snapshots.clear()
    assert f"failed to get snapshot {SNAPSHOT}" in read_refusal(cloud, image=IMAGE)
    assert post_server(cloud, image=IMAGE).status_code == 400
