# SPDX-License-Identifier: Apache-2.0
"""What hosts are told of a network service, and when: routers and their moves, gateways, cost, what
concerns nobody."""

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
    """Seconds that pass when the test says so, and a thousandth at each look."""

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
    """A network service with hosts, none of which has asked yet."""
    return Network(fabric)


def description(cloud: Network, host: str) -> Any:
    return cloud.told(host)


def acknowledge(cloud: Network, host: str, revision: int, **more: Any) -> None:
    body = {"revision": revision} | more
    assert cloud.host("PUT", "", host, body).status_code == 204


def bind(cloud: Network, network: str, host: str) -> Any:
    """A bound port, answered at once."""
    cloud.fabric.hosts.acknowledge(host, 10**9)  # as if the host were always ahead
    return cloud.create("port", role="admin", network_id=network, **{"binding:host_id": host})


def routed(cloud: Network) -> tuple[str, str]:
    """The ids of a router with a gateway and an interface, and of the inner network."""
    public = cloud.create("network", role="admin", **{"router:external": True})["id"]
    cloud.create(
        "subnet",
        role="admin",
        network_id=public,
        cidr="172.24.4.0/24",
        ip_version=4,
        enable_dhcp=False,
    )
    inner, subnet = cloud.wired()
    router = cloud.create("router", external_gateway_info={"network_id": public})["id"]
    assert (
        cloud.call(
            "PUT", f"/routers/{router}/add_router_interface", {"subnet_id": subnet}
        ).status_code
        == 200
    )
    return router, inner


def test_a_router_is_described_to_the_one_host_that_carries_it(cloud: Network) -> None:
    for host in ("h1", "h2"):
        description(cloud, host)
        cloud.fabric.hosts.acknowledge(host, 10**9)
    router, inner = routed(cloud)
    told = description(cloud, "h1")
    [interface] = told["routers"][router]["interfaces"]
    assert (interface["network"], interface["address"]) == (inner, "10.0.0.1/24")
    outside = told["routers"][router]["external"]
    assert (outside["addresses"], outside["gateway"], outside["snat"]) == (
        ["172.24.4.2/24"],
        "172.24.4.1",
        True,
    )
    assert set(told["networks"]) == {inner, outside["network"]}
    assert told["ports"] == {}
    assert description(cloud, "h2")["routers"] == {}


def test_router_prefers_external_gateway_and_leaves_dead_host(cloud: Network, clock: Clock) -> None:
    for host in ("h1", "h2"):
        acknowledge(
            cloud,
            host,
            description(cloud, host)["revision"],
            external_gateway=host == "h2",
            tunnel_address=f"192.0.2.{host[1]}",
        )
        cloud.fabric.hosts.acknowledge(host, 10**9)
    router, inner = routed(cloud)
    assert set(description(cloud, "h2")["routers"]) == {router}
    clock.now += SILENCE_SECONDS + 1
    before = description(cloud, "h1")["revision"]
    place_routers(cloud.fabric)
    told = description(cloud, "h1")
    assert set(told["routers"]) == {router}
    assert told["revision"] > before
    assert description(cloud, "h2")["routers"] == {}
    # a gateway knows every external network
    assert description(cloud, "h2")["networks"].keys() - {inner}


def test_a_host_learns_the_name_of_a_guest_and_of_its_change(cloud: Network) -> None:
    description(cloud, "h1")
    net, _ = cloud.wired()
    port = bind(cloud, net, "h1")["id"]
    assert description(cloud, "h1")["ports"][port]["hostname"] == ""  # it makes one of the address
    for name in ("vm-1", "vm-2", ""):
        before = description(cloud, "h1")["revision"]
        cloud.change("port", port, role="service", dns_name=name)
        told = description(cloud, "h1")
        assert told["ports"][port]["hostname"] == name
        assert told["revision"] > before


