# SPDX-License-Identifier: Apache-2.0
"""osc-placement from PyPI against the placement service of a running cloud.

Operators read hosts and allocations, change inventories and traits, which the scheduler uses, and
get refusals.
"""

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
    """A host of the cloud, and commands of the client about its resource provider."""

    live: Live
    name: str
    uuid: str

    def run_for_json(self, *commands: str) -> list[Any]:
        """Run commands as admin, and return their JSON output.

        {} stands for the id of the host's provider.
        """
        return self.live.openstack(
            *(command.replace("{}", self.uuid) + JSON for command in commands), cloud=ADMIN
        )

    def run_commands(self, *commands: str) -> None:
        """Run commands as admin without using their output."""
        output, complaints = self.live.type(
            *(command.replace("{}", self.uuid) for command in commands), cloud=ADMIN
        )
        assert complaints == "", f"{output}\n{complaints}"

    def run_refused(self, command: str, cloud: str = ADMIN) -> str:
        """Run a command that must fail, and return the error output."""
        output, complaints = self.live.type(command.replace("{}", self.uuid), cloud=cloud)
        assert complaints and "Traceback" not in complaints, output
        return complaints

    def read_inventories(self) -> dict[str, dict[str, Any]]:
        """Return the host's inventories by resource class."""
        [inventories] = self.run_for_json("resource provider inventory list {}")
        return {inventory["resource_class"]: inventory for inventory in inventories}

    def read_session(self) -> int:
        """Return the host's session, a random number that changes with each registration."""
        [(session,)] = self.live.rows("SELECT session FROM hosts WHERE name = ?", self.name)
        return int(session)


@pytest.fixture
def host(in_memory: Live) -> Host:
    [providers] = in_memory.openstack("resource provider list --name one" + JSON, cloud=ADMIN)
    return Host(in_memory, "one", providers[0]["uuid"])


@pytest.fixture
def customized_host(host: Host) -> Iterator[Host]:
    """Yield a host with a custom trait and a custom resource class, both removed at the end."""
    before = host.read_inventories()
    host.run_commands(
        "trait create CUSTOM_GOLD",
        "resource class create CUSTOM_LICENCE",
        "resource provider trait set --trait CUSTOM_GOLD {}",
        "resource provider inventory set --amend --resource CUSTOM_LICENCE=2 {}",
    )
    yield host
    options = " ".join(
        f"--resource {name}={inventory['total']} --resource {name}:max_unit={inventory['max_unit']}"
        for name, inventory in before.items()
    )
    host.run_commands(
        "resource provider trait delete {}",
        f"resource provider inventory set {options} {{}}",
        "trait delete CUSTOM_GOLD",
        "resource class delete CUSTOM_LICENCE",
    )
    assert host.read_inventories() == before


def test_osc_placement_shows_providers_traits_inventories_and_usages(host: Host) -> None:
    catalogue, listed, shown, traits, classes, usages = host.run_for_json(
        "catalog show placement",
        "resource provider list",
        "resource provider show {}",
        "resource provider trait list {}",
        "resource class list",
        "resource provider usage show {}",
    )
    assert catalogue["type"] == "placement"
    assert {row["name"] for row in listed} >= {"one", "two"}
    assert (shown["name"], shown["root_provider_uuid"], shown["parent_provider_uuid"]) == (
        "one",
        host.uuid,
        None,
    )
    assert "COMPUTE_NODE" in {row["name"] for row in traits}
    assert {row["name"] for row in classes} >= {"VCPU", "MEMORY_MB", "DISK_GB", "PCPU"}
    read_inventories = host.read_inventories()
    assert (
        {row["resource_class"] for row in usages}
        == set(read_inventories)
        == {"VCPU", "MEMORY_MB", "DISK_GB"}
    )
    assert (read_inventories["VCPU"]["total"], read_inventories["VCPU"]["allocation_ratio"]) == (
        1000,
        4.0,
    )


