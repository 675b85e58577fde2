# SPDX-License-Identifier: Apache-2.0
"""POST /os-server-external-events: who may, what each event does, and the code of each."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from common.domain.models import Interface
from common.domain.wire import to_wire
from common.store import schema
from tests.api.conftest import PROJECT, Cloud
from tests.api.networks import Networks

UNKNOWN = "deadbeef-dead-dead-dead-deaddeadbeef"
NAMES = {
    1: ["network-changed", "network-vif-plugged", "network-vif-unplugged", "network-vif-deleted"],
    51: ["volume-extended"],
    76: ["power-update"],
    82: ["accelerator-request-bound"],
    93: ["volume-reimaged"],
}


def send(cloud: Cloud, *events: dict[str, Any], mv: str = "2.104", token: str = "service") -> Any:
    return cloud.call(
        "POST", "/os-server-external-events", {"events": list(events)}, mv=mv, token=token
    )


def event(name: str, server: str, tag: str | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "server_uuid": server, **({} if tag is None else {"tag": tag}), **more}


def codes(answer: Any) -> list[int]:
    assert answer.status_code == (
        200 if {one["code"] for one in answer.json["events"]} == {200} else 207
    )
    return [one["code"] for one in answer.json["events"]]


@pytest.fixture
def plugged(wired: Cloud, networks: Networks) -> tuple[str, str]:
    """A server that rests with one port."""
    server, red = wired.create(mv="2.37"), networks.add_network("red", PROJECT)
    port = networks.add_port(red, PROJECT, device_id=server)
    wired.rest(server, interfaces=[to_wire(Interface(port, red, "red", tag="t"))])
    return server, port


def test_a_plugged_port_wakes_who_waits_for_it(wired: Cloud) -> None:
    waits, works = wired.create(mv="2.37"), wired.create(mv="2.37")
    for server, step in ((waits, "plug"), (works, "build")):
        wired.change(schema.servers, schema.servers.c.id == server, host="host1")
        wired.change(schema.actions, schema.actions.c.server_id == server, step=step, due_at=2**60)
    woken = wired.wakeup.woken
    answer = send(
        wired,
        event("network-vif-plugged", waits, "p1"),
        event("network-vif-unplugged", works, "p2"),
    )
    assert answer.json == {
        "events": [
            {
                "name": "network-vif-plugged",
                "server_uuid": waits,
                "tag": "p1",
                "status": "completed",
                "code": 200,
            },
            {
                "name": "network-vif-unplugged",
                "server_uuid": works,
                "tag": "p2",
                "status": "completed",
                "code": 200,
            },
        ]
    }
    due = {row.server_id: row.due_at for row in wired.rows(schema.actions)}
    assert due[waits] <= wired.store.now()
    assert due[works] == 2**60
    assert wired.wakeup.woken > woken


def test_a_change_is_read_again_with_the_callers_token(
    wired: Cloud, networks: Networks, plugged: tuple[str, str]
) -> None:
    server, port = plugged
    networks.floating_ips.append(
        {"port_id": port, "fixed_ip_address": "10.0.0.10", "floating_ip_address": "172.24.4.9"}
    )
    networks.ports_by_id[port]["status"] = "ACTIVE"
    assert codes(
        send(wired, event("network-changed", server), event("network-changed", server, "x"))
    ) == [200, 200]
    [row] = wired.rows(schema.servers)
    assert (row.interfaces[0]["active"], row.interfaces[0]["mtu"], row.interfaces[0]["tag"]) == (
        True,
        1450,
        "t",
    )
    found = wired.call("GET", f"/servers/{server}/ips/red").json["red"]
    assert [one["addr"] for one in found] == ["10.0.0.10", "172.24.4.9"]
    assert networks.asked["ports"] == 1


def test_a_silent_network_service_makes_the_sender_try_again(
    wired: Cloud, networks: Networks, plugged: tuple[str, str]
) -> None:
    networks.down = True
    answer = send(wired, event("network-changed", plugged[0]))
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("state", "is_begun"),
    [
        ({}, True),
        ({"vm_state": "stopped"}, True),
        ({"locked": True, "locked_by": "owner"}, True),
        ({"vm_state": "shelved"}, False),
        ({"task_state": "rebuilding"}, False),
        ({"action": "another"}, False),
    ],
)
def test_deleted_port_leaves_its_guest_now_or_by_pending_cleanup(
    wired: Cloud, plugged: tuple[str, str], state: dict[str, Any], is_begun: bool
) -> None:
    server, port = plugged
    wired.rest(server, **state)
    assert codes(send(wired, event("network-vif-deleted", server, port))) == [200]
    begun = [
        (row.workflow, row.args["port"])
        for row in wired.rows(schema.actions)
        if row.name == "detach_interface"
    ]
    assert begun == ([("detach_interface", port)] if is_begun else [])
    assert pending(wired) == ([] if is_begun else [("gone-port", port, server)])


def test_port_deleted_during_its_attachment_is_left_to_pending_cleanup(
    wired: Cloud, plugged: tuple[str, str]
) -> None:
    """The server's row has the port only when the guest has it."""
    server, arriving = plugged[0], str(uuid.uuid4())
    wired.rest(server, action="another")
    assert (
        codes(
            send(
                wired,
                event("network-vif-deleted", server, arriving),
                event("network-vif-deleted", server, arriving),
                event("network-vif-deleted", server, "no id " * 40),
            )
        )
        == [200] * 3
    )
    assert pending(wired) == [("gone-port", arriving, server)]


