# SPDX-License-Identifier: Apache-2.0
"""Claims on SQLite, PostgreSQL and MariaDB, also in parallel.

They check capacity, group policies, CPUs and devices, hosts with failed builds, disabled hosts and
damaged records.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.domain.clock import SECOND
from common.domain.hardware import DeviceRequest, Hardware, NumaNodeRequest
from common.domain.models import Device, HardwareAssignment, HostInventory, NumaNode
from common.domain.wire import from_wire, to_wire
from common.store import schema
from common.store.engine import Connection, Store, now
from common.store.hosts import hosts, services
from common.store.placement import allocations
from common.store.placement.allocations import ClaimRequest, FailedBuildLimit
from common.store.servers import guests
from common.store.tenants import server_groups
from deploy.operator import doctor

SMALL = {"VCPU": 1, "MEMORY_MB": 64}
PINNED = Hardware(numa_nodes=(NumaNodeRequest((0, 1), 256),), dedicated=frozenset({0, 1}))
WITH_DEVICE = Hardware(devices=(DeviceRequest("net", 1, (("8086", "10ed"),)),))


def new_host(store: Store, name: str, vcpus: int = 10, pcpus: int = 0, devices: int = 0) -> None:
    """Register a host with one NUMA node. Guests can have the CPUs 100, 101 … for themselves."""
    numa_node = NumaNode(0, list(range(vcpus)), list(range(100, 100 + pcpus)), 10240)
    parts = [Device(f"0000:81:00.{number}", "8086", "10ed") for number in range(devices)]
    store.write(
        lambda tx: hosts.register(
            tx,
            name,
            "boot",
            HostInventory(
                "memory",
                1,
                name,
                vcpus,
                10240,
                1000,
                pcpus=pcpus,
                numa_nodes=[numa_node],
                devices=parts,
            ),
        )
    )


def new_group(store: Store, policy: str, members: Sequence[str], most: int | None = None) -> str:
    rules = {} if most is None else {"max_server_per_host": most}

    def work(tx: Connection) -> str:
        group = server_groups.create(
            tx,
            {
                "project_id": "project",
                "user_id": "user",
                "name": "g",
                "policy": policy,
                "rules": rules,
            },
        ).id
        server_groups.join(tx, [{"group_id": group, "server_id": server} for server in members])
        return str(group)

    return store.write(work)


def request(names: Sequence[str], server: str | None = None, **more: Any) -> ClaimRequest:
    return ClaimRequest(
        server or ids.new(), "project", "user", more.pop("resources", SMALL), list(names), **more
    )


def claim(
    store: Store, *requests: ClaimRequest, failed_build_limit: FailedBuildLimit | None = None
) -> list[str | None]:
    """Claim, store the guests as the conductor does, and return the claimed hosts."""

    def work(tx: Connection) -> None:
        allocations.claim(tx, requests, failed_build_limit)
        guests.add(
            tx,
            [
                {
                    "server_id": claim_request.consumer,
                    "host": claim_request.host,
                    "fence": 1,
                    "assignment": to_wire(claim_request.assignment)
                    if claim_request.assignment
                    else None,
                }
                for claim_request in requests
                if claim_request.host
            ],
        )

    store.write(work)
    return [claim_request.host for claim_request in requests]


def release(store: Store, server: str, host: str) -> None:
    store.write(lambda tx: guests.add_removal(tx, server, 1))
    store.write(lambda tx: guests.confirm_removals(tx, [(server, host, 1)]))


def fail_builds(store: Store, host: str, times: int, seconds_ago: int = 0) -> None:
    def work(tx: Connection) -> None:
        allocations.judge(tx, [(host, -1)] * times)
        tx.execute(
            sa.update(schema.providers)
            .where(schema.providers.c.host == host)
            .values(failed_at=now() - seconds_ago * SECOND)
        )

    store.write(work)


def claim_findings(store: Store) -> list[doctor.Finding]:
    """Return the doctor's findings about claims.

    Other findings occur because no server rows exist.
    """
    return [
        finding
        for finding in store.read(doctor.check)
        if finding.invariant in ("capacity", "group-policy", "assignment-exact", "consumer")
    ]


# --- groups ---
def test_claim_respects_anti_affinity_limit_within_one_transaction(store: Store) -> None:
    for name in ("h1", "h2"):
        new_host(store, name)
    servers = [ids.new() for _ in range(6)]
    group = new_group(store, "anti-affinity", servers, most=2)
    requests = [
        request(["h1", "h2"] if number % 2 else ["h2", "h1"], server, group=group)
        for number, server in enumerate(servers)
    ]
    assert Counter(claim(store, *requests)) == {"h1": 2, "h2": 2, None: 2}
    assert requests[-1].refused == "its server group's policy anti-affinity"
    release(store, requests[0].consumer, "h2")
    assert claim(
        store, request(["h1"], servers[4], group=group), request(["h2"], servers[5], group=group)
    ) == [None, "h2"]


def test_claim_with_affinity_follows_other_members_of_group(store: Store) -> None:
    for name in ("h1", "h2"):
        new_host(store, name)
    first, second = ids.new(), ids.new()
    group = new_group(store, "affinity", [first, second])
    assert claim(store, request(["h1"], first, group=group)) == ["h1"]
    assert claim(store, request(["h2"], second, group=group)) == [None]
    assert claim(store, request(["h2", "h1"], second, group=group), request(["h1"])) == ["h1", "h1"]
    release(store, second, "h1")
    assert claim(store, request(["h1"], second, group=group)) == ["h1"]
    release(store, first, "h1")
    release(store, second, "h1")
    assert claim(store, request(["h2"], first, group=group)) == ["h2"], "nobody is left to follow"


def test_claim_ignores_soft_policies_and_deleted_groups(store: Store) -> None:
    new_host(store, "h1")
    servers = [ids.new() for _ in range(2)]
    soft = new_group(store, "soft-anti-affinity", servers)
    assert claim(store, *(request(["h1"], server, group=soft) for server in servers)) == [
        "h1",
        "h1",
    ]
    assert claim(store, request(["h1"], group=ids.new())) == ["h1"]


@pytest.mark.parametrize(("policy", "placed"), [("affinity", 60), ("anti-affinity", 6)])
def test_parallel_claims_respect_hard_group_policy(store: Store, policy: str, placed: int) -> None:
    names = [f"h{number}" for number in range(6)]
    for name in names:
        new_host(store, name, vcpus=100)
    servers = [ids.new() for _ in range(60)]
    group = new_group(store, policy, servers)
    draw, start = random.Random(1), threading.Barrier(12)
    orders = [draw.sample(names, len(names)) for _ in servers]

    def worker(number: int) -> list[str | None]:
        start.wait()
        claimed_hosts = []
        for server, order in list(zip(servers, orders, strict=True))[number::12]:
            # A repeated scheduling request starts with another host.
            claimed_hosts += [
                next(
                    (
                        name
                        for name in order
                        if claim(store, request([name], server, group=group)) == [name]
                    ),
                    None,
                )
            ]
        return claimed_hosts

    with ThreadPoolExecutor(12) as pool:
        placements = Counter(
            host for hosts_ in pool.map(worker, range(12)) for host in hosts_ if host
        )
    assert placements.total() == placed
    assert len(placements) == (1 if policy == "affinity" else 6)
    assert claim_findings(store) == []


# --- CPUs and devices ---
def test_claimed_cpus_and_device_are_exclusive_until_removal_is_confirmed(store: Store) -> None:
    new_host(store, "h1", pcpus=4, devices=1)
    need = {"PCPU": 2, "MEMORY_MB": 256}
    requests = [request(["h1"], hardware=PINNED, resources=need) for _ in range(3)]
    assert claim(store, *requests) == ["h1", "h1", None]
    cpu_sets = [
        set(claim_request.assignment.numa_nodes[0].pins.values())
        for claim_request in requests
        if claim_request.assignment
    ]
    assert [len(cpus) for cpus in cpu_sets] == [2, 2]
    assert cpu_sets[0].isdisjoint(cpu_sets[1])
    with_device = request(["h1"], hardware=WITH_DEVICE)
    assert claim(store, with_device) == ["h1"]
    late = request(["h1"], hardware=WITH_DEVICE)
    assert (claim(store, late), late.refused) == (
        [None],
        "no CPUs, memory pages or devices that fit",
    )
    store.write(lambda tx: guests.add_removal(tx, with_device.consumer, 1))
    assert claim(store, late) == [None], "a removal may still hold it"
    store.write(lambda tx: guests.confirm_removals(tx, [(with_device.consumer, "h1", 1)]))
    assert claim(store, late) == ["h1"]
    assert claim_findings(store) == []


def test_claim_takes_next_host_when_first_lacks_device(store: Store) -> None:
    new_host(store, "h1")
    new_host(store, "h2", devices=1)
    assert claim(store, request(["h1", "h2"], hardware=WITH_DEVICE), request(["h2"])) == [
        "h2",
        "h2",
    ]


# --- hosts on which builds fail ---
def test_claim_skips_host_after_5_failed_builds_and_tries_one_server_later(store: Store) -> None:
    new_host(store, "h1")
    new_host(store, "h2")
    fail_builds(store, "h1", 4)
    first = request(["h1"])
    assert (claim(store, first), first.tried) == (["h1"], True), "four are not five"
    fail_builds(store, "h1", 1)
    left_out = request(["h1"])
    assert (claim(store, left_out), left_out.refused) == ([None], "builds fail there")
    assert claim(store, request(["h1", "h2"]), request(["h2"])) == ["h2", "h2"]
    assert claim(store, request(["h1"], forced=True)) == ["h1"]
    fail_builds(store, "h1", 0, seconds_ago=301)
    assert claim(store, request(["h1"]), request(["h1"])) == ["h1", None], "one at a time"
    assert claim(store, request(["h1"])) == [None]
    assert claim(store, request(["h1"]), failed_build_limit=FailedBuildLimit(failures=0)) == ["h1"]
    assert claim(store, request(["h1"]), failed_build_limit=FailedBuildLimit(failures=6)) == ["h1"]


def test_parallel_claims_try_host_with_failed_builds_only_once(store: Store) -> None:
    new_host(store, "h1", vcpus=100)
    fail_builds(store, "h1", 5, seconds_ago=400)
    start = threading.Barrier(8)

    def claim_in_thread(number: int) -> list[str | None]:
        start.wait()
        return claim(store, request(["h1"]))

    with ThreadPoolExecutor(8) as pool:
        assert Counter(
            host for claimed_hosts in pool.map(claim_in_thread, range(8)) for host in claimed_hosts
        ) == {
            "h1": 1,
            None: 7,
        }


def test_successful_build_clears_failed_builds_of_host(store: Store) -> None:
    new_host(store, "h1")
    fail_builds(store, "h1", 7)
    store.write(lambda tx: allocations.judge(tx, [("h1", 0)]))
    later_request = request(["h1"])
    assert (claim(store, later_request), later_request.tried) == (["h1"], False)


# --- hosts that are disabled ---
def disable(tx: Connection, host: str, disabled: bool = True) -> None:
    services.set_state(tx, services.list_all(tx, host)[0].uuid, disabled=disabled)


def test_claim_on_disabled_host_accepts_only_forced_and_present_servers(store: Store) -> None:
    new_host(store, "h1")
    new_host(store, "h2")
    current, late = request(["h1"]), request(["h1"])
    assert claim(store, current) == ["h1"]
    store.write(lambda tx: disable(tx, "h1"))
    assert (claim(store, late), late.refused) == ([None], "disabled")
    assert claim(store, request(["h1", "h2"]), request(["h2"])) == ["h2", "h2"], (
        "the next alternate"
    )
    assert claim(store, request(["h1"], forced=True)) == ["h1"]
    larger = request(
        ["h1"],
        current.consumer,
        resources={"VCPU": 2, "MEMORY_MB": 64},
        leaves=("h1", ids.new()),
        has=SMALL,
    )
    store.write(lambda tx: allocations.claim(tx, [larger]))
    assert larger.host == "h1", "it was there before"
    store.write(lambda tx: disable(tx, "h1", False))
    assert claim(store, late) == ["h1"]


def test_hand_back_of_allocations_on_disabled_source_host_is_accepted(store: Store) -> None:
    """A disabled host refuses new servers only.

    After a revert the server has the migration's allocations on the source again.
    """
    new_host(store, "h1")
    new_host(store, "h2")
    original, migration = request(["h1"]), ids.new()
    assert claim(store, original) == ["h1"]
    store.write(lambda tx: disable(tx, "h1"))
    move = request(["h2"], original.consumer, leaves=("h1", migration))
    store.write(lambda tx: allocations.claim(tx, [move]))
    assert move.host == "h2"
    store.write(lambda tx: allocations.hand_back(tx, migration, original.consumer, "h1"))
    assert store.read(lambda tx: allocations_of(tx, original.consumer)) == {"h1", "h2"}


def test_allocations_without_amounts_are_stored_as_no_rows(store: Store) -> None:
    """A flavor can request no resources, with extra specs like resources:VCPU=0."""
    new_host(store, "h1")
    server, migration = request(["h1"], resources={"VCPU": 0}), ids.new()
    assert claim(store, server) == ["h1"]
    larger = request(["h1"], server.consumer, leaves=("h1", migration))
    store.write(lambda tx: allocations.claim(tx, [larger]))
    store.write(lambda tx: allocations.stay(tx, migration, server.consumer, "h1", {"VCPU": 0}))
    holder = {"id": ids.new(), "type": "server", "project_id": "project", "user_id": "user"}
    store.write(lambda tx: allocations.put(tx, holder, "h1", {}))
    for consumer in (server.consumer, migration, holder["id"]):
        assert store.read(partial(allocations_of, consumer=consumer)) == set()


def allocations_of(tx: Connection, consumer: str) -> set[str]:
    return set(
        tx.scalars(
            sa.select(schema.providers.c.host)
            .join(schema.allocations, schema.allocations.c.provider_id == schema.providers.c.id)
            .where(schema.allocations.c.consumer_id == consumer)
        )
    )


def test_claim_waiting_for_disable_of_host_is_refused(store: Store) -> None:
    """Before the wait the claim read the host as enabled."""
    new_host(store, "h1")
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            disable(tx, "h1")
            late = request(["h1"])
            outcome = pool.submit(claim, store, late)
            # On SQLite the claim waits for a write transaction.
            with pytest.raises(NotYet):
                outcome.result(timeout=0.5)
        assert outcome.result(timeout=20) == [None]
    assert late.refused == "disabled"


# --- everything at once ---
@pytest.mark.parametrize("seed", range(3))
def test_random_parallel_claims_and_releases_keep_all_limits(store: Store, seed: int) -> None:
    """Eight workers claim and release at random.

    The doctor and the inventories are checked afterwards.
    """
    names = [f"h{number}" for number in range(4)]
    for name in names:
        new_host(store, name, vcpus=6, pcpus=5, devices=2)
    members = {policy: [ids.new() for _ in range(40)] for policy in ("affinity", "anti-affinity")}
    groups = {
        policy: new_group(store, policy, servers, most=2) for policy, servers in members.items()
    }
    start = threading.Barrier(8)

    def worker(number: int) -> None:
        draw, mine = random.Random(f"{seed}/{number}"), []
        pools = {policy: servers[number::8] for policy, servers in members.items()}
        start.wait()
        for _ in range(12):
            requests = [
                _random_request(draw, names, pools, groups) for _ in range(draw.randint(1, 4))
            ]
            claim(store, *requests)
            mine += [
                (claim_request.consumer, claim_request.host)
                for claim_request in requests
                if claim_request.host
            ]
            while mine and draw.random() < 0.4:
                release(store, *mine.pop(draw.randrange(len(mine))))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(worker, range(8)))
    assert claim_findings(store) == []
    assignments = [
        from_wire(HardwareAssignment, row.assignment)
        for row in store.read(
            lambda tx: tx.execute(
                sa.select(schema.guests.c.assignment).where(schema.guests.c.assignment.is_not(None))
            ).all()
        )
    ]
    assert all(assignment.numa_nodes or assignment.devices for assignment in assignments)
    for name in names:
        used = store.read(lambda tx, name=name: hosts.list_all(tx, name))[0]["inventory"]
        assert all(stock["used"] <= stock["total"] * stock["ratio"] for stock in used.values())


def _random_request(
    draw: random.Random, names: list[str], pools: dict[str, list[str]], groups: dict[str, str]
) -> ClaimRequest:
    order = draw.sample(names, draw.randint(1, 3))
    match draw.choice(("plain", "pinned", "device", "affinity", "anti-affinity")):
        case "pinned":
            return request(order, hardware=PINNED, resources={"PCPU": 2, "MEMORY_MB": 256})
        case "device":
            return request(order, hardware=WITH_DEVICE)
        case ("affinity" | "anti-affinity") as policy if pools[policy]:
            return request(order, pools[policy].pop(), group=groups[policy])
    return request(order)


# --- damaged records ---
@pytest.mark.parametrize(
    ("table", "column"), [("guests", "assignment"), ("hosts", "numa_nodes"), ("hosts", "devices")]
)
@pytest.mark.parametrize("text", ["[1,2", "[[]]", "7"])
def test_claim_of_hardware_on_host_with_damaged_record_is_refused(
    store: Store, table: str, column: str, text: str
) -> None:
    for name in ("h1", "h2"):
        new_host(store, name, pcpus=4, devices=2)
    need = {"PCPU": 2, "MEMORY_MB": 256}
    assert claim(store, request(["h1"], hardware=PINNED, resources=need)) == ["h1"]
    place = "host" if table == "guests" else "name"
    damage = sa.text(f"UPDATE {table} SET {column} = :text WHERE {place} = 'h1'")
    store.write(lambda tx: tx.execute(damage, {"text": text}))
    refused = request(["h1"], hardware=PINNED, resources=need)
    assert claim(
        store,
        refused,
        request(["h2"], hardware=PINNED, resources=need),
        request(["h1"]),
    ) == [None, "h2", "h1"]
    assert refused.refused == "no CPUs, memory pages or devices that fit"


def test_claim_with_damaged_group_rules_allows_one_server_per_host(store: Store) -> None:
    new_host(store, "h1")
    servers = [ids.new() for _ in range(2)]
    group = new_group(store, "anti-affinity", servers, most=2)
    store.write(lambda tx: tx.execute(sa.text("UPDATE server_groups SET rules = '{\"max'")))
    requests = [request(["h1"], server, group=group) for server in servers]
    assert claim(store, *requests, request(["h1"])) == ["h1", None, "h1"]