def test_osc_placement_shows_allocations_of_server_until_delete(host: Host) -> None:
    live, rest = host.live, host.live.rest()
    server = rest.create(image=live.image("empty"), flavor=live.flavor("m1.small"))
    try:
        rest.await_status(server, "ACTIVE")
        allocations, usage = host.run_for_json(
            f"resource provider allocation show {server}",
            f"resource usage show {live.seed.demo.session.get_project_id()}",
        )
        assert [row["resources"] for row in allocations] == [
            {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}
        ]
        assert {row["resource_class"]: row["usage"] for row in usage}["MEMORY_MB"] >= 2048
    finally:
        rest.call("DELETE", f"/servers/{server}")
        rest.await_gone(server)
    assert host.run_for_json(f"resource provider allocation show {server}") == [[]]


def test_scheduler_uses_custom_trait_and_class_set_with_osc_placement(
    customized_host: Host,
) -> None:
    live, rest, admin = (
        customized_host.live,
        customized_host.live.rest(),
        customized_host.live.rest("kilonova-admin"),
    )
    [flavor] = live.openstack(
        f"flavor create --ram 64 --disk 1 --vcpus 1 --property trait:CUSTOM_GOLD=required "
        f"--property resources:CUSTOM_LICENCE=1 gold-{uuid.uuid4().hex[:8]}" + JSON,
        cloud=ADMIN,
    )
    servers = [rest.create(image=live.image("empty"), flavor=flavor["id"]) for _ in range(2)]
    try:
        for server in servers:
            rest.await_status(server, "ACTIVE")
            assert admin.server(server)["OS-EXT-SRV-ATTR:host"] == "one"
        assert customized_host.read_inventories()["CUSTOM_LICENCE"]["used"] == 2
        assert "in use" in customized_host.run_refused(
            "resource provider inventory delete --resource-class CUSTOM_LICENCE {}"
        )
        assert customized_host.run_for_json(
            "allocation candidate list --resource CUSTOM_LICENCE=1"
        ) == [[]]
        servers.append(rest.create(image=live.image("empty"), flavor=flavor["id"]))
        assert "CUSTOM_LICENCE" in rest.await_status(servers[2], "ERROR")["fault"]["message"]
    finally:
        for server in servers:
            rest.call("DELETE", f"/servers/{server}")
            rest.await_gone(server)
        live.openstack(f"flavor delete {flavor['id']}", cloud=ADMIN)
    live.assert_healthy()


def test_reserved_amount_set_by_operator_survives_reports_until_reset(host: Host) -> None:
    total = host.read_inventories()["MEMORY_MB"]["total"]
    host.run_commands(
        f"resource provider inventory set --amend --resource MEMORY_MB:reserved={total - 64} {{}}"
    )
    assert host.read_inventories()["MEMORY_MB"]["reserved"] == total - 64
    assert host.name not in {
        provider["name"]
        for provider in host.run_for_json("resource provider list --resource MEMORY_MB=128")[0]
    }
    before = host.read_session()
    process_control.restart(host.live.cloud, "agent")
    await_true(lambda: host.read_session() != before, SETTLE, lambda: "the host has not registered")
    assert host.read_inventories()["MEMORY_MB"]["reserved"] == total - 64, (
        "a report of the host leaves it"
    )
    host.run_commands(
        f"resource provider inventory class set --total {total} --max_unit {total} {{}} MEMORY_MB"
    )
    assert host.read_inventories()["MEMORY_MB"]["reserved"] != total - 64
    assert host.name in {
        provider["name"]
        for provider in host.run_for_json("resource provider list --resource MEMORY_MB=128")[0]
    }


