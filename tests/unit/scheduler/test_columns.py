# SPDX-License-Identifier: Apache-2.0
"""The scheduler's columns about hosts besides resources.

The tests update the columns from changes in the store.
"""

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


def load_hosts(cloud: Cloud, **read_options: Any) -> Hosts:
    hosts = Hosts(cloud.store, cloud.clock, ReadOptions(**read_options))
    hosts.refresh()
    return hosts


def change(cloud: Cloud, host: str, *statements: sa.Executable) -> None:
    """Change a host in the store, and update the time of its provider."""
    with cloud.store.begin() as tx:
        for statement in statements:
            tx.execute(statement)
        tx.execute(
            sa.update(schema.providers)
            .where(schema.providers.c.host == host)
            .values(changed_at=cloud.clock.micros())
        )


def insert_host(cloud: Cloud, name: str, **values: Any) -> sa.Insert:
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


def insert_guest(
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


def insert_server(
    cloud: Cloud, key: str, host: str | None, project: str = "p", **values: Any
) -> sa.Insert:
    now = cloud.clock.micros()
    times = {"created_at": now, "updated_at": now}
    names = {"name": key, "hostname": key, "project_id": project}
    return sa.insert(schema.servers).values(
        **server_row(key, host=host, **{**names, **times, **values})
    )


def test_columns_omit_provider_without_host(cloud: Cloud) -> None:
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
    hosts = load_hosts(cloud)
    assert hosts.snapshot().names == ["a"]
    cloud.clock.seconds += 2
    hosts.refresh()
    assert hosts.snapshot().names == ["a"]


def test_columns_keep_other_hosts_when_hosts_are_added_and_removed(cloud: Cloud) -> None:
    for name in ("a", "b", "c"):
        cloud.host(name, vcpus=ord(name))
    cloud.zone("az1", "c")
    hosts = load_hosts(cloud)
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


def test_columns_insert_late_provider_in_order_of_ids(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b", vcpus=2)
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.providers).where(schema.providers.c.host == "b").values(id=9))
        tx.execute(
            sa.update(schema.inventories)
            .where(schema.inventories.c.provider_id == cloud.ids["b"])
            .values(provider_id=9)
        )
    hosts = load_hosts(cloud)
    cloud.clock.seconds += 10
    # A transaction may take its number early and commit late.
    with cloud.store.begin() as tx:
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


def test_refresh_rereads_every_host_in_turn_despite_unchanged_timestamp(cloud: Cloud) -> None:
    for number in range(30):
        cloud.host(f"h{number}")
    hosts = load_hosts(cloud)
    cloud.clock.seconds += 10
    hosts.refresh()
    # This change does not update the time of the providers.
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.inventories).values(total=7))
    fresh_counts = []
    for _ in range(31):
        cloud.clock.seconds += 2
        hosts.refresh()
        fresh_counts.append(int(np.count_nonzero(hosts.snapshot().stock["VCPU"].free == 7)))
    assert (
        fresh_counts[0] in range(1, 10)
        and fresh_counts[-1] == 30
        and fresh_counts == sorted(fresh_counts)
    )


def test_refresh_reads_every_host_within_minute_when_called_every_100_ms(cloud: Cloud) -> None:
    cloud.host("a"), cloud.host("b")
    hosts = load_hosts(cloud)
    cloud.clock.seconds += 10
    hosts.refresh()
    # This change does not update the time of the providers.
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.inventories).values(total=7))
    for _ in range(900):
        cloud.clock.seconds += 0.1
        hosts.refresh()
    assert hosts.snapshot().stock["VCPU"].free.tolist() == [7, 7]


def test_columns_share_equal_facts_of_hosts_and_forget_unused_ones(cloud: Cloud) -> None:
    for name in ("a", "b", "c"):
        cloud.host(name)
        change(cloud, name, insert_host(cloud, name, hypervisor_version=1 if name == "c" else 2))
    hosts = load_hosts(cloud)
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
    numbers = shared.forget(column[1:])
    assert [shared.values[number] for number in numbers] == ["y", "z", "y", ""] and len(
        shared.values
    ) == 3
    assert shared.number("z") == numbers[1] and shared.number("x") == 3


def test_columns_have_mask_of_hosts_per_trait(cloud: Cloud) -> None:
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
    hosts = load_hosts(cloud)
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


def test_columns_move_traits_and_parts_when_host_is_removed(cloud: Cloud) -> None:
    node = NumaNode(0, cpus=[0, 1], pcpus=[2, 3], memory_mb=4096)
    for name in ("a", "b"):
        cloud.host(name)
    trait = {"provider_id": cloud.ids["b"], "trait": "CUSTOM_X", "by_hand": True}
    assignment = HardwareAssignment([AssignedNumaNode(0, [0], {"0": 16}, 4, 0)])
    change(
        cloud,
        "b",
        insert_host(cloud, "b", numa_nodes=to_wire([node])),
        insert_guest(cloud, "s", "b", assignment=assignment),
        sa.insert(schema.provider_traits).values(**trait),
    )
    hosts = load_hosts(cloud)
    before = hosts.snapshot()
    assert before.traits["CUSTOM_X"].tolist() == [False, True]
    parts = before.parts[1]
    assert parts.held == [assignment]
    with cloud.store.begin() as tx:
        tx.execute(sa.delete(schema.providers).where(schema.providers.c.host == "a"))
    cloud.clock.seconds += 10
    hosts.refresh(at_once=True)
    after = hosts.snapshot()
    assert after.names == ["b"] and after.traits["CUSTOM_X"].tolist() == [True]
    assert dict(after.parts) == {0: parts}


