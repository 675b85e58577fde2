# SPDX-License-Identifier: Apache-2.0
"""Descriptions that the embedded network service sends to hosts: routers, ports and revisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.fabric import Fabric
from deploy.one_machine.services.network.hosts import SILENCE_SECONDS
from deploy.one_machine.services.network.routers import place_routers
from tests.unit.standalone.conftest import Network

SERVICE = {"role": "service", "project": "service"}


class Clock:
    """A clock that the test advances. Each call advances it by a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fabric(tmp_path: Path, clock: Clock) -> Iterator[Fabric]:
    database = Database(tmp_path / "network.db", schema.METADATA)
    yield Fabric(database, monotonic=clock)
    database.close()


@pytest.fixture
def cloud(fabric: Fabric) -> Network:
    """Return a network service for hosts, before the first request of a host."""
    return Network(fabric)


def describe_host(cloud: Network, host: str) -> Any:
    return cloud.describe_host(host)


def acknowledge(cloud: Network, host: str, revision: int, **more: Any) -> None:
    body = {"revision": revision} | more
    assert cloud.call_as_host("PUT", "", host, body).status_code == 204


def bind(cloud: Network, network: str, host: str) -> Any:
    """Create a port that is bound to a host, without waiting for the host."""
    cloud.fabric.hosts.acknowledge(host, 10**9)
    return cloud.create("port", role="admin", network_id=network, **{"binding:host_id": host})


def create_router(cloud: Network) -> tuple[str, str]:
    """Create a router with a gateway and an interface. Return its id and the inner network's."""
    public = cloud.create("network", role="admin", **{"router:external": True})["id"]
    cloud.create(
        "subnet",
        role="admin",
        network_id=public,
        cidr="172.24.4.0/24",
        ip_version=4,
        enable_dhcp=False,
    )
    inner, subnet = cloud.create_network()
    router = cloud.create("router", external_gateway_info={"network_id": public})["id"]
    assert (
        cloud.call(
            "PUT", f"/routers/{router}/add_router_interface", {"subnet_id": subnet}
        ).status_code
        == 200
    )
    return router, inner


def test_router_is_described_only_to_its_host(cloud: Network) -> None:
    for host in ("h1", "h2"):
        describe_host(cloud, host)
        cloud.fabric.hosts.acknowledge(host, 10**9)
    router, inner = create_router(cloud)
    host_description = describe_host(cloud, "h1")
    [interface] = host_description["routers"][router]["interfaces"]
    assert (interface["network"], interface["address"]) == (inner, "10.0.0.1/24")
    outside = host_description["routers"][router]["external"]
    assert (outside["addresses"], outside["gateway"], outside["snat"]) == (
        ["172.24.4.2/24"],
        "172.24.4.1",
        True,
    )
    assert set(host_description["networks"]) == {inner, outside["network"]}
    assert host_description["ports"] == {}
    assert describe_host(cloud, "h2")["routers"] == {}


def test_router_prefers_host_with_external_gateway_and_leaves_silent_host(
    cloud: Network, clock: Clock
) -> None:
    for host in ("h1", "h2"):
        acknowledge(
            cloud,
            host,
            describe_host(cloud, host)["revision"],
            external_gateway=host == "h2",
            tunnel_address=f"192.0.2.{host[1]}",
        )
        cloud.fabric.hosts.acknowledge(host, 10**9)
    router, inner = create_router(cloud)
    assert set(describe_host(cloud, "h2")["routers"]) == {router}
    clock.now += SILENCE_SECONDS + 1
    before = describe_host(cloud, "h1")["revision"]
    place_routers(cloud.fabric)
    host_description = describe_host(cloud, "h1")
    assert set(host_description["routers"]) == {router}
    assert host_description["revision"] > before
    assert describe_host(cloud, "h2")["routers"] == {}
    # A host with an external gateway has every external network.
    assert describe_host(cloud, "h2")["networks"].keys() - {inner}


def test_host_description_has_current_dns_name_of_port(cloud: Network) -> None:
    describe_host(cloud, "h1")
    net, _ = cloud.create_network()
    port = bind(cloud, net, "h1")["id"]
    # Without a DNS name, the host derives a name from the address.
    assert describe_host(cloud, "h1")["ports"][port]["hostname"] == ""
    for name in ("vm-1", "vm-2", ""):
        before = describe_host(cloud, "h1")["revision"]
        cloud.change("port", port, role="service", dns_name=name)
        host_description = describe_host(cloud, "h1")
        assert host_description["ports"][port]["hostname"] == name
        assert host_description["revision"] > before


