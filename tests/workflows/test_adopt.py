# SPDX-License-Identifier: Apache-2.0
"""A guest that no record knows becomes a server again: what is written, refused, and goes on."""

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
from tests.workflows.test_lost_commits import everything, running

QUOTA = {"instances": 10, "cores": 20, "ram": 51200}
NOBODY = "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed"


class Answers:
    """The agents' answers to queries, at once."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.forged = cloud, dict[str, Any]()

    def query(self, host: str, verb: str, arguments: JsonObject, timeout: float = 10) -> JsonObject:
        if host in self.cloud.cut:
            raise errors.NoAnswer("cut off")
        told = HostQueries(self.cloud.hosts[host].driver, None).answer(verb, arguments)
        if verb == "server_facts":
            told["facts"] |= self.forged
        return told


class Adopter:
    """An operator at a cloud."""

    def __init__(self, cloud: Cloud, **quota: int) -> None:
        self.cloud, self.answers = cloud, Answers(cloud)
        self.sources = Sources(
            cloud.store, self.answers, self._ports, Quota(QUOTA | quota), self._flavor, ImageRef
        )

    def _ports(self, server: str) -> list[Interface]:
        return self.cloud.networks.described(self.cloud.networks.ports(server), True)

    def _flavor(self, word: str) -> Flavor:
        return self.cloud.store.read(lambda tx: flavors.record(flavors.show(tx, word)))

    def adopt(self, server: str, host: str = "h1", **options: object) -> int:
        given = dict.fromkeys(("name", "project", "user", "flavor", "image"), None)
        flags = dict.fromkeys(("force", "replace"), False)
        words = {**given, **flags, "yes": True, "host": host, **options}
        return host_adopt.carry_out(self.sources, server, argparse.Namespace(**words))

    def is_refused(self, why: str, server: str, host: str = "h1", **options: object) -> str:
        """Says why, and writes nothing."""
        before = everything_in(self.cloud)
        with pytest.raises(errors.Problem, match=why) as caught:
            self.adopt(server, host, **options)
        assert everything_in(self.cloud) == before
        return caught.value.text


def everything_in(cloud: Cloud) -> list[Any]:
    tables = (schema.servers, schema.guests, schema.allocations, schema.consumers, schema.actions)
    return cloud.store.read(lambda tx: [tx.execute(sa.select(one)).all() for one in tables])


def minutes(cloud: Cloud) -> None:
    cloud.idle(65)


def lost(cloud: Cloud, **wishes: Any) -> str:
    """A server of which the database knows nothing, and whose guest runs on h1."""
    cloud.round()
    set_back = everything(cloud)
    server = cloud.create(host="h1", forced=True, **wishes)[0]
    cloud.settle()
    for key in ("os-stop", "os-start"):
        cloud.ask(server, key)
        cloud.settle()
    cloud.hosts["h1"].driver.host.write_file(server, "canary", "alive")
    set_back()
    cloud.hosts["h1"].restart()
    minutes(cloud)
    assert [one.invariant for one in cloud.findings() if one.subject == server] == ["domain-known"]
    return server


def away(cloud: Cloud, move: str) -> str:
    """A server whose guest is on h2, and whose record names h1."""
    cloud.round()
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.hosts["h1"].driver.host.write_file(server, "canary", "alive")
    set_back = everything(cloud)
    cloud.move(server, move, bigger(cloud, server) if move == "resize" else None, host="h2")
    cloud.settle()
    set_back()
    minutes(cloud)
    assert "h2" in cloud.domains(server)
    return server


def lives(cloud: Cloud, server: str, host: str) -> None:
    """All goes on: it is on this host alone, with its disk, and can be started, moved, deleted."""
    minutes(cloud)
    cloud.clean_up()
    assert (cloud.findings(), cloud.domains(server), cloud.pending()) == ([], [host], [])
    assert cloud.hosts[host].driver.host.guests[server].disk == {"canary": "alive"}
    for key, state in (("os-stop", states.STOPPED), ("os-start", states.ACTIVE)):
        if cloud.show(server).vm_state != state:
            cloud.ask(server, key)
            cloud.settle()
        assert cloud.show(server).vm_state == state
    assert running(cloud, server) == [host]
    cloud.move(server, "os-migrateLive")
    cloud.settle()
    assert running(cloud, server) not in ([], [host])
    assert cloud.findings() == []
    cloud.ask(server, "delete")
    cloud.settle()
    assert (cloud.domains(server), cloud.networks.ports(server)) == ([], [])
    assert cloud.findings() == []


def test_a_lost_server_is_one_again(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    server = lost(cloud)
    operator = Adopter(cloud)
    before = everything_in(cloud)
    assert operator.adopt(server, yes=False) == 1
    assert everything_in(cloud) == before
    assert operator.adopt(server) == 0
    said = capsys.readouterr().out
    [port] = cloud.networks.ports(server)
    for word in (f"({FLAVOR.id})", "project project, user user", port["id"], "lost, for no host"):
        assert said.count(word) == 2, said
    row = cloud.show(server)
    assert (row.name, row.project_id, row.user_id, row.host) == ("s", "project", "user", "h1")
    assert (row.vm_state, row.power_state) == (states.ACTIVE, states.RUNNING)
    assert [one["port"] for one in row.interfaces] == [port["id"]] and row.interfaces[0]["own"]
    [action] = cloud.store.read(lambda tx: tx.execute(sa.select(schema.actions)).all())
    assert (action.name, action.state, action.user_id) == ("adopt", "done", "kilonova")
    lives(cloud, server, "h1")


@pytest.mark.parametrize(
    ("key", "state"),
    [
        ("os-stop", states.STOPPED),
        ("pause", states.PAUSED),
        ("suspend", states.SUSPENDED),
        ("rescue", states.RESCUED),
    ],
)
def test_it_rests_as_its_guest_does(cloud: Cloud, key: str, state: str) -> None:
    register(cloud)
    set_back = everything(cloud)
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.ask(server, key, args={"image": {"id": ids.new()}} if key == "rescue" else None)
    cloud.settle()
    assert cloud.show(server).vm_state == state
    set_back()
    minutes(cloud)
    Adopter(cloud).adopt(server)
    minutes(cloud)
    assert (cloud.show(server).vm_state, cloud.findings()) == (state, [])


def test_quota_is_counted(cloud: Cloud) -> None:
    server = lost(cloud)
    small = Adopter(cloud, cores=0)
    assert "Requested 1, but already used 0 of 0" in small.is_refused("cores", server)
    small.adopt(server, force=True)
    lives(cloud, server, "h1")


def test_a_full_host_refuses_with_numbers(cloud: Cloud) -> None:
    server = lost(cloud)
    whole = replace(FLAVOR, memory_mb=8192 - 512)
    full = cloud.create(host="h1", forced=True, flavor=whole, networks=[])[0]
    cloud.settle()
    while cloud.show(full).vm_state != states.ACTIVE:
        whole = replace(whole, memory_mb=whole.memory_mb - 64)
        full = cloud.create(host="h1", forced=True, flavor=whole, networks=[])[0]
        cloud.settle()
    operator = Adopter(cloud)
    left = _memory_left(cloud)
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.inventories)
            .where(schema.inventories.c.resource_class == "MEMORY_MB")
            .values(total=schema.inventories.c.total - left)
        )
    )
    why = operator.is_refused("has no room for it", server)
    assert "128 MEMORY_MB are needed" in why and "are used" in why
    operator.adopt(server, force=True)
    assert [one for one in cloud.findings() if one.subject == server or "h1" in one.subject] == []


def _memory_left(cloud: Cloud) -> int:
    """MiB that h1 has left."""

    def look(tx: sa.Connection) -> int:
        stock = tx.execute(
            sa.select(schema.inventories).where(
                schema.inventories.c.resource_class == "MEMORY_MB",
                schema.inventories.c.provider_id == 1,
            )
        ).one()
        used = tx.scalar(
            sa.select(sa.func.sum(schema.allocations.c.used)).where(
                schema.allocations.c.resource_class == "MEMORY_MB",
                schema.allocations.c.provider_id == 1,
            )
        )
        return int((stock.total - stock.reserved) * stock.allocation_ratio) - int(used or 0)

    return cloud.store.read(look)


def test_a_server_that_moved_since_gets_its_place(either: Cloud) -> None:
    either.watcher = lambda: None  # a guest that nobody knows is a finding
    server = away(either, "os-migrateLive")
    operator = Adopter(either)
    operator.is_refused("--user: the database has this server", server, "h2", user="me")
    operator.adopt(server, "h2")
    row = either.show(server)
    assert (row.host, row.vm_state, row.flavor_id) == ("h2", states.STOPPED, "1")
    lives(either, server, "h2")


def test_of_two_copies_an_operator_says_which_stays(either: Cloud) -> None:
    either.watcher = lambda: None
    server = away(either, "resize")
    operator = Adopter(either)
    operator.is_refused("has a guest of it too, which is off", server, "h2")
    operator.adopt(server, "h2", replace=True)
    row = either.show(server)
    assert (row.host, row.flavor_id, row.vcpus) == ("h2", "2", 2)
    lives(either, server, "h2")


def test_the_copy_that_runs_where_the_record_is_stays(cloud: Cloud) -> None:
    server = away(cloud, "resize")
    cloud.ask(server, "os-start")
    cloud.settle()
    Adopter(cloud).is_refused("runs on host h1", server, "h2", replace=True)
    cloud.ask(server, "os-stop")
    Adopter(cloud).is_refused("busy|runs on host h1", server, "h2", replace=True)


def test_a_silent_host_may_have_the_guest(cloud: Cloud) -> None:
    server = away(cloud, "os-migrateLive")
    cloud.cut.add("h1")
    cloud.until_down("h1")
    Adopter(cloud).is_refused("h1, which the server's record names, does not", server, "h2")
    cloud.force_down("h2")
    Adopter(cloud).is_refused("h2 does not answer", server, "h2")


def test_two_guests_without_a_record_are_no_server(cloud: Cloud) -> None:
    server = lost(cloud)
    twin = deepcopy(cloud.hosts["h1"].driver.host.guests[server])
    cloud.hosts["h2"].driver.host.keep_guest(server, twin)
    operator = Adopter(cloud)
    assert "host discard h2" in operator.is_refused("Host h2 has a guest", server)
    cloud.store.write(lambda tx: guests.discard(tx, server, "h2"))
    minutes(cloud)
    operator.adopt(server)
    lives(cloud, server, "h1")


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        ({"flavor": {"id": "1", "name": "n", "vcpus": 0, "memory_mb": 1, "root_gb": 1}}, "sense"),
        ({"name": 7}, "sense"),
        ({"image": {"id": "../../etc"}}, "sense"),
        ({"ports": {"x": "y"}}, "sense"),
        ({"key_data": "k" * 70000}, "sense"),
        ({"project_id": "another"}, "of project project, and its guest on h2 says"),
    ],
)
def test_a_host_is_not_believed_in_everything(
    cloud: Cloud, forged: dict[str, object], why: str
) -> None:
    server = away(cloud, "os-migrateLive")
    operator = Adopter(cloud)
    operator.answers.forged = forged
    operator.is_refused(why, server, "h2")


def test_ports_of_others_are_left_out(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    server = lost(cloud)
    other = cloud.create(host="h2", forced=True)[0]
    cloud.settle()
    [own], [foreign] = cloud.networks.ports(server), cloud.networks.ports(other)
    operator = Adopter(cloud)
    operator.answers.forged = {"ports": {foreign["id"]: "stolen", own["id"]: "own"}}
    operator.adopt(server)
    assert f"port {foreign['id']}, which the guest has, is not" in capsys.readouterr().out
    assert [(one["port"], one["tag"]) for one in cloud.show(server).interfaces] == [
        (own["id"], "own")
    ]


def test_an_interface_that_was_lost_is_plugged_in_again(cloud: Cloud) -> None:
    """As the doctor says; the guest has it all the time."""
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back = everything(cloud)
    cloud.ask(server, "attach_interface", args={"networks": [{"network": "n2", "tag": "blue"}]})
    cloud.settle()
    [port] = cloud.networks.ports(server)
    set_back()
    minutes(cloud)
    [found] = cloud.findings()
    assert (found.invariant, found.subject) == ("port-of-server", port["id"])
    assert f"openstack server add port {server} {port['id']}" in found.text
    cloud.networks.update(port["id"], {"device_id": "", "device_owner": ""})
    cloud.ask(server, "attach_interface", args={"networks": [{"port": port["id"]}]})
    cloud.settle()
    assert [one["port"] for one in cloud.show(server).interfaces] == [port["id"]]
    assert list(cloud.hosts["h1"].driver.server_facts(server).ports) == [port["id"]]
    assert cloud.findings() == []


def test_adopt_asks_for_facts_that_the_host_lacks(cloud: Cloud) -> None:
    server = lost(cloud)
    cloud.hosts["h1"].driver.host.guests[server].facts = HostedServer(name="old")
    operator = Adopter(cloud)
    why = operator.is_refused("does not remember", server)
    assert "--project, --user, --flavor, and --image" in why and "--name" not in why
    made = {"flavorid": "7", "name": "m7", "vcpus": 1, "memory_mb": 128, "root_gb": 1}
    made |= {"is_public": True}
    cloud.store.write(lambda tx: flavors.create(tx, made))
    image = ids.new()
    operator.adopt(server, project="project", user="u2", flavor="7", image=image)
    row = cloud.show(server)
    assert (row.name, row.project_id, row.user_id, row.flavor_id) == ("old", "project", "u2", "7")
    assert (row.image_id, row.image["id"]) == (image, image)
    lives(cloud, server, "h1")


def test_a_record_that_changed_meanwhile_is_looked_at_again(cloud: Cloud) -> None:
    server = lost(cloud)
    operator = Adopter(cloud)
    facts = cloud.hosts["h1"].driver.server_facts(server)
    seen = adoption.Adoption(server, "h1", 3, states.RUNNING, facts, FLAVOR, [])
    limits = operator.sources.quota.source("project")

    def write(found: adoption.Adoption) -> None:
        cloud.store.write(lambda tx: adoption.adopt(tx, found, limits(tx)))

    for stale in (replace(seen, record="h1"), replace(seen, record="")):
        with pytest.raises(errors.Conflict, match="have changed meanwhile"):
            write(stale)
    write(seen)
    with pytest.raises(errors.Conflict, match="has a record"):
        write(seen)
    cloud.ask(server, "delete")
    cloud.settle()
    with pytest.raises(errors.Conflict, match="was deleted"):
        write(seen)
    operator.is_refused("no guest of server", server)
    here = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    operator.is_refused("nothing to adopt", here)


def test_a_server_that_is_busy_or_moves_is_not_taken(cloud: Cloud) -> None:
    server = away(cloud, "os-migrateLive")
    cloud.ask(server, "os-stop")
    Adopter(cloud).is_refused("busy", server, "h2")


def test_parts_of_the_host_stay_the_guests(cloud: Cloud) -> None:
    server = lost(cloud, flavor=PINNED, networks=[])
    had = cloud.hosts["h1"].driver.server_facts(server).assignment
    assert had is not None and had.numa_nodes
    set_back = everything(cloud)
    other = cloud.create(host="h1", forced=True, flavor=PINNED, networks=[])[0]
    cloud.settle()
    assert cloud.show(other).vm_state == states.ACTIVE
    operator = Adopter(cloud)
    operator.is_refused(f"CPU .* of host h1, which are {other}'s by now", server)
    cloud.ask(other, "delete")
    cloud.settle()
    operator.adopt(server)
    minutes(cloud)
    kept = cloud.store.read(lambda tx: tx.execute(sa.select(schema.guests)).one()).assignment
    assert (kept, cloud.findings()) == (to_wire(had), [])
    set_back()
    cloud.hosts["h1"].driver.host.guests[server].facts = replace(
        cloud.hosts["h1"].driver.host.guests[server].facts, assignment=None
    )
    operator.is_refused("does not tell which", server)


def test_no_such_guest_or_host(cloud: Cloud) -> None:
    register(cloud)
    operator = Adopter(cloud)
    operator.is_refused("has no guest of server", NOBODY)
    operator.is_refused("There is no host h9", NOBODY, "h9")


def test_the_doctor_is_content_afterwards(cloud: Cloud) -> None:
    """A guest that was adopted and one that was discarded leave nothing to find."""
    register(cloud)
    set_back = everything(cloud)
    first, second = cloud.create(2, host="h1", forced=True)
    cloud.settle()
    set_back()
    minutes(cloud)
    found = [one.subject for one in cloud.findings() if one.invariant == "domain-known"]
    assert sorted(found) == sorted((first, second))
    Adopter(cloud).adopt(first)
    cloud.store.write(lambda tx: guests.discard(tx, second, "h1"))
    minutes(cloud)
    assert {one.invariant for one in cloud.findings()} <= {"port-of-server"}
    assert running(cloud, first) == ["h1"] and cloud.domains(second) == []


def test_a_guest_whose_volumes_are_lost_is_not_adopted(cloud: Cloud) -> None:
    """It would lose them when it starts, and others could get them while it runs."""
    server, volume = lost(cloud), cloud.volumes.make()
    guest = cloud.hosts["h1"].driver.host.guests[server]
    guest.volumes = [AttachedVolume(volume, "/dev/vdb", 1, {"driver_volume_type": "nbd"})]
    adopter = Adopter(cloud)
    adopter.is_refused(f"The guest has volume {volume}, and the database has lost that", server)
    adopter.answers.forged = {"volumes": ["../etc"]}
    adopter.is_refused("makes no sense", server)
    adopter.answers.forged, guest.volumes = {}, []
    assert adopter.adopt(server) == 0
