# SPDX-License-Identifier: Apache-2.0
"""Tests of ``kilonova host adopt``, which creates a server's record for a guest without one.

They run on the simulated cloud. The real ``HostQueries`` of the hosts return the facts.
"""

from __future__ import annotations

import argparse
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.json_types import JsonObject
from common.domain.models import AttachedVolume, Flavor, ImageRef, Interface
from common.domain.server_facts import HostedServer
from common.domain.wire import to_wire
from common.store import schema
from common.store.servers import guests
from common.store.tenants import flavors
from compute_agent.queries import HostQueries
from compute_api.compute.request.quota import Quota
from deploy.operator.hosts import adopt as host_adopt
from deploy.operator.hosts.adopt import Sources
from deploy.operator.store import adoption
from tests.workflows.frozen import register
from tests.workflows.scenarios import PINNED, bigger
from tests.workflows.simulator import FLAVOR, Cloud
from tests.workflows.test_lost_commits import read_running_hosts, snapshot_database

QUOTA = {"instances": 10, "cores": 20, "ram": 51200}
UNKNOWN_SERVER = "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed"


class HostAnswers:
    """Answers queries to agents at once, and replaces facts by ``forged_facts``."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.forged_facts = cloud, dict[str, Any]()

    def query(self, host: str, verb: str, arguments: JsonObject, timeout: float = 10) -> JsonObject:
        if host in self.cloud.cut:
            raise errors.NoAnswer("cut off")
        answer = HostQueries(self.cloud.hosts[host].driver, None).answer(verb, arguments)
        if verb == "server_facts":
            answer["facts"] |= self.forged_facts
        return answer


class Adopter:
    """Runs ``kilonova host adopt`` for guests of a cloud."""

    def __init__(self, cloud: Cloud, **quota: int) -> None:
        self.cloud, self.answers = cloud, HostAnswers(cloud)
        self.sources = Sources(
            cloud.store, self.answers, self._ports, Quota(QUOTA | quota), self._flavor, ImageRef
        )

    def _ports(self, server: str) -> list[Interface]:
        return self.cloud.networks.described(self.cloud.networks.ports(server), True)

    def _flavor(self, word: str) -> Flavor:
        return self.cloud.store.read(lambda tx: flavors.record(flavors.show(tx, word)))

    def adopt(self, server: str, host: str = "h1", **options: object) -> int:
        texts = dict.fromkeys(("name", "project", "user", "flavor", "image"), None)
        flags = dict.fromkeys(("force", "replace"), False)
        args = {**texts, **flags, "yes": True, "host": host, **options}
        return host_adopt.carry_out(self.sources, server, argparse.Namespace(**args))

    def check_refusal(self, pattern: str, server: str, host: str = "h1", **options: object) -> str:
        """Check that adopt raises a ``Problem`` with a text like ``pattern`` and writes no row.

        Returns:
            The text of the problem.
        """
        before = read_rows(self.cloud)
        with pytest.raises(errors.Problem, match=pattern) as caught:
            self.adopt(server, host, **options)
        assert read_rows(self.cloud) == before
        return caught.value.text


def read_rows(cloud: Cloud) -> list[Any]:
    tables = (schema.servers, schema.guests, schema.allocations, schema.consumers, schema.actions)
    return cloud.store.read(lambda tx: [tx.execute(sa.select(table)).all() for table in tables])


def wait_for_full_reports(cloud: Cloud) -> None:
    cloud.idle(65)


def boot_lost_server(cloud: Cloud, **options: Any) -> str:
    """Create a server on h1, and set the database back to the time before the server.

    The guest still runs on h1, and so is a guest without a record.
    """
    cloud.round()
    set_back = snapshot_database(cloud)
    server = cloud.create(host="h1", forced=True, **options)[0]
    cloud.settle()
    for key in ("os-stop", "os-start"):
        cloud.ask(server, key)
        cloud.settle()
    cloud.hosts["h1"].driver.host.write_file(server, "canary", "alive")
    set_back()
    cloud.hosts["h1"].restart()
    wait_for_full_reports(cloud)
    assert [finding.invariant for finding in cloud.findings() if finding.subject == server] == [
        "domain-known"
    ]
    return server


def boot_moved_server(cloud: Cloud, move: str) -> str:
    """Move a server from h1 to h2, and set the database back to the time before the move.

    The guest is on h2 then, and the record of the server names h1.
    """
    cloud.round()
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.hosts["h1"].driver.host.write_file(server, "canary", "alive")
    set_back = snapshot_database(cloud)
    cloud.move(server, move, bigger(cloud, server) if move == "resize" else None, host="h2")
    cloud.settle()
    set_back()
    wait_for_full_reports(cloud)
    assert "h2" in cloud.domains(server)
    return server


def check_usable(cloud: Cloud, server: str, host: str) -> None:
    """Check that the server runs on this host alone, with the original disk.

    Then stop and start the server, migrate the guest live and delete the server.
    """
    wait_for_full_reports(cloud)
    cloud.clean_up()
    assert (cloud.findings(), cloud.domains(server), cloud.pending()) == ([], [host], [])
    assert cloud.hosts[host].driver.host.guests[server].disk == {"canary": "alive"}
    for key, state in (("os-stop", states.STOPPED), ("os-start", states.ACTIVE)):
        if cloud.show(server).vm_state != state:
            cloud.ask(server, key)
            cloud.settle()
        assert cloud.show(server).vm_state == state
    assert read_running_hosts(cloud, server) == [host]
    cloud.move(server, "os-migrateLive")
    cloud.settle()
    assert read_running_hosts(cloud, server) not in ([], [host])
    assert cloud.findings() == []
    cloud.ask(server, "delete")
    cloud.settle()
    assert (cloud.domains(server), cloud.networks.ports(server)) == ([], [])
    assert cloud.findings() == []


def test_adopt_creates_server_record_from_facts_of_guest(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    server = boot_lost_server(cloud)
    operator = Adopter(cloud)
    before = read_rows(cloud)
    assert operator.adopt(server, yes=False) == 1
    assert read_rows(cloud) == before
    assert operator.adopt(server) == 0
    output = capsys.readouterr().out
    [port] = cloud.networks.ports(server)
    for word in (f"({FLAVOR.id})", "project project, user user", port["id"], "lost, because hosts"):
        assert output.count(word) == 2, output
    row = cloud.show(server)
    assert (row.name, row.project_id, row.user_id, row.host) == ("s", "project", "user", "h1")
    assert (row.vm_state, row.power_state) == (states.ACTIVE, states.RUNNING)
    assert [nic["port"] for nic in row.interfaces] == [port["id"]] and row.interfaces[0]["own"]
    [action] = cloud.store.read(lambda tx: tx.execute(sa.select(schema.actions)).all())
    assert (action.name, action.state, action.user_id) == ("adopt", "done", "kilonova")
    check_usable(cloud, server, "h1")


@pytest.mark.parametrize(
    ("key", "state"),
    [
        ("os-stop", states.STOPPED),
        ("pause", states.PAUSED),
        ("suspend", states.SUSPENDED),
        ("rescue", states.RESCUED),
    ],
)
def test_adopt_sets_vm_state_of_guest(cloud: Cloud, key: str, state: str) -> None:
    register(cloud)
    set_back = snapshot_database(cloud)
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.ask(server, key, args={"image": {"id": ids.new()}} if key == "rescue" else None)
    cloud.settle()
    assert cloud.show(server).vm_state == state
    set_back()
    wait_for_full_reports(cloud)
    Adopter(cloud).adopt(server)
    wait_for_full_reports(cloud)
    assert (cloud.show(server).vm_state, cloud.findings()) == (state, [])


def test_adopt_over_quota_is_refused_without_force(cloud: Cloud) -> None:
    server = boot_lost_server(cloud)
    operator = Adopter(cloud, cores=0)
    assert "Requested 1, but already used 0 of 0" in operator.check_refusal("cores", server)
    operator.adopt(server, force=True)
    check_usable(cloud, server, "h1")


def test_adopt_on_full_host_without_force_is_refused_with_missing_memory(cloud: Cloud) -> None:
    server = boot_lost_server(cloud)
    flavor = replace(FLAVOR, memory_mb=8192 - 512)
    server_on_full_host = cloud.create(host="h1", forced=True, flavor=flavor, networks=[])[0]
    cloud.settle()
    while cloud.show(server_on_full_host).vm_state != states.ACTIVE:
        flavor = replace(flavor, memory_mb=flavor.memory_mb - 64)
        server_on_full_host = cloud.create(host="h1", forced=True, flavor=flavor, networks=[])[0]
        cloud.settle()
    operator = Adopter(cloud)
    free_mb = _read_free_memory(cloud)
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.inventories)
            .where(schema.inventories.c.resource_class == "MEMORY_MB")
            .values(total=schema.inventories.c.total - free_mb)
        )
    )
    text = operator.check_refusal("has no room for the guest", server)
    assert "128 MEMORY_MB are needed" in text and "are in use" in text
    operator.adopt(server, force=True)
    assert [
        finding
        for finding in cloud.findings()
        if finding.subject == server or "h1" in finding.subject
    ] == []


def _read_free_memory(cloud: Cloud) -> int:
    """Return the free memory of h1 in MiB."""

    def read(tx: sa.Connection) -> int:
        row = tx.execute(
            sa.select(schema.inventories).where(
                schema.inventories.c.resource_class == "MEMORY_MB",
                schema.inventories.c.provider_id == 1,
            )
        ).one()
        used_mb = tx.scalar(
            sa.select(sa.func.sum(schema.allocations.c.used)).where(
                schema.allocations.c.resource_class == "MEMORY_MB",
                schema.allocations.c.provider_id == 1,
            )
        )
        return int((row.total - row.reserved) * row.allocation_ratio) - int(used_mb or 0)

    return cloud.store.read(read)


def test_adopt_sets_host_of_server_moved_after_backup(either: Cloud) -> None:
    either.watcher = lambda: None  # The watcher would report the guest without a record.
    server = boot_moved_server(either, "os-migrateLive")
    operator = Adopter(either)
    operator.check_refusal("--user: the server has a record", server, "h2", user="me")
    operator.adopt(server, "h2")
    row = either.show(server)
    assert (row.host, row.vm_state, row.flavor_id) == ("h2", states.STOPPED, "1")
    check_usable(either, server, "h2")


def test_adopt_with_replace_keeps_adopted_guest_and_removes_other(either: Cloud) -> None:
    either.watcher = lambda: None
    server = boot_moved_server(either, "resize")
    operator = Adopter(either)
    operator.check_refusal("h1, which is its recorded host, has a guest too", server, "h2")
    operator.adopt(server, "h2", replace=True)
    row = either.show(server)
    assert (row.host, row.flavor_id, row.vcpus) == ("h2", "2", 2)
    check_usable(either, server, "h2")


def test_adopt_with_replace_is_refused_while_guest_on_recorded_host_runs(cloud: Cloud) -> None:
    server = boot_moved_server(cloud, "resize")
    cloud.ask(server, "os-start")
    cloud.settle()
    Adopter(cloud).check_refusal("runs on host h1", server, "h2", replace=True)
    cloud.ask(server, "os-stop")
    Adopter(cloud).check_refusal("busy|runs on host h1", server, "h2", replace=True)


def test_adopt_is_refused_if_recorded_host_is_silent_or_guest_host_forced_down(
    cloud: Cloud,
) -> None:
    server = boot_moved_server(cloud, "os-migrateLive")
    cloud.cut.add("h1")
    cloud.until_down("h1")
    Adopter(cloud).check_refusal("h1, which is the server's recorded host, does", server, "h2")
    cloud.force_down("h2")
    Adopter(cloud).check_refusal("h2 does not answer", server, "h2")


def test_adopt_is_refused_while_two_hosts_have_guest(cloud: Cloud) -> None:
    server = boot_lost_server(cloud)
    twin = deepcopy(cloud.hosts["h1"].driver.host.guests[server])
    cloud.hosts["h2"].driver.host.keep_guest(server, twin)
    operator = Adopter(cloud)
    assert "host discard h2" in operator.check_refusal("Host h2 has a guest", server)
    cloud.store.write(lambda tx: guests.discard(tx, server, "h2"))
    wait_for_full_reports(cloud)
    operator.adopt(server)
    check_usable(cloud, server, "h1")


@pytest.mark.parametrize(
    ("forged_facts", "why"),
    [
        (
            {"flavor": {"id": "1", "name": "n", "vcpus": 0, "memory_mb": 1, "root_gb": 1}},
            "not valid",
        ),
        ({"name": 7}, "not valid"),
        ({"image": {"id": "../../etc"}}, "not valid"),
        ({"ports": {"x": "y"}}, "not valid"),
        ({"key_data": "k" * 70000}, "not valid"),
        ({"project_id": "another"}, "to project project, but host h2 reports project another"),
    ],
)
def test_adopt_refuses_implausible_facts_of_host(
    cloud: Cloud, forged_facts: dict[str, object], why: str
) -> None:
    server = boot_moved_server(cloud, "os-migrateLive")
    operator = Adopter(cloud)
    operator.answers.forged_facts = forged_facts
    operator.check_refusal(why, server, "h2")


def test_adopt_leaves_out_ports_of_other_servers(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    server = boot_lost_server(cloud)
    other = cloud.create(host="h2", forced=True)[0]
    cloud.settle()
    [own], [foreign] = cloud.networks.ports(server), cloud.networks.ports(other)
    operator = Adopter(cloud)
    operator.answers.forged_facts = {"ports": {foreign["id"]: "stolen", own["id"]: "own"}}
    operator.adopt(server)
    assert f"port {foreign['id']} of the guest is not" in capsys.readouterr().out
    assert [(nic["port"], nic["tag"]) for nic in cloud.show(server).interfaces] == [
        (own["id"], "own")
    ]


def test_attach_interface_restores_port_of_guest_missing_in_server_record(cloud: Cloud) -> None:
    """The guest keeps the interface. The finding names the command that restores the record."""
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back = snapshot_database(cloud)
    cloud.ask(server, "attach_interface", args={"networks": [{"network": "n2", "tag": "blue"}]})
    cloud.settle()
    [port] = cloud.networks.ports(server)
    set_back()
    wait_for_full_reports(cloud)
    [finding] = cloud.findings()
    assert (finding.invariant, finding.subject) == ("port-of-server", port["id"])
    assert f"openstack server add port {server} {port['id']}" in finding.text
    cloud.networks.update(port["id"], {"device_id": "", "device_owner": ""})
    cloud.ask(server, "attach_interface", args={"networks": [{"port": port["id"]}]})
    cloud.settle()
    assert [nic["port"] for nic in cloud.show(server).interfaces] == [port["id"]]
    assert list(cloud.hosts["h1"].driver.server_facts(server).ports) == [port["id"]]
    assert cloud.findings() == []


def test_adopt_requires_options_for_facts_missing_on_host(cloud: Cloud) -> None:
    server = boot_lost_server(cloud)
    cloud.hosts["h1"].driver.host.guests[server].facts = HostedServer(name="old")
    operator = Adopter(cloud)
    text = operator.check_refusal("does not report all", server)
    assert "--project, --user, --flavor, and --image" in text and "--name" not in text
    flavor = {"flavorid": "7", "name": "m7", "vcpus": 1, "memory_mb": 128, "root_gb": 1}
    flavor |= {"is_public": True}
    cloud.store.write(lambda tx: flavors.create(tx, flavor))
    image = ids.new()
    operator.adopt(server, project="project", user="u2", flavor="7", image=image)
    row = cloud.show(server)
    assert (row.name, row.project_id, row.user_id, row.flavor_id) == ("old", "project", "u2", "7")
    assert (row.image_id, row.image["id"]) == (image, image)
    check_usable(cloud, server, "h1")


def test_adopt_conflicts_when_record_changed_meanwhile(cloud: Cloud) -> None:
    server = boot_lost_server(cloud)
    operator = Adopter(cloud)
    facts = cloud.hosts["h1"].driver.server_facts(server)
    observed = adoption.Adoption(server, "h1", 3, states.RUNNING, facts, FLAVOR, [])
    limits = operator.sources.quota.source("project")

    def write(guest: adoption.Adoption) -> None:
        cloud.store.write(lambda tx: adoption.adopt(tx, guest, limits(tx)))

    for stale in (replace(observed, record="h1"), replace(observed, record="")):
        with pytest.raises(errors.Conflict, match="have changed meanwhile"):
            write(stale)
    write(observed)
    with pytest.raises(errors.Conflict, match="has a record"):
        write(observed)
    cloud.ask(server, "delete")
    cloud.settle()
    with pytest.raises(errors.Conflict, match="was deleted"):
        write(observed)
    operator.check_refusal("no guest of server", server)
    recorded_server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    operator.check_refusal("nothing to adopt", recorded_server)


def test_adopt_of_server_with_running_action_is_refused(cloud: Cloud) -> None:
    server = boot_moved_server(cloud, "os-migrateLive")
    cloud.ask(server, "os-stop")
    Adopter(cloud).check_refusal("busy", server, "h2")


def test_adopt_keeps_cpu_assignment_and_is_refused_while_cpus_are_taken(cloud: Cloud) -> None:
    """The command is also refused if the facts of the host lack the assignment."""
    server = boot_lost_server(cloud, flavor=PINNED, networks=[])
    assignment = cloud.hosts["h1"].driver.server_facts(server).assignment
    assert assignment is not None and assignment.numa_nodes
    set_back = snapshot_database(cloud)
    other = cloud.create(host="h1", forced=True, flavor=PINNED, networks=[])[0]
    cloud.settle()
    assert cloud.show(other).vm_state == states.ACTIVE
    operator = Adopter(cloud)
    operator.check_refusal(f"CPU .* of host h1, which server {other} has too", server)
    cloud.ask(other, "delete")
    cloud.settle()
    operator.adopt(server)
    wait_for_full_reports(cloud)
    stored = cloud.store.read(lambda tx: tx.execute(sa.select(schema.guests)).one()).assignment
    assert (stored, cloud.findings()) == (to_wire(assignment), [])
    set_back()
    cloud.hosts["h1"].driver.host.guests[server].facts = replace(
        cloud.hosts["h1"].driver.host.guests[server].facts, assignment=None
    )
    operator.check_refusal("does not report which", server)


def test_adopt_of_unknown_guest_or_host_is_refused(cloud: Cloud) -> None:
    register(cloud)
    operator = Adopter(cloud)
    operator.check_refusal("has no guest of server", UNKNOWN_SERVER)
    operator.check_refusal("There is no host h9", UNKNOWN_SERVER, "h9")


def test_adopt_and_discard_after_lost_creates_leave_only_port_findings(cloud: Cloud) -> None:
    register(cloud)
    set_back = snapshot_database(cloud)
    first, second = cloud.create(2, host="h1", forced=True)
    cloud.settle()
    set_back()
    wait_for_full_reports(cloud)
    subjects = [
        finding.subject for finding in cloud.findings() if finding.invariant == "domain-known"
    ]
    assert sorted(subjects) == sorted((first, second))
    Adopter(cloud).adopt(first)
    cloud.store.write(lambda tx: guests.discard(tx, second, "h1"))
    wait_for_full_reports(cloud)
    assert {finding.invariant for finding in cloud.findings()} <= {"port-of-server"}
    assert read_running_hosts(cloud, first) == ["h1"] and cloud.domains(second) == []


def test_adopt_of_guest_with_volume_missing_in_record_is_refused(cloud: Cloud) -> None:
    """At the next start the guest would lose the volumes, which other servers could attach."""
    server, volume = boot_lost_server(cloud), cloud.volumes.make()
    guest = cloud.hosts["h1"].driver.host.guests[server]
    guest.volumes = [AttachedVolume(volume, "/dev/vdb", 1, {"driver_volume_type": "nbd"})]
    adopter = Adopter(cloud)
    adopter.check_refusal(f"The guest has volume {volume}, but the server's record", server)
    adopter.answers.forged_facts = {"volumes": ["../etc"]}
    adopter.check_refusal("are not valid", server)
    adopter.answers.forged_facts, guest.volumes = {}, []
    assert adopter.adopt(server) == 0
