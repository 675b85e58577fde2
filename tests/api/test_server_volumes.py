# SPDX-License-Identifier: Apache-2.0
"""POST /servers with volumes: rows, new volumes, refusals, and actions on such servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.domain import errors, ids
from common.domain.models import Flavor
from common.store import schema
from common.store.tenants import quotas
from compute_api.compute.servers.create import commit as server_create_commit
from tests.api.conftest import IMAGE, Cloud
from tests.api.volumes import (
    OTHER,
    SHARED,
    SNAPSHOT,
    VOLUME,
    Volumes,
    add_volume_service,
    finish_attachments,
)
from tests.log_lines import logged_fields

FIELD = "block_device_mapping_v2"
LOCAL = {"uuid": IMAGE, "boot_index": 0, "source_type": "image", "destination_type": "local"}
BOOT = {"uuid": VOLUME, "boot_index": 0, "source_type": "volume", "destination_type": "volume"}
FROM_IMAGE = {**LOCAL, "destination_type": "volume", "volume_size": 3}
FROM_SNAPSHOT = {**BOOT, "source_type": "snapshot", "uuid": SNAPSHOT}
BLANK = {
    "boot_index": -1,
    "source_type": "blank",
    "destination_type": "volume",
    "volume_size": 5,
}
SWAP = {
    "boot_index": -1,
    "source_type": "blank",
    "destination_type": "local",
    "guest_format": "swap",
    "volume_size": 64,
}


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    new_cloud = make_cloud()
    new_cloud.add_flavor(Flavor("swap", "m1.swap", 1, 512, 0, swap_mb=64))
    return new_cloud


@pytest.fixture
def volumes(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Volumes:
    monkeypatch.setattr(server_create_commit, "DELETE_POLL_SECONDS", 0.5)
    monkeypatch.setattr(server_create_commit, "DELETE_SECONDS", 1)
    return add_volume_service(cloud)


def post_server(cloud: Cloud, *mappings: Any, mv: str = "2.1", image: str = "", **more: Any) -> Any:
    body = {"name": "vm", "flavorRef": "1", "imageRef": image, FIELD: list(mappings), **more}
    if mv != "2.1":
        body.setdefault("networks", "none")
    return cloud.call("POST", "/servers", {"server": body}, mv=mv)


def create_and_read_volumes(cloud: Cloud, *mappings: Any, **more: Any) -> list[Any]:
    """Create a server, and return the rows of its volumes by device name."""
    answer = post_server(cloud, *mappings, **more)
    assert answer.status_code == 202, answer.text
    rows = cloud.rows(schema.block_devices)
    assert {row.server_id for row in rows} == {answer.json["server"]["id"]}
    [server] = cloud.rows(schema.servers)
    assert server.volumes == len(rows)
    return sorted(rows, key=lambda row: str(row.device_name))


def read_refusal(cloud: Cloud, *mappings: Any, status: int = 400, **more: Any) -> str:
    answer = post_server(cloud, *mappings, **more)
    assert answer.status_code == status, answer.text
    assert cloud.rows(schema.servers) == cloud.rows(schema.block_devices) == []
    [problem] = answer.json.values()
    return str(problem["message"])


def test_create_server_from_volume_reserves_volume_and_uses_its_image(
    cloud: Cloud, volumes: Volumes
) -> None:
    metadata = {"hw_video_model": "vga", "image_id": IMAGE, "min_ram": "64", "disk_format": "raw"}
    volumes.change(VOLUME, image_metadata=metadata, read_only=True)
    [row] = create_and_read_volumes(cloud, {**BOOT, "delete_on_termination": True})
    assert (row.volume_id, row.status, row.boot_index) == (VOLUME, "reserved", 0)
    assert (row.device_name, row.size_gb, row.source_type) == ("/dev/vda", 2, "volume")
    assert (row.delete_on_termination, row.read_only, row.source_id) == (True, True, None)
    [server] = cloud.rows(schema.servers)
    assert (server.image_id, server.image["id"]) == (None, "")
    assert server.image["properties"] == {"hw_video_model": "vga"}
    finish_attachments(cloud, server.id)
    view = cloud.call("GET", f"/servers/{server.id}", mv="2.3", token="admin").json["server"]
    assert (view["image"], view["OS-EXT-SRV-ATTR:root_device_name"]) == ("", "/dev/vda")
    assert view["os-extended-volumes:volumes_attached"] == [
        {"id": VOLUME, "delete_on_termination": True}
    ]
    assert volumes.created == []


@pytest.mark.parametrize(
    ("mapping", "size", "expected"),
    [
        (FROM_IMAGE, 3, {"size_gb": 3, "image_id": IMAGE}),
        (FROM_SNAPSHOT, 3, {"size_gb": 3, "snapshot_id": SNAPSHOT}),
        ({**FROM_SNAPSHOT, "volume_size": 9}, 9, {"size_gb": 9, "snapshot_id": SNAPSHOT}),
    ],
)
def test_create_server_creates_boot_volume_from_image_or_snapshot(
    cloud: Cloud, volumes: Volumes, mapping: Any, size: int, expected: Any
) -> None:
    [row] = create_and_read_volumes(cloud, {**mapping, "volume_type": "fast"}, mv="2.67")
    [request] = volumes.created
    assert request == {
        "id": row.volume_id,
        "token": "user",
        "image_id": None,
        "snapshot_id": None,
        "zone": None,
        "volume_type": "fast",
        **expected,
    }
    assert (row.status, row.size_gb, row.source_id) == ("creating", size, mapping["uuid"])
    assert (row.source_type, row.volume_type) == (mapping["source_type"], "fast")
    [server] = cloud.rows(schema.servers)
    assert server.image_id is None


def test_create_server_names_devices_by_bus_boot_volume_first_then_swap(
    cloud: Cloud, volumes: Volumes
) -> None:
    rows = create_and_read_volumes(
        cloud,
        {**BLANK, "device_name": "vdd", "tag": "data"},
        {**BLANK, "disk_bus": "scsi", "device_type": "disk"},
        {**BOOT, "disk_bus": "virtio"},
        {**BOOT, "uuid": OTHER, "boot_index": "1"},
        SWAP,
        BLANK,
        flavorRef="swap",
        mv="2.42",
    )
    assert [(row.device_name, row.volume_id) for row in rows if row.source_type == "volume"] == [
        ("/dev/vda", VOLUME),
        ("/dev/vdd", OTHER),
    ]
    assert [row.device_name for row in rows] == [
        "/dev/sda",
        "/dev/vda",
        "/dev/vdc",
        "/dev/vdd",
        "/dev/vde",
    ]
    assert [(row.tag, row.disk_bus, row.device_type, row.boot_index) for row in rows] == [
        (None, "scsi", "disk", None),
        (None, "virtio", None, 0),
        ("data", None, None, None),
        (None, None, None, 1),
        (None, None, None, None),
    ]


def test_create_server_from_image_names_additional_volumes_from_vdb(
    cloud: Cloud, volumes: Volumes
) -> None:
    rows = create_and_read_volumes(cloud, LOCAL, BLANK, {**BOOT, "boot_index": None}, image=IMAGE)
    assert [row.device_name for row in rows] == ["/dev/vdb", "/dev/vdc"]
    [server] = cloud.rows(schema.servers)
    assert (server.image_id, server.root_device_name) == (IMAGE, "/dev/vda")


def test_create_server_from_volume_uses_disk_bus_of_its_image(
    cloud: Cloud, volumes: Volumes
) -> None:
    volumes.change(VOLUME, image_metadata={"hw_disk_bus": "scsi"})
    rows = create_and_read_volumes(cloud, BOOT, BLANK)
    assert [(row.device_name, row.disk_bus) for row in rows] == [
        ("/dev/sda", "scsi"),
        ("/dev/sdb", "scsi"),
    ]
    [server] = cloud.rows(schema.servers)
    assert server.root_device_name == "/dev/sda"


@pytest.mark.parametrize("name", ["/dev/vda", "vdk", "/dev/sdz", "/dev/what", "xvdb1"])
def test_create_server_ignores_requested_device_names_of_volumes(
    cloud: Cloud, volumes: Volumes, name: str
) -> None:
    named = {**BLANK, "device_name": name}
    rows = create_and_read_volumes(cloud, {**BOOT, "device_name": name}, named, BLANK, named)
    assert [row.device_name for row in rows] == ["/dev/vda", "/dev/vdb", "/dev/vdc", "/dev/vdd"]
    [server] = cloud.rows(schema.servers)
    assert server.root_device_name == "/dev/vda"


@pytest.mark.parametrize(
    ("bus", "root", "volume"),
    [
        ("virtio", "/dev/vda", "/dev/vdb"),
        ("scsi", "/dev/sda", "/dev/sdb"),
        ("ide", "/dev/hda", "/dev/hdb"),
    ],
)
def test_create_server_names_root_device_by_disk_bus_of_image(
    cloud: Cloud, volumes: Volumes, bus: str, root: str, volume: str
) -> None:
    image = cloud.images.images[IMAGE]
    cloud.images.images[IMAGE] = replace(
        image, ref=replace(image.ref, properties={"hw_disk_bus": bus})
    )
    [row] = create_and_read_volumes(cloud, LOCAL, BLANK, image=IMAGE)
    [server] = cloud.rows(schema.servers)
    assert (server.root_device_name, row.device_name) == (root, volume)


@pytest.mark.parametrize(
    ("image", "mappings", "expected"),
    [
        ("", [{"volume_id": VOLUME, "device_name": "/dev/vda"}], [("/dev/vda", VOLUME, 0)]),
        (
            "",
            [
                {"volume_id": OTHER, "device_name": "vdb"},
                {"volume_id": VOLUME, "device_name": "vda", "delete_on_termination": "1"},
            ],
            [("/dev/vda", VOLUME, 0), ("/dev/vdb", OTHER, None)],
        ),
        (
            IMAGE,
            [{"volume_id": VOLUME, "device_name": "vdf"}, {"no_device": True}],
            [("/dev/vdb", VOLUME, None)],
        ),
    ],
)
def test_create_server_accepts_legacy_block_device_mapping(
    cloud: Cloud, volumes: Volumes, image: str, mappings: Any, expected: Any
) -> None:
    body = {"name": "vm", "flavorRef": "1", "imageRef": image, "block_device_mapping": mappings}
    assert cloud.call("POST", "/servers", {"server": body}).status_code == 202
    rows = cloud.rows(schema.block_devices)
    assert sorted((row.device_name, row.volume_id, row.boot_index) for row in rows) == expected


def test_create_server_accepts_snapshot_in_legacy_block_device_mapping(
    cloud: Cloud, volumes: Volumes
) -> None:
    mapping = {"snapshot_id": SNAPSHOT, "device_name": "vda", "volume_size": 7}
    body = {"name": "vm", "flavorRef": "1", "block_device_mapping": [mapping]}
    assert cloud.call("POST", "/servers", {"server": body}).status_code == 202
    [request] = volumes.created
    assert (request["snapshot_id"], request["size_gb"]) == (SNAPSHOT, 7)


def test_create_several_servers_creates_volumes_for_each(cloud: Cloud, volumes: Volumes) -> None:
    assert post_server(cloud, FROM_IMAGE, BLANK, max_count=3).status_code == 202
    rows = cloud.rows(schema.block_devices)
    assert len({row.volume_id for row in rows}) == len(volumes.created) == 6
    assert len({row.server_id for row in rows}) == 3 and volumes.deleted == []
    assert {row.volumes for row in cloud.rows(schema.servers)} == {2}


def test_create_several_servers_creates_no_volume_over_server_quota(
    cloud: Cloud, volumes: Volumes
) -> None:
    assert post_server(cloud, FROM_IMAGE, min_count=1, max_count=20).status_code == 202
    assert len(cloud.rows(schema.servers)) == len(volumes.created) == 10
    assert post_server(cloud, FROM_IMAGE).status_code == 403
    assert len(volumes.created) == 10


def test_create_server_over_volume_quota_returns_403_and_deletes_volumes(
    cloud: Cloud, volumes: Volumes
) -> None:
    volumes.volume_quota = 2
    assert "VolumeLimitExceeded" in read_refusal(cloud, FROM_IMAGE, max_count=3, status=403)
    assert volumes.deleted == [volume["id"] for volume in volumes.created]


def test_create_server_over_quota_at_commit_returns_403_deleting_volumes(
    cloud: Cloud, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(creation: Any) -> None:
        raise errors.OverQuota({"instances": (1, 10, 10)})

    monkeypatch.setattr(cloud.services.creator, "create", refuse)
    read_refusal(cloud, FROM_IMAGE, BLANK, status=403)
    assert (
        volumes.deleted == [volume["id"] for volume in volumes.created]
        and len(volumes.created) == 2
    )


def test_create_server_with_uncertain_commit_returns_503_and_keeps_volumes(
    cloud: Cloud, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_uncertain(creation: Any) -> None:
        raise errors.Unsure("The database did not answer the COMMIT.")

    monkeypatch.setattr(cloud.services.creator, "create", fail_uncertain)
    assert post_server(cloud, FROM_IMAGE).status_code == 503
    assert len(volumes.created) == 1 and volumes.deleted == []


def test_refused_create_server_logs_new_volume_if_its_deletion_fails(
    cloud: Cloud, volumes: Volumes, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def refuse_delete(token: str, volume_id: str) -> None:
        raise errors.BadRequest("Invalid volume: Volume status must be available")

    monkeypatch.setattr(volumes, "delete", refuse_delete)
    volumes.volume_quota = 1
    read_refusal(cloud, FROM_IMAGE, BLANK, status=403)
    assert logged_fields(
        caplog,
        "a volume was created for a server that was refused, and cannot be deleted yet: its owner can "
        "delete it later",
    ) == [{"volume": volumes.created[0]["id"]}]


def test_repeated_idempotent_create_creates_volume_once(cloud: Cloud, volumes: Volumes) -> None:
    body = {"name": "vm", "flavorRef": "1", "imageRef": "", FIELD: [FROM_IMAGE]}
    answers = [
        cloud.call("POST", "/servers", {"server": body}, headers={"Idempotency-Key": "k"})
        for _ in range(2)
    ]
    assert answers[0].json["server"]["id"] == answers[1].json["server"]["id"]
    assert len(volumes.created) == len(cloud.rows(schema.block_devices)) == 1


BLANK_BOOT = {**BLANK, "boot_index": 0}
NOWHERE = ids.new()
ORDER = "Block Device Mapping is Invalid: Boot sequence"


@pytest.mark.parametrize(
    ("mappings", "more", "text"),
    [
        ([BLANK], {}, ORDER),
        ([BLANK], {"image": IMAGE}, ORDER),
        ([BOOT, {**BOOT, "uuid": OTHER}], {}, ORDER),
        ([BOOT, {**BLANK, "boot_index": 2}], {}, ORDER),
        ([LOCAL, BOOT], {"image": IMAGE}, ORDER),
        ([BLANK_BOOT], {}, "servers cannot boot from a disk of source_type blank"),
        ([{**BOOT, "uuid": NOWHERE}], {}, f"Invalid: failed to get volume {NOWHERE}."),
        ([{**FROM_SNAPSHOT, "uuid": NOWHERE}], {}, f"failed to get snapshot {NOWHERE}."),
        ([{**FROM_IMAGE, "uuid": NOWHERE}], {}, f"failed to get image {NOWHERE}."),
        ([{k: v for k, v in FROM_IMAGE.items() if k != "volume_size"}], {}, "non-zero size"),
        ([BOOT, {k: v for k, v in BLANK.items() if k != "volume_size"}], {}, "non-zero size"),
        ([BOOT, {**BLANK, "uuid": OTHER}], {}, "Invalid: Invalid device UUID."),
        ([{k: v for k, v in BOOT.items() if k != "uuid"}], {}, "Missing device UUID."),
        ([BOOT, {**BOOT, "boot_index": 1}], {}, "a volume is given twice"),
        ([{**BOOT, "volume_type": "fast"}], {"mv": "2.67"}, "volume type to existing volume"),
        ([{**FROM_IMAGE, "volume_type": "no"}], {"mv": "2.67"}, "Volume type no could not be"),
        ([BOOT], {"max_count": 2}, "Cannot attach one or more volumes to multiple instances"),
        ([{**BOOT, "uuid": SHARED}], {}, "only supported starting with compute API version 2.60"),
        ([{**BOOT, "disk_bus": "pigeon"}], {}, ".disk_bus: 'pigeon' is not one of virtio, scsi"),
        ([{**BOOT, "device_type": "lun"}], {}, ".device_type: 'lun' is not one of disk"),
        ([BOOT, {**BLANK, "device_type": "cdrom"}], {}, ".device_type: 'cdrom' is not one of disk"),
        ([{**BOOT, "guest_format": "ext4"}], {}, ".guest_format: volumes are not formatted"),
        ([{**BOOT, "no_device": True}], {}, ".no_device: "),
        ([{**BOOT, "destination_type": "local"}], {}, ".destination_type: "),
        ([{**SWAP, "tag": "t"}, BOOT], {"mv": "2.42", "flavorRef": "swap"}, ".tag: local disks"),
    ],
)
def test_create_server_with_invalid_block_device_mapping_returns_400(
    cloud: Cloud, volumes: Volumes, mappings: Any, more: Any, text: str
) -> None:
    assert text in read_refusal(cloud, *mappings, **more)
    assert volumes.created == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"bootable": False}, f"Block Device {VOLUME} is not bootable."),
        ({"status": "in-use"}, "status must be 'available'"),
        ({"encrypted": True}, "is encrypted"),
        ({"image_metadata": {"min_ram": "2048"}}, "memory is too small"),
        ({"image_metadata": {"min_disk": "3"}}, "Volume is smaller than the minimum size"),
        ({"image_metadata": {"hw_disk_bus": "pigeon"}}, "hw_disk_bus"),
    ],
)
def test_create_server_from_unusable_volume_returns_400(
    cloud: Cloud, volumes: Volumes, values: Any, text: str
) -> None:
    volumes.change(VOLUME, **values)
    assert text in read_refusal(cloud, BOOT)
    if "bootable" in values:
        assert text.split(VOLUME)[1] in read_refusal(cloud, FROM_SNAPSHOT)


@pytest.mark.parametrize("mapping", [FROM_IMAGE, FROM_SNAPSHOT, BLANK])
def test_create_server_with_new_encrypted_volume_returns_400(
    cloud: Cloud, volumes: Volumes, mapping: Any
) -> None:
    """The requested or default type, the image or the snapshot can cause the encryption.

    The new volumes are deleted.
    """
    volumes.encrypts = True
    mappings = [mapping] if mapping.get("boot_index") == 0 else [BOOT, mapping]
    message = read_refusal(
        cloud, *mappings[:-1], {**mappings[-1], "volume_type": "fast"}, mv="2.67"
    )
    assert "is encrypted (volume type fast)" in message and "without encryption" in message
    assert [volume["id"] for volume in volumes.created] == volumes.deleted


@pytest.mark.parametrize("mapping", [LOCAL, FROM_IMAGE])
def test_create_server_from_image_of_encrypted_volume_returns_400(
    cloud: Cloud, volumes: Volumes, mapping: Any
) -> None:
    image = cloud.images.images[IMAGE]
    properties = {**image.ref.properties, "cinder_encryption_key_id": ids.new()}
    cloud.images.images[IMAGE] = replace(image, ref=replace(image.ref, properties=properties))
    image_ref = IMAGE if mapping is LOCAL else ""
    assert "uploaded from an encrypted volume" in read_refusal(cloud, mapping, image=image_ref)
    assert volumes.created == []


def test_create_server_from_volume_with_stale_encryption_key_is_accepted(
    cloud: Cloud, volumes: Volumes
) -> None:
    """A retyped volume keeps the metadata of its image."""
    volumes.change(VOLUME, image_metadata={"cinder_encryption_key_id": ids.new()})
    [row] = create_and_read_volumes(cloud, BOOT)
    assert row.volume_id == VOLUME


def test_create_server_from_unavailable_snapshot_returns_400(
    cloud: Cloud, volumes: Volumes
) -> None:
    volumes.snapshots[SNAPSHOT] = replace(volumes.snapshots[SNAPSHOT], status="creating")
    assert "is creating, not available" in read_refusal(cloud, FROM_SNAPSHOT)


def test_create_server_with_both_block_device_mappings_returns_400(
    cloud: Cloud, volumes: Volumes
) -> None:
    legacy = [{"volume_id": OTHER, "device_name": "vdb"}]
    assert "different block_device_mapping syntaxes" in read_refusal(
        cloud, BOOT, block_device_mapping=legacy
    )


def test_create_server_without_boot_source_returns_400(cloud: Cloud, volumes: Volumes) -> None:
    legacy = [{"virtual_name": "swap", "device_name": "vdb"}]
    body = {"name": "vm", "flavorRef": "1", "block_device_mapping": legacy}
    answer = cloud.call("POST", "/servers", {"server": body})
    assert answer.json["badRequest"]["message"] == "Invalid imageRef provided."
    assert "Unrecognized legacy format" in str(
        cloud.call(
            "POST", "/servers", {"server": {**body, "block_device_mapping": [{"device_name": "a"}]}}
        ).json
    )


def test_create_server_without_cross_az_attach_stays_in_zone_of_volumes(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(cross_az_attach=False)
    volumes = add_volume_service(cloud)
    volumes.change(OTHER, availability_zone="elsewhere")
    both = BOOT, {**BOOT, "uuid": OTHER, "boot_index": 1}
    assert "not in the same" in read_refusal(cloud, *both)
    rows = create_and_read_volumes(cloud, BOOT, BLANK)
    [server] = cloud.rows(schema.servers)
    assert server.pinned_availability_zone == "nova" and len(rows) == 2
    [request] = volumes.created
    assert request["zone"] == "nova"


def test_list_volume_attachments_includes_boot_volume_not_yet_created(
    cloud: Cloud, volumes: Volumes
) -> None:
    [row] = create_and_read_volumes(cloud, FROM_IMAGE)
    path = f"/servers/{row.server_id}/os-volume_attachments"
    [attachment] = cloud.call("GET", path).json["volumeAttachments"]
    assert attachment["volumeId"] == row.volume_id


@pytest.mark.parametrize(
    ("action", "body", "text"),
    [
        ("rescue", None, "cannot be rescued: Cannot rescue a volume-backed instance"),
        (
            "createBackup",
            {"name": "i", "backup_type": "daily", "rotation": 1},
            "Backup is not supported for volume-backed instances.",
        ),
        (
            "rebuild",
            {"imageRef": IMAGE},
            "Unable to rebuild with a different image for a volume-backed server.",
        ),
    ],
)
def test_rescue_backup_and_rebuild_of_server_on_volume_return_400_at_2_1(
    cloud: Cloud, volumes: Volumes, action: str, body: Any, text: str
) -> None:
    [row] = create_and_read_volumes(cloud, BOOT)
    finish_attachments(cloud, row.server_id)
    answer = cloud.call("POST", f"/servers/{row.server_id}/action", {action: body})
    assert answer.status_code == 400 and text in answer.json["badRequest"]["message"]
    table = schema.block_devices
    cloud.change(table, table.c.server_id == row.server_id, boot_index=None)
    cloud.change(schema.servers, schema.servers.c.id == row.server_id, image_id=IMAGE)
    answer = cloud.call("POST", f"/servers/{row.server_id}/action", {action: body})
    assert answer.status_code in (200, 202), answer.text


def test_rescue_of_server_on_volume_needs_2_87_and_rescue_image(
    cloud: Cloud, volumes: Volumes
) -> None:
    [row] = create_and_read_volumes(cloud, BOOT)
    finish_attachments(cloud, row.server_id)

    def rescue(mv: str, **body: str) -> Any:
        path = f"/servers/{row.server_id}/action"
        return cloud.call("POST", path, {"rescue": body or None}, mv=mv)

    assert "Cannot rescue a volume-backed" in rescue("2.86", rescue_image_ref=IMAGE).text
    assert "give a rescue_image_ref" in rescue("2.87").text
    image = cloud.images.images[IMAGE]
    properties = {"block_device_mapping": "[]"}
    cloud.images.images[IMAGE] = replace(image, ref=replace(image.ref, properties=properties))
    answer = rescue("2.87", rescue_image_ref=IMAGE)
    assert answer.status_code == 400 and "is not supported" in answer.text
    cloud.images.images[IMAGE] = image
    assert rescue("2.87", rescue_image_ref=IMAGE).status_code == 200
    [action] = [action for action in cloud.rows(schema.actions) if action.name == "rescue"]
    assert action.args["image"]["id"] == IMAGE


def test_rebuild_of_server_on_volume_writes_image_from_2_93(cloud: Cloud, volumes: Volumes) -> None:
    [row] = create_and_read_volumes(cloud, BOOT)
    finish_attachments(cloud, row.server_id)

    def rebuild(mv: str) -> Any:
        path, body = f"/servers/{row.server_id}/action", {"rebuild": {"imageRef": IMAGE}}
        return cloud.call("POST", path, body, mv=mv)

    image = cloud.images.images[IMAGE]
    cloud.images.images[IMAGE] = replace(image, min_disk=3)
    assert "Volume is smaller than the minimum size" in rebuild("2.93").text
    properties = {"block_device_mapping": "[]"}
    cloud.images.images[IMAGE] = replace(image, ref=replace(image.ref, properties=properties))
    assert "contains no data" in rebuild("2.93").text
    cloud.images.images[IMAGE] = image
    answer = rebuild("2.93")
    assert answer.status_code == 202 and answer.json["server"]["image"] == ""
    [action] = [action for action in cloud.rows(schema.actions) if action.name == "rebuild"]
    assert action.args["reimage"] == IMAGE and action.args["before"]["image"]["properties"] == {}
    [server] = cloud.rows(schema.servers)
    assert (server.image_id, server.image["id"], server.image["on_volume"]) == (None, "", True)
    assert server.image["properties"] == {"architecture": "x86_64"}


def test_rebuild_of_server_on_volume_with_same_image_keeps_volume(
    cloud: Cloud, volumes: Volumes
) -> None:
    volumes.change(VOLUME, image_metadata={"image_id": IMAGE})
    [row] = create_and_read_volumes(cloud, BOOT)
    finish_attachments(cloud, row.server_id)
    path, body = f"/servers/{row.server_id}/action", {"rebuild": {"imageRef": IMAGE}}
    assert cloud.call("POST", path, body, mv="2.92").status_code == 202
    [action] = [action for action in cloud.rows(schema.actions) if action.name == "rebuild"]
    assert "reimage" not in action.args and "before" not in action.args
    [server] = cloud.rows(schema.servers)
    assert (server.image_id, server.image["on_volume"]) == (None, True)


def test_volume_reimaged_event_is_accepted_for_attached_volume_only(
    cloud: Cloud, volumes: Volumes
) -> None:
    [row] = create_and_read_volumes(cloud, BOOT)
    finish_attachments(cloud, row.server_id, host="host1")
    event = {"name": "volume-reimaged", "server_uuid": row.server_id, "tag": VOLUME}
    events = [event, {**event, "tag": OTHER}]
    answer = cloud.call(
        "POST", "/os-server-external-events", {"events": events}, token="admin", mv="2.93"
    )
    assert [item["code"] for item in answer.json["events"]] == [200, 404]


def test_create_server_from_volume_does_not_count_root_disk(cloud: Cloud, volumes: Volumes) -> None:
    cloud.add_flavor(Flavor("large", "m1.large", 1, 512, 40, ephemeral_gb=2))
    create_and_read_volumes(cloud, BOOT, flavorRef="large")
    [server] = cloud.rows(schema.servers)
    assert (server.disk_gb, server.flavor["root_gb"]) == (2, 40)
    usage = cloud.store.read(lambda tx: quotas.count_resources(tx, server.project_id))
    assert usage == {"": 1, "VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 2}


def test_resize_of_server_on_volume_ignores_root_disk_of_flavor(
    cloud: Cloud, volumes: Volumes
) -> None:
    [row] = create_and_read_volumes(cloud, BOOT, flavorRef="2")
    finish_attachments(cloud, row.server_id)
    body = {"resize": {"flavorRef": "1"}}
    assert cloud.call("POST", f"/servers/{row.server_id}/action", body).status_code == 202


@pytest.mark.parametrize(
    "flaw", [{"status": "deactivated"}, {"cinder_encryption_key_id": "k"}], ids=["off", "encrypted"]
)
def test_create_server_with_volume_of_unusable_image_returns_400(
    cloud: Cloud, volumes: Volumes, flaw: dict[str, str]
) -> None:
    image = cloud.images.images[IMAGE]
    if "status" in flaw:
        cloud.images.images[IMAGE] = replace(image, **flaw)
    else:
        properties = {**image.ref.properties, **flaw}
        cloud.images.images[IMAGE] = replace(image, ref=replace(image.ref, properties=properties))
    answer = post_server(cloud, FROM_IMAGE)
    assert answer.status_code == 400 and f"Image {IMAGE} is" in answer.text
    assert not cloud.rows(schema.servers)
