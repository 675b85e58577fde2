# SPDX-License-Identifier: Apache-2.0
"""osc-placement, as it comes from PyPI, against the placement service of a real cloud: what
operators see of hosts and servers, what they set by hand and what schedulers make of it, and what
they are refused."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.one_machine.cloud import process_control
from tests.e2e.live import SETTLE, Live
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")

ADMIN, JSON = "kilonova-admin", " -f json"


@dataclass
class Host:
    """A host of the cloud as the client names it."""

    live: Live
    name: str
    uuid: str

    def ask(self, *commands: str) -> list[Any]:
        """What the client says to an admin; {} is the host's provider."""
        return self.live.openstack(
            *(command.replace("{}", self.uuid) + JSON for command in commands), cloud=ADMIN
        )

    def do(self, *commands: str) -> None:
        """Commands that say nothing, or nothing of interest."""
        said, complaints = self.live.type(
            *(command.replace("{}", self.uuid) for command in commands), cloud=ADMIN
        )
        assert complaints == "", f"{said}\n{complaints}"

    def refused(self, command: str, cloud: str = ADMIN) -> str:
        """What the client complains about."""
        said, complaints = self.live.type(command.replace("{}", self.uuid), cloud=cloud)
        assert complaints and "Traceback" not in complaints, said
        return complaints

    def stock(self) -> dict[str, dict[str, Any]]:
        """Inventories by class."""
        [found] = self.ask("resource provider inventory list {}")
        return {one["resource_class"]: one for one in found}

    def session(self) -> int:
        """A random number, another one each time its agent registers with all that the host has."""
        [(session,)] = self.live.rows("SELECT session FROM hosts WHERE name = ?", self.name)
        return int(session)


@pytest.fixture
def host(in_memory: Live) -> Host:
    [found] = in_memory.openstack("resource provider list --name one" + JSON, cloud=ADMIN)
    return Host(in_memory, "one", found[0]["uuid"])


@pytest.fixture
def special(host: Host) -> Iterator[Host]:
    """A host with a trait and a class of the operator's own; afterwards it is as it was."""
    before = host.stock()
    host.do(
        "trait create CUSTOM_GOLD",
        "resource class create CUSTOM_LICENCE",
        "resource provider trait set --trait CUSTOM_GOLD {}",
        "resource provider inventory set --amend --resource CUSTOM_LICENCE=2 {}",
    )
    yield host
    whole = " ".join(
        f"--resource {name}={one['total']} --resource {name}:max_unit={one['max_unit']}"
        for name, one in before.items()
    )
    host.do(
        "resource provider trait delete {}",
        f"resource provider inventory set {whole} {{}}",
        "trait delete CUSTOM_GOLD",
        "resource class delete CUSTOM_LICENCE",
    )
    assert host.stock() == before


def test_hosts_are_shown_with_what_they_have(host: Host) -> None:
    catalogue, listed, shown, traits, classes, usages = host.ask(
        "catalog show placement",
        "resource provider list",
        "resource provider show {}",
        "resource provider trait list {}",
        "resource class list",
        "resource provider usage show {}",
    )
    assert catalogue["type"] == "placement"
    assert {one["name"] for one in listed} >= {"one", "two"}
    assert (shown["name"], shown["root_provider_uuid"], shown["parent_provider_uuid"]) == (
        "one",
        host.uuid,
        None,
    )
    assert "COMPUTE_NODE" in {one["name"] for one in traits}
    assert {one["name"] for one in classes} >= {"VCPU", "MEMORY_MB", "DISK_GB", "PCPU"}
    stock = host.stock()
    assert (
        {one["resource_class"] for one in usages} == set(stock) == {"VCPU", "MEMORY_MB", "DISK_GB"}
    )
    assert (stock["VCPU"]["total"], stock["VCPU"]["allocation_ratio"]) == (1000, 4.0)