def test_columns_have_numa_nodes_and_devices_with_their_assignments(cloud: Cloud) -> None:
    numa_nodes = to_wire([NumaNode(0, cpus=[0, 1], pcpus=[2, 3], memory_mb=4096)])
    for name in ("a", "b", "c", "d"):
        cloud.host(name)
        change(
            cloud,
            name,
            insert_host(
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
        insert_guest(cloud, "s", "b", assignment=assignment),
        insert_guest(cloud, "t", "b", wanted="absent"),
    )
    hosts = load_hosts(cloud)
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


def test_host_with_failed_builds_waits_and_then_takes_one_server(cloud: Cloud) -> None:
    cloud.host("a")
    change(
        cloud, "a", sa.update(schema.providers).values(failures=5, failed_at=cloud.clock.micros())
    )
    hosts = load_hosts(cloud, pause=100)
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


def test_columns_count_builds_in_progress_per_host(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    hosts = load_hosts(cloud)
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


def test_columns_follow_change_and_deletion_of_aggregates(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    cloud.zone("az1", "a")
    hosts = load_hosts(cloud)

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


def test_read_request_facts_reads_groups_and_hosts_of_hinted_servers(cloud: Cloud) -> None:
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
            tx.execute(insert_guest(cloud, name, "a", wanted))
        tx.execute(insert_server(cloud, "x", "a"))
        tx.execute(insert_server(cloud, "theirs", "b", project="other"))
    hosts = load_hosts(cloud)
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


def test_proposal_without_claim_counts_as_member_of_anti_affinity_group(cloud: Cloud) -> None:
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
    scheduler = Proposals(load_hosts(cloud), options())
    chosen_hosts = [
        scheduler.select([request(f"s{number}", group="g")])[0].hosts[0] for number in range(2)
    ]
    assert sorted(chosen_hosts) == ["a", "b"]


def test_same_host_hint_ignores_servers_of_other_projects(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    with cloud.store.begin() as tx:
        tx.execute(insert_server(cloud, "x", "a"))
    scheduler = Proposals(
        load_hosts(cloud), options(enabled_filters=["ComputeFilter", "SameHostFilter"])
    )
    own_selection, other_selection = scheduler.select(
        [
            request("s", hints={"same_host": ["x"]}),
            RequestSpec("t", "other", dict(ONE), hints={"same_host": ["x"]}),
        ]
    )
    assert own_selection.hosts == ["a"] and other_selection.hosts != ["a"]


def test_columns_have_metrics_and_server_images_only_if_read_options_say(cloud: Cloud) -> None:
    cloud.host("a")
    cloud.host("b")
    now = cloud.clock.micros()
    change(
        cloud,
        "a",
        insert_host(cloud, "a", metrics={"cpu.percent": 0.5, "words": "x"}, metrics_at=now),
    )
    change(cloud, "b", insert_host(cloud, "b"))
    image = {"id": "i", "properties": {"os_distro": "debian"}}
    change(
        cloud,
        "b",
        insert_server(cloud, "x", "b", image_id="i", image=image),
        insert_server(cloud, "y", "b", image_id="i", image=image),
        insert_server(cloud, "z", "b", deleted=1, image_id="j"),
    )
    assert (load_hosts(cloud).snapshot().metrics, load_hosts(cloud).snapshot().images) == ({}, [])
    hosts = load_hosts(cloud, metrics=True, images=True)
    assert {name: column.tolist()[0] for name, column in hosts.snapshot().metrics.items()} == {
        "cpu.percent": 0.5
    }
    assert np.isnan(hosts.snapshot().metrics["cpu.percent"][1])
    (image_on_hosts,) = hosts.snapshot().images
    assert (
        image_on_hosts.properties,
        image_on_hosts.rows.tolist(),
        image_on_hosts.counts.tolist(),
    ) == (
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
def test_host_with_unreadable_assignment_of_guest_offers_no_devices(
    cloud: Cloud, text: str
) -> None:
    numa_nodes = to_wire([NumaNode(0, cpus=[0, 1], pcpus=[2, 3], memory_mb=4096)])
    assignment = HardwareAssignment([], [GPU.address])
    for name in ("a", "b"):
        cloud.host(name)
        host_insert = insert_host(cloud, name, numa_nodes=numa_nodes, devices=to_wire([GPU]))
        guests = [
            insert_guest(cloud, server + name, name, assignment=assignment) for server in "xy"
        ]
        change(cloud, name, host_insert, *guests)
    damage = sa.text("UPDATE guests SET assignment = :text WHERE server_id = 'xa'")
    with cloud.store.begin() as tx:
        tx.execute(damage, {"text": text})
    snapshot = load_hosts(cloud).snapshot()
    assert list(snapshot.parts) == [snapshot.rows["b"]] and snapshot.devices[0] == 0


def test_host_of_damaged_aggregate_takes_only_forced_server(cloud: Cloud) -> None:
    for name in ("a", "b"):
        cloud.host(name)
    cloud.zone("az1", "a")
    with cloud.store.begin() as tx:
        tx.execute(sa.text("UPDATE aggregates SET meta = '{\"filter_tenant_id'"))
    scheduler = Proposals(load_hosts(cloud), options(enabled_filters=["ComputeFilter"]))
    for zone in (None, "nova"):
        [selection] = scheduler.select([request("s", availability_zone=zone)])
        assert selection.hosts == ["b"]
    explanation = scheduler.explain(request("t", force_host="a"))
    assert explanation.hosts == ["a"], "an operator may insist"
