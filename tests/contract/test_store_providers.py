# SPDX-License-Identifier: Apache-2.0
"""Providers, traits and inventories that admins change, on SQLite, PostgreSQL and MariaDB.

Some tests use parallel transactions.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids
from common.domain.models import HostInventory
from common.domain.service_binaries import COMPUTE_DISABLED
from common.store import schema
from common.store.engine import Connection, Store, now
from common.store.hosts import hosts
from common.store.placement import (
    allocations,
    inventories,
    provider_search,
    providers,
    resource_classes,
    traits,
)
from common.store.placement.provider_search import ProviderFilters

PARTS = HostInventory(
    "QEMU",
    7002000,
    "host.cloud",
    8,
    16384,
    100,
    "192.0.2.1",
    {},
    ratios={"VCPU": 4.0},
    traits=["COMPUTE_NODE"],
    reserved_memory_mb=512,
)


def run_in_parallel(*works: Callable[[], Any]) -> list[Any]:
    """Run these functions in parallel and return their results.

    A raised Problem takes the place of a result.
    """

    def outcome(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except errors.Problem as problem:
            return problem

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(outcome, works))


def run_second_while_first_is_open(
    store: Store, first: Callable[[Connection], Any], second: Callable[[Connection], Any]
) -> Any:
    """Return the result of ``second``, called while the transaction of ``first`` is open.

    ``second`` must wait for the end of this transaction.
    """
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            first(tx)
            outcome = pool.submit(store.write, second)
            # On SQLite ``second`` waits for a write transaction.
            with pytest.raises(NotYet):
                outcome.result(timeout=0.5)
        return outcome.result(timeout=20)


def create_provider(store: Store, name: str, parent: str | None = None, **stock: Any) -> str:
    """Create a provider with inventories, and return the uuid."""

    def work(tx: Connection) -> str:
        row = providers.create(tx, name, None, parent)
        inventories.put(
            tx,
            row,
            {
                key: {"total": value} if isinstance(value, int) else value
                for key, value in stock.items()
            },
        )
        return str(row.uuid)

    return store.write(work)


def list_names(store: Store, **filters: Any) -> list[str]:
    return [
        row.name
        for row in store.read(lambda tx: provider_search.find(tx, ProviderFilters(**filters)))
    ]


def test_provider_search_counts_free_amount_in_permitted_units(store: Store) -> None:
    uuid = create_provider(
        store,
        "one",
        DISK_GB={
            "total": 100,
            "reserved": 20,
            "allocation_ratio": 1.5,
            "min_unit": 10,
            "max_unit": 60,
            "step_size": 5,
        },
        VCPU=4,
    )
    create_provider(store, "two", DISK_GB=100)
    with store.begin() as tx:
        row = providers.show(tx, uuid)
        tx.execute(
            sa.insert(schema.allocations).values(
                provider_id=row.id, consumer_id=ids.new(), resource_class="DISK_GB", used=80
            )
        )
    assert list_names(store, resources={"DISK_GB": 40}) == ["one", "two"]
    assert list_names(store, resources={"DISK_GB": 45}) == ["two"], "of 120 are 80 held"
    assert list_names(store, resources={"DISK_GB": 12}) == ["two"], "in steps of five"
    assert list_names(store, resources={"DISK_GB": 5}) == ["two"], "ten at least"
    assert list_names(store, resources={"DISK_GB": 10, "VCPU": 4}) == ["one"]
    assert list_names(store, resources={"DISK_GB": 10, "VCPU": 5}) == []


def test_provider_search_filters_by_tree_aggregates_and_traits(store: Store) -> None:
    group, other = ids.new(), ids.new()
    root = create_provider(store, "root")
    leaf = create_provider(store, "leaf", root)
    store.write(lambda tx: hosts.register(tx, "host", "boot", PARTS))

    def tag(tx: Connection) -> None:
        traits.create(tx, "CUSTOM_FAST")
        traits.put(tx, providers.lock(tx, leaf), ["CUSTOM_FAST", "HW_CPU_X86_AVX"])
        providers.set_aggregates(tx, providers.lock(tx, leaf), [group])
        tx.execute(
            sa.insert(schema.aggregates).values(
                id=1, uuid=other, name="rack", meta={}, created_at=now()
            )
        )
        tx.execute(sa.insert(schema.aggregate_hosts).values(aggregate_id=1, host="host"))

    store.write(tag)
    assert list_names(store, in_tree=leaf) == ["root", "leaf"]
    assert list_names(store, member_of=(frozenset((group, other)),)) == ["leaf", "host"]
    assert list_names(store, member_of=(frozenset((group,)), frozenset((other,)))) == []
    assert list_names(store, not_member_of=frozenset((other,))) == ["root", "leaf"]
    assert list_names(store, required=(frozenset(("CUSTOM_FAST", "COMPUTE_NODE")),)) == [
        "leaf",
        "host",
    ]
    assert (
        list_names(
            store, required=(frozenset(("CUSTOM_FAST",)),), forbidden=frozenset(("HW_CPU_X86_AVX",))
        )
        == []
    )
    assert list_names(store, root_forbidden=frozenset(("COMPUTE_NODE",))) == ["root", "leaf"]
    assert list_names(store, name="leaf") == ["leaf"]


def test_aggregate_uuid_with_and_without_hyphens_is_the_same(store: Store) -> None:
    by_hand, rack = ids.new(), ids.new()
    bare = by_hand.replace("-", "")
    store.write(lambda tx: hosts.register(tx, "host", "boot", PARTS))
    with store.begin() as tx:
        tx.execute(
            sa.insert(schema.aggregates).values(
                id=1, uuid=rack, name="rack", meta={}, created_at=now()
            )
        )
        tx.execute(sa.insert(schema.aggregate_hosts).values(aggregate_id=1, host="host"))
        [row] = provider_search.find(tx, ProviderFilters(name="host"))
        put = providers.set_aggregates(
            tx, providers.lock(tx, row.uuid), [bare, by_hand, rack.replace("-", "")]
        )
    assert put == [bare, rack]
    assert store.read(lambda tx: providers.aggregates_of(tx, [row.id])) == {
        row.id: sorted([bare, rack])
    }
    assert (
        list_names(store, member_of=(frozenset((by_hand,)),))
        == list_names(store, member_of=(frozenset((bare,)),))
        == ["host"]
    )
    assert list_names(store, not_member_of=frozenset((by_hand,))) == []
    with store.begin() as tx:
        tx.execute(sa.update(schema.aggregates).values(uuid=by_hand))
    assert store.read(lambda tx: providers.aggregates_of(tx, [row.id])) == {row.id: [by_hand]}, (
        "the host's too, once"
    )


def test_parallel_inventory_writes_with_same_generation_accept_one(store: Store) -> None:
    uuid = create_provider(store, "one")

    def write(amount: int) -> Callable[[], Any]:
        def work(tx: Connection) -> int:
            row = providers.lock(tx, uuid, 0)
            allocations.touch(tx, [row.id])
            inventories.put(tx, row, {"VCPU": {"total": amount}})
            return amount

        return lambda: store.write(work)

    amounts = [
        outcome
        for outcome in run_in_parallel(*(write(amount) for amount in range(1, 9)))
        if isinstance(outcome, int)
    ]
    assert len(amounts) == 1
    row = store.read(lambda tx: providers.show(tx, uuid))
    assert row.generation == 1
    assert store.read(lambda tx: inventories.of(tx, [row.id]))[row.id]["VCPU"].total == amounts[0]


def test_parallel_creates_of_one_provider_name_accept_one(store: Store) -> None:
    outcomes = run_in_parallel(*(lambda: create_provider(store, "same") for _ in range(6)))
    assert sum(isinstance(outcome, str) for outcome in outcomes) == 1
    assert {type(outcome) for outcome in outcomes} <= {str, providers.ProviderConflict}


def test_provider_rename_is_refused_when_parallel_rename_takes_name(store: Store) -> None:
    first, second = create_provider(store, "one"), create_provider(store, "two")

    def rename(tx: Connection, uuid: str) -> None:
        providers.rename(tx, providers.lock(tx, uuid), "same")

    with pytest.raises(providers.ProviderConflict, match="name: same already exists"):
        run_second_while_first_is_open(
            store, lambda tx: rename(tx, first), lambda tx: rename(tx, second)
        )
    assert store.read(lambda tx: providers.show(tx, second)).name == "two"


def test_resource_class_rename_is_refused_if_parallel_rename_takes_name(store: Store) -> None:
    for name in ("CUSTOM_X", "CUSTOM_Y"):
        store.write(lambda tx, name=name: resource_classes.create(tx, name))
    with pytest.raises(errors.Conflict, match="already exists: CUSTOM_Z"):
        run_second_while_first_is_open(
            store,
            lambda tx: resource_classes.rename(tx, "CUSTOM_X", "CUSTOM_Z"),
            lambda tx: resource_classes.rename(tx, "CUSTOM_Y", "CUSTOM_Z"),
        )
    assert store.read(
        lambda tx: resource_classes.unknown(tx, ["CUSTOM_X", "CUSTOM_Y", "CUSTOM_Z"])
    ) == ["CUSTOM_X"]


def test_resource_class_delete_and_parallel_inventory_exclude_each_other(store: Store) -> None:
    for round_number in range(5):
        store.write(lambda tx: resource_classes.create(tx, "CUSTOM_X"))
        uuid = create_provider(store, f"taker{round_number}")

        def take(uuid: str = uuid) -> None:
            def work(tx: Connection) -> None:
                if resource_classes.unknown(tx, ["CUSTOM_X"], lock=True):
                    raise errors.BadRequest("gone")
                inventories.put(tx, providers.lock(tx, uuid), {"CUSTOM_X": {"total": 1}})

            store.write(work)

        run_in_parallel(
            take, lambda: store.write(lambda tx: resource_classes.delete(tx, "CUSTOM_X"))
        )
        exists = not store.read(lambda tx: resource_classes.unknown(tx, ["CUSTOM_X"]))
        used = bool(list_names(store, resources={"CUSTOM_X": 1}))
        assert exists == used
        store.write(lambda tx, uuid=uuid: providers.delete(tx, uuid))
        if exists:
            store.write(lambda tx: resource_classes.delete(tx, "CUSTOM_X"))


def test_parallel_moves_of_two_provider_trees_create_no_cycle(store: Store) -> None:
    first, second = create_provider(store, "one"), create_provider(store, "two")

    def move_below(child: str, parent: str) -> Callable[[], Any]:
        return lambda: store.write(
            lambda tx: providers.move(tx, providers.lock(tx, child), parent, True)
        )

    outcomes = run_in_parallel(move_below(first, second), move_below(second, first))
    assert sorted(type(outcome) for outcome in outcomes if outcome is not None) == [
        errors.BadRequest
    ]
    rows = {
        uuid: store.read(lambda tx, uuid=uuid: providers.show(tx, uuid)) for uuid in (first, second)
    }
    (root,) = (uuid for uuid, row in rows.items() if row.parent_uuid is None)
    assert {row.root_uuid for row in rows.values()} == {root}


def test_host_registration_adopts_existing_provider_with_name_of_host(store: Store) -> None:
    uuid = create_provider(store, "host", CUSTOM_X=3, VCPU=2)
    store.write(lambda tx: traits.put(tx, providers.lock(tx, uuid), [COMPUTE_DISABLED]))
    store.write(lambda tx: hosts.register(tx, "host", "boot", PARTS))
    row = store.read(lambda tx: providers.show(tx, uuid))
    stock = store.read(lambda tx: inventories.of(tx, [row.id]))[row.id]
    assert row.host == "host"
    assert (stock["VCPU"].total, stock["VCPU"].allocation_ratio, stock["CUSTOM_X"].total) == (
        8,
        4.0,
        3,
    )
    assert COMPUTE_DISABLED not in store.read(lambda tx: traits.of(tx, [row.id]))[row.id], (
        "its service is enabled"
    )
    store.write(lambda tx: hosts.register(tx, "host", "boot", PARTS))


def test_host_registration_is_refused_if_namesake_provider_has_children(store: Store) -> None:
    create_provider(store, "leaf", create_provider(store, "host"))
    with pytest.raises(errors.Conflict, match="Rename this provider"):
        store.write(lambda tx: hosts.register(tx, "host", "boot", PARTS))


def test_host_report_keeps_traits_and_inventories_set_by_admin(store: Store) -> None:
    store.write(lambda tx: hosts.register(tx, "host", "boot", PARTS))
    uuid = store.read(lambda tx: provider_search.find(tx, ProviderFilters(name="host")))[0].uuid

    def set_by_hand(tx: Connection) -> None:
        row = providers.lock(tx, uuid)
        traits.create(tx, "CUSTOM_GOLD")
        traits.put(tx, row, ["CUSTOM_GOLD"])
        inventories.put(
            tx,
            row,
            {"MEMORY_MB": {"total": 16384, "reserved": 1000}, "CUSTOM_X": {"total": 5}},
            whole=False,
        )

    store.write(set_by_hand)
    store.write(lambda tx: hosts.describe(tx, "host", PARTS))
    row = store.read(lambda tx: providers.show(tx, uuid))
    stock = store.read(lambda tx: inventories.of(tx, [row.id]))[row.id]
    assert (
        stock["MEMORY_MB"].reserved,
        stock["VCPU"].allocation_ratio,
        stock["CUSTOM_X"].total,
    ) == (1000, 4.0, 5)
    assert store.read(lambda tx: traits.of(tx, [row.id]))[row.id] == ["COMPUTE_NODE", "CUSTOM_GOLD"]
    store.write(
        lambda tx: inventories.put(
            tx, providers.lock(tx, uuid), {"MEMORY_MB": {"total": 16384}}, whole=False
        )
    )
    stock = store.read(lambda tx: inventories.of(tx, [row.id]))[row.id]
    assert stock["MEMORY_MB"].reserved == 512, "left out, it is the host's again"


def test_allocation_ratio_has_same_precision_in_search_and_inventory(store: Store) -> None:
    """Ordinary fractions of some databases have seven digits only."""
    uuid = create_provider(
        store,
        "one",
        DISK_GB={"total": 10, "allocation_ratio": 0.9},
        MEMORY_MB={"total": 1000, "allocation_ratio": 1.23456789},
    )
    [row] = store.read(
        lambda tx: provider_search.find(
            tx, ProviderFilters(resources={"DISK_GB": 9, "MEMORY_MB": 1234})
        )
    )
    assert row.uuid == uuid
    assert (
        store.read(lambda tx: provider_search.find(tx, ProviderFilters(resources={"DISK_GB": 10})))
        == []
    )
    stock = store.read(lambda tx: inventories.of(tx, [row.id]))[row.id]
    assert (stock["DISK_GB"].allocation_ratio, stock["MEMORY_MB"].allocation_ratio) == (
        0.9,
        1.23456789,
    )