def test_what_a_server_holds_is_shown_while_it_holds_it(host: Host) -> None:
    live, rest = host.live, host.live.rest()
    server = rest.create(image=live.image("empty"), flavor=live.flavor("m1.small"))
    try:
        rest.await_status(server, "ACTIVE")
        held, usage = host.ask(
            f"resource provider allocation show {server}",
            f"resource usage show {live.seed.demo.session.get_project_id()}",
        )
        assert [one["resources"] for one in held] == [{"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}]
        assert {one["resource_class"]: one["usage"] for one in usage}["MEMORY_MB"] >= 2048
    finally:
        rest.call("DELETE", f"/servers/{server}")
        rest.await_gone(server)
    assert host.ask(f"resource provider allocation show {server}") == [[]]


def test_servers_follow_what_is_set_by_hand(special: Host) -> None:
    live, rest, admin = special.live, special.live.rest(), special.live.rest("kilonova-admin")
    [made] = live.openstack(
        f"flavor create --ram 64 --disk 1 --vcpus 1 --property trait:CUSTOM_GOLD=required "
        f"--property resources:CUSTOM_LICENCE=1 gold-{uuid.uuid4().hex[:8]}" + JSON,
        cloud=ADMIN,
    )
    servers = [rest.create(image=live.image("empty"), flavor=made["id"]) for _ in range(2)]
    try:
        for server in servers:
            rest.await_status(server, "ACTIVE")
            assert admin.server(server)["OS-EXT-SRV-ATTR:host"] == "one"
        assert special.stock()["CUSTOM_LICENCE"]["used"] == 2
        assert "in use" in special.refused(
            "resource provider inventory delete --resource-class CUSTOM_LICENCE {}"
        )
        assert special.ask("allocation candidate list --resource CUSTOM_LICENCE=1") == [[]]
        servers.append(rest.create(image=live.image("empty"), flavor=made["id"]))
        assert "CUSTOM_LICENCE" in rest.await_status(servers[2], "ERROR")["fault"]["message"]
    finally:
        for server in servers:
            rest.call("DELETE", f"/servers/{server}")
            rest.await_gone(server)
        live.openstack(f"flavor delete {made['id']}", cloud=ADMIN)
    live.judge()


def test_reserved_by_hand_holds_and_is_given_back(host: Host) -> None:
    total = host.stock()["MEMORY_MB"]["total"]
    host.do(
        f"resource provider inventory set --amend --resource MEMORY_MB:reserved={total - 64} {{}}"
    )
    assert host.stock()["MEMORY_MB"]["reserved"] == total - 64
    assert host.name not in {
        one["name"] for one in host.ask("resource provider list --resource MEMORY_MB=128")[0]
    }
    before = host.session()
    process_control.restart(host.live.cloud, "agent")
    await_true(lambda: host.session() != before, SETTLE, lambda: "the host has not registered")
    assert host.stock()["MEMORY_MB"]["reserved"] == total - 64, "a report of the host leaves it"
    host.do(
        f"resource provider inventory class set --total {total} --max_unit {total} {{}} MEMORY_MB"
    )
    assert host.stock()["MEMORY_MB"]["reserved"] != total - 64
    assert host.name in {
        one["name"] for one in host.ask("resource provider list --resource MEMORY_MB=128")[0]
    }


def test_providers_of_the_operators_own(host: Host) -> None:
    name, group = f"rack-{uuid.uuid4().hex[:8]}", str(uuid.uuid4())
    [rack] = host.ask(f"resource provider create {name}")
    [shelf] = host.ask(f"resource provider create --parent-provider {rack['uuid']} {name}-shelf")
    host.do(
        f"resource provider inventory set --resource DISK_GB=100 --resource DISK_GB:step_size=10 {shelf['uuid']}",
        f"resource provider aggregate set --aggregate {group} --generation 1 {shelf['uuid']}",
    )
    tree, members, candidates = host.ask(
        f"resource provider list --in-tree {rack['uuid']}",
        f"resource provider list --member-of {group}",
        f"allocation candidate list --resource DISK_GB=50 --member-of {group}",
    )
    assert {one["name"] for one in tree} == {name, f"{name}-shelf"}
    assert [one["uuid"] for one in members] == [shelf["uuid"]]
    assert [one["resource provider"] for one in candidates] == [shelf["uuid"]]
    assert "It has child resource providers" in host.refused(
        f"resource provider delete {rack['uuid']}"
    )
    host.do(f"resource provider delete {shelf['uuid']}", f"resource provider delete {rack['uuid']}")


#: command -> what the complaint says; {} is a host's provider
REFUSED = {
    "resource provider inventory set --amend --resource VCPU:total=5 {}": "as the host one reports it",
    "resource provider inventory set --resource VCPU=5 {}": "the host one reports this itself",
    "resource provider inventory set --amend --resource CUSTOM_NOBODY=5 {}": "No such resource class",
    "resource provider inventory set --amend --resource VCPU:reserved=-1 {}": "-1 is less than the minimum of 0",
    "resource provider inventory set --amend --resource VCPU:colour=1 {}": "colour",
    "resource provider delete {}": "provider of a host",
    "resource provider set --name other {}": "provider of a host",
    "resource provider create --parent-provider {} below": "cannot stand below it",
    "resource provider create one": "already exists",
    "resource provider show 00000000-0000-4000-8000-000000000009": "No resource provider with uuid",
    "resource provider trait set --trait CUSTOM_NOBODY {}": "No such trait",
    "resource provider trait set --trait COMPUTE_STATUS_DISABLED {}": "disable the service instead",
    "trait create gold": "A valid trait must",
    "trait delete COMPUTE_NODE": "Cannot delete standard trait",
    "resource class create GOLD": "does not match",
    "resource class delete VCPU": "Cannot delete standard resource class",
    "resource provider allocation set --project-id p --user-id u --allocation rp={},VCPU=1 "
    "00000000-0000-4000-8000-000000000009": "own claim",
    "allocation candidate list --resource VCPU=0": "requires amount >= 1",
    "allocation candidate list --resource NOSUCH=1": "No such resource class NOSUCH",
}


def test_wrong_commands_are_told_why_and_change_nothing(host: Host) -> None:
    before = host.stock(), host.ask("resource provider trait list {}", "resource provider show {}")
    said = host.refused("\n".join(REFUSED))
    for command, reason in REFUSED.items():
        before_it, found, said = said.partition(reason)
        assert found, f"{command}\n{before_it}"
    after = host.stock(), host.ask("resource provider trait list {}", "resource provider show {}")
    assert after == before


def test_users_are_refused(host: Host) -> None:
    commands = (
        "resource provider list",
        "resource provider show {}",
        "trait list",
        "resource class list",
        "resource provider delete {}",
        "allocation candidate list --resource VCPU=1",
    )
    assert host.refused("\n".join(commands), cloud="kilonova").count("HTTP 403") == len(commands)


def test_broken_requests_are_answered(host: Host) -> None:
    token = host.live.seed.admin.session.get_token()
    head = (
        f"POST /resource_providers HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Auth-Token: {token}\r\n"
        "Content-Type: application/json\r\n"
    )
    for rest in (
        "Transfer-Encoding: chunked\r\n\r\nzz\r\nabc",
        "Content-Length: 100\r\n\r\n{",
        "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "Content-Length: x\r\n\r\n{}",
    ):
        with socket.create_connection(("127.0.0.1", host.live.cloud.ports.placement), 30) as client:
            client.sendall((head + rest).encode())
            client.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 400 "), (rest, answer[:300])
