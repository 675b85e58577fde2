# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of hosts, on the three databases.

The first read is complete, and each later change is seen without reading everything again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import sqlalchemy as sa

from common.domain.clock import Clock
from common.domain.models import Device, HostInventory, NumaNode, RequestSpec
from common.domain.service_binaries import COMPUTE_DISABLED, Binary
from common.store import schema
from common.store.engine import Connection, Store, now
from common.store.hosts import aggregates, hosts, services
from common.store.placement import allocations, host_states
from common.store.servers import guests
from common.store.tenants import server_groups
from common.store.views import host_removal
from scheduler.hosts import Hosts, ReadOptions
from scheduler.snapshot import Snapshot
from tests.server_rows import server_row

GPU = Device("0000:81:00.0", "10de", "1db4")


def new_host(store: Store, name: str, **more: object) -> None:
    store.write(
        lambda tx: hosts.register(
            tx,
            name,
            "boot",
            HostInventory(
                "QEMU",
                7002000,
                name,
                10,
                10240,
                1000,
                traits=["HW_CPU_X86_SSE", "CUSTOM_B", "CUSTOM_A"],
                cpu_info={"arch": "x86_64", "model": "å☃"},
                facts={"supported_instances": [["x86_64", "kvm", "hvm"]]},
                ratios={"VCPU": 1.5},
                **more,
            ),
        )
    )  # type: ignore[arg-type]


@pytest.fixture
def look(store: Store) -> Callable[..., Snapshot]:
    """Return a function that reads changes and builds the snapshot for request specs."""
    host_reader = Hosts(store, Clock(), ReadOptions(metrics=True, images=True))

    def read(*specs: RequestSpec) -> Snapshot:
        host_reader.refresh(at_once=True)
        return host_reader.snapshot(host_reader.read_request_facts(specs))

    return read


def claim(tx: Connection, server: str, host: str, **amounts: int) -> None:
    request = allocations.ClaimRequest(server, "p", "u", amounts, [host])
    allocations.claim(tx, [request])
    assert request.host == host


def test_host_states_snapshot_contains_inventory_traits_and_facts(
    store: Store, look: Callable[..., Snapshot]
) -> None:
    assert look().names == []
    new_host(
        store,
        "a",
        numa_nodes=[NumaNode(0, cpus=[0, 1], memory_mb=512)],
        devices=[GPU],
        reserved_memory_mb=240,
    )
    new_host(store, "b")
    snapshot = look()
    assert (
        snapshot.names == ["a", "b"]
        and snapshot.served.all()
        and snapshot.up.all()
        and not snapshot.disabled.any()
    )
    assert snapshot.stock["VCPU"].free.tolist() == [15, 15] and snapshot.stock[
        "MEMORY_MB"
    ].free.tolist() == [10000, 10240]
    assert snapshot.stock["VCPU"].most.tolist() == [10, 10] and snapshot.stock[
        "DISK_GB"
    ].step.tolist() == [1, 1]
    assert (
        set(snapshot.traits) == {"HW_CPU_X86_SSE", "CUSTOM_A", "CUSTOM_B"}
        and snapshot.traits["CUSTOM_A"].all()
    )
    assert snapshot.facts[snapshot.kinds[1]] == {
        "hypervisor_type": "QEMU",
        "hypervisor_version": 7002000,
        "cpu_info": {"arch": "x86_64", "model": "å☃"},
        "supported_instances": [["x86_64", "kvm", "hvm"]],
    }
    assert (
        list(snapshot.parts) == [0]
        and snapshot.parts[0].numa_nodes[0].cpus == [0, 1]
        and snapshot.devices.tolist() == [1, 0]
    )


def test_host_states_snapshot_shows_each_change_after_next_read(
    store: Store, look: Callable[..., Snapshot]
) -> None:
    new_host(store, "a")
    new_host(store, "b")
    look()
    store.write(lambda tx: age(tx))
    store.write(lambda tx: claim(tx, "s", "a", VCPU=2, MEMORY_MB=100))
    assert look().stock["VCPU"].free.tolist() == [13, 15]
    service = next(row for row in store.read(services.list_all) if row.host == "b")
    store.write(lambda tx: services.set_state(tx, service.uuid, disabled=True, forced_down=True))
    snapshot = look()
    assert (snapshot.disabled.tolist(), snapshot.forced_down.tolist()) == (
        [False, True],
        [False, True],
    )
    assert snapshot.traits[COMPUTE_DISABLED].tolist() == [False, True]
    store.write(lambda tx: allocations.release(tx, [("s", "a")]))
    assert look().stock["MEMORY_MB"].free.tolist() == [10240, 10240]
    zone = store.write(lambda tx: aggregates.create(tx, "z", "az1"))
    store.write(lambda tx: aggregates.add_host(tx, zone.id, "b", "nova"))
    snapshot = look()
    assert snapshot.zones.tolist() == [snapshot.zone_numbers["nova"], snapshot.zone_numbers["az1"]]
    store.write(lambda tx: aggregates.remove_host(tx, zone.id, "b", "nova"))
    assert look().zones.tolist() == [look().zone_numbers["nova"]] * 2
    new_host(store, "c")
    assert look().names == ["a", "b", "c"]
    store.write(lambda tx: host_removal.remove(tx, service, service.uuid))
    assert look().names == ["a", "c"]


