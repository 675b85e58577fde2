# SPDX-License-Identifier: Apache-2.0
"""/servers/{id}/os-volume_attachments: list, show, attach, update, swap, detach, and refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from common.domain import errors, ids
from common.store import schema
from tests.api.conftest import Cloud
from tests.api.volumes import OTHER, SHARED, VOLUME, Volumes, add_volume_service, finish_attachments


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    return make_cloud()


@pytest.fixture
def volumes(cloud: Cloud) -> Volumes:
    return add_volume_service(cloud)


@pytest.fixture
def server(cloud: Cloud, volumes: Volumes) -> str:
    server_id = cloud.create()
    cloud.set_state(server_id)
    return server_id


def path(server: str, volume: str = "") -> str:
    return f"/servers/{server}/os-volume_attachments" + (f"/{volume}" if volume else "")


def attach(
    cloud: Cloud,
    server: str,
    volume: str = VOLUME,
    token: str = "user",
    mv: str = "2.1",
    **more: Any,
) -> Any:
    body = {"volumeAttachment": {"volumeId": volume, **more}}
    return cloud.call("POST", path(server), body, mv=mv, token=token)


def find_actions(cloud: Cloud, name: str) -> list[Any]:
    return [action for action in cloud.rows(schema.actions) if action.name == name]


def test_attach_volume_begins_action_and_returns_attachment(cloud: Cloud, server: str) -> None:
    answer = attach(cloud, server)
    attachment = {"id": VOLUME, "volumeId": VOLUME, "serverId": server, "device": "/dev/vdb"}
    assert (answer.status_code, answer.json) == (200, {"volumeAttachment": attachment})
    [row], [action] = cloud.rows(schema.block_devices), find_actions(cloud, "attach_volume")
    assert action.args == {"was": "active", "block_device": row.uuid, "volume_id": VOLUME}
    assert (row.volume_id, row.size_gb, row.status, row.device_name) == (
        VOLUME,
        2,
        "attaching",
        "/dev/vdb",
    )


@pytest.mark.parametrize(
    ("mv", "more", "new_fields"),
    [
        ("2.48", {}, {}),
        ("2.69", {"tag": "foo"}, {}),
        ("2.70", {"tag": "foo"}, {"tag": "foo"}),
        ("2.70", {}, {"tag": None}),
        ("2.79", {"delete_on_termination": True}, {"tag": None, "delete_on_termination": True}),
        ("2.100", {"device": "/dev/sdb"}, {"tag": None, "delete_on_termination": False}),
    ],
)
def test_volume_attachment_has_the_fields_of_each_microversion(
    cloud: Cloud, server: str, mv: str, more: dict[str, Any], new_fields: dict[str, Any]
) -> None:
    answer = attach(cloud, server, mv=mv, **more)
    plain = {"id": VOLUME, "volumeId": VOLUME, "serverId": server, "device": "/dev/vdb"}
    assert answer.json == {"volumeAttachment": plain | new_fields}
    finish_attachments(cloud, server)
    attachment = cloud.call("GET", path(server, VOLUME), mv=mv).json["volumeAttachment"]
    assert cloud.call("GET", path(server), mv=mv).json == {"volumeAttachments": [attachment]}
    [row] = cloud.rows(schema.block_devices)
    if mv == "2.100":
        plain.pop("id")
        new_fields = new_fields | {"attachment_id": row.attachment_id, "bdm_uuid": row.uuid}
    assert attachment == plain | new_fields


def test_attach_volume_returns_202_from_2_101(cloud: Cloud, server: str) -> None:
    answer = attach(cloud, server, mv="2.101", tag="t", delete_on_termination="yes")
    assert (answer.status_code, answer.text) == (202, "")
    [row] = cloud.rows(schema.block_devices)
    assert (row.tag, row.delete_on_termination) == ("t", True)


def test_server_shows_attached_volumes_by_microversion(cloud: Cloud, server: str) -> None:
    name = "os-extended-volumes:volumes_attached"
    attach(cloud, server)
    finish_attachments(cloud, server)
    for mv, fields in (("2.1", {}), ("2.3", {"delete_on_termination": False})):
        expected = [{"id": VOLUME, **fields}]
        assert cloud.call("GET", f"/servers/{server}", mv=mv).json["server"][name] == expected
        [item] = cloud.call("GET", "/servers/detail", mv=mv).json["servers"]
        assert item[name] == expected
    body = {"server": {"name": "other"}}
    updated = cloud.call("PUT", f"/servers/{server}", body, mv="2.75").json["server"]
    assert updated[name] == [{"id": VOLUME, "delete_on_termination": False}]


def test_attach_volume_during_attachment_returns_409_and_list_is_ordered(
    cloud: Cloud, server: str
) -> None:
    attach(cloud, server)
    assert attach(cloud, server, OTHER).status_code == 409, "the first attachment is not complete"
    finish_attachments(cloud, server)
    assert attach(cloud, server, OTHER).json["volumeAttachment"]["device"] == "/dev/vdc"
    attachments = cloud.call("GET", path(server)).json["volumeAttachments"]
    assert [attachment["id"] for attachment in attachments] == [VOLUME, OTHER]
    for query, expected in (("?limit=1", [VOLUME]), ("?offset=1", [OTHER]), ("?limit=0", [])):
        page = cloud.call("GET", path(server) + query).json["volumeAttachments"]
        assert [attachment["id"] for attachment in page] == expected


def read_refusal(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    [problem] = answer.json.values()
    return str(problem["message"])


def test_attach_volume_already_attached_returns_400(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    finish_attachments(cloud, server)
    assert read_refusal(attach(cloud, server), 400) == (
        f"Invalid volume: volume {VOLUME} already attached"
    )


@pytest.mark.parametrize(
    "device", ["/dev/vda", "/dev/vdb", "/dev/vdf", "/dev/vdaa", "/dev/vd", "/dev/vdb1", "/dev/sdz"]
)
def test_attach_volume_ignores_requested_device_and_returns_actual_device(
    cloud: Cloud, server: str, device: str
) -> None:
    """Guests number their disks, so a requested device name could belong to another disk."""
    for volume, name in ((VOLUME, "/dev/vdb"), (OTHER, "/dev/vdc")):
        answer = attach(cloud, server, volume, device=device)
        assert answer.json["volumeAttachment"]["device"] == name
        finish_attachments(cloud, server)
        attachment = cloud.call("GET", path(server, volume)).json["volumeAttachment"]
        assert attachment["device"] == name


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"status": "in-use"}, "status must be 'available'. Currently in 'in-use'"),
        ({"status": "error"}, "Currently in 'error'"),
        ({"multiattach": True}, "starting with compute API version 2.60"),
        ({"encrypted": True}, "is encrypted"),
    ],
)
def test_attach_unusable_volume_returns_400(
    cloud: Cloud, volumes: Volumes, server: str, values: dict[str, Any], text: str
) -> None:
    volumes.change(VOLUME, **values)
    assert text in read_refusal(attach(cloud, server), 400)
    assert cloud.rows(schema.block_devices) == []


def test_attach_multiattach_volume_needs_2_60(cloud: Cloud, server: str) -> None:
    assert attach(cloud, server, SHARED, mv="2.59").status_code == 400
    assert attach(cloud, server, SHARED, mv="2.60").status_code == 200
    [row] = cloud.rows(schema.block_devices)
    assert row.multiattach


@pytest.mark.parametrize("token", ["user", "admin"])
def test_attach_unknown_volume_returns_404(cloud: Cloud, server: str, token: str) -> None:
    missing = "0" * 8 + "-0000-4000-8000-" + "0" * 12
    answer = attach(cloud, server, missing, token=token)
    assert read_refusal(answer, 404) == f"Volume {missing} could not be found."


def test_attach_volume_of_other_zone_without_cross_az_attach_returns_400(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(cross_az_attach=False)
    volumes = add_volume_service(cloud)
    server = cloud.create()
    cloud.set_state(server)
    volumes.change(VOLUME, availability_zone="elsewhere")
    assert "not in the same availability_zone. Instance is in nova" in read_refusal(
        attach(cloud, server), 400
    )
    assert attach(cloud, server, OTHER).status_code == 200


@pytest.mark.parametrize("state", ["suspended", "error", "rescued"])
def test_attach_and_detach_volume_in_wrong_state_return_409(
    cloud: Cloud, server: str, state: str
) -> None:
    attach(cloud, server)
    finish_attachments(cloud, server, vm_state=state)
    assert read_refusal(attach(cloud, server, OTHER), 409).startswith("Cannot 'attach_volume'")
    answer = cloud.call("DELETE", path(server, VOLUME))
    assert read_refusal(answer, 409).startswith("Cannot 'detach_volume'")


@pytest.mark.parametrize("state", ["shelved", "shelved_offloaded"])
def test_attach_and_detach_volume_of_shelved_server_need_2_20(
    cloud: Cloud, volumes: Volumes, server: str, state: str
) -> None:
    host = None if state == "shelved_offloaded" else "host1"
    cloud.set_state(server, state, host=host)
    assert read_refusal(attach(cloud, server, mv="2.19"), 409).startswith("Cannot 'attach_volume'")
    assert attach(cloud, server, mv="2.20").status_code == 200
    finish_attachments(cloud, server, vm_state=state, host=host)
    assert cloud.call("DELETE", path(server, VOLUME), mv="2.19").status_code == 409
    assert cloud.call("DELETE", path(server, VOLUME), mv="2.20").status_code == 202
    if host is None:
        cloud.set_state(server, state, host=host)
        assert "Tagged" in read_refusal(attach(cloud, server, OTHER, mv="2.49", tag="t"), 400)
        assert "multiattach" in read_refusal(attach(cloud, server, SHARED, mv="2.60"), 400)


def test_detach_volume_begins_one_action_when_repeated(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    finish_attachments(cloud, server)
    assert cloud.call("DELETE", path(server, VOLUME)).status_code == 202
    [row], [action] = cloud.rows(schema.block_devices), find_actions(cloud, "detach_volume")
    assert row.status == "detaching"
    assert action.args == {
        "was": "active",
        "block_device": row.uuid,
        "volume_id": VOLUME,
        "before": "attached",
    }
    assert cloud.call("DELETE", path(server, VOLUME)).status_code == 202, "the same detach"
    assert find_actions(cloud, "detach_volume") == [action]
    assert cloud.call("DELETE", path(server, OTHER)).status_code == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_volume_attachment_of_unattached_volume_returns_404(
    cloud: Cloud, server: str, method: str
) -> None:
    body = {"volumeAttachment": {"volumeId": OTHER}} if method == "PUT" else None
    answer = cloud.call(method, path(server, OTHER), body, mv="2.85")
    assert read_refusal(answer, 404) == f"Instance {server} is not attached to volume {OTHER}"


def test_detach_boot_volume_returns_403(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    finish_attachments(cloud, server)
    table = schema.block_devices
    cloud.change(table, table.c.server_id == server, boot_index=0)
    answer = cloud.call("DELETE", path(server, VOLUME))
    assert read_refusal(answer, 403) == "Cannot detach a root device volume"


def test_update_volume_attachment_changes_delete_on_termination_only(
    cloud: Cloud, server: str
) -> None:
    attach(cloud, server, mv="2.49", tag="t")
    finish_attachments(cloud, server)
    unchanged = {"id": VOLUME, "serverId": server, "device": "/dev/vdb", "tag": "t"}
    for delete_on_termination in (True, False):
        body = {
            "volumeAttachment": {
                "volumeId": VOLUME,
                "delete_on_termination": delete_on_termination,
                **unchanged,
            }
        }
        answer = cloud.call("PUT", path(server, VOLUME), body, mv="2.85")
        assert (answer.status_code, answer.text) == (202, "")
        [row] = cloud.rows(schema.block_devices)
        assert bool(row.delete_on_termination) is delete_on_termination
    for name, value in (("id", OTHER), ("serverId", OTHER), ("device", "/dev/vdc"), ("tag", "u")):
        body = {"volumeAttachment": {"volumeId": VOLUME, name: value}}
        answer = cloud.call("PUT", path(server, VOLUME), body, mv="2.85")
        assert read_refusal(answer, 400) == f"The {name} property is not mutable."


@pytest.fixture
def migrating_server(cloud: Cloud, volumes: Volumes, server: str) -> str:
    """Return a server with a volume that is being migrated to OTHER."""
    attach(cloud, server)
    finish_attachments(cloud, server)
    volumes.change(VOLUME, status="in-use", servers=(server,), migration="migrating")
    volumes.change(OTHER, migration=f"target:{VOLUME}")
    return server


def swap_volume(
    cloud: Cloud, server: str, mv: str = "2.85", token: str = "admin", **more: Any
) -> Any:
    body = {"volumeAttachment": {"volumeId": OTHER, **more}}
    return cloud.call("PUT", path(server, VOLUME), body, mv=mv, token=token)


@pytest.mark.parametrize("mv", ["2.1", "2.85"])
def test_swap_volume_begins_action(cloud: Cloud, migrating_server: str, mv: str) -> None:
    answer = swap_volume(cloud, migrating_server, mv)
    assert (answer.status_code, answer.text) == (202, "")
    [row], [action] = cloud.rows(schema.block_devices), find_actions(cloud, "swap_volume")
    assert action.args == {
        "was": "active",
        "block_device": row.uuid,
        "volume_id": VOLUME,
        "new_volume_id": OTHER,
        "new_size_gb": 2,
    }
    assert (row.volume_id, row.status) == (VOLUME, "attached")
    assert swap_volume(cloud, migrating_server, mv).status_code == 409


def test_swap_volume_changes_delete_on_termination_too(cloud: Cloud, migrating_server: str) -> None:
    assert swap_volume(cloud, migrating_server, delete_on_termination=True).status_code == 202
    [row] = cloud.rows(schema.block_devices)
    assert row.delete_on_termination and find_actions(cloud, "swap_volume")
    assert "not mutable" in read_refusal(swap_volume(cloud, migrating_server, tag="another"), 400)


def test_refused_swap_volume_keeps_delete_on_termination(
    cloud: Cloud, volumes: Volumes, migrating_server: str
) -> None:
    volumes.change(VOLUME, migration="")
    assert swap_volume(cloud, migrating_server, delete_on_termination=True).status_code == 409
    volumes.change(VOLUME, migration="migrating")
    assert swap_volume(cloud, migrating_server).status_code == 202
    assert swap_volume(cloud, migrating_server, delete_on_termination=True).status_code == 409
    [row] = cloud.rows(schema.block_devices)
    assert not row.delete_on_termination


@pytest.mark.parametrize(("token", "status"), [("user", 403), ("service", 404)])
def test_swap_volume_returns_403_to_users_and_404_to_foreign_service(
    cloud: Cloud, migrating_server: str, token: str, status: int
) -> None:
    for mv in ("2.1", "2.85"):
        assert swap_volume(cloud, migrating_server, mv, token).status_code == status
    assert find_actions(cloud, "swap_volume") == []


@pytest.mark.parametrize(
    ("volume", "changes", "status", "message"),
    [
        (VOLUME, {"migration": ""}, 409, "is not migrating; this API should only be called by"),
        (VOLUME, {"migration": "success"}, 409, "is not migrating"),
        (VOLUME, {"servers": (OTHER,)}, 400, "attached to a different instance"),
        (VOLUME, {"encrypted": True}, 400, "is encrypted"),
        (OTHER, {"servers": (OTHER,)}, 400, "must be detached in order to swap"),
        (OTHER, {"size_gb": 1}, 400, "must be the same size or larger"),
        (OTHER, {"migration": ""}, 400, "is not the target of the migration"),
        (OTHER, {"encrypted": True}, 400, "is encrypted"),
    ],
)
def test_swap_volume_returns_409_if_not_migrating_and_400_if_unusable(
    cloud: Cloud,
    volumes: Volumes,
    migrating_server: str,
    volume: str,
    changes: Any,
    status: int,
    message: str,
) -> None:
    volumes.change(volume, **changes)
    assert message in read_refusal(swap_volume(cloud, migrating_server), status)
    assert find_actions(cloud, "swap_volume") == []


def test_swap_volume_returns_400_for_multiattach_or_missing_target_and_409_if_stopped(
    cloud: Cloud, volumes: Volumes, migrating_server: str
) -> None:
    volumes.change(VOLUME, servers=(migrating_server, OTHER))
    assert "multi-attach" in read_refusal(swap_volume(cloud, migrating_server), 400)
    volumes.change(VOLUME, servers=(migrating_server,))
    volume = volumes.by_id.pop(OTHER)
    assert "could not be found" in read_refusal(swap_volume(cloud, migrating_server), 400)
    volumes.by_id[OTHER] = volume
    cloud.set_state(migrating_server, vm_state="stopped")
    assert read_refusal(swap_volume(cloud, migrating_server), 409).startswith(
        "Cannot 'swap_volume'"
    )
    del volumes.by_id[VOLUME]
    assert "could not be found" in read_refusal(swap_volume(cloud, migrating_server), 404)


def test_volume_attachment_without_attachment_id_is_hidden_from_2_89(
    cloud: Cloud, server: str
) -> None:
    attach(cloud, server)
    for mv, is_shown in (("2.88", True), ("2.89", False)):
        assert bool(cloud.call("GET", path(server), mv=mv).json["volumeAttachments"]) is is_shown
        answer = cloud.call("GET", path(server, VOLUME), mv=mv)
        assert answer.status_code == (200 if is_shown else 404)
    finish_attachments(cloud, server)
    [row] = cloud.rows(schema.block_devices)
    attachment = cloud.call("GET", path(server, VOLUME), mv="2.89").json["volumeAttachment"]
    assert attachment["attachment_id"] == row.attachment_id


def test_attach_volume_without_volume_service_returns_501(
    cloud: Cloud, volumes: Volumes, server: str
) -> None:
    volumes.has_endpoint = False
    assert "no block storage service" in read_refusal(attach(cloud, server), 501)
    cloud.services.volumes = None
    assert "no block storage service" in read_refusal(attach(cloud, server), 501)
    assert cloud.call("GET", path(server)).json == {"volumeAttachments": []}


def fail_next_attachment(cloud: Cloud) -> None:
    """Let the next attachment fail as soon as a conductor is woken."""

    def wake(service_calls: bool = False) -> None:
        action = find_actions(cloud, "attach_volume")[-1]
        values = {"state": "failed", "message": "Invalid volume: taken"}
        cloud.change(schema.actions, schema.actions.c.id == action.id, **values)

    cloud.wakeup.wake = wake  # type: ignore[method-assign]


def test_attach_volume_refused_by_volume_service_returns_400_with_reason(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(answer_timeout_seconds=5)
    add_volume_service(cloud)
    server = cloud.create()
    cloud.set_state(server)
    fail_next_attachment(cloud)
    assert "taken" in read_refusal(attach(cloud, server), 400)


def test_attach_volume_returns_503_when_volume_service_does_not_answer(
    cloud: Cloud, volumes: Volumes, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_unavailable(token: str, volume_id: str) -> None:
        raise errors.Unavailable("The block storage service does not answer; try again later.")

    monkeypatch.setattr(volumes, "volume", raise_unavailable)
    assert "does not answer" in read_refusal(attach(cloud, server), 503)
    assert cloud.rows(schema.block_devices) == []


def test_volume_extended_event_begins_action_for_attached_volume(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    event = {"name": "volume-extended", "server_uuid": server, "tag": VOLUME}

    def send_event(**more: Any) -> list[int]:
        answer = cloud.call(
            "POST",
            "/os-server-external-events",
            {"events": [{**event, **more}]},
            mv="2.51",
            token="service",
        )
        return [item["code"] for item in answer.json["events"]]

    assert send_event() == [422], "the attachment is not complete"
    finish_attachments(cloud, server, locked=True)
    assert send_event(tag=OTHER) == [404] and send_event() == [200]
    [action], [row] = find_actions(cloud, "extend_volume"), cloud.rows(schema.block_devices)
    assert action.args == {"was": "active", "block_device": row.uuid, "volume_id": VOLUME}


@pytest.fixture
def conducted_cloud(make_cloud: Callable[..., Cloud]) -> Iterator[tuple[Cloud, str]]:
    """Yield a cloud and a server. A thread completes each action after a moment."""
    cloud, is_ended = make_cloud(answer_timeout_seconds=30), threading.Event()
    server = cloud.create()
    cloud.set_state(server)

    def complete_actions() -> None:
        while not is_ended.wait(0.02):
            if any(row.action for row in cloud.rows(schema.servers)):
                finish_attachments(cloud, server)

    conductor = threading.Thread(target=complete_actions)
    conductor.start()
    yield cloud, server
    is_ended.set()
    conductor.join(30)


def test_concurrent_attachments_to_one_server_all_succeed(
    conducted_cloud: tuple[Cloud, str],
) -> None:
    cloud, server = conducted_cloud
    service, volumes = add_volume_service(cloud), [ids.new() for _ in range(20)]
    for volume in volumes:
        service.by_id[volume] = replace(service.by_id[VOLUME], id=volume)
    with ThreadPoolExecutor(len(volumes)) as pool:
        answers = list(pool.map(lambda volume: attach(cloud, server, volume, mv="2.101"), volumes))
    assert [answer.status_code for answer in answers] == [202] * len(volumes)
    assert len(find_actions(cloud, "attach_volume")) == len(volumes)


def test_pause_during_attach_volume_waits_and_is_accepted(
    conducted_cloud: tuple[Cloud, str],
) -> None:
    cloud, server = conducted_cloud
    add_volume_service(cloud)
    assert attach(cloud, server, mv="2.101").status_code == 202
    answer = cloud.call("POST", f"/servers/{server}/action", {"pause": None})
    assert answer.status_code == 202, answer.text
