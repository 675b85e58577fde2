# SPDX-License-Identifier: Apache-2.0
"""/servers/{id}/os-interface: list, show, attach and detach, with waits and refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from common.domain import states
from common.domain.models import Interface
from common.domain.wire import to_wire
from common.store import schema
from common.store.servers import actions
from tests.api.conftest import OTHER, PROJECT, Cloud
from tests.api.networks import Networks
from tests.api.test_networks import UNSUPPORTED, add_unsupported_port

UNKNOWN = "deadbeef-dead-dead-dead-deaddeadbeef"
NETWORK, PORT, SUBNET = (f"{number}0000000-0000-4000-8000-000000000000" for number in range(1, 4))
INTERFACE = Interface(
    PORT,
    NETWORK,
    "red",
    "fa:16:3e:00:00:09",
    [
        {
            "address": "10.0.0.9",
            "version": 4,
            "prefix": 24,
            "subnet": SUBNET,
            "gateway": None,
            "dns": [],
            "routes": [],
            "dhcp": True,
            "floating": [],
        }
    ],
    1450,
    "data",
    active=True,
)


class Conductor:
    """A conductor that ends an attachment when woken, with an interface or with a failure."""

    def __init__(self, cloud: Cloud, failure: str | None = None) -> None:
        self.cloud, self.failure, self.count = cloud, failure, 0

    def wake(self, service_calls: bool = False) -> None:
        self.count += 1
        action = next(
            row for row in self.cloud.rows(schema.actions) if row.name == "attach_interface"
        )
        event = {
            "action_id": action.id,
            "seq": 1,
            "step": "attach",
            "attempt": 1,
            "event": "failed" if self.failure else "succeeded",
            "message": self.failure,
        }
        self.cloud.store.write(lambda tx: actions.append(tx, [event]))
        self.cloud.change(
            schema.actions,
            schema.actions.c.id == action.id,
            message=self.failure,
            state="failed" if self.failure else "done",
            data={"interface": to_wire(INTERFACE)},
        )


@pytest.fixture
def red(networks: Networks) -> str:
    return networks.add_network("red", PROJECT)


@pytest.fixture
def server(networked_cloud: Cloud) -> str:
    server_id = networked_cloud.create(mv="2.37")
    networked_cloud.set_state(server_id)
    return server_id


def add_server_port(
    cloud: Cloud, networks: Networks, server: str, network: str, tag: str = ""
) -> str:
    """Add a port to the server in the network service and in the server's record."""
    port = networks.add_port(network, PROJECT, device_id=server, status="ACTIVE")
    cloud.set_state(server, interfaces=[to_wire(Interface(port, network, "red", tag=tag))])
    return port


def attach(cloud: Cloud, server: str, mv: str = "2.49", token: str = "user", **fields: Any) -> Any:
    return cloud.call(
        "POST",
        f"/servers/{server}/os-interface",
        {"interfaceAttachment": fields},
        mv=mv,
        token=token,
    )


def find_actions(cloud: Cloud, name: str) -> list[Any]:
    return [action for action in cloud.rows(schema.actions) if action.name == name]


def test_list_and_show_interfaces_return_ports_of_network_service(
    networked_cloud: Cloud, networks: Networks, server: str, red: str
) -> None:
    port = add_server_port(networked_cloud, networks, server, red, "data")
    networks.add_port(red, PROJECT, device_id="another")
    subnet = networks.networks_by_id[red]["subnets"][0]
    attachment = {
        "port_id": port,
        "net_id": red,
        "mac_addr": "fa:16:3e:00:00:00",
        "port_state": "ACTIVE",
        "fixed_ips": [{"ip_address": "10.0.0.10", "subnet_id": subnet}],
    }
    path = f"/servers/{server}/os-interface"
    assert networked_cloud.call("GET", path).json == {"interfaceAttachments": [attachment]}
    assert networked_cloud.call("GET", f"{path}/{port}").json == {"interfaceAttachment": attachment}
    assert networked_cloud.call("GET", path, mv="2.70").json == {
        "interfaceAttachments": [{**attachment, "tag": "data"}]
    }
    assert networked_cloud.call("GET", f"{path}/{port}", mv="2.70").json == {
        "interfaceAttachment": {**attachment, "tag": "data"}
    }


