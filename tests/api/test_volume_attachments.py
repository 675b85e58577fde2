# SPDX-License-Identifier: Apache-2.0
"""/servers/{id}/os-volume_attachments: shown, attached, changed, detached; and every refusal."""

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
from tests.api.volumes import OTHER, SHARED, VOLUME, Volumes, finish_attachments, add_volume_service


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    return make_cloud()


@pytest.fixture
def volumes(cloud: Cloud) -> Volumes:
    return add_volume_service(cloud)


@pytest.fixture
def server(cloud: Cloud, volumes: Volumes) -> str:
    found = cloud.create()
    cloud.rest(found)
    return found


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


def begun(cloud: Cloud, name: str) -> list[Any]:
    return [action for action in cloud.rows(schema.actions) if action.name == name]


def test_a_volume_is_being_attached(cloud: Cloud, server: str) -> None:
    answer = attach(cloud, server)
    shown = {"id": VOLUME, "volumeId": VOLUME, "serverId": server, "device": "/dev/vdb"}
    assert (answer.status_code, answer.json) == (200, {"volumeAttachment": shown})
    [row], [action] = cloud.rows(schema.block_devices), begun(cloud, "attach_volume")
    assert action.args == {"was": "active", "block_device": row.uuid, "volume_id": VOLUME}
    assert (row.volume_id, row.size_gb, row.status, row.device_name) == (
        VOLUME,
        2,
        "attaching",
        "/dev/vdb",
    )


@pytest.mark.parametrize(
    ("mv", "more", "shown"),
    [
        ("2.48", {}, {}),
        ("2.69", {"tag": "foo"}, {}),
        ("2.70", {"tag": "foo"}, {"tag": "foo"}),
        ("2.70", {}, {"tag": None}),
        ("2.79", {"delete_on_termination": True}, {"tag": None, "delete_on_termination": True}),
        ("2.100", {"device": "/dev/sdb"}, {"tag": None, "delete_on_termination": False}),
    ],
)
def test_answers_say_what_their_version_knows(
    cloud: Cloud, server: str, mv: str, more: dict[str, Any], shown: dict[str, Any]
) -> None:
    answer = attach(cloud, server, mv=mv, **more)
    plain = {"id": VOLUME, "volumeId": VOLUME, "serverId": server, "device": "/dev/vdb"}
    assert answer.json == {"volumeAttachment": plain | shown}
    finish_attachments(cloud, server)
    one = cloud.call("GET", path(server, VOLUME), mv=mv).json["volumeAttachment"]
    assert cloud.call("GET", path(server), mv=mv).json == {"volumeAttachments": [one]}
    [row] = cloud.rows(schema.block_devices)
    if mv == "2.100":
        plain.pop("id")
        shown = shown | {"attachment_id": row.attachment_id, "bdm_uuid": row.uuid}
    assert one == plain | shown


def test_a_new_client_is_answered_at_once(cloud: Cloud, server: str) -> None:
    answer = attach(cloud, server, mv="2.101", tag="t", delete_on_termination="yes")
    assert (answer.status_code, answer.text) == (202, "")
    [row] = cloud.rows(schema.block_devices)
    assert (row.tag, row.delete_on_termination) == ("t", True)


def test_a_server_shows_its_volumes(cloud: Cloud, server: str) -> None:
    name = "os-extended-volumes:volumes_attached"
    attach(cloud, server)
    finish_attachments(cloud, server)
    for mv, shown in (("2.1", {}), ("2.3", {"delete_on_termination": False})):
        expected = [{"id": VOLUME, **shown}]
        assert cloud.call("GET", f"/servers/{server}", mv=mv).json["server"][name] == expected
        [listed] = cloud.call("GET", "/servers/detail", mv=mv).json["servers"]
        assert listed[name] == expected
    body = {"server": {"name": "other"}}
    changed = cloud.call("PUT", f"/servers/{server}", body, mv="2.75").json["server"]
    assert changed[name] == [{"id": VOLUME, "delete_on_termination": False}]