def test_router_description_has_associated_floating_ips_only(cloud: Network) -> None:
    describe_host(cloud, "h1")
    cloud.fabric.hosts.acknowledge("h1", 10**9)
    router, inner = create_router(cloud)
    public = describe_host(cloud, "h1")["routers"][router]["external"]["network"]
    port = cloud.create("port", network_id=inner)["id"]
    associated, half_associated, idle = (
        cloud.create("floatingip", floating_network_id=public, port_id=port_id)
        for port_id in (port, None, None)
    )
    with cloud.fabric.change() as change:  # as after an incomplete write
        change.set(schema.floating_ips, half_associated["id"], {"router_id": router})
    assert describe_host(cloud, "h1")["routers"][router]["floating"] == [
        {"floating": associated["floating_ip_address"], "fixed": associated["fixed_ip_address"]}
    ]
    assert idle["status"] == "DOWN"
    cloud.change("floatingip", associated["id"], port_id=None)
    assert describe_host(cloud, "h1")["routers"][router]["floating"] == []


def test_change_of_unbound_port_keeps_host_revision(cloud: Network) -> None:
    before = describe_host(cloud, "h1")["revision"]
    net, _ = cloud.create_network()
    port = cloud.create("port", network_id=net)
    cloud.create("security_group", name="web")
    cloud.change("port", port["id"], name="x")
    assert describe_host(cloud, "h1")["revision"] == before
    bind(cloud, net, "h1")
    assert describe_host(cloud, "h1")["revision"] > before


def test_host_description_returns_304_for_newest_revision(cloud: Network) -> None:
    revision = describe_host(cloud, "h1")["revision"]
    response = cloud.call_as_host("GET", f"/description?seen={revision}&wait=0", "h1")
    assert response.status_code == 304


def test_binding_to_silent_host_fails_until_host_returns(cloud: Network, clock: Clock) -> None:
    describe_host(cloud, "h1")
    net, _ = cloud.create_network()
    clock.now += SILENCE_SECONDS + 1
    port = bind(cloud, net, "h1")
    assert (port["status"], port["binding:vif_type"]) == ("DOWN", "binding_failed")
    assert describe_host(cloud, "h1")["ports"] == {}
    rebound = cloud.change("port", port["id"], role="admin", **{"binding:host_id": "h1"})
    assert rebound["binding:vif_type"] == "bridge"
    assert set(describe_host(cloud, "h1")["ports"]) == {port["id"]}


def test_returning_host_gets_ports_bound_meanwhile(cloud: Network, clock: Clock) -> None:
    acknowledge(cloud, "h1", describe_host(cloud, "h1")["revision"])
    net, _ = cloud.create_network()
    clock.now += SILENCE_SECONDS + 1
    port = bind(cloud, net, "h1")["id"]
    acknowledge(cloud, "h1", describe_host(cloud, "h1")["revision"])
    host_description = describe_host(cloud, "h1")
    assert set(host_description["ports"]) == {port}
    port_body = cloud.get(f"/ports/{port}", **SERVICE)["port"]
    # The host has the description but has not applied it.
    assert (port_body["status"], port_body["binding:vif_type"]) == (
        "DOWN",
        "bridge",
    )
    acknowledge(cloud, "h1", host_description["revision"])
    assert cloud.get(f"/ports/{port}", **SERVICE)["port"]["status"] == "ACTIVE"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"revision": -1},
        {"revision": 1, "tunnel_address": "x"},
        {"revision": 1, "failed": []},
        {"revision": 1, "colour": "red"},
    ],
)
def test_host_report_with_invalid_body_returns_400(cloud: Network, body: Any) -> None:
    refused = cloud.call_as_host("PUT", "", "h1", body)
    assert (refused.status_code, refused.json["NeutronError"]["type"]) == (400, "HTTPBadRequest")


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_host_request_without_key_of_same_host_returns_401(cloud: Network, method: str) -> None:
    describe_host(cloud, "h1")
    path = "/description" if method == "GET" else ""
    assert cloud.call_as_host(method, path, "h1", {"revision": 1}, key_of="h2").status_code == 401
    for role in ("admin", "service", "member"):
        assert (
            cloud.call(method, f"/kilonova/hosts/h1{path}", {"revision": 1}, role=role).status_code
            == 401
        )
    cloud.fabric.settings = replace(cloud.fabric.settings, host_secret="")
    # Without a secret of the services, no key is accepted.
    assert cloud.call_as_host(method, path, "h1", {"revision": 1}).status_code == 401


def test_key_of_network_host_gives_no_access_to_other_paths(cloud: Network) -> None:
    describe_host(cloud, "h1")
    for path in ("/../../../ports", "/%2e%2e/h2/description", "/../h2/description"):
        assert cloud.call_as_host("GET", path, "h1").status_code in (401, 404)


def test_create_port_bound_to_known_host_takes_at_most_12_statements(cloud: Network) -> None:
    describe_host(cloud, "h1")
    net, _ = cloud.create_network()
    bind(cloud, net, "h1")
    statements: list[str] = []
    sa.event.listen(
        sa.Engine, "before_cursor_execute", listener := lambda *args: statements.append(args[2])
    )
    bind(cloud, net, "h1")
    sa.event.remove(sa.Engine, "before_cursor_execute", listener)
    assert (
        len([statement for statement in statements if not statement.startswith("BEGIN")]) <= 12
    ), statements
