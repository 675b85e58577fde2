# SPDX-License-Identifier: Apache-2.0
"""POST /os-server-external-events: permitted roles, the effect of each event, and the codes."""

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
        200 if {event["code"] for event in answer.json["events"]} == {200} else 207
    )
    return [event["code"] for event in answer.json["events"]]


@pytest.fixture
def plugged_server(networked_cloud: Cloud, networks: Networks) -> tuple[str, str]:
    """Return the id of a resting server with one port, and the port's id."""
    server, red = networked_cloud.create(mv="2.37"), networks.add_network("red", PROJECT)
    port = networks.add_port(red, PROJECT, device_id=server)
    networked_cloud.set_state(server, interfaces=[to_wire(Interface(port, red, "red", tag="t"))])
    return server, port


def test_vif_plugged_event_wakes_action_waiting_for_ports(networked_cloud: Cloud) -> None:
    waiting, building = networked_cloud.create(mv="2.37"), networked_cloud.create(mv="2.37")
    for server, step in ((waiting, "plug"), (building, "build")):
        networked_cloud.change(schema.servers, schema.servers.c.id == server, host="host1")
        networked_cloud.change(
            schema.actions, schema.actions.c.server_id == server, step=step, due_at=2**60
        )
    woken = networked_cloud.wakeup.count
    answer = send(
        networked_cloud,
        event("network-vif-plugged", waiting, "p1"),
        event("network-vif-unplugged", building, "p2"),
    )
    assert answer.json == {
        "events": [
            {
                "name": "network-vif-plugged",
                "server_uuid": waiting,
                "tag": "p1",
                "status": "completed",
                "code": 200,
            },
            {
                "name": "network-vif-unplugged",
                "server_uuid": building,
                "tag": "p2",
                "status": "completed",
                "code": 200,
            },
        ]
    }
    due = {row.server_id: row.due_at for row in networked_cloud.rows(schema.actions)}
    assert due[waiting] <= networked_cloud.store.now()
    assert due[building] == 2**60
    assert networked_cloud.wakeup.count > woken


def test_network_changed_events_refresh_interfaces_with_one_port_query(
    networked_cloud: Cloud, networks: Networks, plugged_server: tuple[str, str]
) -> None:
    server, port = plugged_server
    networks.floating_ips.append(
        {"port_id": port, "fixed_ip_address": "10.0.0.10", "floating_ip_address": "172.24.4.9"}
    )
    networks.ports_by_id[port]["status"] = "ACTIVE"
    assert codes(
        send(
            networked_cloud, event("network-changed", server), event("network-changed", server, "x")
        )
    ) == [200, 200]
    [row] = networked_cloud.rows(schema.servers)
    assert (row.interfaces[0]["active"], row.interfaces[0]["mtu"], row.interfaces[0]["tag"]) == (
        True,
        1450,
        "t",
    )
    addresses = networked_cloud.call("GET", f"/servers/{server}/ips/red").json["red"]
    assert [address["addr"] for address in addresses] == ["10.0.0.10", "172.24.4.9"]
    assert networks.queries["ports"] == 1


def test_network_changed_event_returns_503_when_network_service_is_down(
    networked_cloud: Cloud, networks: Networks, plugged_server: tuple[str, str]
) -> None:
    networks.down = True
    answer = send(networked_cloud, event("network-changed", plugged_server[0]))
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("state", "begins"),
    [
        ({}, True),
        ({"vm_state": "stopped"}, True),
        ({"locked": True, "locked_by": "owner"}, True),
        ({"vm_state": "shelved"}, False),
        ({"task_state": "rebuilding"}, False),
        ({"action": "another"}, False),
    ],
)
def test_vif_deleted_event_begins_detach_or_records_cleanup_if_not_allowed(
    networked_cloud: Cloud, plugged_server: tuple[str, str], state: dict[str, Any], begins: bool
) -> None:
    server, port = plugged_server
    networked_cloud.set_state(server, **state)
    assert codes(send(networked_cloud, event("network-vif-deleted", server, port))) == [200]
    detachments = [
        (row.workflow, row.args["port"])
        for row in networked_cloud.rows(schema.actions)
        if row.name == "detach_interface"
    ]
    assert detachments == ([("detach_interface", port)] if begins else [])
    assert pending_cleanups(networked_cloud) == ([] if begins else [("gone-port", port, server)])


def test_vif_deleted_event_during_attach_records_pending_cleanup(
    networked_cloud: Cloud, plugged_server: tuple[str, str]
) -> None:
    """The server's row contains the port only after the guest has the interface."""
    server, arriving = plugged_server[0], str(uuid.uuid4())
    networked_cloud.set_state(server, action="another")
    assert (
        codes(
            send(
                networked_cloud,
                event("network-vif-deleted", server, arriving),
                event("network-vif-deleted", server, arriving),
                event("network-vif-deleted", server, "no id " * 40),
            )
        )
        == [200] * 3
    )
    assert pending_cleanups(networked_cloud) == [("gone-port", arriving, server)]


