# SPDX-License-Identifier: Apache-2.0
"""Ports of the embedded network service with several bindings: the API, and hosts' descriptions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.fabric import Fabric
from tests.unit.standalone.conftest import Network

SERVICE = {"role": "service", "project": "service"}
HOSTS = ("h1", "h2", "h3")


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Network]:
    """Yield a network service with three hosts, each of which has acknowledged all revisions."""
    database = Database(tmp_path / "network.db", schema.METADATA)
    cloud = Network(Fabric(database))
    for number, host in enumerate(HOSTS, 1):
        describe_host(cloud, host)
        cloud.call_as_host("PUT", "", host, {"revision": 0, "tunnel_address": f"192.0.2.{number}"})
        cloud.fabric.hosts.acknowledge(host, 10**9)  # requests do not wait for this host
    yield cloud
    database.close()


def describe_host(cloud: Network, host: str) -> Any:
    return cloud.describe_host(host)


def wire(cloud: Network, host: str, **failed: str) -> None:
    """Report that the host has applied its description, except for the ``failed`` ports."""
    body = {"revision": describe_host(cloud, host)["revision"], "failed": failed}
    assert cloud.call_as_host("PUT", "", host, body).status_code == 204
    cloud.fabric.hosts.acknowledge(host, 10**9)


def create_server_port(cloud: Network, host: str = "h1") -> tuple[str, str]:
    """Create a server's port that is wired on a host. Return the port's and the network's id."""
    network, _ = cloud.create_network()
    port = cloud.create(
        "port",
        role="admin",
        network_id=network,
        device_id=str(uuid.uuid4()),
        device_owner="compute:nova",
        **{"binding:host_id": host, "binding:profile": {"of": "h1"}},
    )
    wire(cloud, host)
    return port["id"], network


def show_port(cloud: Network, port: str) -> Any:
    return cloud.get(f"/ports/{port}", **SERVICE)["port"]


def list_bindings(cloud: Network, port: str) -> dict[str, str]:
    return {
        binding["host"]: binding["status"]
        for binding in cloud.get(f"/ports/{port}/bindings", **SERVICE)["bindings"]
    }


def request_binding(cloud: Network, method: str, path: str, status: int, **binding: Any) -> Any:
    answer = cloud.call(
        method, path, {"binding": binding} if method != "DELETE" else None, **SERVICE
    )
    assert answer.status_code == status, answer.text
    return answer.json["binding"] if answer.content else None


def list_events(cloud: Network) -> list[str]:
    with cloud.fabric.database.read() as connection:
        return [
            row.name
            for row in connection.execute(sa.select(schema.events).order_by(schema.events.c.id))
        ]


def test_inactive_port_binding_is_described_to_host_but_not_shown_by_port(cloud: Network) -> None:
    port, network = create_server_port(cloud)
    before, events_before = show_port(cloud, port), list_events(cloud)
    binding = request_binding(
        cloud,
        "POST",
        f"/ports/{port}/bindings",
        201,
        host="h2",
        profile={"a": "b"},
        vnic_type="normal",
    )
    assert binding == {
        "host": "h2",
        "status": "INACTIVE",
        "vif_type": "bridge",
        "vnic_type": "normal",
        "profile": {"a": "b"},
        "vif_details": {"port_filter": True, "bridge_name": f"brq{network[:11]}"},
    }
    assert cloud.get(f"/ports/{port}/bindings?host=h2", **SERVICE)["bindings"] == [binding]
    for host, peer in (("h1", "192.0.2.2"), ("h2", "192.0.2.1")):
        description = describe_host(cloud, host)
        assert set(description["ports"]) == {port}
        assert description["networks"][network]["peers"] == [peer]
    assert description["ports"][port]["arrived"]
    assert description["ports"][port] == describe_host(cloud, "h1")["ports"][port] | {
        "arrived": True
    }
    assert description["groups"] == describe_host(cloud, "h1")["groups"]
    wire(cloud, "h2")
    assert (show_port(cloud, port), list_events(cloud)) == (before, events_before)


