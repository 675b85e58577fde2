# SPDX-License-Identifier: Apache-2.0
"""Reads and changes of network records by the API.

One suite runs against the network service in memory, which the API tests use, and over HTTP through
the API's client against the embedded network service.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
import requests

from common.clients.network_records import Records
from common.domain import errors, ids
from compute_api.compute.request.dependencies import TenantNetworks
from deploy.one_machine.services.database import Database
from deploy.one_machine.services.network import app, schema
from deploy.one_machine.services.network.fabric import Fabric, NetworkSettings
from tests.api import networks as in_memory

MINE, OTHER = "m" * 32, "o" * 32
#: token -> project and role
TOKENS = {"mine": (MINE, "member"), "other": (OTHER, "member"), "admin": ("a" * 32, "admin")}


class Rig(Protocol):
    """A network service, and methods that create records."""

    client: TenantNetworks

    def add_network(
        self,
        name: str,
        project_id: str,
        cidr: str | None = "10.0.0.0/24",
        *,
        shared: bool = False,
        external: bool = False,
    ) -> str: ...

    def add_port(
        self, network_id: str, project_id: str, address: str | None = None, **more: Any
    ) -> str: ...

    def add_group(self, name: str, project_id: str) -> str: ...

    def add_router(self, external: str, inside: str) -> None: ...

    def set_limit(self, project_id: str, ports: int) -> None: ...


class Memory(in_memory.Networks):
    """The network service in memory, which is also the client."""

    def __init__(self) -> None:
        super().__init__(
            {
                token: None if role == "admin" else project
                for token, (project, role) in TOKENS.items()
            }
        )
        self.client: TenantNetworks = self

    def set_limit(self, project_id: str, ports: int) -> None:
        self.limit = ports


class Quiet(WSGIRequestHandler):
    """A request handler without a log."""

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Do not log the request."""


WITHOUT_HOSTS = NetworkSettings(has_hosts=False)


