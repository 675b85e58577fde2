# SPDX-License-Identifier: Apache-2.0
"""Routers, floating IPs and agents of the embedded network service, in requests and events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import select

from deploy.one_machine.services.network import schema
from tests.unit.standalone.conftest import Network

Refusal = tuple[int, str]


@dataclass(frozen=True)
class Site:
    """Ids of a router between a project's and an external network, and of a server's port."""

    public: str
    network: str
    subnet: str
    router: str
    port: str


@pytest.fixture
def site(network: Network) -> Site:
    public = network.create(
        "network", role="admin", project="operator", **{"router:external": True}
    )["id"]
    network.create(
        "subnet",
        role="admin",
        project="operator",
        network_id=public,
        cidr="172.24.4.0/28",
        ip_version=4,
        enable_dhcp=False,
    )
    inside, subnet = network.create_network()
    router = network.create("router", name="r", external_gateway_info={"network_id": public})["id"]
    assert (
        network.call(
            "PUT", f"/routers/{router}/add_router_interface", {"subnet_id": subnet}
        ).status_code
        == 200
    )
    port = network.create(
        "port",
        role="admin",
        network_id=inside,
        project_id="mine",
        device_id="server",
        device_owner="compute:nova",
    )["id"]
    return Site(public, inside, subnet, router, port)


def create_floating_ip(network: Network, site: Site, **more: Any) -> Any:
    return network.create("floatingip", floating_network_id=site.public, **more)


def test_router_shows_gateway_and_interface(network: Network, site: Site) -> None:
    router = network.get(f"/routers/{site.router}")["router"]
    info = router["external_gateway_info"]
    assert (info["network_id"], info["enable_snat"], router["status"]) == (
        site.public,
        True,
        "ACTIVE",
    )
    assert [fixed_ip["ip_address"] for fixed_ip in info["external_fixed_ips"]] == ["172.24.4.2"]
    owners = {
        port["device_owner"]: port
        for port in network.get(f"/ports?device_id={site.router}", role="admin")["ports"]
    }
    assert {port["status"] for port in owners.values()} == {"ACTIVE"}
    assert owners["network:router_interface"]["fixed_ips"] == [
        {"subnet_id": site.subnet, "ip_address": "10.0.0.1"}
    ]
    # The gateway port belongs to no project, so tenants do not see it.
    assert owners["network:router_gateway"]["project_id"] == ""


def test_floating_ip_is_associated_and_disassociated_with_events(
    network: Network, site: Site
) -> None:
    created = create_floating_ip(network, site, port_id=site.port)
    assert (created["status"], created["router_id"], created["fixed_ip_address"]) == (
        "ACTIVE",
        site.router,
        "10.0.0.3",
    )
    assert created["port_details"]["device_id"] == "server"
    disassociated = network.change("floatingip", created["id"], port_id=None)
    assert (
        disassociated["status"],
        disassociated["router_id"],
        disassociated["fixed_ip_address"],
        disassociated["port_details"],
    ) == (
        "DOWN",
        None,
        None,
        None,
    )
    reassociated = network.change(
        "floatingip", created["id"], port_id=site.port, fixed_ip_address="10.0.0.3"
    )
    assert reassociated["status"] == "ACTIVE"
    assert [row["id"] for row in network.get("/floatingips?status=ACTIVE")["floatingips"]] == [
        created["id"]
    ]
    assert network.get("/floatingips?status=DOWN")["floatingips"] == []
    with network.fabric.database.read() as connection:
        events = connection.execute(select(schema.events.c.name, schema.events.c.server)).all()
    assert events[-3:] == [("network-changed", "server")] * 3


def test_deleted_floating_ip_is_free_again(network: Network, site: Site) -> None:
    floating_ip = create_floating_ip(network, site, port_id=site.port)
    network.delete("floatingip", floating_ip["id"])
    assert (
        create_floating_ip(network, site)["floating_ip_address"]
        == floating_ip["floating_ip_address"]
    )
    assert len(network.get("/ports?device_owner=network:floatingip", role="admin")["ports"]) == 1


def test_delete_port_disassociates_its_floating_ip(network: Network, site: Site) -> None:
    floating_ip = create_floating_ip(network, site, port_id=site.port)
    network.delete("port", site.port)
    floating_ip_after = network.get(f"/floatingips/{floating_ip['id']}")["floatingip"]
    assert (floating_ip_after["port_id"], floating_ip_after["status"]) == (None, "DOWN")


def test_invalid_floating_ip_is_refused_with_error_of_neutron(network: Network, site: Site) -> None:
    other, _ = network.create_network("10.9.0.0/24")
    apart = network.create("port", network_id=other)["id"]
    create_floating_ip(network, site, port_id=site.port)
    cases: list[tuple[dict[str, Any], Refusal]] = [
        ({"floating_network_id": "nowhere"}, (404, "NetworkNotFound")),
        ({"floating_network_id": site.network}, (400, "BadRequest")),
        ({"floating_network_id": site.public, "port_id": "nowhere"}, (404, "PortNotFound")),
        (
            {"floating_network_id": site.public, "port_id": apart},
            (404, "ExternalGatewayForFloatingIPNotFound"),
        ),
        (
            {"floating_network_id": site.public, "port_id": site.port},
            (409, "FloatingIPPortAlreadyAssociated"),
        ),
        (
            {
                "floating_network_id": site.public,
                "port_id": site.port,
                "fixed_ip_address": "10.0.0.99",
            },
            (400, "BadRequest"),
        ),
        (
            {"floating_network_id": site.public, "fixed_ip_address": "10.0.0.3"},
            (400, "BadRequest"),
        ),
        (
            {"floating_network_id": site.public, "floating_ip_address": "172.24.4.9"},
            (403, "PolicyNotAuthorized"),
        ),
    ]
    for body, refused in cases:
        assert network.refusal("POST", "/floatingips", {"floatingip": body}) == refused
    assert len(network.get("/floatingips")["floatingips"]) == 1
    assert network.refusal(
        "GET",
        f"/floatingips/{network.get('/floatingips')['floatingips'][0]['id']}",
        project="theirs",
    ) == (404, "FloatingIPNotFound")


def test_update_of_floating_ip_with_fixed_address_without_port_returns_400(
    network: Network, site: Site
) -> None:
    floating_ip = create_floating_ip(network, site, port_id=site.port)
    path = f"/floatingips/{floating_ip['id']}"
    for port in ({}, {"port_id": None}):
        body = {"floatingip": {"fixed_ip_address": "10.0.0.9", "description": "new", **port}}
        assert network.refusal("PUT", path, body) == (400, "BadRequest")
    assert network.get(path)["floatingip"] == floating_ip


@pytest.mark.parametrize("field", ["subnet_id", "floating_ip_address"])
def test_create_floating_ip_with_ipv6_address_returns_400(
    network: Network, site: Site, field: str
) -> None:
    """The hosts translate IPv4 addresses only."""
    operator = {"role": "admin", "project": "operator"}
    subnet = network.create(
        "subnet",
        network_id=site.public,
        cidr="2001:db8:4::/64",
        ip_version=6,
        enable_dhcp=False,
        **operator,
    )["id"]
    value = {"subnet_id": subnet, "floating_ip_address": "2001:db8:4::9"}[field]
    body = {"floatingip": {"floating_network_id": site.public, field: value}}
    assert network.refusal("POST", "/floatingips", body, role="admin") == (400, "BadRequest")
    ports = network.get("/ports?device_owner=network:floatingip", role="admin")["ports"]
    assert ports == []


def test_invalid_router_request_is_refused_with_error_of_neutron(
    network: Network, site: Site
) -> None:
    floating_ip = create_floating_ip(network, site, port_id=site.port)
    path, subnet = f"/routers/{site.router}", {"subnet_id": site.subnet}
    cases: list[tuple[str, str, dict[str, Any] | None, Refusal]] = [
        ("PUT", f"{path}/add_router_interface", subnet, (400, "BadRequest")),
        ("PUT", f"{path}/add_router_interface", {}, (400, "BadRequest")),
        ("PUT", f"{path}/add_router_interface", {"subnet_id": "nowhere"}, (404, "SubnetNotFound")),
        ("PUT", f"{path}/add_router_interface", {"port_id": site.port}, (409, "PortInUse")),
        (
            "PUT",
            f"{path}/remove_router_interface",
            subnet,
            (409, "RouterInterfaceInUseByFloatingIP"),
        ),
        (
            "PUT",
            f"{path}/remove_router_interface",
            {"port_id": site.port},
            (404, "RouterInterfaceNotFound"),
        ),
        (
            "PUT",
            path,
            {"router": {"external_gateway_info": None}},
            (409, "RouterExternalGatewayInUseByFloatingIp"),
        ),
        (
            "PUT",
            path,
            {"router": {"external_gateway_info": {"network_id": site.network}}},
            (409, "RouterExternalGatewayInUseByFloatingIp"),
        ),
        (
            "PUT",
            path,
            {"router": {"routes": [{"destination": "10.8.0.0/16", "nexthop": "10.7.0.1"}]}},
            (400, "InvalidRoutes"),
        ),
        ("DELETE", path, None, (409, "RouterInUse")),
        (
            "POST",
            "/routers",
            {"router": {"external_gateway_info": {"network_id": site.network}}},
            (400, "BadRequest"),
        ),
    ]
    for method, target, body, refused in cases:
        assert network.refusal(method, target, body) == refused, target
    network.delete("floatingip", floating_ip["id"])
    assert network.refusal("PUT", f"{path}/remove_router_interface", subnet, project="theirs") == (
        404,
        "RouterNotFound",
    )


def test_delete_router_deletes_its_ports(network: Network, site: Site) -> None:
    path = f"/routers/{site.router}"
    route = [{"destination": "10.8.0.0/16", "nexthop": "10.0.0.9"}]
    assert network.change("router", site.router, routes=route)["routes"] == route
    assert network.refusal(
        "PUT", f"{path}/remove_router_interface", {"subnet_id": site.subnet}
    ) == (409, "RouterInterfaceInUseByRoute")
    network.change("router", site.router, routes=[])
    assert (
        network.call(
            "PUT", f"{path}/remove_router_interface", {"subnet_id": site.subnet}
        ).status_code
        == 200
    )
    network.delete("router", site.router)
    owners = {port["device_owner"] for port in network.get("/ports", role="admin")["ports"]}
    assert owners == {"network:dhcp", "compute:nova"}


def test_add_router_interface_uses_given_port(network: Network, site: Site) -> None:
    inside, _ = network.create_network("10.5.0.0/24")
    port = network.create("port", network_id=inside)
    joined = network.call(
        "PUT", f"/routers/{site.router}/add_router_interface", {"port_id": port["id"]}
    )
    assert joined.json["port_id"] == port["id"]
    port_after = network.get(f"/ports/{port['id']}", role="admin")["port"]
    assert (port_after["device_owner"], port_after["security_groups"], port_after["fixed_ips"]) == (
        "network:router_interface",
        [],
        port["fixed_ips"],
    )


def test_agent_list_shows_hosts_with_reports_to_admin(network: Network) -> None:
    assert network.get("/agents", role="admin")["agents"] == []
    assert network.refusal("GET", "/agents") == (403, "PolicyNotAuthorized")
    report = {"revision": 0, "tunnel_address": "198.18.0.1"}
    assert network.call_as_host("PUT", "", "h1", report).status_code == 204
    [agent] = network.get("/agents?host=h1&alive=true", role="admin")["agents"]
    assert (agent["host"], agent["alive"], agent["configurations"]["tunneling_ip"]) == (
        "h1",
        True,
        "198.18.0.1",
    )
    assert network.get("/agents?host=h2", role="admin")["agents"] == []


def test_network_ip_availability_has_total_and_used_addresses(network: Network, site: Site) -> None:
    availability = network.get(f"/network-ip-availabilities/{site.public}", role="admin")[
        "network_ip_availability"
    ]
    assert (availability["total_ips"], availability["used_ips"]) == (13, 1)
    wide = network.create("network")["id"]
    network.create("subnet", network_id=wide, ip_version=6, cidr="2001:db8::/56")
    path = f"/network-ip-availabilities/{wide}"
    total = network.get(path, role="admin")["network_ip_availability"]["total_ips"]
    assert 2**72 - 3 < total < 2**72
    assert network.refusal("GET", path) == (403, "PolicyNotAuthorized")
    missing = network.refusal("GET", f"/network-ip-availabilities/{site.port}", role="admin")
    assert missing == (404, "NetworkNotFound")


@pytest.mark.parametrize(("role", "count"), [("member", 1), ("admin", 1), ("service,admin", 0)])
def test_port_change_is_notified_unless_made_by_compute_service(
    network: Network, site: Site, role: str, count: int
) -> None:
    network.change(
        "port",
        site.port,
        role=role,
        fixed_ips=[{"subnet_id": site.subnet, "ip_address": "10.0.0.9"}],
    )
    with network.fabric.database.read() as connection:
        names = list(connection.scalars(select(schema.events.c.name)))
    assert names.count("network-changed") == count