def test_show_interface_of_malformed_port_id_returns_404_without_lookup(
    networked_cloud: Cloud, networks: Networks, server: str
) -> None:
    networks.queries.clear()
    for text in ("%3Fname=x", "%2E%2E", "eth0"):
        assert (
            networked_cloud.call("GET", f"/servers/{server}/os-interface/{text}").status_code == 404
        )
    assert not networks.queries


def test_show_interface_of_unknown_port_or_of_other_server_returns_404(
    networked_cloud: Cloud, networks: Networks, server: str, red: str
) -> None:
    other = networks.add_port(red, PROJECT, device_id="another")
    for port in (other, UNKNOWN):
        answer = networked_cloud.call("GET", f"/servers/{server}/os-interface/{port}")
        assert answer.json == {
            "itemNotFound": {
                "code": 404,
                "message": f"Server {server} has no interface with port {port}.",
            }
        }


def test_attach_interface_returns_interface_of_completed_action(
    networked_cloud: Cloud, server: str, red: str
) -> None:
    networked_cloud.services.wakeup = Conductor(networked_cloud)
    answer = attach(
        networked_cloud,
        server,
        "2.70",
        net_id=red,
        fixed_ips=[{"ip_address": "10.0.0.9"}],
        tag="data",
    )
    assert answer.status_code == 200
    assert answer.json == {
        "interfaceAttachment": {
            "port_id": PORT,
            "net_id": NETWORK,
            "mac_addr": "fa:16:3e:00:00:09",
            "port_state": "ACTIVE",
            "tag": "data",
            "fixed_ips": [{"ip_address": "10.0.0.9", "subnet_id": SUBNET}],
        }
    }
    [action] = find_actions(networked_cloud, "attach_interface")
    assert (action.workflow, action.args["security_groups"]) == ("attach_interface", [])
    assert action.args["networks"] == [
        {"network": red, "label": "red", "fixed_ip": "10.0.0.9", "tag": "data"}
    ]


def test_attach_interface_returns_409_with_reason_when_action_fails(
    networked_cloud: Cloud, server: str, red: str
) -> None:
    networked_cloud.services.wakeup = Conductor(networked_cloud, "the bridge is not there")
    answer = attach(networked_cloud, server, net_id=red)
    assert answer.json == {
        "conflictingRequest": {"code": 409, "message": "the bridge is not there"}
    }


def test_attach_interface_returns_202_when_action_outlasts_wait(
    networked_cloud: Cloud, server: str, red: str
) -> None:
    answer = attach(networked_cloud, server, net_id=red)
    assert (answer.status_code, answer.text) == (202, "")


def test_attach_interface_accepts_port_or_defaults_to_only_network(
    networked_cloud: Cloud, networks: Networks, server: str, red: str
) -> None:
    port = networks.add_port(red, PROJECT)
    assert attach(networked_cloud, server, port_id=port, tag="t").status_code == 202
    networked_cloud.set_state(server)
    assert attach(networked_cloud, server, tag="u").status_code == 202
    networked_cloud.set_state(server)
    assert networked_cloud.call("POST", f"/servers/{server}/os-interface", {}).status_code == 202
    assert sorted(
        (action.args["networks"] for action in find_actions(networked_cloud, "attach_interface")),
        key=str,
    ) == sorted(
        [
            [{"port": port, "label": "red", "tag": "t"}],
            [{"network": red, "label": "red", "tag": "u"}],
            [{"network": red, "label": "red"}],
        ],
        key=str,
    )


def test_attach_interface_returns_409_only_if_server_stays_busy(
    make_cloud: Callable[..., Cloud], networks: Networks, red: str
) -> None:
    cloud = make_cloud(networks=networks, answer_timeout_seconds=0.3)
    server = cloud.create(mv="2.37")
    cloud.set_state(server, action="another")
    answer = attach(cloud, server, net_id=red)
    assert answer.json == {
        "conflictingRequest": {
            "code": 409,
            "message": f"Instance {server} is busy with another action; try again when it has ended.",
        }
    }
    assert find_actions(cloud, "attach_interface") == []
    free = threading.Timer(0.05, cloud.set_state, (server,))
    free.start()
    assert attach(cloud, server, net_id=red).status_code == 202
    free.join()
    assert len(find_actions(cloud, "attach_interface")) == 1