class EmbeddedNetwork:
    """The embedded network service on a real port. A table replaces the identity service."""

    def __init__(self, folder: Path, settings: NetworkSettings = WITHOUT_HOSTS) -> None:
        self._database = Database(folder / "network.db", schema.METADATA)
        self.fabric = Fabric(self._database, replace(settings, host_secret="a secret"))
        self._app = app.build(self.fabric)
        self._server = make_server("127.0.0.1", 0, self.answer, handler_class=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self._url = f"http://127.0.0.1:{self._server.server_port}"
        self.client: TenantNetworks = Records(self._url + "/")

    def answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        project, role = TOKENS.get(environ.get("HTTP_X_AUTH_TOKEN", ""), ("", ""))
        body = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        return self._app(
            {
                **environ,
                "wsgi.input": body,
                "HTTP_X_IDENTITY_STATUS": "Confirmed",
                "HTTP_X_PROJECT_ID": project,
                "HTTP_X_ROLES": role,
            },
            start_response,
        )

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._database.close()

    def _send(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
        answer = requests.request(
            method,
            f"{self._url}/v2.0{path}",
            json=body,
            headers={"X-Auth-Token": "admin"},
            timeout=10,
        )
        assert answer.status_code < 300, answer.text
        return answer.json()

    def add_network(
        self,
        name: str,
        project_id: str,
        cidr: str | None = "10.0.0.0/24",
        *,
        shared: bool = False,
        external: bool = False,
    ) -> str:
        network = self._send(
            "POST",
            "/networks",
            {
                "network": {
                    "name": name,
                    "project_id": project_id,
                    "shared": shared,
                    "router:external": external,
                }
            },
        )["network"]["id"]
        if cidr:
            self._send(
                "POST",
                "/subnets",
                {
                    "subnet": {
                        "network_id": network,
                        "project_id": project_id,
                        "cidr": cidr,
                        "ip_version": 6 if ":" in cidr else 4,
                    }
                },
            )
        return str(network)

    def add_port(
        self, network_id: str, project_id: str, address: str | None = None, **more: Any
    ) -> str:
        fixed = (
            {} if address is None else {"fixed_ips": [{"ip_address": address}] if address else []}
        )
        return str(
            self._send(
                "POST",
                "/ports",
                {"port": {"network_id": network_id, "project_id": project_id, **fixed, **more}},
            )["port"]["id"]
        )

    def add_group(self, name: str, project_id: str) -> str:
        return str(
            self._send(
                "POST",
                "/security-groups",
                {"security_group": {"name": name, "project_id": project_id}},
            )["security_group"]["id"]
        )

    def add_router(self, external: str, inside: str) -> None:
        router = self._send(
            "POST",
            "/routers",
            {"router": {"project_id": MINE, "external_gateway_info": {"network_id": external}}},
        )["router"]["id"]
        [subnet] = self.client.subnets("admin", [inside])
        self._send("PUT", f"/routers/{router}/add_router_interface", {"subnet_id": subnet["id"]})

    def set_limit(self, project_id: str, ports: int) -> None:
        self._send("PUT", f"/quotas/{project_id}", {"quota": {"port": ports}})


@pytest.fixture(params=["memory", "standalone"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    if request.param == "memory":
        yield Memory()
        return
    rig = EmbeddedNetwork(tmp_path)
    yield rig
    rig.close()


def names(records: list[dict[str, Any]]) -> list[str]:
    return sorted(record["name"] for record in records)


def test_networks_of_project_include_shared_and_requested_external_ones(rig: Rig) -> None:
    """An admin also gets a requested network of another project."""
    red, bare = rig.add_network("red", MINE), rig.add_network("bare", MINE, None)
    shared = rig.add_network("shared", OTHER, "10.1.0.0/24", shared=True)
    foreign, public = (
        rig.add_network("foreign", OTHER),
        rig.add_network("public", OTHER, external=True),
    )
    assert rig.client.has_service()
    assert names(rig.client.networks("mine", MINE)) == ["bare", "red", "shared"]
    networks = {
        network["id"]: network
        for network in rig.client.networks("mine", MINE, [red, bare, shared, foreign, public])
    }
    assert set(networks) == {red, bare, shared, public}
    assert networks[public]["router:external"] is True
    assert [len(networks[network]["subnets"]) for network in (red, bare)] == [1, 0]
    assert [networks[network]["shared"] for network in (red, shared, public)] == [
        False,
        True,
        False,
    ]
    assert rig.client.networks("mine", MINE, [ids.new()]) == []
    assert names(rig.client.networks("admin", MINE, [foreign])) == ["foreign"]


def test_subnet_list_returns_subnets_of_given_networks(rig: Rig) -> None:
    red, blue = rig.add_network("red", MINE), rig.add_network("blue", MINE, "fd00::/64")
    subnets = rig.client.subnets("mine", [red, blue])
    assert sorted((subnet["network_id"], subnet["cidr"]) for subnet in subnets) == sorted(
        [(red, "10.0.0.0/24"), (blue, "fd00::/64")]
    )
    assert rig.client.subnets("mine", []) == []


def test_ports_are_filtered_by_device_network_and_address(rig: Rig) -> None:
    red, server = rig.add_network("red", MINE), ids.new()
    free = rig.add_port(red, MINE, "10.0.0.9")
    used_port = rig.add_port(red, MINE, "10.0.0.10", device_id=server, device_owner="compute:nova")
    shared = rig.add_network("shared", OTHER, "10.1.0.0/24", shared=True)
    theirs = rig.add_port(shared, OTHER, "10.1.0.11", device_id=server)
    port = rig.client.port("mine", free)
    assert (port["id"], port["network_id"], port["device_id"], port["project_id"]) == (
        free,
        red,
        "",
        MINE,
    )
    assert [fixed_ip["ip_address"] for fixed_ip in port["fixed_ips"]] == ["10.0.0.9"]
    assert port["mac_address"]
    assert [record["id"] for record in rig.client.ports("mine", device_id=server)] == [used_port]
    assert sorted(
        fixed_ip["id"] for fixed_ip in rig.client.ports("admin", device_id=server)
    ) == sorted([used_port, theirs])
    there = rig.client.ports("mine", network_id=red, fixed_ips="ip_address=10.0.0.10")
    assert [record["device_id"] for record in there] == [server]
    assert rig.client.ports("mine", network_id=red, fixed_ips="ip_address=10.0.0.99") == []
    for missing in (theirs, ids.new()):
        with pytest.raises(errors.NotFound):
            rig.client.port("mine", missing)


def test_port_without_address_has_no_fixed_ips(rig: Rig) -> None:
    port = rig.add_port(rig.add_network("red", MINE), MINE, "")
    assert rig.client.port("mine", port)["fixed_ips"] == []


def test_security_group_list_contains_only_groups_of_project(rig: Rig) -> None:
    web, theirs = rig.add_group("web", MINE), rig.add_group("theirs", OTHER)
    groups = {group["id"]: group for group in rig.client.security_groups("mine", MINE)}
    assert groups[web] == {"id": web, "name": "web"}
    assert theirs not in groups
    whole = {group["id"]: group for group in rig.client.security_groups("mine", MINE, whole=True)}[
        web
    ]
    assert {"id", "name", "description", "project_id", "security_group_rules"} <= set(whole)


def test_ports_left_is_port_quota_minus_ports_or_minus_1_when_unlimited(rig: Rig) -> None:
    red = rig.add_network("red", MINE, None)
    rig.set_limit(MINE, 3)
    assert rig.client.ports_left("mine", MINE) == 3
    rig.add_port(red, MINE, "")
    assert rig.client.ports_left("mine", MINE) == 2
    rig.set_limit(MINE, 0)
    assert rig.client.ports_left("mine", MINE) == 0
    rig.set_limit(MINE, -1)
    assert rig.client.ports_left("mine", MINE) == -1


def test_server_interfaces_contain_security_groups_and_addresses(rig: Rig) -> None:
    red, server = rig.add_network("red", MINE), ids.new()
    groups = [rig.add_group(name, MINE) for name in ("web", "db")]
    port = rig.add_port(
        red, MINE, "10.0.0.9", device_id=server, device_owner="compute:nova", security_groups=groups
    )
    [interface] = rig.client.interfaces("mine", server)
    assert sorted(interface.groups or ()) == ["db", "web"]
    assert (interface.port, interface.network, interface.label, interface.own) == (
        port,
        red,
        "red",
        False,
    )
    [address] = interface.addresses
    assert (
        address["address"],
        address["version"],
        address["prefix"],
        address["gateway"],
        address["dhcp"],
        address["floating"],
    ) == ("10.0.0.9", 4, 24, "10.0.0.1", True, [])
    assert rig.client.interfaces("mine", ids.new()) == []


def test_user_creates_updates_and_deletes_own_unused_security_group(rig: Rig) -> None:
    client = rig.client
    group = client.create("mine", "security-groups", {"name": "web", "description": "d"})
    assert (group["name"], group["description"], group["project_id"]) == ("web", "d", MINE)
    assert "security_group_rules" in group
    assert (
        client.update("mine", "security-groups", group["id"], {"name": "www", "description": ""})[
            "name"
        ]
        == "www"
    )
    assert client.record("mine", "security-groups", group["id"])["name"] == "www"
    assert [record["id"] for record in client.records("mine", "security-groups", name="www")] == [
        group["id"]
    ]
    with pytest.raises(errors.Conflict):
        client.create("mine", "security-groups", {"name": "default", "description": ""})
    for token, change in (("other", client.record), ("other", client.delete)):
        with pytest.raises(errors.NotFound):
            change(token, "security-groups", group["id"])
    port = rig.add_port(
        rig.add_network("red", MINE), MINE, "10.0.0.9", security_groups=[group["id"]]
    )
    with pytest.raises(errors.Conflict):
        client.delete("mine", "security-groups", group["id"])
    client.update("mine", "ports", port, {"fixed_ips": []})
    unused = rig.add_group("unused", MINE)
    client.delete("mine", "security-groups", unused)
    with pytest.raises(errors.NotFound):
        client.record("mine", "security-groups", unused)


def test_security_group_rule_can_be_created_and_deleted_only_once_by_user(rig: Rig) -> None:
    client, web = rig.client, rig.add_group("web", MINE)
    rule_request = {
        "security_group_id": web,
        "direction": "ingress",
        "ethertype": "IPv4",
        "protocol": "tcp",
        "port_range_min": 22,
        "port_range_max": 22,
        "remote_ip_prefix": "10.0.0.0/8",
    }
    rule = client.create("mine", "security-group-rules", rule_request)
    assert {name: rule[name] for name in rule_request} == rule_request
    assert rule["remote_group_id"] is None
    with pytest.raises(errors.Conflict):
        client.create("mine", "security-group-rules", rule_request)
    with pytest.raises(errors.NotFound):
        client.create(
            "mine", "security-group-rules", {**rule_request, "security_group_id": ids.new()}
        )
    client.delete("mine", "security-group-rules", rule["id"])
    with pytest.raises(errors.NotFound):
        client.delete("mine", "security-group-rules", rule["id"])


def test_user_creates_floating_ip_for_port_behind_router_and_deletes_it(rig: Rig) -> None:
    client, red = rig.client, rig.add_network("red", MINE)
    public = rig.add_network("public", OTHER, "172.24.4.0/29", external=True)
    port, second = rig.add_port(red, MINE, "10.0.0.9"), rig.add_port(red, MINE, "10.0.0.10")
    assert names(client.records("mine", "networks", **{"router:external": True})) == ["public"]
    floating_ip = client.create("mine", "floatingips", {"floating_network_id": public})
    assert (
        floating_ip["floating_network_id"],
        floating_ip["port_id"],
        floating_ip["fixed_ip_address"],
    ) == (
        public,
        None,
        None,
    )
    lead = {"port_id": port, "fixed_ip_address": "10.0.0.9"}
    with pytest.raises(errors.NotFound):
        client.update("mine", "floatingips", floating_ip["id"], lead)
    rig.add_router(public, red)
    client.update("mine", "floatingips", floating_ip["id"], lead)
    [stored] = client.records(
        "mine", "floatingips", floating_ip_address=floating_ip["floating_ip_address"]
    )
    assert {name: stored[name] for name in lead} == lead
    other = client.create("mine", "floatingips", {"floating_network_id": public})
    with pytest.raises(errors.Conflict):
        client.update("mine", "floatingips", other["id"], lead)
    with pytest.raises(errors.BadRequest):
        client.update("mine", "floatingips", other["id"], {**lead, "fixed_ip_address": "10.0.0.10"})
    client.update(
        "mine", "floatingips", other["id"], {"port_id": second, "fixed_ip_address": "10.0.0.10"}
    )
    freed = client.update("mine", "floatingips", floating_ip["id"], {"port_id": None})
    assert (freed["port_id"], freed["fixed_ip_address"]) == (None, None)
    assert client.records("other", "floatingips", project_id=OTHER) == []
    client.delete("mine", "floatingips", floating_ip["id"])
    with pytest.raises(errors.NotFound):
        client.record("mine", "floatingips", floating_ip["id"])
    # No address is left.
    with pytest.raises(errors.Conflict):
        for _ in range(8):
            client.create("mine", "floatingips", {"floating_network_id": public})


def test_port_fixed_ips_update_adds_and_removes_addresses(rig: Rig) -> None:
    client, red = rig.client, rig.add_network("red", MINE, "10.0.0.0/29")
    port = rig.add_port(red, MINE, "10.0.0.3")
    fixed = client.port("mine", port)["fixed_ips"]
    more = client.update(
        "mine", "ports", port, {"fixed_ips": [*fixed, {"subnet_id": fixed[0]["subnet_id"]}]}
    )
    assert len({address["ip_address"] for address in more["fixed_ips"]}) == 2
    assert "10.0.0.3" in [address["ip_address"] for address in more["fixed_ips"]]
    assert client.update("mine", "ports", port, {"fixed_ips": fixed})["fixed_ips"] == fixed
    # No address is left.
    with pytest.raises(errors.Conflict):
        for _ in range(8):
            now = client.port("mine", port)["fixed_ips"]
            client.update(
                "mine", "ports", port, {"fixed_ips": [*now, {"subnet_id": fixed[0]["subnet_id"]}]}
            )
