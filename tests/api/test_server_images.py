# SPDX-License-Identifier: Apache-2.0
"""Images of servers and boots from another image: createImage, createBackup, shelve and rescue."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import sqlalchemy as sa

from common.clients.image import Image
from common.domain.models import ImageRef
from common.store import schema
from common.store.engine import now
from tests.api.conftest import IMAGE, PROJECT, Cloud

OTHER_IMAGE = "0f2f8fd4-3f0f-4c9e-8d5e-0f6f0a4b7a11"


@pytest.fixture
def server(cloud: Cloud) -> str:
    server_id = cloud.create("vm")
    cloud.set_state(server_id)
    return server_id


def act(cloud: Cloud, server: str, key: str, body: Any, mv: str = "2.1") -> Any:
    return cloud.call("POST", f"/servers/{server}/action", {key: body}, mv=mv)


def newest_action(cloud: Cloud) -> Any:
    return max(cloud.rows(schema.actions), key=lambda action: action.fence)


IMAGES = pytest.mark.parametrize(
    ("key", "more", "kind"),
    [
        ("createImage", {}, {"image_type": "snapshot"}),
        (
            "createBackup",
            {"backup_type": "daily", "rotation": 2},
            {"image_type": "backup", "backup_type": "daily"},
        ),
    ],
)


@IMAGES
@pytest.mark.parametrize("mv", ["2.1", "2.44", "2.45", "2.104"])
def test_create_image_and_backup_return_location_up_to_2_44_then_image_id(
    cloud: Cloud, server: str, key: str, more: Any, kind: Any, mv: str
) -> None:
    answer = act(cloud, server, key, {"name": "img", "metadata": {"mine": "1"}, **more}, mv)
    action = newest_action(cloud)
    image_id = action.args["image_id"]
    if mv in ("2.1", "2.44"):
        assert (answer.status_code, answer.content) == (202, b"")
        assert answer.headers["Location"] == f"http://images/v2/images/{image_id}"
    else:
        assert (answer.status_code, answer.json) == (202, {"image_id": image_id})
        assert "Location" not in answer.headers
    assert action.args == {
        "was": "active",
        "image_id": image_id,
        "name": "img",
        **more,
        "properties": {
            "architecture": "x86_64",
            "mine": "1",
            "instance_uuid": server,
            "user_id": "u1",
            "base_image_ref": IMAGE,
            **kind,
        },
    }


def test_create_backup_with_rotation_0_returns_no_location(cloud: Cloud, server: str) -> None:
    answer = act(
        cloud, server, "createBackup", {"name": "b", "backup_type": "daily", "rotation": "0"}
    )
    assert (answer.status_code, answer.content) == (202, b"")
    assert "Location" not in answer.headers
    assert newest_action(cloud).args["rotation"] == 0


@IMAGES
def test_create_image_and_backup_return_403_over_metadata_limit_and_400_for_image_fields(
    cloud: Cloud, server: str, key: str, more: Any, kind: Any
) -> None:
    many = {"name": "img", "metadata": {str(number): "" for number in range(129)}, **more}
    assert act(cloud, server, key, many, "2.38").status_code == 403
    assert act(cloud, server, key, many, "2.39").status_code == 202
    cloud.set_state(server)
    for field in ("id", "owner", "visibility", "status", "locations"):
        answer = act(cloud, server, key, {"name": "img", "metadata": {field: "x"}, **more})
        assert answer.status_code == 400, field
        assert field in answer.json["badRequest"]["message"]
    body = {"name": "img", "metadata": {"instance_uuid": "another", "image_type": "x"}, **more}
    assert act(cloud, server, key, body).status_code == 202
    properties = newest_action(cloud).args["properties"]
    assert properties["instance_uuid"] == server
    assert properties["image_type"] == ("x" if key == "createImage" else "backup"), (
        "rotation counts backups by this property"
    )


def test_create_image_does_not_inherit_signature_and_cache_properties(
    cloud: Cloud, server: str
) -> None:
    cloud.change(
        schema.servers,
        schema.servers.c.id == server,
        image={
            "id": IMAGE,
            "properties": {
                "hw_disk_bus": "virtio",
                "img_signature": "s",
                "img_signature_key_type": "t",
                "cache_in_nova": "True",
            },
        },
    )
    act(cloud, server, "createImage", {"name": "img"})
    assert set(newest_action(cloud).args["properties"]) == {
        "hw_disk_bus",
        "instance_uuid",
        "user_id",
        "image_type",
        "base_image_ref",
    }


@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("createImage", {}),
        ("createImage", {"name": ""}),
        ("createImage", {"name": "x", "rotation": 1}),
        ("createImage", {"name": "x", "metadata": {"a": 1}}),
        ("createBackup", {"name": "x"}),
        ("createBackup", {"name": "x", "backup_type": "daily", "rotation": -1}),
        ("createBackup", {"name": "x", "backup_type": 1, "rotation": 1}),
        ("createBackup", {"name": "x", "backup_type": "daily", "rotation": 1, "more": 1}),
        ("rescue", {"rescue_image_ref": "x"}),
        ("rescue", {"image": IMAGE}),
        ("rescue", "now"),
        ("changePassword", {}),
        ("changePassword", {"adminPass": None}),
        ("os-resetState", {"state": "stopped"}),
        ("os-resetState", {}),
    ],
)
def test_image_password_and_state_actions_with_invalid_body_return_400(
    cloud: Cloud, server: str, key: str, body: Any
) -> None:
    answer = cloud.call("POST", f"/servers/{server}/action", {key: body}, token="admin")
    assert answer.status_code == 400
    assert len(cloud.rows(schema.actions)) == 1


@pytest.mark.parametrize(
    ("event", "refusal", "status"),
    [
        ("succeeded", None, 202),
        ("failed", None, 409),
        ("failed", 400, 409),
        ("failed", 403, 403),
        ("failed", 413, 403),
    ],
)
def test_create_image_waits_for_image_record_and_returns_its_failure(
    make_cloud: Any, event: str, refusal: int | None, status: int
) -> None:
    """The test plays the conductor and writes the outcome of the step while the request waits."""
    cloud: Cloud = make_cloud(answer_timeout_seconds=10)
    server = cloud.create()
    cloud.set_state(server)

    class Conductor:
        """A conductor that does the step as soon as a wake-up arrives."""

        def wake(self, service_calls: bool = False) -> None:
            action = newest_action(cloud)
            with cloud.store.begin() as tx:
                tx.execute(
                    sa.insert(schema.events).values(at=now()),
                    {
                        "action_id": action.id,
                        "seq": 1,
                        "step": "record",
                        "attempt": 1,
                        "event": event,
                        "host": None,
                        "message": "The image quota is used up.",
                        "details": None,
                    },
                )
                if event == "failed":
                    tx.execute(
                        sa.update(schema.actions)
                        .where(schema.actions.c.id == action.id)
                        .values(
                            state="failed", data={"problem": {"status": refusal}} if refusal else {}
                        )
                    )

    cloud.services.wakeup = Conductor()
    answer = act(cloud, server, "createImage", {"name": "img"}, "2.45")
    assert answer.status_code == status
    if event == "failed":
        [fault] = answer.json.values()
        assert fault == {"code": status, "message": "The image quota is used up."}


def test_create_image_returns_202_without_wait_when_wait_slots_are_in_use(make_cloud: Any) -> None:
    cloud: Cloud = make_cloud(answer_timeout_seconds=0.1, threads=4)
    server = cloud.create()
    cloud.set_state(server)
    while cloud.services.wait_slots.acquire(blocking=False):
        pass
    assert act(cloud, server, "createImage", {"name": "img"}, "2.45").status_code == 202


def test_shelve_stores_name_and_id_of_image(cloud: Cloud, server: str) -> None:
    assert act(cloud, server, "shelve", None).status_code == 202
    args = newest_action(cloud).args
    assert (args["name"], args["properties"]["instance_uuid"]) == ("vm-shelved", server)
    assert len(args["image_id"]) == 36


@pytest.mark.parametrize("body", [None, {}, {"adminPass": "p"}, {"rescue_image_ref": IMAGE}])
def test_rescue_returns_password_and_stores_image(
    cloud: Cloud, server: str, body: dict[str, str] | None
) -> None:
    answer = act(cloud, server, "rescue", body)
    assert answer.status_code == 200
    assert set(answer.json) == {"adminPass"}
    image = newest_action(cloud).args["image"]
    assert (image["id"] if image else None) == (body or {}).get("rescue_image_ref")


def test_rescue_with_unusable_image_returns_400(cloud: Cloud, server: str) -> None:
    body = {"rescue_image_ref": "0f2f8fd4-3f0f-4c9e-8d5e-000000000000"}
    assert act(cloud, server, "rescue", body).status_code == 400
    cloud.images.images[IMAGE] = dataclasses.replace(cloud.images.images[IMAGE], status="queued")
    assert act(cloud, server, "rescue", {"rescue_image_ref": IMAGE}).status_code == 400
    ref = dataclasses.replace(
        cloud.images.images[IMAGE].ref, properties={"cinder_encryption_key_id": "k"}
    )
    cloud.images.images[IMAGE] = Image(ref)
    answer = act(cloud, server, "rescue", {"rescue_image_ref": IMAGE})
    assert "uploaded from an encrypted volume" in answer.json["badRequest"]["message"]
    assert cloud.rows(schema.servers)[0].project_id == PROJECT
    assert len(cloud.rows(schema.actions)) == 1


@pytest.mark.parametrize("disk_format", ["iso", "vmdk", "vhd", "vhdx", "vdi", "ploop", "ami", ""])
@pytest.mark.parametrize("key", ["create", "rebuild", "rescue"])
def test_create_rebuild_and_rescue_with_unsupported_format_return_400(
    cloud: Cloud, server: str, key: str, disk_format: str
) -> None:
    ref = ImageRef(OTHER_IMAGE, disk_format, 10)
    cloud.images.images[OTHER_IMAGE] = Image(ref)
    before = cloud.rows(schema.actions)
    answer = request_with_image(cloud, server, key)
    assert answer.status_code == 400, answer.text
    assert f"its format is {disk_format!r}" in answer.json["badRequest"]["message"]
    assert cloud.rows(schema.actions) == before


@pytest.mark.parametrize(
    "change",
    [
        {"status": "deactivated"},
        {"min_ram": 99999},
        {"ref": ImageRef(IMAGE, "qcow2", 10, properties={"hw_disk_bus": "nonsense"})},
    ],
)
@pytest.mark.parametrize("key", ["create", "rebuild"])
def test_create_and_rebuild_check_image_anew_for_each_request(
    cloud: Cloud, server: str, key: str, change: dict[str, Any]
) -> None:
    cloud.images.images[OTHER_IMAGE] = cloud.images.images[IMAGE]
    assert request_with_image(cloud, server, key).status_code == 202
    cloud.set_state(server)
    cloud.images.images[OTHER_IMAGE] = dataclasses.replace(cloud.images.images[IMAGE], **change)
    assert request_with_image(cloud, server, key).status_code == 400


def request_with_image(cloud: Cloud, server: str, key: str) -> Any:
    if key == "create":
        body = {"name": "vm", "flavorRef": "1", "imageRef": OTHER_IMAGE}
        return cloud.call("POST", "/servers", {"server": body})
    field = {"rebuild": "imageRef", "rescue": "rescue_image_ref"}[key]
    return act(cloud, server, key, {field: OTHER_IMAGE})
