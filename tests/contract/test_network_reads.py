# SPDX-License-Identifier: Apache-2.0
"""What the API reads and changes of a network service: one suite for the one in memory, which the
API's tests use, and for our client over HTTP with the standalone service behind it."""

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
    """A network service and how things are put into it."""

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
    """The one in memory is its own client."""

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
    """Logs nothing."""

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Called for each request."""


WITHOUT_HOSTS = NetworkSettings(has_hosts=False)


class Standalone:
    """The standalone service behind a real port, with callers from a table instead of an identity
    service."""

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

    def _put(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
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
        made = self._put(
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
            self._put(
                "POST",
                "/subnets",
                {
                    "subnet": {
                        "network_id": made,
                        "project_id": project_id,
                        "cidr": cidr,
                        "ip_version": 6 if ":" in cidr else 4,
                    }
                },
            )
        return str(made)

    def add_port(
        self, network_id: str, project_id: str, address: str | None = None, **more: Any
    ) -> str:
        fixed = (
            {} if address is None else {"fixed_ips": [{"ip_address": address}] if address else []}
        )
        return str(
            self._put(
                "POST",
                "/ports",
                {"port": {"network_id": network_id, "project_id": project_id, **fixed, **more}},
            )["port"]["id"]
        )

    def add_group(self, name: str, project_id: str) -> str:
        return str(
            self._put(
                "POST",
                "/security-groups",
                {"security_group": {"name": name, "project_id": project_id}},
            )["security_group"]["id"]
        )

    def add_router(self, external: str, inside: str) -> None:
        router = self._put(
            "POST",
            "/routers",
            {"router": {"project_id": MINE, "external_gateway_info": {"network_id": external}}},
        )["router"]["id"]
        [subnet] = self.client.subnets("admin", [inside])
        self._put("PUT", f"/routers/{router}/add_router_interface", {"subnet_id": subnet["id"]})

    def set_limit(self, project_id: str, ports: int) -> None:
        self._put("PUT", f"/quotas/{project_id}", {"quota": {"port": ports}})


@pytest.fixture(params=["memory", "standalone"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    if request.param == "memory":
        yield Memory()
        return
    made = Standalone(tmp_path)
    yield made
    made.close()


def names(found: list[dict[str, Any]]) -> list[str]:
    return sorted(one["name"] for one in found)


def test_networks_that_a_project_may_use(rig: Rig) -> None:
    red, bare = rig.add_network("red", MINE), rig.add_network("bare", MINE, None)
    shared = rig.add_network("shared", OTHER, "10.1.0.0/24", shared=True)
    foreign, public = (
        rig.add_network("foreign", OTHER),
        rig.add_network("public", OTHER, external=True),
    )
    assert rig.client.has_service()
    assert names(rig.client.networks("mine", MINE)) == ["bare", "red", "shared"]
    found = {
        one["id"]: one
        for one in rig.client.networks("mine", MINE, [red, bare, shared, foreign, public])
    }
    assert set(found) == {red, bare, shared, public}
    assert found[public]["router:external"] is True
    assert [len(found[one]["subnets"]) for one in (red, bare)] == [1, 0]
    assert [found[one]["shared"] for one in (red, shared, public)] == [False, True, False]
    assert rig.client.networks("mine", MINE, [ids.new()]) == []
    assert names(rig.client.networks("admin", MINE, [foreign])) == ["foreign"]


def test_subnets_of_networks(rig: Rig) -> None:
    red, blue = rig.add_network("red", MINE), rig.add_network("blue", MINE, "fd00::/64")
    found = rig.client.subnets("mine", [red, blue])
    assert sorted((one["network_id"], one["cidr"]) for one in found) == sorted(
        [(red, "10.0.0.0/24"), (blue, "fd00::/64")]
    )
    assert rig.client.subnets("mine", []) == []


def test_ports_by_what_they_have(rig: Rig) -> None:
    red, server = rig.add_network("red", MINE), ids.new()
    free = rig.add_port(red, MINE, "10.0.0.9")
    used = rig.add_port(red, MINE, "10.0.0.10", device_id=server, device_owner="compute:nova")
    shared = rig.add_network("shared", OTHER, "10.1.0.0/24", shared=True)
    theirs = rig.add_port(shared, OTHER, "10.1.0.11", device_id=server)
    port = rig.client.port("mine", free)
    assert (port["id"], port["network_id"], port["device_id"], port["project_id"]) == (
        free,
        red,
        "",
        MINE,
    )
    assert [one["ip_address"] for one in port["fixed_ips"]] == ["10.0.0.9"]
    assert port["mac_address"]
    assert [one["id"] for one in rig.client.ports("mine", device_id=server)] == [used]
    assert sorted(one["id"] for one in rig.client.ports("admin", device_id=server)) == sorted(
        [used, theirs]
    )
    there = rig.client.ports("mine", network_id=red, fixed_ips="ip_address=10.0.0.10")
    assert [one["device_id"] for one in there] == [server]
    assert rig.client.ports("mine", network_id=red, fixed_ips="ip_address=10.0.0.99") == []
    for missing in (theirs, ids.new()):
        with pytest.raises(errors.NotFound):
            rig.client.port("mine", missing)


def test_a_port_without_an_address(rig: Rig) -> None:
    port = rig.add_port(rig.add_network("red", MINE), MINE, "")
    assert rig.client.port("mine", port)["fixed_ips"] == []


def test_security_groups_of_a_project(rig: Rig) -> None:
    web, theirs = rig.add_group("web", MINE), rig.add_group("theirs", OTHER)
    found = {one["id"]: one for one in rig.client.security_groups("mine", MINE)}
    assert found[web] == {"id": web, "name": "web"}
    assert theirs not in found
    whole = {one["id"]: one for one in rig.client.security_groups("mine", MINE, whole=True)}[web]
    assert {"id", "name", "description", "project_id", "security_group_rules"} <= set(whole)


def test_ports_that_are_left(rig: Rig) -> None:
    red = rig.add_network("red", MINE, None)
    rig.set_limit(MINE, 3)
    assert rig.client.ports_left("mine", MINE) == 3
    rig.add_port(red, MINE, "")
    assert rig.client.ports_left("mine", MINE) == 2
    rig.set_limit(MINE, 0)
    assert rig.client.ports_left("mine", MINE) == 0
    rig.set_limit(MINE, -1)
    assert rig.client.ports_left("mine", MINE) == -1


def test_a_servers_interfaces_described_whole(rig: Rig) -> None:
    red, server = rig.add_network("red", MINE), ids.new()
    groups = [rig.add_group(name, MINE) for name in ("web", "db")]
    port = rig.add_port(
        red, MINE, "10.0.0.9", device_id=server, device_owner="compute:nova", security_groups=groups
    )
    [found] = rig.client.interfaces("mine", server)
    assert sorted(found.groups or ()) == ["db", "web"]
    assert (found.port, found.network, found.label, found.own) == (port, red, "red", False)
    [address] = found.addresses
    assert (
        address["address"],
        address["version"],
        address["prefix"],
        address["gateway"],
        address["dhcp"],
        address["floating"],
    ) == ("10.0.0.9", 4, 24, "10.0.0.1", True, [])
    assert rig.client.interfaces("mine", ids.new()) == []


def test_security_groups_that_users_change(rig: Rig) -> None:
    client = rig.client
    made = client.create("mine", "security-groups", {"name": "web", "description": "d"})
    assert (made["name"], made["description"], made["project_id"]) == ("web", "d", MINE)
    assert "security_group_rules" in made
    assert (
        client.update("mine", "security-groups", made["id"], {"name": "www", "description": ""})[
            "name"
        ]
        == "www"
    )
    assert client.record("mine", "security-groups", made["id"])["name"] == "www"
    assert [one["id"] for one in client.records("mine", "security-groups", name="www")] == [
        made["id"]
    ]
    with pytest.raises(errors.Conflict):
        client.create("mine", "security-groups", {"name": "default", "description": ""})
    for token, change in (("other", client.record), ("other", client.delete)):
        with pytest.raises(errors.NotFound):
            change(token, "security-groups", made["id"])
    port = rig.add_port(
        rig.add_network("red", MINE), MINE, "10.0.0.9", security_groups=[made["id"]]
    )
    with pytest.raises(errors.Conflict):
        client.delete("mine", "security-groups", made["id"])
    client.update("mine", "ports", port, {"fixed_ips": []})
    unused = rig.add_group("unused", MINE)
    client.delete("mine", "security-groups", unused)
    with pytest.raises(errors.NotFound):
        client.record("mine", "security-groups", unused)


def test_rules_that_users_change(rig: Rig) -> None:
    client, web = rig.client, rig.add_group("web", MINE)
    wish = {
        "security_group_id": web,
        "direction": "ingress",
        "ethertype": "IPv4",
        "protocol": "tcp",
        "port_range_min": 22,
        "port_range_max": 22,
        "remote_ip_prefix": "10.0.0.0/8",
    }
    made = client.create("mine", "security-group-rules", wish)
    assert {name: made[name] for name in wish} == wish
    assert made["remote_group_id"] is None
    with pytest.raises(errors.Conflict):
        client.create("mine", "security-group-rules", wish)
    with pytest.raises(errors.NotFound):
        client.create("mine", "security-group-rules", {**wish, "security_group_id": ids.new()})
    client.delete("mine", "security-group-rules", made["id"])
    with pytest.raises(errors.NotFound):
        client.delete("mine", "security-group-rules", made["id"])


def test_floating_ips_that_users_change(rig: Rig) -> None:
    client, red = rig.client, rig.add_network("red", MINE)
    public = rig.add_network("public", OTHER, "172.24.4.0/29", external=True)
    port, second = rig.add_port(red, MINE, "10.0.0.9"), rig.add_port(red, MINE, "10.0.0.10")
    assert names(client.records("mine", "networks", **{"router:external": True})) == ["public"]
    made = client.create("mine", "floatingips", {"floating_network_id": public})
    assert (made["floating_network_id"], made["port_id"], made["fixed_ip_address"]) == (
        public,
        None,
        None,
    )
    lead = {"port_id": port, "fixed_ip_address": "10.0.0.9"}
    with pytest.raises(errors.NotFound):
        client.update("mine", "floatingips", made["id"], lead)
    rig.add_router(public, red)
    client.update("mine", "floatingips", made["id"], lead)
    [found] = client.records("mine", "floatingips", floating_ip_address=made["floating_ip_address"])
    assert {name: found[name] for name in lead} == lead
    other = client.create("mine", "floatingips", {"floating_network_id": public})
    with pytest.raises(errors.Conflict):
        client.update("mine", "floatingips", other["id"], lead)
    with pytest.raises(errors.BadRequest):
        client.update("mine", "floatingips", other["id"], {**lead, "fixed_ip_address": "10.0.0.10"})
    client.update(
        "mine", "floatingips", other["id"], {"port_id": second, "fixed_ip_address": "10.0.0.10"}
    )
    freed = client.update("mine", "floatingips", made["id"], {"port_id": None})
    assert (freed["port_id"], freed["fixed_ip_address"]) == (None, None)
    assert client.records("other", "floatingips", project_id=OTHER) == []
    client.delete("mine", "floatingips", made["id"])
    with pytest.raises(errors.NotFound):
        client.record("mine", "floatingips", made["id"])
    with pytest.raises(errors.Conflict):  # no address is left
        for _ in range(8):
            client.create("mine", "floatingips", {"floating_network_id": public})


def test_addresses_that_users_change(rig: Rig) -> None:
    client, red = rig.client, rig.add_network("red", MINE, "10.0.0.0/29")
    port = rig.add_port(red, MINE, "10.0.0.3")
    fixed = client.port("mine", port)["fixed_ips"]
    more = client.update(
        "mine", "ports", port, {"fixed_ips": [*fixed, {"subnet_id": fixed[0]["subnet_id"]}]}
    )
    assert len({one["ip_address"] for one in more["fixed_ips"]}) == 2
    assert "10.0.0.3" in [one["ip_address"] for one in more["fixed_ips"]]
    assert client.update("mine", "ports", port, {"fixed_ips": fixed})["fixed_ips"] == fixed
    with pytest.raises(errors.Conflict):  # no address is left
        for _ in range(8):
            now = client.port("mine", port)["fixed_ips"]
            client.update(
                "mine", "ports", port, {"fixed_ips": [*now, {"subnet_id": fixed[0]["subnet_id"]}]}
            )