def test_attach_interface_returns_503_when_wait_slots_are_in_use(
    networked_cloud: Cloud, server: str, red: str
) -> None:
    while networked_cloud.services.wait_slots.acquire(blocking=False):
        pass
    answer = attach(networked_cloud, server, net_id=red)
    assert answer.status_code == 503
    assert find_actions(networked_cloud, "attach_interface") == []


def test_detach_interface_begins_action_and_returns_202(
    networked_cloud: Cloud, networks: Networks, server: str, red: str
) -> None:
    port = add_server_port(networked_cloud, networks, server, red)
    answer = networked_cloud.call("DELETE", f"/servers/{server}/os-interface/{port}")
    assert (answer.status_code, answer.text) == (202, "")
    [action] = find_actions(networked_cloud, "detach_interface")
    assert (action.workflow, action.args) == ("detach_interface", {"was": "active", "port": port})
    busy = networked_cloud.call("DELETE", f"/servers/{server}/os-interface/{port}")
    assert busy.status_code == 409


def test_detach_interface_of_unknown_port_returns_404(networked_cloud: Cloud, server: str) -> None:
    answer = networked_cloud.call("DELETE", f"/servers/{server}/os-interface/{UNKNOWN}")
    assert answer.json == {
        "itemNotFound": {
            "code": 404,
            "message": f"Server {server} has no interface with port {UNKNOWN}.",
        }
    }


@pytest.mark.parametrize("vm_state", states.VM_STATES)
def test_interface_changes_need_active_paused_or_stopped_server(
    networked_cloud: Cloud, networks: Networks, server: str, red: str, vm_state: str
) -> None:
    if vm_state == states.DELETED:
        return
    port = add_server_port(networked_cloud, networks, server, red)
    expected = 202 if vm_state in ("active", "paused", "stopped") else 409
    networked_cloud.set_state(server, vm_state)
    assert attach(networked_cloud, server, net_id=red).status_code == expected
    networked_cloud.set_state(server, vm_state)
    assert (
        networked_cloud.call("DELETE", f"/servers/{server}/os-interface/{port}").status_code
        == expected
    )


def test_interface_changes_of_locked_server_return_409_except_to_admin(
    networked_cloud: Cloud, networks: Networks, server: str, red: str
) -> None:
    port = add_server_port(networked_cloud, networks, server, red)
    networked_cloud.set_state(server, locked=True, locked_by="owner")
    assert attach(networked_cloud, server, net_id=red).status_code == 409
    assert (
        networked_cloud.call("DELETE", f"/servers/{server}/os-interface/{port}").status_code == 409
    )
    assert attach(networked_cloud, server, token="admin", net_id=red).status_code == 202


@pytest.mark.parametrize(
    ("token", "read_status", "change_status"),
    [
        ("user", 200, 202),
        ("reader", 200, 403),
        ("stranger", 404, 404),
        ("nobody", 403, 403),
        ("admin", 200, 202),
    ],
)
def test_interface_changes_return_403_to_reader_and_404_to_other_project(
    networked_cloud: Cloud,
    networks: Networks,
    server: str,
    red: str,
    token: str,
    read_status: int,
    change_status: int,
) -> None:
    port = add_server_port(networked_cloud, networks, server, red)
    path = f"/servers/{server}/os-interface"
    assert networked_cloud.call("GET", path, token=token).status_code == read_status
    assert networked_cloud.call("GET", f"{path}/{port}", token=token).status_code == read_status
    assert (
        networked_cloud.call("DELETE", f"{path}/{port}", token=token).status_code == change_status
    )
    networked_cloud.set_state(server)
    assert attach(networked_cloud, server, token=token, net_id=red).status_code == change_status


def test_attach_interface_of_port_with_ip_allocation_none_begins_action(
    networked_cloud: Cloud, networks: Networks, server: str, red: str
) -> None:
    port = networks.add_port(red, PROJECT, "", ip_allocation="none")
    attach(networked_cloud, server, port_id=port)
    assert [
        action.args["networks"][0]["port"]
        for action in find_actions(networked_cloud, "attach_interface")
    ] == [port]


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_attach_interface_of_unsupported_port_returns_400_with_reason(
    networked_cloud: Cloud, networks: Networks, server: str, red: str, case: str
) -> None:
    port, reason = add_unsupported_port(networks, red, case)
    answer = attach(networked_cloud, server, port_id=port)
    assert answer.status_code == 400
    message = f"Port {port} cannot be used: no host supports its {reason}."
    assert answer.json["badRequest"]["message"] == message
    assert find_actions(networked_cloud, "attach_interface") == []