def age(tx: Connection) -> None:
    """Move all changes a minute into the past, so that later reads see only new changes."""
    minute = 60_000_000
    tx.execute(
        sa.update(schema.providers).values(changed_at=schema.providers.c.changed_at - minute)
    )


def test_host_states_snapshot_shows_silent_host_down_until_heartbeat(
    store: Store, look: Callable[..., Snapshot]
) -> None:
    for name in ("a", "b", "c", "d", "e", "f"):
        new_host(store, name)
    look()
    store.write(lambda tx: age(tx))
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.heartbeats)
            .where(schema.heartbeats.c.host == "b")
            .values(seen_at=now() - 100_000_000)
        )
    )
    assert store.write(lambda tx: services.judge(tx, 30)) == (["b"], False)
    assert look().up.tolist() == [True, False, True, True, True, True]
    store.write(lambda tx: age(tx))
    store.write(lambda tx: services.beat(tx, ["a", "b"], Binary.COMPUTE))
    assert look().up.all()


# fmt: off
def test_host_states_have_groups_actions_metrics_and_images(store: Store, look: Callable[..., Snapshot]) -> None:
    new_host(store, "a")
    group = store.write(lambda tx: server_groups.create(tx, {
        "project_id": "p", "user_id": "u", "name": "g", "policy": "anti-affinity",
        "rules": {"max_server_per_host": 3}})).id

    def fill(tx: Connection) -> None:
        common = {"project_id": "p", "user_id": "u", "created_at": now(), "updated_at": now()}
        server_groups.join(tx, [{"group_id": group, "server_id": name} for name in ("x", "y", "z")])
        for name in ("x", "y"):
            guests.add(tx, [{"server_id": name, "host": "a", "fence": 1}])
            image = {"id": "i", "properties": {"os_distro": "debian"}}
            tx.execute(sa.insert(schema.servers).values(**server_row(
                name, name=name, hostname=name, host="a", image_id="i", image=image, **common)))
        for number, verb in enumerate(("ensure_guest", "ensure_stopped", "rescue")):
            tx.execute(sa.insert(schema.actions).values(
                id=str(number), server_id="x", request_id="r", name="create", workflow="create", version=1, args={},
                fence=1, state="waiting", data={}, host="a", verb=verb, **common))
        tx.execute(sa.update(schema.hosts).values(metrics={"cpu.percent": 0.25}, metrics_at=now()))
        tx.execute(sa.update(schema.providers).values(changed_at=now()))
    store.write(fill)
    snapshot = look(RequestSpec("y", "p", {}, group=group, hints={"same_host": ["x", "z"]}))
    assert (snapshot.groups[group].most, snapshot.groups[group].members) == (3, {0: 1})
    assert snapshot.places_by_project == {"p": {"x": "a"}}
    assert (snapshot.servers.tolist(), snapshot.working.tolist()) == ([2], [2])
    assert snapshot.metrics["cpu.percent"].tolist() == [0.25]
    assert [(image.properties, image.counts.tolist()) for image in snapshot.images] == [({"os_distro": "debian"}, [2])]
# fmt: on


def test_host_states_change_marks_contain_new_aggregate_and_new_host(store: Store) -> None:
    empty = store.read(lambda tx: host_states.marks(tx, 0))
    assert (empty.number, empty.total, empty.newest, empty.changed) == (
        0,
        0,
        0,
        (),
    ) and empty.read_at > 0
    aggregate = store.write(lambda tx: aggregates.create(tx, "z", None))
    new_host(store, "a")
    then = store.read(lambda tx: host_states.marks(tx, empty.read_at))
    assert len(then.changed) == 1
    assert not store.read(lambda tx: host_states.marks(tx, then.read_at + 1)).changed
    assert (then.number, then.total) == (1, aggregate.id) and then.newest >= empty.read_at


def test_store_metrics_does_not_wait_for_claim_or_mark_host_as_changed(store: Store) -> None:
    def read_changes() -> list[tuple[int, int]]:
        return [
            (row.generation, row.changed_at)
            for row in store.read(lambda tx: host_states.marks(tx, 0)).changed
        ]

    def store_metrics() -> None:
        store.write(lambda tx: hosts.store_metrics(tx, "h1", {"cpu.percent": 0.5}))

    new_host(store, "h1")
    before = read_changes()
    if store.dialect_name == "sqlite":  # SQLite has one writer at a time.
        store_metrics()
    else:
        with ThreadPoolExecutor(1) as pool, store.begin() as tx:
            allocations.lock(tx, ["h1"])
            future = pool.submit(store_metrics)
            wait([future], timeout=5)
            is_done = future.done()
            tx.rollback()
        assert is_done
    assert store.read(lambda tx: host_states.metrics(tx, 0)) == [("h1", {"cpu.percent": 0.5})]
    assert read_changes() == before


def test_hosts_describe_of_removed_host_creates_no_provider(store: Store) -> None:
    store.write(
        lambda tx: hosts.describe(
            tx, "gone", HostInventory("QEMU", 7002000, "gone", 10, 10240, 1000)
        )
    )
    assert store.read(host_states.count) == 0