def test_several_volumes_come_in_turn(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    assert attach(cloud, server, OTHER).status_code == 409, "the first is still being attached"
    finish_attachments(cloud, server)
    assert attach(cloud, server, OTHER).json["volumeAttachment"]["device"] == "/dev/vdc"
    listed = cloud.call("GET", path(server)).json["volumeAttachments"]
    assert [one["id"] for one in listed] == [VOLUME, OTHER]
    for query, found in (("?limit=1", [VOLUME]), ("?offset=1", [OTHER]), ("?limit=0", [])):
        page = cloud.call("GET", path(server) + query).json["volumeAttachments"]
        assert [one["id"] for one in page] == found


def refused(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    [problem] = answer.json.values()
    return str(problem["message"])


def test_a_volume_that_the_server_has_is_refused(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    finish_attachments(cloud, server)
    assert refused(attach(cloud, server), 400) == (
        f"Invalid volume: volume {VOLUME} already attached"
    )


@pytest.mark.parametrize(
    "device", ["/dev/vda", "/dev/vdb", "/dev/vdf", "/dev/vdaa", "/dev/vd", "/dev/vdb1", "/dev/sdz"]
)
def test_attach_volume_with_device_answers_device_of_guest(
    cloud: Cloud, server: str, device: str
) -> None:
    """Guests count their disks, so a device name of the caller's would be another disk's."""
    for volume, name in ((VOLUME, "/dev/vdb"), (OTHER, "/dev/vdc")):
        answer = attach(cloud, server, volume, device=device)
        assert answer.json["volumeAttachment"]["device"] == name
        finish_attachments(cloud, server)
        shown = cloud.call("GET", path(server, volume)).json["volumeAttachment"]
        assert shown["device"] == name


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"status": "in-use"}, "status must be 'available'. Currently in 'in-use'"),
        ({"status": "error"}, "Currently in 'error'"),
        ({"multiattach": True}, "starting with compute API version 2.60"),
        ({"encrypted": True}, "is encrypted"),
    ],
)
def test_a_volume_that_cannot_be_had_is_refused(
    cloud: Cloud, volumes: Volumes, server: str, values: dict[str, Any], text: str
) -> None:
    volumes.change(VOLUME, **values)
    assert text in refused(attach(cloud, server), 400)
    assert cloud.rows(schema.block_devices) == []


def test_several_servers_may_have_a_shared_volume(cloud: Cloud, server: str) -> None:
    assert attach(cloud, server, SHARED, mv="2.59").status_code == 400
    assert attach(cloud, server, SHARED, mv="2.60").status_code == 200
    [row] = cloud.rows(schema.block_devices)
    assert row.multiattach


@pytest.mark.parametrize("token", ["user", "admin"])
def test_a_volume_that_is_not_there_is_not_found(cloud: Cloud, server: str, token: str) -> None:
    missing = "0" * 8 + "-0000-4000-8000-" + "0" * 12
    answer = attach(cloud, server, missing, token=token)
    assert refused(answer, 404) == f"Volume {missing} could not be found."


def test_a_server_stays_in_its_zone(make_cloud: Callable[..., Cloud]) -> None:
    cloud = make_cloud(cross_az_attach=False)
    volumes = add_volume_service(cloud)
    server = cloud.create()
    cloud.rest(server)
    volumes.change(VOLUME, availability_zone="elsewhere")
    assert "not in the same availability_zone. Instance is in nova" in refused(
        attach(cloud, server), 400
    )
    assert attach(cloud, server, OTHER).status_code == 200


@pytest.mark.parametrize("state", ["suspended", "error", "rescued"])
def test_states_that_forbid_it_are_refused(cloud: Cloud, server: str, state: str) -> None:
    attach(cloud, server)
    finish_attachments(cloud, server, vm_state=state)
    assert refused(attach(cloud, server, OTHER), 409).startswith("Cannot 'attach_volume'")
    answer = cloud.call("DELETE", path(server, VOLUME))
    assert refused(answer, 409).startswith("Cannot 'detach_volume'")