def test_vif_deleted_event_during_detach_or_delete_records_no_cleanup(
    networked_cloud: Cloud, plugged_server: tuple[str, str]
) -> None:
    server, port = plugged_server
    answer = networked_cloud.call("DELETE", f"/servers/{server}/os-interface/{port}")
    assert answer.status_code == 202
    assert codes(send(networked_cloud, event("network-vif-deleted", server, port))) == [200]
    assert networked_cloud.call("DELETE", f"/servers/{server}").status_code == 204
    assert codes(send(networked_cloud, event("network-vif-deleted", server, port))) == [200]
    assert pending_cleanups(networked_cloud) == []


def pending_cleanups(cloud: Cloud) -> list[tuple[str, str, str]]:
    return [(row.kind, row.target, row.server_id) for row in cloud.rows(schema.cleanups)]


def test_vif_deleted_event_for_unknown_port_begins_no_action(
    networked_cloud: Cloud, plugged_server: tuple[str, str]
) -> None:
    assert codes(
        send(networked_cloud, event("network-vif-deleted", plugged_server[0], "another"))
    ) == [200]
    assert [row.name for row in networked_cloud.rows(schema.actions)] == ["create"]


def test_external_events_return_a_code_for_each_event_and_207(
    networked_cloud: Cloud, plugged_server: tuple[str, str]
) -> None:
    server, _ = plugged_server
    unplaced = networked_cloud.create(mv="2.37")
    answer = send(
        networked_cloud,
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
    assert [item["status"] for item in answer.json["events"]] == ["completed"] + ["failed"] * 8


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
def test_bad_external_event_tag_has_code_400_but_404_for_unknown_server(
    networked_cloud: Cloud, name: str, tag: str | None
) -> None:
    unplaced = networked_cloud.create(mv="2.37")
    assert codes(send(networked_cloud, event(name, UNKNOWN, tag), event(name, unplaced, tag))) == [
        404,
        400,
    ]


def test_external_event_for_deleted_server_has_code_404(
    networked_cloud: Cloud, plugged_server: tuple[str, str]
) -> None:
    networked_cloud.change(schema.servers, schema.servers.c.id == plugged_server[0], deleted=1)
    assert codes(send(networked_cloud, event("network-changed", plugged_server[0]))) == [404]


@pytest.mark.parametrize("since", sorted(NAMES))
def test_external_event_names_are_accepted_from_their_microversion(
    networked_cloud: Cloud, plugged_server: tuple[str, str], since: int
) -> None:
    for name in NAMES[since]:
        body = event(name, plugged_server[0], "POWER_ON")
        assert send(networked_cloud, body, mv=f"2.{since}").status_code in (200, 207)
        if since > 1:
            assert send(networked_cloud, body, mv=f"2.{since - 1}").status_code == 400


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
def test_external_events_with_invalid_body_return_400(networked_cloud: Cloud, body: Any) -> None:
    answer = networked_cloud.call("POST", "/os-server-external-events", body, token="service")
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("token", "status"),
    [("service", 207), ("admin", 207), ("user", 403), ("manager", 403), ("reader", 403)],
)
def test_external_events_return_403_unless_sent_by_service_or_admin(
    networked_cloud: Cloud, token: str, status: int
) -> None:
    assert (
        send(networked_cloud, event("network-changed", UNKNOWN), token=token).status_code == status
    )


def test_network_changed_event_has_code_422_without_network_service(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.set_state(server)
    assert codes(
        send(cloud, event("network-changed", server), event("network-vif-plugged", server, "p"))
    ) == [422, 200]


def test_inject_network_info_by_admin_refreshes_interfaces(
    networked_cloud: Cloud, networks: Networks, plugged_server: tuple[str, str]
) -> None:
    server, port = plugged_server

    def inject(token: str = "admin", body: Any = None) -> int:
        answer = networked_cloud.call(
            "POST", f"/servers/{server}/action", {"injectNetworkInfo": body}, token=token
        )
        return int(answer.status_code)

    assert inject("user") == 403
    assert not networked_cloud.rows(schema.servers)[0].interfaces[0]["addresses"]
    assert inject() == 202 and inject(body={}) == 202
    [interface] = networked_cloud.rows(schema.servers)[0].interfaces
    assert interface["addresses"] and interface["port"] == port and interface["tag"] == "t"
    networks.has_endpoint = False
    assert inject() == 202, "a cloud without a network service has nothing to read"
