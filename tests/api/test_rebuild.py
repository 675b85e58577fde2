# SPDX-License-Identifier: Apache-2.0
"""Rebuild: changes of the server by its body, answers of each microversion, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from common.clients.image import Image
from common.domain.models import ImageRef
from common.store import schema
from tests.api.conftest import IMAGE, Cloud
from tests.api.test_servers import BASE, GUARDED, MORE

OTHER_IMAGE = "0f2f8fd4-3f0f-4c9e-8d5e-0f6f0a4b7a11"
HOSTNAME = "OS-EXT-SRV-ATTR:hostname"
#: Minor version, with the keys that begin with this version.
NEW = {
    9: {"locked"},
    19: {"description"},
    26: {"tags"},
    54: {"key_name"},
    57: {"user_data"},
    63: {"trusted_image_certificates"},
    71: {"server_groups"},
    73: {"locked_reason"},
    75: MORE,
    90: {HOSTNAME},
    96: {"pinned_availability_zone"},
    100: {"scheduler_hints"},
}
EDGES = sorted({1, 104} | {edge for since in NEW for edge in (since - 1, since)})


@pytest.fixture
def server(cloud: Cloud) -> str:
    server_id = cloud.create(metadata={"a": "1"}, user_data="b2xk")
    cloud.set_state(server_id)
    cloud.images.images[OTHER_IMAGE] = Image(
        ImageRef(OTHER_IMAGE, "raw", 10, properties={"os_distro": "debian"})
    )
    return server_id


def rebuild(cloud: Cloud, server: str, mv: str = "2.1", token: str = "user", **body: Any) -> Any:
    return cloud.call(
        "POST",
        f"/servers/{server}/action",
        {"rebuild": {"imageRef": OTHER_IMAGE, **body}},
        mv=mv,
        token=token,
    )


def test_rebuild_returns_server_in_format_of_microversion(cloud: Cloud, server: str) -> None:
    for version in EDGES:
        cloud.set_state(server, interfaces=GUARDED)
        answer = rebuild(cloud, server, f"2.{version}")
        assert answer.status_code == 202, answer.text
        expected = (BASE | {"adminPass"}).union(
            *(keys for since, keys in NEW.items() if since <= version)
        )
        assert set(answer.json["server"]) == expected, version
        assert answer.json["server"]["status"] == "REBUILD"
        assert answer.json["server"]["image"]["id"] == OTHER_IMAGE
        assert answer.headers["Location"].endswith(f"/v2.1/servers/{server}")


def test_rebuild_by_admin_returns_host_and_user_data_once(cloud: Cloud, server: str) -> None:
    answer = rebuild(cloud, server, "2.104", token="admin").json["server"]
    assert answer["OS-EXT-SRV-ATTR:host"] == "host1"
    assert (answer["user_data"], "OS-EXT-SRV-ATTR:user_data" in answer) == ("b2xk", False)


def test_rebuild_changes_named_fields_only(cloud: Cloud, server: str) -> None:
    before = cloud.rows(schema.servers)[0]
    key = cloud.call("POST", "/os-keypairs", {"keypair": {"name": "k"}}).json["keypair"]
    answer = rebuild(
        cloud,
        server,
        "2.104",
        name="new",
        metadata={"b": "2"},
        description="d",
        key_name="k",
        user_data="bmV3",
        trusted_image_certificates=["c"],
        hostname="h.example",
        accessIPv4="192.0.2.7",
        accessIPv6="2001:db8::7",
        preserve_ephemeral="yes",
        **{"OS-DCF:diskConfig": "AUTO"},
    )
    assert answer.status_code == 202, answer.text
    [row] = cloud.rows(schema.servers)
    changed = {
        "name": "new",
        "meta": {"b": "2"},
        "description": "d",
        "key_name": "k",
        "key_data": key["public_key"],
        "user_data": "bmV3",
        "trusted_image_certificates": ["c"],
        "hostname": "h.example",
        "image_id": OTHER_IMAGE,
        "access_ip_v4": "192.0.2.7",
        "access_ip_v6": "2001:db8::7",
        "disk_config": "AUTO",
        "task_state": "rebuilding",
    }
    assert {name: getattr(row, name) for name in changed} == changed
    assert (row.image["id"], row.image["properties"]) == (OTHER_IMAGE, {"os_distro": "debian"})
    changed_names = {*changed, "image", "fence", "action", "updated_at"}
    assert {
        name for name in row._fields if getattr(row, name) != getattr(before, name)
    } == changed_names
    action = next(action for action in cloud.rows(schema.actions) if action.name == "rebuild")
    previous, written = action.args.pop("before"), action.args.pop("wrote")
    assert action.args == {"was": "active", "preserve_ephemeral": True}
    restored = {*changed, "image", "root_device_name"} - {"task_state"}
    assert previous == {name: getattr(before, name) for name in restored}, "for a refused image"
    assert written == {
        name: changed[name]
        for name in (
            "name",
            "meta",
            "description",
            "hostname",
            "access_ip_v4",
            "access_ip_v6",
            "disk_config",
        )
    }


def test_rebuild_stores_previous_metadata_changed_during_its_checks(
    cloud: Cloud, server: str
) -> None:
    cloud.run_after_statement(
        "SELECT servers",
        lambda: cloud.change(schema.servers, schema.servers.c.id == server, meta={"a": "2"}),
    )
    assert rebuild(cloud, server, metadata={"b": "3"}).status_code == 202
    action = next(action for action in cloud.rows(schema.actions) if action.name == "rebuild")
    assert action.args["before"]["meta"] == {"a": "2"}


@pytest.mark.parametrize(
    "change", [{"flavor": {"id": "9"}}, {"image": {"id": OTHER_IMAGE}, "image_id": OTHER_IMAGE}]
)
def test_rebuild_returns_409_when_flavor_or_image_changes_during_checks(
    cloud: Cloud, server: str, change: dict[str, Any]
) -> None:
    cloud.run_after_statement(
        "SELECT servers",
        lambda: cloud.change(schema.servers, schema.servers.c.id == server, **change),
    )
    answer = rebuild(cloud, server)
    assert "try again" in answer.json["conflictingRequest"]["message"]
    assert cloud.rows(schema.servers)[0].action is None


def test_rebuild_names_root_device_by_disk_bus_of_new_image(cloud: Cloud, server: str) -> None:
    [row] = cloud.rows(schema.servers)
    assert row.root_device_name == "/dev/vda"
    cloud.images.images[OTHER_IMAGE] = Image(
        ImageRef(OTHER_IMAGE, "raw", 10, properties={"hw_disk_bus": "scsi"})
    )
    assert rebuild(cloud, server).status_code == 202
    [row] = cloud.rows(schema.servers)
    assert row.root_device_name == "/dev/sda"


def test_rebuild_with_null_clears_field_and_omitted_field_stays(cloud: Cloud, server: str) -> None:
    cloud.change(
        schema.servers,
        schema.servers.c.id == server,
        key_name="k",
        key_data="ssh",
        description="d",
        trusted_image_certificates=["c"],
    )
    assert rebuild(cloud, server, "2.104").status_code == 202
    [row] = cloud.rows(schema.servers)
    assert (row.key_name, row.description, row.user_data, row.meta) == (
        "k",
        "d",
        "b2xk",
        {"a": "1"},
    )
    cloud.set_state(server, "stopped")
    assert (
        rebuild(
            cloud,
            server,
            "2.104",
            key_name=None,
            description=None,
            user_data=None,
            trusted_image_certificates=None,
        ).status_code
        == 202
    )
    [row] = cloud.rows(schema.servers)
    assert (
        row.key_name,
        row.key_data,
        row.description,
        row.user_data,
        row.trusted_image_certificates,
    ) == (None,) * 5
    assert max(cloud.rows(schema.actions), key=lambda action: action.fence).args["was"] == "stopped"


def test_rebuild_with_files_sets_config_drive_and_encrypts_files(
    make_cloud: Callable[..., Cloud],
) -> None:
    files, cloud = [{"path": "/etc/motd", "contents": "aGk="}], make_cloud(secret_key="k")
    server = cloud.create()
    cloud.set_state(server)
    cloud.images.images[OTHER_IMAGE] = Image(ImageRef(OTHER_IMAGE, "raw", 10))
    assert rebuild(cloud, server, personality=files).status_code == 202
    assert cloud.rows(schema.servers)[0].config_drive
    assert cloud.vault is not None
    newest = max(cloud.rows(schema.actions), key=lambda action: action.fence)
    assert cloud.vault.open(newest.secrets)["files"] == files


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"status": "queued"}, "is not active"),
        ({"min_ram": 100_000}, "memory is too small"),
        ({"min_disk": 100}, "disk is too small"),
        ({"virtual_size": 2**40}, "disk is too small"),
    ],
)
def test_rebuild_with_unusable_image_returns_400(
    cloud: Cloud, server: str, change: dict[str, Any], text: str
) -> None:
    cloud.images.images[OTHER_IMAGE] = dataclasses.replace(
        cloud.images.images[OTHER_IMAGE], **change
    )
    answer = rebuild(cloud, server)
    assert answer.status_code == 400
    assert text in answer.json["badRequest"]["message"]
    [row] = cloud.rows(schema.servers)
    assert (row.image_id, row.action) == (IMAGE, None)


@pytest.mark.parametrize(
    ("mv", "body", "status"),
    [
        ("2.1", {"imageRef": "0f2f8fd4-3f0f-4c9e-8d5e-000000000000"}, 400),
        ("2.1", {"imageRef": "x"}, 400),
        ("2.18", {"description": "d"}, 400),
        ("2.53", {"key_name": "k"}, 400),
        ("2.54", {"key_name": "unknown"}, 400),
        ("2.56", {"user_data": "aGk="}, 400),
        ("2.57", {"personality": []}, 400),
        ("2.57", {"user_data": "%"}, 400),
        ("2.62", {"trusted_image_certificates": ["c"]}, 400),
        ("2.63", {"trusted_image_certificates": []}, 400),
        ("2.89", {"hostname": "h"}, 400),
        ("2.90", {"hostname": "h.example"}, 400),
        ("2.1", {"name": ""}, 400),
        ("2.1", {"metadata": {str(number): "" for number in range(129)}}, 403),
        ("2.1", {"flavorRef": "1"}, 400),
    ],
)
def test_rebuild_with_invalid_body_is_refused(
    cloud: Cloud, server: str, mv: str, body: dict[str, Any], status: int
) -> None:
    assert rebuild(cloud, server, mv, **body).status_code == status
    assert cloud.rows(schema.servers)[0].action is None


def test_rebuild_refuses_signed_image_when_server_has_certificates(
    cloud: Cloud, server: str
) -> None:
    cloud.change(schema.servers, schema.servers.c.id == server, trusted_image_certificates=["c"])
    cloud.images.images[OTHER_IMAGE] = Image(
        ImageRef(OTHER_IMAGE, properties={"img_signature": "s"})
    )
    assert rebuild(cloud, server, "2.63").status_code == 400
    assert rebuild(cloud, server, "2.63", trusted_image_certificates=None).status_code == 202


def test_rebuild_with_disk_config_disabled_by_image_returns_400(cloud: Cloud, server: str) -> None:
    cloud.images.images[OTHER_IMAGE] = Image(
        ImageRef(OTHER_IMAGE, properties={"auto_disk_config": "disabled"})
    )
    answer = rebuild(cloud, server, **{"OS-DCF:diskConfig": "AUTO"})
    assert answer.status_code == 400
    assert "automatic disk resize disabled" in answer.json["badRequest"]["message"]
    assert rebuild(cloud, server, **{"OS-DCF:diskConfig": "MANUAL"}).status_code == 202


def test_rebuild_checks_state_before_request_to_image_service(cloud: Cloud, server: str) -> None:
    cloud.set_state(server, "paused")
    cloud.images.down = True
    answer = rebuild(cloud, server)
    assert answer.json["conflictingRequest"]["message"] == (
        f"Cannot 'rebuild' instance {server} while it is in vm_state paused"
    )
    cloud.set_state(server)
    assert rebuild(cloud, server).status_code == 503