def test_router_description_has_associated_floating_ips_only(cloud: Network) -> None:
    description(cloud, "h1")
    cloud.fabric.hosts.acknowledge("h1", 10**9)
    router, inner = routed(cloud)
    public = description(cloud, "h1")["routers"][router]["external"]["network"]
    port = cloud.create("port", network_id=inner)["id"]
    leads, led, idle = (
        cloud.create("floatingip", floating_network_id=public, port_id=to)
        for to in (port, None, None)
    )
    with cloud.fabric.change() as change:  # as if a write had been cut in two
        change.set(schema.floating_ips, led["id"], {"router_id": router})
    assert description(cloud, "h1")["routers"][router]["floating"] == [
        {"floating": leads["floating_ip_address"], "fixed": leads["fixed_ip_address"]}
    ]
    assert idle["status"] == "DOWN"
    cloud.change("floatingip", leads["id"], port_id=None)
    assert description(cloud, "h1")["routers"][router]["floating"] == []


def test_change_without_hosts_changes_no_revision(cloud: Network) -> None:
    before = description(cloud, "h1")["revision"]
    net, _ = cloud.wired()
    port = cloud.create("port", network_id=net)
    cloud.create("security_group", name="web")
    cloud.change("port", port["id"], name="x")
    assert description(cloud, "h1")["revision"] == before
    bind(cloud, net, "h1")
    assert description(cloud, "h1")["revision"] > before


def test_host_with_the_newest_revision_gets_304(cloud: Network) -> None:
    revision = description(cloud, "h1")["revision"]
    seen = cloud.host("GET", f"/description?seen={revision}&wait=0", "h1")
    assert seen.status_code == 304


def test_a_silent_host_fails_a_binding_until_it_asks_again(cloud: Network, clock: Clock) -> None:
    description(cloud, "h1")
    net, _ = cloud.wired()
    clock.now += SILENCE_SECONDS + 1
    port = bind(cloud, net, "h1")
    assert (port["status"], port["binding:vif_type"]) == ("DOWN", "binding_failed")
    assert description(cloud, "h1")["ports"] == {}
    again = cloud.change("port", port["id"], role="admin", **{"binding:host_id": "h1"})
    assert again["binding:vif_type"] == "bridge"
    assert set(description(cloud, "h1")["ports"]) == {port["id"]}


def test_returning_host_gets_ports_bound_meanwhile(cloud: Network, clock: Clock) -> None:
    acknowledge(cloud, "h1", description(cloud, "h1")["revision"])
    net, _ = cloud.wired()
    clock.now += SILENCE_SECONDS + 1
    port = bind(cloud, net, "h1")["id"]
    acknowledge(cloud, "h1", description(cloud, "h1")["revision"])
    told = description(cloud, "h1")
    assert set(told["ports"]) == {port}
    shown = cloud.get(f"/ports/{port}", **SERVICE)["port"]
    # it was told, not yet done
    assert (shown["status"], shown["binding:vif_type"]) == (
        "DOWN",
        "bridge",
    )
    acknowledge(cloud, "h1", told["revision"])
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
def test_a_host_that_talks_nonsense_is_refused(cloud: Network, body: Any) -> None:
    refused = cloud.host("PUT", "", "h1", body)
    assert (refused.status_code, refused.json["NeutronError"]["type"]) == (400, "HTTPBadRequest")


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_host_needs_its_own_key(cloud: Network, method: str) -> None:
    description(cloud, "h1")
    path = "/description" if method == "GET" else ""
    assert cloud.host(method, path, "h1", {"revision": 1}, key_of="h2").status_code == 401
    for role in ("admin", "service", "member"):
        assert (
            cloud.call(method, f"/kilonova/hosts/h1{path}", {"revision": 1}, role=role).status_code
            == 401
        )
    cloud.fabric.settings = replace(cloud.fabric.settings, host_secret="")
    # without a secret nobody is believed
    assert cloud.host(method, path, "h1", {"revision": 1}).status_code == 401


def test_a_hosts_key_opens_nothing_else(cloud: Network) -> None:
    description(cloud, "h1")
    for path in ("/../../../ports", "/%2e%2e/h2/description", "/../h2/description"):
        assert cloud.host("GET", path, "h1").status_code in (401, 404)


def test_a_port_bound_to_a_host_costs_few_statements(cloud: Network) -> None:
    description(cloud, "h1")
    net, _ = cloud.wired()
    bind(cloud, net, "h1")
    statements: list[str] = []
    sa.event.listen(
        sa.Engine, "before_cursor_execute", listener := lambda *args: statements.append(args[2])
    )
    bind(cloud, net, "h1")
    sa.event.remove(sa.Engine, "before_cursor_execute", listener)
    assert len([one for one in statements if not one.startswith("BEGIN")]) <= 12, statements