def test_vif_deleted_event_during_detach_or_delete_records_no_cleanup(
    wired: Cloud, plugged: tuple[str, str]
) -> None:
    server, port = plugged
    answer = wired.call("DELETE", f"/servers/{server}/os-interface/{port}")
    assert answer.status_code == 202
    assert codes(send(wired, event("network-vif-deleted", server, port))) == [200]
    assert wired.call("DELETE", f"/servers/{server}").status_code == 204
    assert codes(send(wired, event("network-vif-deleted", server, port))) == [200]
    assert pending(wired) == []


def pending(cloud: Cloud) -> list[tuple[str, str, str]]:
    return [(row.kind, row.target, row.server_id) for row in cloud.rows(schema.cleanups)]


def test_a_deleted_port_that_the_server_never_had(wired: Cloud, plugged: tuple[str, str]) -> None:
    assert codes(send(wired, event("network-vif-deleted", plugged[0], "another"))) == [200]
    assert [row.name for row in wired.rows(schema.actions)] == ["create"]


def test_the_code_of_each_event_and_the_whole(wired: Cloud, plugged: tuple[str, str]) -> None:
    server, _ = plugged
    unplaced = wired.create(mv="2.37")
    answer = send(
        wired,
        event("network-vif-plugged", server, "p"),
        event("network-vif-plugged", UNKNOWN, "p"),
        event("network-vif-plugged", unplaced, "p", status="in-progress"),
        event("volume-extended", server, "v"),
        event("accelerator-request-bound", server),
        event("power-update", server, "POWER_OFF"),
        event("power-update", server, "UP"),
        event("volume-reimaged", server, "v"),
        event("network-vif-deleted", server),
    )
    assert codes(answer) == [200, 404, 422, 404, 400, 422, 400, 404, 400]
    assert [one["status"] for one in answer.json["events"]] == ["completed"] + ["failed"] * 8


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("network-vif-deleted", None),
        ("accelerator-request-bound", None),
        ("power-update", "UP"),
        ("volume-extended", None),
        ("volume-reimaged", None),
    ],
)
def test_who_is_unknown_comes_before_what_is_wrong(
    wired: Cloud, name: str, tag: str | None
) -> None:
    unplaced = wired.create(mv="2.37")
    assert codes(send(wired, event(name, UNKNOWN, tag), event(name, unplaced, tag))) == [404, 400]


def test_a_server_that_is_gone(wired: Cloud, plugged: tuple[str, str]) -> None:
    wired.change(schema.servers, schema.servers.c.id == plugged[0], deleted=1)
    assert codes(send(wired, event("network-changed", plugged[0]))) == [404]


@pytest.mark.parametrize("since", sorted(NAMES))
def test_names_of_events_come_with_versions(
    wired: Cloud, plugged: tuple[str, str], since: int
) -> None:
    for name in NAMES[since]:
        one = event(name, plugged[0], "POWER_ON")
        assert send(wired, one, mv=f"2.{since}").status_code in (200, 207)
        if since > 1:
            assert send(wired, one, mv=f"2.{since - 1}").status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"events": []},
        {"events": {}},
        {"events": [{}]},
        {"events": [{"name": "network-changed"}]},
        {"events": [{"name": "rain", "server_uuid": UNKNOWN}]},
        {"events": [{"name": "network-changed", "server_uuid": 7}]},
        {"events": [{"name": "network-changed", "server_uuid": UNKNOWN, "status": "perhaps"}]},
        {"events": [{"name": "network-changed", "server_uuid": UNKNOWN, "tag": "x" * 256}]},
        {"events": [{"name": "network-changed", "server_uuid": UNKNOWN, "code": 200}]},
    ],
)
def test_bodies_that_do_not_fit(wired: Cloud, body: Any) -> None:
    answer = wired.call("POST", "/os-server-external-events", body, token="service")
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("token", "status"),
    [("service", 207), ("admin", 207), ("user", 403), ("manager", 403), ("reader", 403)],
)
def test_only_services_and_admins_tell_events(wired: Cloud, token: str, status: int) -> None:
    assert send(wired, event("network-changed", UNKNOWN), token=token).status_code == status


def test_a_cloud_without_a_network_service(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.rest(server)
    assert codes(
        send(cloud, event("network-changed", server), event("network-vif-plugged", server, "p"))
    ) == [422, 200]


def test_an_admin_has_the_network_read_again(
    wired: Cloud, networks: Networks, plugged: tuple[str, str]
) -> None:
    server, port = plugged

    def ask(token: str = "admin", body: Any = None) -> int:
        answer = wired.call(
            "POST", f"/servers/{server}/action", {"injectNetworkInfo": body}, token=token
        )
        return int(answer.status_code)

    assert ask("user") == 403
    assert not wired.rows(schema.servers)[0].interfaces[0]["addresses"]
    assert ask() == 202 and ask(body={}) == 202
    [kept] = wired.rows(schema.servers)[0].interfaces
    assert kept["addresses"] and kept["port"] == port and kept["tag"] == "t"
    networks.there = False
    assert ask() == 202, "a cloud without a network service has nothing to read"