@pytest.mark.parametrize("state", ["shelved", "shelved_offloaded"])
def test_shelved_servers_change_since_their_version(
    cloud: Cloud, volumes: Volumes, server: str, state: str
) -> None:
    host = None if state == "shelved_offloaded" else "host1"
    cloud.rest(server, state, host=host)
    assert refused(attach(cloud, server, mv="2.19"), 409).startswith("Cannot 'attach_volume'")
    assert attach(cloud, server, mv="2.20").status_code == 200
    finish_attachments(cloud, server, vm_state=state, host=host)
    assert cloud.call("DELETE", path(server, VOLUME), mv="2.19").status_code == 409
    assert cloud.call("DELETE", path(server, VOLUME), mv="2.20").status_code == 202
    if host is None:
        cloud.rest(server, state, host=host)
        assert "Tagged" in refused(attach(cloud, server, OTHER, mv="2.49", tag="t"), 400)
        assert "multiattach" in refused(attach(cloud, server, SHARED, mv="2.60"), 400)


def test_a_volume_is_being_detached(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    finish_attachments(cloud, server)
    assert cloud.call("DELETE", path(server, VOLUME)).status_code == 202
    [row], [action] = cloud.rows(schema.block_devices), begun(cloud, "detach_volume")
    assert row.status == "detaching"
    assert action.args == {
        "was": "active",
        "block_device": row.uuid,
        "volume_id": VOLUME,
        "before": "attached",
    }
    assert cloud.call("DELETE", path(server, VOLUME)).status_code == 202, "the same detach"
    assert begun(cloud, "detach_volume") == [action]
    assert cloud.call("DELETE", path(server, OTHER)).status_code == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_what_the_server_does_not_have_is_not_found(cloud: Cloud, server: str, method: str) -> None:
    body = {"volumeAttachment": {"volumeId": OTHER}} if method == "PUT" else None
    answer = cloud.call(method, path(server, OTHER), body, mv="2.85")
    assert refused(answer, 404) == f"Instance {server} is not attached to volume {OTHER}"


def test_what_a_server_boots_from_stays(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    finish_attachments(cloud, server)
    table = schema.block_devices
    cloud.change(table, table.c.server_id == server, boot_index=0)
    answer = cloud.call("DELETE", path(server, VOLUME))
    assert refused(answer, 403) == "Cannot detach a root device volume"


def test_what_goes_with_the_server_is_changed(cloud: Cloud, server: str) -> None:
    attach(cloud, server, mv="2.49", tag="t")
    finish_attachments(cloud, server)
    same = {"id": VOLUME, "serverId": server, "device": "/dev/vdb", "tag": "t"}
    for wanted in (True, False):
        body = {"volumeAttachment": {"volumeId": VOLUME, "delete_on_termination": wanted, **same}}
        answer = cloud.call("PUT", path(server, VOLUME), body, mv="2.85")
        assert (answer.status_code, answer.text) == (202, "")
        [row] = cloud.rows(schema.block_devices)
        assert bool(row.delete_on_termination) is wanted
    for name, value in (("id", OTHER), ("serverId", OTHER), ("device", "/dev/vdc"), ("tag", "u")):
        body = {"volumeAttachment": {"volumeId": VOLUME, name: value}}
        answer = cloud.call("PUT", path(server, VOLUME), body, mv="2.85")
        assert refused(answer, 400) == f"The {name} property is not mutable."


@pytest.fixture
def migrating(cloud: Cloud, volumes: Volumes, server: str) -> str:
    """A server whose volume is being migrated to OTHER."""
    attach(cloud, server)
    finish_attachments(cloud, server)
    volumes.change(VOLUME, status="in-use", servers=(server,), migration="migrating")
    volumes.change(OTHER, migration=f"target:{VOLUME}")
    return server


def swap(cloud: Cloud, server: str, mv: str = "2.85", token: str = "admin", **more: Any) -> Any:
    body = {"volumeAttachment": {"volumeId": OTHER, **more}}
    return cloud.call("PUT", path(server, VOLUME), body, mv=mv, token=token)


@pytest.mark.parametrize("mv", ["2.1", "2.85"])
def test_the_service_has_volumes_exchanged(cloud: Cloud, migrating: str, mv: str) -> None:
    answer = swap(cloud, migrating, mv)
    assert (answer.status_code, answer.text) == (202, "")
    [row], [action] = cloud.rows(schema.block_devices), begun(cloud, "swap_volume")
    assert action.args == {
        "was": "active",
        "block_device": row.uuid,
        "volume_id": VOLUME,
        "new_volume_id": OTHER,
        "new_size_gb": 2,
    }
    assert (row.volume_id, row.status) == (VOLUME, "attached")
    assert swap(cloud, migrating, mv).status_code == 409


def test_what_else_is_asked_for_is_changed_too(cloud: Cloud, migrating: str) -> None:
    assert swap(cloud, migrating, delete_on_termination=True).status_code == 202
    [row] = cloud.rows(schema.block_devices)
    assert row.delete_on_termination and begun(cloud, "swap_volume")
    assert "not mutable" in refused(swap(cloud, migrating, tag="another"), 400)


@pytest.mark.parametrize(("token", "status"), [("user", 403), ("service", 404)])
def test_users_exchange_no_volumes(cloud: Cloud, migrating: str, token: str, status: int) -> None:
    for mv in ("2.1", "2.85"):
        assert swap(cloud, migrating, mv, token).status_code == status
    assert begun(cloud, "swap_volume") == []


@pytest.mark.parametrize(
    ("which", "changed", "status", "said"),
    [
        (VOLUME, {"migration": ""}, 409, "is not migrating; this API should only be called by"),
        (VOLUME, {"migration": "success"}, 409, "is not migrating"),
        (VOLUME, {"servers": (OTHER,)}, 400, "attached to a different instance"),
        (VOLUME, {"encrypted": True}, 400, "is encrypted"),
        (OTHER, {"servers": (OTHER,)}, 400, "must be detached in order to swap"),
        (OTHER, {"size_gb": 1}, 400, "must be the same size or larger"),
        (OTHER, {"migration": ""}, 400, "is not the one to which"),
        (OTHER, {"encrypted": True}, 400, "is encrypted"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(
    cloud: Cloud,
    volumes: Volumes,
    migrating: str,
    which: str,
    changed: Any,
    status: int,
    said: str,
) -> None:
    volumes.change(which, **changed)
    assert said in refused(swap(cloud, migrating), status)
    assert begun(cloud, "swap_volume") == []


def test_an_exchange_needs_both_and_one_user(
    cloud: Cloud, volumes: Volumes, migrating: str
) -> None:
    volumes.change(VOLUME, servers=(migrating, OTHER))
    assert "multi-attach" in refused(swap(cloud, migrating), 400)
    volumes.change(VOLUME, servers=(migrating,))
    kept = volumes.held.pop(OTHER)
    assert "could not be found" in refused(swap(cloud, migrating), 400)
    volumes.held[OTHER] = kept
    cloud.rest(migrating, vm_state="stopped")
    assert refused(swap(cloud, migrating), 409).startswith("Cannot 'swap_volume'")
    del volumes.held[VOLUME]
    assert "could not be found" in refused(swap(cloud, migrating), 404)


def test_an_attachment_is_there_since_2_89_when_it_has_an_id(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    for mv, there in (("2.88", True), ("2.89", False)):
        assert bool(cloud.call("GET", path(server), mv=mv).json["volumeAttachments"]) is there
        answer = cloud.call("GET", path(server, VOLUME), mv=mv)
        assert answer.status_code == (200 if there else 404)
    finish_attachments(cloud, server)
    [row] = cloud.rows(schema.block_devices)
    shown = cloud.call("GET", path(server, VOLUME), mv="2.89").json["volumeAttachment"]
    assert shown["attachment_id"] == row.attachment_id


def test_a_cloud_without_the_service_says_so(cloud: Cloud, volumes: Volumes, server: str) -> None:
    volumes.there = False
    assert "no block storage service" in refused(attach(cloud, server), 501)
    cloud.services.volumes = None
    assert "no block storage service" in refused(attach(cloud, server), 501)
    assert cloud.call("GET", path(server)).json == {"volumeAttachments": []}


def fail(cloud: Cloud) -> None:
    """The next action that is begun has failed at once."""

    def wake(neighbours: bool = False) -> None:
        action = begun(cloud, "attach_volume")[-1]
        values = {"state": "failed", "message": "Invalid volume: taken"}
        cloud.change(schema.actions, schema.actions.c.id == action.id, **values)

    cloud.wakeup.wake = wake  # type: ignore[method-assign]


def test_what_the_service_refuses_is_the_answer(make_cloud: Callable[..., Cloud]) -> None:
    cloud = make_cloud(answer_timeout_seconds=5)
    add_volume_service(cloud)
    server = cloud.create()
    cloud.rest(server)
    fail(cloud)
    assert "taken" in refused(attach(cloud, server), 400)


def test_a_service_that_does_not_answer_is_said(
    cloud: Cloud, volumes: Volumes, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(token: str, volume_id: str) -> None:
        raise errors.Unavailable("The block storage service does not answer; try again later.")

    monkeypatch.setattr(volumes, "volume", silent)
    assert "does not answer" in refused(attach(cloud, server), 503)
    assert cloud.rows(schema.block_devices) == []


def test_a_volume_that_has_grown_is_seen(cloud: Cloud, server: str) -> None:
    attach(cloud, server)
    event = {"name": "volume-extended", "server_uuid": server, "tag": VOLUME}

    def codes(**more: Any) -> list[int]:
        answer = cloud.call(
            "POST",
            "/os-server-external-events",
            {"events": [{**event, **more}]},
            mv="2.51",
            token="service",
        )
        return [one["code"] for one in answer.json["events"]]

    assert codes() == [422], "it is still being attached"
    finish_attachments(cloud, server, locked=True)
    assert codes(tag=OTHER) == [404] and codes() == [200]
    [action], [row] = begun(cloud, "extend_volume"), cloud.rows(schema.block_devices)
    assert action.args == {"was": "active", "block_device": row.uuid, "volume_id": VOLUME}


@pytest.fixture
def busy(make_cloud: Callable[..., Cloud]) -> Iterator[tuple[Cloud, str]]:
    """A cloud whose actions take a moment each, and a server of it."""
    cloud, ended = make_cloud(answer_timeout_seconds=30), threading.Event()
    server = cloud.create()
    cloud.rest(server)

    def conduct() -> None:
        while not ended.wait(0.02):
            if any(row.action for row in cloud.rows(schema.servers)):
                finish_attachments(cloud, server)

    conductor = threading.Thread(target=conduct)
    conductor.start()
    yield cloud, server
    ended.set()
    conductor.join(30)


def test_parallel_attachments_to_one_server_take_turns(busy: tuple[Cloud, str]) -> None:
    cloud, server = busy
    service, volumes = add_volume_service(cloud), [ids.new() for _ in range(20)]
    for volume in volumes:
        service.held[volume] = replace(service.held[VOLUME], id=volume)
    with ThreadPoolExecutor(len(volumes)) as pool:
        answers = list(pool.map(lambda one: attach(cloud, server, one, mv="2.101"), volumes))
    assert [answer.status_code for answer in answers] == [202] * len(volumes)
    assert len(begun(cloud, "attach_volume")) == len(volumes)


def test_action_waits_for_attachment_that_shows_no_task_state(busy: tuple[Cloud, str]) -> None:
    cloud, server = busy
    add_volume_service(cloud)
    assert attach(cloud, server, mv="2.101").status_code == 202
    answer = cloud.call("POST", f"/servers/{server}/action", {"pause": None})
    assert answer.status_code == 202, answer.text