def test_activation_swaps_port_bindings_and_keeps_host_descriptions(cloud: Network) -> None:
    port, _ = create_server_port(cloud)
    request_binding(cloud, "POST", f"/ports/{port}/bindings", 201, host="h2", profile={"of": "h2"})
    wire(cloud, "h2")
    before, events_before = {host: describe_host(cloud, host) for host in HOSTS}, list_events(cloud)
    active = request_binding(cloud, "PUT", f"/ports/{port}/bindings/h2/activate", 200)
    assert (active["host"], active["status"], active["profile"]) == ("h2", "ACTIVE", {"of": "h2"})
    port_after = show_port(cloud, port)
    assert (
        port_after["binding:host_id"],
        port_after["binding:vif_type"],
        port_after["status"],
    ) == (
        "h2",
        "bridge",
        "ACTIVE",
    )
    assert port_after["binding:profile"] == {"of": "h2"}
    assert list_bindings(cloud, port) == {"h2": "ACTIVE", "h1": "INACTIVE"}
    assert ({host: describe_host(cloud, host) for host in HOSTS}, list_events(cloud)) == (
        before,
        events_before,
    )
    request_binding(cloud, "DELETE", f"/ports/{port}/bindings/h1", 204)
    assert list_bindings(cloud, port) == {"h2": "ACTIVE"}
    assert (describe_host(cloud, "h1")["ports"], set(describe_host(cloud, "h2")["ports"])) == (
        {},
        {port},
    )
    assert next(iter(describe_host(cloud, "h2")["networks"].values()))["peers"] == []
    assert show_port(cloud, port)["status"] == "ACTIVE"


def test_port_is_down_after_activation_until_host_applied_binding(cloud: Network) -> None:
    port, _ = create_server_port(cloud)
    request_binding(cloud, "POST", f"/ports/{port}/bindings", 201, host="h2")
    request_binding(cloud, "PUT", f"/ports/{port}/bindings/h2/activate", 200)
    assert show_port(cloud, port)["status"] == "DOWN"
    wire(cloud, "h2")
    assert show_port(cloud, port)["status"] == "ACTIVE"
    # The port is still wired on h1.
    request_binding(cloud, "PUT", f"/ports/{port}/bindings/h1/activate", 200)
    assert show_port(cloud, port)["status"] == "ACTIVE"


def test_port_is_down_after_activation_when_host_failed_to_apply_it(cloud: Network) -> None:
    port, _ = create_server_port(cloud)
    request_binding(cloud, "POST", f"/ports/{port}/bindings", 201, host="h2")
    wire(cloud, "h2", **{port: "no bridge"})
    request_binding(cloud, "PUT", f"/ports/{port}/bindings/h2/activate", 200)
    assert show_port(cloud, port)["status"] == "DOWN"