def test_osc_placement_manages_custom_providers_and_aggregates(host: Host) -> None:
    name, group = f"rack-{uuid.uuid4().hex[:8]}", str(uuid.uuid4())
    [rack] = host.run_for_json(f"resource provider create {name}")
    [shelf] = host.run_for_json(
        f"resource provider create --parent-provider {rack['uuid']} {name}-shelf"
    )
    host.run_commands(
        f"resource provider inventory set --resource DISK_GB=100 --resource DISK_GB:step_size=10 {shelf['uuid']}",
        f"resource provider aggregate set --aggregate {group} --generation 1 {shelf['uuid']}",
    )
    tree, members, candidates = host.run_for_json(
        f"resource provider list --in-tree {rack['uuid']}",
        f"resource provider list --member-of {group}",
        f"allocation candidate list --resource DISK_GB=50 --member-of {group}",
    )
    assert {provider["name"] for provider in tree} == {name, f"{name}-shelf"}
    assert [provider["uuid"] for provider in members] == [shelf["uuid"]]
    assert [provider["resource provider"] for provider in candidates] == [shelf["uuid"]]
    assert "It has child resource providers" in host.run_refused(
        f"resource provider delete {rack['uuid']}"
    )
    host.run_commands(
        f"resource provider delete {shelf['uuid']}", f"resource provider delete {rack['uuid']}"
    )


#: Command -> text of the error. {} stands for the provider of a host.
REFUSED_COMMANDS = {
    "resource provider inventory set --amend --resource VCPU:total=5 {}": "The host one reports total",
    "resource provider inventory set --resource VCPU=5 {}": "The host one reports the inventory of ",
    "resource provider inventory set --amend --resource CUSTOM_NOBODY=5 {}": "No such resource class",
    "resource provider inventory set --amend --resource VCPU:reserved=-1 {}": "-1 is less than the minimum of 0",
    "resource provider inventory set --amend --resource VCPU:colour=1 {}": "colour",
    "resource provider delete {}": "provider of a host",
    "resource provider set --name other {}": "provider of a host",
    "resource provider create --parent-provider {} below": "cannot have child providers",
    "resource provider create one": "already exists",
    "resource provider show 00000000-0000-4000-8000-000000000009": "No resource provider with uuid",
    "resource provider trait set --trait CUSTOM_NOBODY {}": "No such trait",
    "resource provider trait set --trait COMPUTE_STATUS_DISABLED {}": "Disable the service instead",
    "trait create gold": "A valid trait must",
    "trait delete COMPUTE_NODE": "Cannot delete standard trait",
    "resource class create GOLD": "does not match",
    "resource class delete VCPU": "Cannot delete standard resource class",
    "resource provider allocation set --project-id p --user-id u --allocation rp={},VCPU=1 "
    "00000000-0000-4000-8000-000000000009": "cannot change allocations",
    "allocation candidate list --resource VCPU=0": "requires amount >= 1",
    "allocation candidate list --resource NOSUCH=1": "No such resource class NOSUCH",
}


def test_osc_placement_wrong_commands_fail_with_reason_and_no_change(host: Host) -> None:
    before = (
        host.read_inventories(),
        host.run_for_json("resource provider trait list {}", "resource provider show {}"),
    )
    complaints = host.run_refused("\n".join(REFUSED_COMMANDS))
    for command, reason in REFUSED_COMMANDS.items():
        preceding, match, complaints = complaints.partition(reason)
        assert match, f"{command}\n{preceding}"
    after = (
        host.read_inventories(),
        host.run_for_json("resource provider trait list {}", "resource provider show {}"),
    )
    assert after == before


def test_osc_placement_commands_of_non_admin_fail_with_403(host: Host) -> None:
    commands = (
        "resource provider list",
        "resource provider show {}",
        "trait list",
        "resource class list",
        "resource provider delete {}",
        "allocation candidate list --resource VCPU=1",
    )
    assert host.run_refused("\n".join(commands), cloud="kilonova").count("HTTP 403") == len(
        commands
    )


def test_placement_answers_broken_requests_with_400(host: Host) -> None:
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
