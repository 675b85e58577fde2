# SPDX-License-Identifier: Apache-2.0
"""The actions addFloatingIp, removeFloatingIp, addFixedIp and removeFixedIp, up to 2.43.

They change the network service at once, without an action of a conductor.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import ids
from common.store import schema
from tests.api.conftest import OTHER, PROJECT, Cloud
from tests.api.networks import Networks

ACTIONS = {
    "addFloatingIp": {"address": "172.24.4.2"},
    "removeFloatingIp": {"address": "172.24.4.2"},
    "addFixedIp": {"networkId": ids.new()},
    "removeFixedIp": {"address": "10.0.0.9"},
}
EACH_ACTION = pytest.mark.parametrize("name", ACTIONS)


def act(
    cloud: Cloud, server: str, name: str, mv: str = "2.43", token: str = "user", **body: Any
) -> Any:
    return cloud.call(
        "POST", f"/servers/{server}/action", {name: body or ACTIONS[name]}, mv=mv, token=token
    )


@pytest.fixture
def scene(networked_cloud: Cloud, networks: Networks) -> tuple[Cloud, Networks, str]:
    """Return a cloud, its network service and a server.

    The server has the address 10.0.0.9. A router leads to it, and 172.24.4.2 is a free floating IP.
    """
    server, red = networked_cloud.create(mv="2.37"), networks.add_network("red", PROJECT)
    public = networks.add_network("public", OTHER, "172.24.4.0/29", external=True)
    networks.add_router(public, red)
    networks.add_port(red, PROJECT, "10.0.0.9", device_id=server)
    networks.create("user", "floatingips", {"floating_network_id": public})
    networked_cloud.set_state(server)
    return networked_cloud, networks, server


def find_fixed_address(networks: Networks) -> str | None:
    address: str | None = networks.floating_ips[0]["fixed_ip_address"]
    return address


def list_fixed_addresses(networks: Networks, server: str) -> list[str]:
    return [
        fixed_ip["ip_address"]
        for port in networks.ports("user", device_id=server)
        for fixed_ip in port["fixed_ips"]
    ]


@EACH_ACTION
def test_address_actions_refuse_2_44_wrong_roles_bodies_and_silent_service(
    scene: tuple[Cloud, Networks, str], cloud: Cloud, name: str
) -> None:
    networked_cloud, networks, server = scene
    assert act(networked_cloud, server, name, mv="2.44").status_code == 404
    assert act(networked_cloud, server, name, token="reader").status_code == 403
    assert act(networked_cloud, server, name, token="stranger").status_code == 404
    assert act(networked_cloud, ids.new(), name).status_code == 404
    assert act(networked_cloud, server, name, more="x").status_code == 400
    assert act(networked_cloud, server, name, more="x", **ACTIONS[name]).status_code == 400
    assert act(cloud, cloud.create(), name).status_code == 404
    networks.down = True
    assert act(networked_cloud, server, name).status_code == 503


def test_add_and_remove_floating_ip_change_network_service_at_once(
    scene: tuple[Cloud, Networks, str],
) -> None:
    networked_cloud, networks, server = scene
    before, woken = networked_cloud.rows(schema.actions), networked_cloud.wakeup.count
    for mv in ("2.1", "2.43"):
        answer = act(networked_cloud, server, "addFloatingIp", mv=mv)
        assert (answer.status_code, answer.text) == (202, "")
        assert find_fixed_address(networks) == "10.0.0.9"
        assert act(networked_cloud, server, "removeFloatingIp", mv=mv).status_code == 202
        assert find_fixed_address(networks) is None
        assert act(networked_cloud, server, "removeFloatingIp", mv=mv).status_code == 409
    assert (networked_cloud.rows(schema.actions), networked_cloud.wakeup.count) == (before, woken)


def test_add_floating_ip_ignores_lock_and_running_action(
    scene: tuple[Cloud, Networks, str],
) -> None:
    networked_cloud, networks, server = scene
    networked_cloud.set_state(
        server, task_state="rebooting", action="held", locked=True, locked_by="admin"
    )
    assert act(networked_cloud, server, "addFloatingIp").status_code == 202
    assert find_fixed_address(networks) == "10.0.0.9"


def test_add_floating_ip_uses_first_ipv4_or_requested_fixed_address(
    scene: tuple[Cloud, Networks, str],
) -> None:
    networked_cloud, networks, server = scene
    six = networks.add_network("six", PROJECT, "fd00::/64")
    port = networks.ports("user", device_id=server)[0]
    port["fixed_ips"] = [
        *networks.port("user", networks.add_port(six, PROJECT, "fd00::9"))["fixed_ips"],
        *port["fixed_ips"],
        {"subnet_id": port["fixed_ips"][0]["subnet_id"], "ip_address": "10.0.0.8"},
    ]
    assert act(networked_cloud, server, "addFloatingIp").status_code == 202
    assert find_fixed_address(networks) == "10.0.0.9"
    assert (
        act(
            networked_cloud, server, "addFloatingIp", address="172.24.4.2", fixed_address="10.0.0.8"
        ).status_code
        == 202
    )
    assert find_fixed_address(networks) == "10.0.0.8"
    answer = act(
        networked_cloud, server, "addFloatingIp", address="172.24.4.2", fixed_address="10.0.0.7"
    )
    assert answer.status_code == 400
    assert "10.0.0.7 is not a fixed address of server" in answer.json["badRequest"]["message"]
    port["fixed_ips"] = port["fixed_ips"][:1]
    # Only an IPv6 address is left.
    assert act(networked_cloud, server, "addFloatingIp").status_code == 400
    port["fixed_ips"] = []
    assert act(networked_cloud, server, "addFloatingIp").status_code == 400


def test_floating_ip_actions_refuse_unusable_addresses(scene: tuple[Cloud, Networks, str]) -> None:
    networked_cloud, networks, server = scene
    for name in ("addFloatingIp", "removeFloatingIp"):
        assert act(networked_cloud, server, name, address="172.24.4.6").status_code == 404
        assert act(networked_cloud, server, name, address="nowhere").status_code == 400
    networks.create(
        "user",
        "floatingips",
        {"floating_network_id": networks.floating_ips[0]["floating_network_id"]},
    )
    assert act(networked_cloud, server, "addFloatingIp").status_code == 202
    # The fixed address has a floating IP already.
    assert act(networked_cloud, server, "addFloatingIp", address="172.24.4.3").status_code == 400
    other = networked_cloud.create(mv="2.37")
    networked_cloud.set_state(other)
    assert act(networked_cloud, other, "removeFloatingIp").status_code == 409
    assert find_fixed_address(networks) == "10.0.0.9"
    networks.routes.clear()
    assert act(networked_cloud, server, "addFloatingIp").status_code == 400
    networks.floating_ips[1]["floating_ip_address"] = "172.24.4.2"
    assert act(networked_cloud, server, "addFloatingIp").status_code == 409


def test_add_and_remove_fixed_ip_change_port(scene: tuple[Cloud, Networks, str]) -> None:
    networked_cloud, networks, server = scene
    [port] = networks.ports("user", device_id=server)
    answer = act(networked_cloud, server, "addFixedIp", networkId=port["network_id"])
    assert (answer.status_code, answer.text) == (202, "")
    assert list_fixed_addresses(networks, server) == ["10.0.0.9", "10.0.0.2"]
    assert act(networked_cloud, server, "removeFixedIp", address="10.0.0.9").status_code == 202
    assert list_fixed_addresses(networks, server) == ["10.0.0.2"]
    answer = act(networked_cloud, server, "removeFixedIp", address="10.0.0.9")
    assert answer.status_code == 400
    assert "10.0.0.9 is not a fixed address of server" in answer.json["badRequest"]["message"]


def test_add_fixed_ip_refuses_other_network_and_full_subnet(
    scene: tuple[Cloud, Networks, str],
) -> None:
    networked_cloud, networks, server = scene
    for network in (networks.add_network("blue", PROJECT), "red", 5):
        answer = act(networked_cloud, server, "addFixedIp", networkId=network)
        assert answer.status_code == 404
        assert "attach an interface instead" in answer.json["itemNotFound"]["message"]
    assert act(networked_cloud, server, "addFixedIp", networkId="x" * 37).status_code == 400
    small = networks.add_network("small", PROJECT, "10.9.0.0/30")
    networks.add_port(small, PROJECT, "10.9.0.2", device_id=server)
    # No address is left.
    assert act(networked_cloud, server, "addFixedIp", networkId=small).status_code == 400
    assert list_fixed_addresses(networks, server) == ["10.0.0.9", "10.9.0.2"]