def test_refused_binding_request_has_error_type_of_neutron(cloud: Network) -> None:
    port, network = create_server_port(cloud)
    mine = f"/ports/{port}/bindings"
    request_binding(cloud, "POST", mine, 201, host="h2")
    for host in ("h1", "h2"):
        assert cloud.refusal("POST", mine, {"binding": {"host": host}}, **SERVICE) == (
            409,
            "PortBindingAlreadyExists",
        )
    assert cloud.refusal("PUT", f"{mine}/h1/activate", **SERVICE) == (
        409,
        "PortBindingAlreadyActive",
    )
    assert cloud.refusal("DELETE", f"{mine}/h1", **SERVICE) == (409, "PortBindingInUse")
    for method, path in (("PUT", "/h3/activate"), ("DELETE", "/h3")):
        assert cloud.refusal(method, mine + path, **SERVICE) == (404, "PortBindingNotFound")
    assert cloud.refusal("POST", mine, {"binding": {"host": "nowhere"}}, **SERVICE) == (
        500,
        "PortBindingError",
    )
    assert cloud.refusal("GET", f"/ports/{network}/bindings", **SERVICE) == (404, "PortNotFound")
    for body in (
        {},
        {"binding": {}},
        {"binding": {"host": ""}},
        {"binding": {"host": "h3", "vnic_type": "direct"}},
        {"binding": {"host": "h3", "status": "ACTIVE"}},
        {"binding": []},
    ):
        assert cloud.refusal("POST", mine, body, **SERVICE) == (400, "HTTPBadRequest")
    assert cloud.refusal("GET", f"{mine}?colour=red", **SERVICE) == (400, "HTTPBadRequest")
    unbound = cloud.create("port", network_id=network)["id"]
    assert cloud.refusal("GET", f"/ports/{unbound}/bindings", **SERVICE) == (400, "BadRequest")
    for method, path in (
        ("GET", ""),
        ("POST", ""),
        ("PUT", "/h2/activate"),
        ("DELETE", "/h2"),
    ):
        member_body: Any = {"binding": {"host": "h3"}} if method == "POST" else None
        assert cloud.refusal(method, mine + path, member_body) == (403, "PolicyNotAuthorized")
    assert list_bindings(cloud, port) == {"h1": "ACTIVE", "h2": "INACTIVE"}


def test_binding_list_is_filtered_by_query(cloud: Network) -> None:
    port, _ = create_server_port(cloud)
    mine = f"/ports/{port}/bindings"
    request_binding(cloud, "POST", mine, 201, host="h2")
    for query, hosts in (
        ("?status=INACTIVE", ["h2"]),
        ("?host=h1", ["h1"]),
        ("?host=h1&host=h2", ["h1", "h2"]),
        ("?vif_type=ovs", []),
        ("?vnic_type=normal&fields=host", ["h1", "h2"]),
    ):
        assert [
            binding["host"] for binding in cloud.get(mine + query, **SERVICE)["bindings"]
        ] == hosts


@pytest.mark.parametrize("host", ["h2", "h3", ""])
def test_change_of_host_id_of_port_replaces_all_its_bindings(cloud: Network, host: str) -> None:
    port, _ = create_server_port(cloud)
    request_binding(cloud, "POST", f"/ports/{port}/bindings", 201, host="h2")
    cloud.change("port", port, role="service", name="the place is not spoken of")
    assert list_bindings(cloud, port) == {"h1": "ACTIVE", "h2": "INACTIVE"}
    cloud.change("port", port, role="service", **{"binding:host_id": host})
    assert list_bindings(cloud, port) == ({host: "ACTIVE"} if host else {})
    assert {name: set(describe_host(cloud, name)["ports"]) for name in HOSTS} == {
        name: {port} if name == host else set() for name in HOSTS
    }


def test_delete_port_deletes_all_its_bindings(cloud: Network) -> None:
    port, _ = create_server_port(cloud)
    request_binding(cloud, "POST", f"/ports/{port}/bindings", 201, host="h2")
    cloud.delete("port", port, role="service")
    assert [describe_host(cloud, host)["ports"] for host in HOSTS] == [{}, {}, {}]
    with cloud.fabric.database.read() as connection:
        assert connection.execute(sa.select(schema.inactive_bindings)).all() == []


def test_port_change_raises_revision_of_every_bound_host(cloud: Network) -> None:
    port, network = create_server_port(cloud)
    request_binding(cloud, "POST", f"/ports/{port}/bindings", 201, host="h2")
    group = cloud.create("security_group", name="web")["id"]
    changes = [
        lambda: cloud.change("port", port, role="service", dns_name="vm"),
        lambda: cloud.change("port", port, role="service", security_groups=[group]),
        lambda: cloud.create("security_group_rule", security_group_id=group, direction="ingress"),
        lambda: cloud.change("network", network, mtu=1400),
    ]
    for change in changes:
        before = {host: describe_host(cloud, host)["revision"] for host in HOSTS}
        change()
        after = {host: describe_host(cloud, host)["revision"] for host in HOSTS}
        assert [after[host] > before[host] for host in HOSTS] == [True, True, False]