def test_attach_interface_refuses_unusable_networks_ports_and_addresses(
    networked_cloud: Cloud, networks: Networks, server: str, red: str
) -> None:
    used, dry = (
        networks.add_port(red, PROJECT, "10.0.0.7", device_id="x"),
        networks.add_port(red, PROJECT, ""),
    )
    public, bare = (
        networks.add_network("public", OTHER, external=True),
        networks.add_network("bare", PROJECT, None),
    )
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (400, "Must not input both net_id and port_id", {"net_id": red, "port_id": used}),
        (
            400,
            "Must input net_id when request IP address",
            {"fixed_ips": [{"ip_address": "10.0.0.9"}]},
        ),
        (404, f"Network {UNKNOWN} could not be found.", {"net_id": UNKNOWN}),
        (404, f"Port id {UNKNOWN} could not be found.", {"port_id": UNKNOWN}),
        (409, f"Port {used} is still in use.", {"port_id": used}),
        (400, f"Port {dry} requires a FixedIP in order to be used.", {"port_id": dry}),
        (
            403,
            f"It is not allowed to create an interface on external network {public}",
            {"net_id": public},
        ),
        (400, f"Network {bare} requires a subnet in order to boot instances on.", {"net_id": bare}),
        (
            409,
            "Fixed IP address 10.0.0.7 is already in use on instance x.",
            {"net_id": red, "fixed_ips": [{"ip_address": "10.0.0.7"}]},
        ),
        (
            400,
            f"Fixed IP address 10.9.0.7 is in no subnet of network {red}.",
            {"net_id": red, "fixed_ips": [{"ip_address": "10.9.0.7"}]},
        ),
        (400, "Multiple possible networks found, use a Network ID to be more specific.", {}),
    ]
    for status, message, fields in cases:
        answer = attach(networked_cloud, server, **fields)
        assert [answer.status_code, [fault["message"] for fault in answer.json.values()]] == [
            status,
            [message],
        ]
    networks.limit = 2
    assert (
        attach(networked_cloud, server, net_id=red).json["forbidden"]["message"]
        == "Maximum number of ports exceeded"
    )
    assert find_actions(networked_cloud, "attach_interface") == []
    # Only the create woke a conductor.
    assert networked_cloud.wakeup.count == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"colour": "red"},
        {"net_id": "red"},
        {"fixed_ips": []},
        {"tag": "a,b"},
        {"tag": ""},
        {"fixed_ips": [{"ip_address": "x"}]},
        {"fixed_ips": [{}]},
        {"fixed_ips": [{"ip_address": "10.0.0.1"}, {"ip_address": "10.0.0.2"}]},
    ],
)
def test_attach_interface_with_invalid_body_returns_400(
    networked_cloud: Cloud, server: str, fields: Any
) -> None:
    assert attach(networked_cloud, server, **fields).status_code == 400


def test_attach_interface_accepts_tag_from_2_49(
    networked_cloud: Cloud, server: str, red: str
) -> None:
    assert attach(networked_cloud, server, "2.48", net_id=red, tag="t").status_code == 400
    assert attach(networked_cloud, server, "2.49", net_id=red, tag="t").status_code == 202


def test_attach_interface_returns_400_when_project_has_no_network(
    networked_cloud: Cloud, server: str
) -> None:
    assert attach(networked_cloud, server).json == {
        "badRequest": {
            "code": 400,
            "message": (
                f"No specific network was requested and none are available for project '{PROJECT}'."
            ),
        }
    }


def test_interfaces_without_network_service_are_empty_and_attach_is_501(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.set_state(server)
    path = f"/servers/{server}/os-interface"
    assert cloud.call("GET", path).json == {"interfaceAttachments": []}
    assert cloud.call("GET", f"{path}/{UNKNOWN}").status_code == 404
    assert cloud.call("DELETE", f"{path}/{UNKNOWN}").status_code == 404
    assert attach(cloud, server, net_id=UNKNOWN).status_code == 501
