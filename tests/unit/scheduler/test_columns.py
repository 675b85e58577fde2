# SPDX-License-Identifier: Apache-2.0
"""What the columns know of hosts besides resources, and that it follows the store piece by
piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from common.domain.models import AssignedNumaNode, Device, HardwareAssignment, NumaNode, RequestSpec
from common.domain.wire import to_wire
from common.store import schema
from scheduler.columns import Shared
from scheduler.hosts import Hosts, ReadOptions
from scheduler.proposals import Proposals
from tests.server_rows import server_row
from tests.unit.scheduler.conftest import Cloud, options

ONE = {"VCPU": 1, "MEMORY_MB": 1024, "DISK_GB": 10}
GPU = Device("0000:81:00.0", "10de", "1db4")


def request(server: str = "s", **more: object) -> RequestSpec:
    return RequestSpec(server, "p", **{"resources": dict(ONE), **more})  # type: ignore[arg-type]


def hosts_of(cloud: Cloud, **wants: Any) -> Hosts:
    hosts = Hosts(cloud.store, cloud.clock, ReadOptions(**wants))
    hosts.refresh()
    return hosts


def change(cloud: Cloud, host: str, *statements: sa.Executable) -> None:
    """What somebody does to a host, and says so."""
    with cloud.store.begin() as tx:
        for statement in statements:
            tx.execute(statement)
        tx.execute(
            sa.update(schema.providers)
            .where(schema.providers.c.host == host)
            .values(changed_at=cloud.clock.micros())
        )


def describe(cloud: Cloud, name: str, **values: Any) -> sa.Insert:
    now = cloud.clock.micros()
    return sa.insert(schema.hosts).values(
        **{
            "name": name,
            "session": 1,
            "hypervisor_type": "QEMU",
            "hypervisor_version": 7002000,
            "hypervisor_hostname": name,
            "host_ip": "192.0.2.1",
            "cpu_info": {"arch": "x86_64"},
            "traits": [],
            "facts": {"supported_instances": [["x86_64", "kvm", "hvm"]]},
            "created_at": now,
            "updated_at": now,
            **values,
        }
    )


def guest(
    cloud: Cloud,
    server: str,
    host: str,
    wanted: str = "running",
    assignment: HardwareAssignment | None = None,
) -> sa.Insert:
    return sa.insert(schema.guests).values(
        server_id=server,
        host=host,
        fence=1,
        wanted=wanted,
        may_run=True,
        changed_at=cloud.clock.micros(),
        assignment=None if assignment is None else to_wire(assignment),
    )


def server(
    cloud: Cloud, key: str, host: str | None, project: str = "p", **values: Any
) -> sa.Insert:
    now = cloud.clock.micros()
    times = {"created_at": now, "updated_at": now}
    names = {"name": key, "hostname": key, "project_id": project}
    return sa.insert(schema.servers).values(
        **server_row(key, host=host, **{**names, **times, **values})
    )


def test_a_provider_made_by_hand_is_no_host(cloud: Cloud) -> None:
    cloud.host("a")
    change(
        cloud,
        "a",
        sa.insert(schema.providers).values(
            uuid="x",
            name="x",
            host=None,
            root_uuid="x",
            created_at=0,
            changed_at=cloud.clock.micros(),
        ),
    )
    hosts = hosts_of(cloud)
    assert hosts.snapshot().names == ["a"]
    cloud.clock.seconds += 2
    hosts.refresh()
    assert hosts.snapshot().names == ["a"]


def test_hosts_that_come_and_go_leave_the_others_as_they_are(cloud: Cloud) -> None:
    for name in ("a", "b", "c"):
        cloud.host(name, vcpus=ord(name))
    cloud.zone("az1", "c")
    hosts = hosts_of(cloud)
    cloud.clock.seconds += 10
    with cloud.store.begin() as tx:
        tx.execute(sa.delete(schema.providers).where(schema.providers.c.host == "b"))
    cloud.host("d", vcpus=ord("d"))
    hosts.refresh()
    snapshot = hosts.snapshot()
    assert snapshot.names == ["a", "c", "d"] and snapshot.rows == {"a": 0, "c": 1, "d": 2}
    assert snapshot.stock["VCPU"].free.tolist() == [ord("a"), ord("c"), ord("d")]
    assert snapshot.zones.tolist() == [
        snapshot.zone_numbers[zone] for zone in ("nova", "az1", "nova")
    ]
    assert snapshot.up.all() and len(set(snapshot.seeds.tolist())) == 3


def test_a_provider_whose_id_is_between_two_that_are_known_finds_its_place(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b", vcpus=2)
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.providers).where(schema.providers.c.host == "b").values(id=9))
        tx.execute(
            sa.update(schema.inventories)
            .where(schema.inventories.c.provider_id == cloud.ids["b"])
            .values(provider_id=9)
        )
    hosts = hosts_of(cloud)
    cloud.clock.seconds += 10
    with cloud.store.begin() as tx:  # its transaction took its number early and committed late
        tx.execute(
            sa.insert(schema.providers).values(
                id=5,
                uuid="c",
                name="c",
                host="c",
                root_uuid="c",
                created_at=0,
                changed_at=cloud.clock.micros(),
            )
        )
    hosts.refresh()
    assert hosts.snapshot().names == ["a", "c", "b"]
    assert hosts.snapshot().stock["VCPU"].free.tolist() == [4, 0, 2]


def test_every_host_is_read_in_turn_whatever_its_time_says(cloud: Cloud) -> None:
    for number in range(30):
        cloud.host(f"h{number}")
    hosts = hosts_of(cloud)
    cloud.clock.seconds += 10
    hosts.refresh()
    with cloud.store.begin() as tx:  # changed by somebody who does not say so
        tx.execute(sa.update(schema.inventories).values(total=7))
    seen = []
    for _ in range(31):
        cloud.clock.seconds += 2
        hosts.refresh()
        seen.append(int(np.count_nonzero(hosts.snapshot().stock["VCPU"].free == 7)))
    assert seen[0] in range(1, 10) and seen[-1] == 30 and seen == sorted(seen)


def test_what_hosts_have_in_common_is_kept_once_and_let_go(cloud: Cloud) -> None:
    for name in ("a", "b", "c"):
        cloud.host(name)
        change(cloud, name, describe(cloud, name, hypervisor_version=1 if name == "c" else 2))
    hosts = hosts_of(cloud)
    snapshot = hosts.snapshot()
    facts = [snapshot.facts[kind] for kind in snapshot.kinds]
    assert (
        facts[0] is facts[1]
        and facts[0]["hypervisor_version"] == 2
        and snapshot.versions.tolist() == [2, 2, 1]
    )
    assert facts[2] == {
        "hypervisor_type": "QEMU",
        "hypervisor_version": 1,
        "cpu_info": {"arch": "x86_64"},
        "supported_instances": [["x86_64", "kvm", "hvm"]],
    }
    shared: Shared[str] = Shared(str, "")
    column = np.array([shared.number(key) for key in ("x", "y", "z", "y")] + [0])
    kept = shared.forget(column[1:])
    assert [shared.values[number] for number in kept] == ["y", "z", "y", ""] and len(
        shared.values
    ) == 3
    assert shared.number("z") == kept[1] and shared.number("x") == 3


def test_traits_are_masks(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    for name, traits in (("a", ["CUSTOM_X", "CUSTOM_Y"]), ("b", ["CUSTOM_Y"])):
        change(
            cloud,
            name,
            *(
                sa.insert(schema.provider_traits).values(
                    provider_id=cloud.ids[name], trait=trait, by_hand=True
                )
                for trait in traits
            ),
        )
    hosts = hosts_of(cloud)
    traits = hosts.snapshot().traits
    assert (traits["CUSTOM_X"].tolist(), traits["CUSTOM_Y"].tolist()) == (
        [True, False],
        [True, True],
    )
    assert (
        traits.get("CUSTOM_Z") is None
        and sorted(traits) == ["CUSTOM_X", "CUSTOM_Y"]
        and len(traits) == 2
    )
    change(
        cloud,
        "b",
        sa.delete(schema.provider_traits).where(
            schema.provider_traits.c.provider_id == cloud.ids["b"]
        ),
    )
    hosts.refresh(at_once=True)
    assert hosts.snapshot().traits["CUSTOM_Y"].tolist() == [True, False]


def test_parts_and_who_holds_them(cloud: Cloud) -> None:
    numa_nodes = to_wire([NumaNode(0, cpus=[0, 1], pcpus=[2, 3], memory_mb=4096)])
    for name in ("a", "b", "c", "d"):
        cloud.host(name)
        change(
            cloud,
            name,
            describe(
                cloud,
                name,
                numa_nodes=numa_nodes if name != "d" else [],
                devices=to_wire([GPU]) if name in ("a", "b") else [],
            ),
        )
    assignment = HardwareAssignment(
        [AssignedNumaNode(0, cpus=[0], pins={"0": 2}, memory_mb=128)], [GPU.address]
    )
    change(
        cloud,
        "b",
        guest(cloud, "s", "b", assignment=assignment),
        guest(cloud, "t", "b", wanted="absent"),
    )
    hosts = hosts_of(cloud)
    snapshot = hosts.snapshot()
    assert sorted(snapshot.parts) == [0, 1, 2] and 3 not in snapshot.parts
    assert (snapshot.parts[0].devices, list(snapshot.parts[0].held)) == ([GPU], [])
    assert (snapshot.parts[1].held, snapshot.parts[1].numa_nodes) == (
        [assignment],
        snapshot.parts[0].numa_nodes,
    )
    assert snapshot.parts[1] is snapshot.parts[1]
    assert snapshot.servers.tolist() == [0, 2, 0, 0] and snapshot.devices.tolist() == [1, 0, 0, 0]
    snapshot.take("a", ONE, assignment=assignment)
    assert snapshot.parts[0].held == [assignment] and snapshot.devices[0] == 0
    assert not hosts.snapshot().parts[0].held
    change(cloud, "b", sa.delete(schema.guests))
    hosts.refresh(at_once=True)
    assert not hosts.snapshot().parts[1].held and hosts.snapshot().devices.tolist() == [1, 1, 0, 0]


def test_a_host_whose_builds_failed_waits_and_the_wait_gets_shorter(cloud: Cloud) -> None:
    cloud.host("a")
    change(
        cloud, "a", sa.update(schema.providers).values(failures=5, failed_at=cloud.clock.micros())
    )
    hosts = hosts_of(cloud, pause=100)
    assert (hosts.snapshot().failures.tolist(), hosts.snapshot().waits.tolist()) == ([5], [100])
    cloud.clock.seconds += 60
    assert hosts.snapshot().waits.tolist() == [40]
    scheduler = Proposals(hosts, options())
    assert scheduler.select([request()])[0].reason == (
        "1 host: 1 left out after 5 failed builds in a row, tried again in 40 s"
    )
    cloud.clock.seconds += 41
    first, second = scheduler.select([request("s"), request("t")])
    assert (first.hosts, second.hosts) == (["a"], [])


def test_work_in_hand_is_counted_where_it_weighs(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    hosts = hosts_of(cloud)
    now = cloud.clock.micros()
    with cloud.store.begin() as tx:
        for number, (workflow, verb, state, host) in enumerate(
            (
                ("create", "ensure_guest", "waiting", "a"),
                ("rebuild", "rebuild", "waiting", "a"),
                ("stop", "ensure_stopped", "waiting", "a"),
                ("create", "ensure_guest", "done", "b"),
            )
        ):
            tx.execute(
                sa.insert(schema.actions).values(
                    id=str(number),
                    server_id="s",
                    project_id="p",
                    user_id="u",
                    request_id="r",
                    name=workflow,
                    workflow=workflow,
                    version=1,
                    args={},
                    fence=1,
                    state=state,
                    verb=verb,
                    data={},
                    host=host,
                    created_at=now,
                    updated_at=now,
                )
            )
    hosts.refresh(at_once=True)
    assert hosts.snapshot().working.tolist() == [2, 0]


def test_aggregates_follow_each_change_and_deletion(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    cloud.zone("az1", "a")
    hosts = hosts_of(cloud)

    def zones() -> list[str]:
        snapshot = hosts.snapshot()
        names = {number: name for name, number in snapshot.zone_numbers.items()}
        return [names[number] for number in snapshot.zones.tolist()]

    assert zones() == ["az1", "nova"]
    cloud.clock.seconds += 30
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.aggregate_hosts).values(host="b"))
        tx.execute(sa.update(schema.aggregates).values(updated_at=cloud.clock.micros()))
    hosts.refresh()
    assert zones() == ["nova", "az1"]
    (aggregate,) = hosts.snapshot().aggregates
    assert (aggregate.name, aggregate.meta, aggregate.members.tolist()) == (
        "az1",
        {"availability_zone": "az1"},
        [False, True],
    )
    cloud.clock.seconds += 30
    with cloud.store.begin() as tx:
        tx.execute(sa.delete(schema.aggregates))
    hosts.refresh()
    assert zones() == ["nova", "nova"] and hosts.snapshot().aggregates == []


def test_groups_and_places_are_read_for_those_who_name_them(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    now = cloud.clock.micros()
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.server_groups).values(
                id="g",
                project_id="p",
                user_id="u",
                name="g",
                created_at=now,
                policy="anti-affinity",
                rules={"max_server_per_host": 2},
            )
        )
        for name, wanted in (
            ("x", "running"),
            ("y", "stopped"),
            ("gone", "absent"),
            ("self", "running"),
        ):
            tx.execute(sa.insert(schema.server_group_members).values(group_id="g", server_id=name))
            tx.execute(guest(cloud, name, "a", wanted))
        tx.execute(server(cloud, "x", "a"))
        tx.execute(server(cloud, "theirs", "b", project="other"))
    hosts = hosts_of(cloud)
    specs = [
        request("self", group="g", hints={"same_host": "x", "different_host": ["theirs", "nobody"]})
    ]
    snapshot = hosts.snapshot(hosts.read_request_facts(specs))
    assert (
        snapshot.groups["g"].policy,
        snapshot.groups["g"].most,
        snapshot.groups["g"].members,
    ) == ("anti-affinity", 2, {0: 2})
    assert snapshot.places_by_project == {"p": {"x": "a"}}
    assert Proposals(hosts, options()).select([request("new", group="g")])[0].hosts == ["b"]


def test_proposals_count_as_members_until_they_are_claimed(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.server_groups).values(
                id="g",
                project_id="p",
                user_id="u",
                name="g",
                created_at=0,
                policy="anti-affinity",
                rules={},
            )
        )
    scheduler = Proposals(hosts_of(cloud), options())
    found = [
        scheduler.select([request(f"s{number}", group="g")])[0].hosts[0] for number in range(2)
    ]
    assert sorted(found) == ["a", "b"]


def test_places_of_one_project_are_not_told_to_another(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    with cloud.store.begin() as tx:
        tx.execute(server(cloud, "x", "a"))
    scheduler = Proposals(
        hosts_of(cloud), options(enabled_filters=["ComputeFilter", "SameHostFilter"])
    )
    ours, theirs = scheduler.select(
        [
            request("s", hints={"same_host": ["x"]}),
            RequestSpec("t", "other", dict(ONE), hints={"same_host": ["x"]}),
        ]
    )
    assert ours.hosts == ["a"] and theirs.hosts != ["a"]


def test_measures_and_images_are_read_when_somebody_looks(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    now = cloud.clock.micros()
    change(
        cloud, "a", describe(cloud, "a", metrics={"cpu.percent": 0.5, "words": "x"}, metrics_at=now)
    )
    change(cloud, "b", describe(cloud, "b"))
    image = {"id": "i", "properties": {"os_distro": "debian"}}
    change(
        cloud,
        "b",
        server(cloud, "x", "b", image_id="i", image=image),
        server(cloud, "y", "b", image_id="i", image=image),
        server(cloud, "z", "b", deleted=1, image_id="j"),
    )
    assert (hosts_of(cloud).snapshot().metrics, hosts_of(cloud).snapshot().images) == ({}, [])
    hosts = hosts_of(cloud, metrics=True, images=True)
    assert {name: column.tolist()[0] for name, column in hosts.snapshot().metrics.items()} == {
        "cpu.percent": 0.5
    }
    assert np.isnan(hosts.snapshot().metrics["cpu.percent"][1])
    (found,) = hosts.snapshot().images
    assert (found.properties, found.rows.tolist(), found.counts.tolist()) == (
        {"os_distro": "debian"},
        [1],
        [2],
    )
    change(cloud, "b", sa.delete(schema.servers))
    cloud.clock.seconds += 11
    with cloud.store.begin() as tx:
        tx.execute(
            sa.update(schema.hosts)
            .where(schema.hosts.c.name == "a")
            .values(metrics={"cpu.percent": 0.75}, metrics_at=cloud.clock.micros())
        )
    hosts.refresh(at_once=True)
    assert hosts.snapshot().images == [] and hosts.snapshot().metrics["cpu.percent"][0] == 0.75


@pytest.mark.parametrize("text", ["[1,2", "[]", "7"])
def test_host_with_damaged_assignment_offers_no_parts(cloud: Cloud, text: str) -> None:
    numa_nodes = to_wire([NumaNode(0, cpus=[0, 1], pcpus=[2, 3], memory_mb=4096)])
    assignment = HardwareAssignment([], [GPU.address])
    for name in ("a", "b"):
        cloud.host(name)
        described = describe(cloud, name, numa_nodes=numa_nodes, devices=to_wire([GPU]))
        guests = [guest(cloud, server + name, name, assignment=assignment) for server in "xy"]
        change(cloud, name, described, *guests)
    damage = sa.text("UPDATE guests SET assignment = :text WHERE server_id = 'xa'")
    with cloud.store.begin() as tx:
        tx.execute(damage, {"text": text})
    snapshot = hosts_of(cloud).snapshot()
    assert list(snapshot.parts) == [snapshot.rows["b"]] and snapshot.devices[0] == 0


def test_host_of_damaged_aggregate_takes_no_new_server(cloud: Cloud) -> None:
    for name in ("a", "b"):
        cloud.host(name)
    cloud.zone("az1", "a")
    with cloud.store.begin() as tx:
        tx.execute(sa.text("UPDATE aggregates SET meta = '{\"filter_tenant_id'"))
    scheduler = Proposals(hosts_of(cloud), options(enabled_filters=["ComputeFilter"]))
    for zone in (None, "nova"):
        [found] = scheduler.select([request("s", availability_zone=zone)])
        assert found.hosts == ["b"]
    explained = scheduler.explain(request("t", force_host="a"))
    assert explained.hosts == ["a"], "an operator may insist"
