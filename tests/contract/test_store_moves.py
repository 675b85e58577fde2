# SPDX-License-Identifier: Apache-2.0
"""Moves of servers on SQLite, PostgreSQL and MariaDB.

The tests cover migration records, allocations of both hosts, and silent hosts. Whole moves run here
by the real workflows, so that each database executes all of their statements.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.domain.models import Control, Flavor, HostInventory
from common.domain.statuses import GuestState, MigrationType
from common.domain.wire import from_wire, to_wire
from common.store import schema
from common.store.engine import Store, now
from common.store.hosts import hosts, services
from common.store.placement import allocations
from common.store.placement.allocations import ClaimRequest
from common.store.servers import actions, guests, migrations
from deploy.operator import doctor
from tests.contract.test_store import Realtime, run_in_parallel
from tests.workflows.simulator import FLAVOR, Cloud

ADMIN = RequestContext(user_id="admin", project_id="admins", roles=("admin",), request_id="req-a")
BIGGER = replace(FLAVOR, id="2", name="m1.bigger", vcpus=2, memory_mb=256, root_gb=2)


@pytest.fixture
def cloud(store: Store) -> Cloud:
    """Return a cloud of two registered hosts."""
    cloud = Cloud(store, Realtime())
    cloud.round()
    return cloud


def server_on(cloud: Cloud, host: str) -> str:
    server = cloud.create(host=host)[0]
    cloud.settle()
    assert cloud.show(server).host == host
    return server


def read_allocations(store: Store) -> dict[tuple[str, str], dict[str, int]]:
    """Return the amounts per resource class, by (consumer, host)."""
    used_by_place: dict[tuple[str, str], dict[str, int]] = {}
    for row in store.read(
        lambda tx: list(
            tx.execute(
                sa.select(schema.allocations, schema.providers.c.host).join(
                    schema.providers, schema.providers.c.id == schema.allocations.c.provider_id
                )
            )
        )
    ):
        used_by_place.setdefault((row.consumer_id, row.host), {})[row.resource_class] = row.used
    return used_by_place


def read_wanted_states(store: Store, server: str) -> dict[str, str]:
    """Return the wanted state of the server's guest on each host."""
    return {row.host: row.wanted for row in store.read(lambda tx: guests.places(tx, server))}


def set_migration(store: Store, server: str, **values: Any) -> None:
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.migrations)
            .where(schema.migrations.c.server_id == server)
            .values(**values)
        )
    )


# --- whole moves ---
def test_resize_confirm_keeps_destination_and_releases_source(cloud: Cloud, store: Store) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "resize", BIGGER)
    cloud.settle()
    move = cloud.migration(server)
    assert (move.status, move.source_host, move.dest_host, move.source_node) == (
        "finished",
        "h1",
        "h2",
        "h1",
    )
    assert sorted(read_allocations(store)) == sorted([(move.uuid, "h1"), (server, "h2")])
    assert read_wanted_states(store, server) == {"h1": "kept", "h2": "running"}
    cloud.close(server, "confirmResize")
    cloud.settle()
    row = cloud.show(server)
    assert (row.vm_state, row.host, row.vcpus, row.memory_mb) == (
        states.ACTIVE,
        "h2",
        2,
        256,
    )
    assert (cloud.migration(server).status, list(read_allocations(store))) == (
        "confirmed",
        [(server, "h2")],
    )
    assert cloud.findings() == []


def test_cold_migration_revert_returns_server_to_source(cloud: Cloud, store: Store) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "migrate")
    cloud.settle()
    cloud.close(server, "revertResize")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    assert (cloud.migration(server).status, list(read_allocations(store))) == (
        "reverted",
        [(server, "h1")],
    )
    assert read_wanted_states(store, server) == {"h1": "running"}
    assert cloud.findings() == []


@pytest.mark.parametrize("ending", ["confirmResize", "revertResize"])
def test_resize_on_same_host_claims_only_difference_until_confirm_or_revert(
    store: Store, ending: str
) -> None:
    cloud = Cloud(store, Realtime(), hosts=1)
    cloud.engine = replace(cloud.engine, allow_resize_to_same_host=True)
    cloud.round()
    server = server_on(cloud, "h1")
    smaller = replace(BIGGER, memory_mb=64)
    cloud.move(server, "resize", smaller)
    cloud.settle()
    move = cloud.migration(server)
    assert read_allocations(store) == {
        (server, "h1"): {"VCPU": 2, "MEMORY_MB": 64, "DISK_GB": 2},
        (move.uuid, "h1"): {"MEMORY_MB": 64},
    }
    assert cloud.findings() == []
    cloud.close(server, ending)
    cloud.settle()
    flavor = smaller if ending == "confirmResize" else FLAVOR
    assert read_allocations(store) == {
        (server, "h1"): {
            "VCPU": flavor.vcpus,
            "MEMORY_MB": flavor.memory_mb,
            "DISK_GB": flavor.root_gb,
        }
    }
    row = cloud.show(server)
    assert (row.vm_state, row.vcpus, row.memory_mb) == (
        states.ACTIVE,
        flavor.vcpus,
        flavor.memory_mb,
    )
    assert cloud.findings() == []


def test_live_migration_moves_server_and_allocations(cloud: Cloud, store: Store) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "os-migrateLive")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h2")
    assert (cloud.migration(server).status, list(read_allocations(store))) == (
        "completed",
        [(server, "h2")],
    )
    assert cloud.findings() == []


def test_evacuation_is_completed_when_forced_down_source_host_returns(
    cloud: Cloud, store: Store
) -> None:
    server = server_on(cloud, "h1")
    cloud.hosts["h1"].power_cut()
    cloud.force_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h2")
    assert (cloud.migration(server).status, sorted(read_allocations(store))) == (
        "done",
        [(server, "h1"), (server, "h2")],
    )
    assert read_wanted_states(store, server) == {"h1": "absent", "h2": "running"}
    cloud.force_down("h1", down=False)
    cloud.hosts["h1"].power_on()
    cloud.settle()
    assert (cloud.migration(server).status, list(read_allocations(store))) == (
        "completed",
        [(server, "h2")],
    )
    assert cloud.findings() == []


def test_abandon_of_unconfirmed_resize_confirms_and_removes_source_guest(
    cloud: Cloud, store: Store
) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "resize", BIGGER)
    cloud.settle()
    fence = cloud.show(server).fence + 1

    def work(tx: sa.Connection) -> None:
        actions.take_lock(tx, server, None)
        migrations.abandon(tx, server, fence)
        tx.execute(
            sa.update(schema.servers)
            .where(schema.servers.c.id == server)
            .values(fence=fence, vm_state=states.ACTIVE)
        )

    store.write(work)
    assert (cloud.migration(server).status, read_wanted_states(store, server)) == (
        "confirmed",
        {"h1": "absent", "h2": "running"},
    )
    cloud.settle()
    assert (list(read_allocations(store)), cloud.findings()) == ([(server, "h2")], [])


# --- the record ---
def test_parallel_resizes_of_one_server_begin_exactly_one(cloud: Cloud, store: Store) -> None:
    server = server_on(cloud, "h1")
    outcomes = run_in_parallel(6, lambda number: cloud.move(server, "resize", BIGGER))
    action_ids = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(action_ids) == 1
    assert all(isinstance(outcome, (str, errors.WrongState, errors.Busy)) for outcome in outcomes)
    [row] = store.read(lambda tx: migrations.page(tx))
    assert (row.action_id, row.status, row.was) == (action_ids[0], "accepted", states.ACTIVE)
    assert from_wire(Flavor, row.old_flavor) == FLAVOR
    assert from_wire(Flavor, row.new_flavor) == BIGGER
    action = store.read(lambda tx: actions.show_by_id(tx, action_ids[0]))
    assert action is not None
    assert (action.args["migration"], action.args["source"]) == (row.uuid, "h1")


def test_migrate_without_host_and_confirm_without_migration_are_refused(
    cloud: Cloud, store: Store
) -> None:
    server = server_on(cloud, "h1")
    store.write(lambda tx: actions.update_servers(tx, {server: {"vm_state": states.RESIZED}}))
    with pytest.raises(errors.BadRequest, match="has not been resized"):
        cloud.close(server, "confirmResize")
    store.write(
        lambda tx: actions.update_servers(tx, {server: {"vm_state": states.ACTIVE, "host": None}})
    )
    with pytest.raises(errors.Conflict, match="on no host"):
        cloud.move(server, "migrate")
    assert store.read(lambda tx: migrations.page(tx)) == []
    assert cloud.show(server).action is None


def add_migrations(store: Store, count: int) -> list[str]:
    """Insert migrations of different servers, two with each creation time.

    Return their uuids, oldest first.
    """
    values = [
        {
            "uuid": ids.new(),
            "server_id": ids.new(),
            "action_id": ids.new(),
            "project_id": "pq"[number % 2],
            "user_id": "u",
            "type": (MigrationType.LIVE, MigrationType.RESIZE)[number % 2],
            "status": "running",
            "source_host": f"h{number % 2 + 1}",
            "dest_host": "h3",
            "old_flavor": to_wire(FLAVOR),
            "new_flavor": to_wire(FLAVOR),
            "was": "active",
            "created_at": number // 2,
            "updated_at": number,
        }
        for number in range(count)
    ]
    with store.begin() as tx:
        tx.execute(sa.insert(schema.migrations), values)
    return [str(row["uuid"]) for row in values]


def test_migration_pages_hold_every_migration_once_newest_first(store: Store) -> None:
    uuids = add_migrations(store, 7)

    def page(marker: str | None) -> list[str]:
        return [
            row.uuid for row in store.read(lambda tx: migrations.page(tx, limit=2, marker=marker))
        ]

    listed = page(None)
    while next_page := page(listed[-1]):
        listed += next_page
    assert listed == uuids[::-1]
    with pytest.raises(errors.BadRequest, match="Marker"):
        store.read(lambda tx: migrations.page(tx, marker="nobody"))


@pytest.mark.parametrize(
    ("filters", "indexes"),
    [
        ({}, "543210"),
        ({"host": "h1"}, "420"),
        ({"source": "h2"}, "531"),
        ({"dest": "h3"}, "543210"),
        ({"dest": "h1"}, ""),
        ({"type": "resize"}, "531"),
        ({"project_id": "p", "status": "running"}, "420"),
        ({"changed_since": 4}, "54"),
        ({"changed_before": 1, "user_id": "u"}, "10"),
    ],
    ids=str,
)
def test_migration_pages_apply_filters(store: Store, filters: dict[str, Any], indexes: str) -> None:
    uuids = add_migrations(store, 6)
    page = store.read(lambda tx: migrations.page(tx, **filters))
    assert "".join(str(uuids.index(row.uuid)) for row in page) == indexes


def test_migration_request_control_is_accepted_only_in_given_statuses(store: Store) -> None:
    uuids = add_migrations(store, 2)
    assert not store.write(
        lambda tx: migrations.request_control(tx, uuids[0], Control.ABORT, migrations.QUEUED)
    )
    assert store.write(
        lambda tx: migrations.request_control(tx, uuids[0], Control.ABORT, migrations.ABORTABLE)
    )
    [row] = store.read(lambda tx: migrations.requested_controls(tx, "h1"))
    assert row.requested_control == "abort"
    assert store.read(lambda tx: migrations.requested_controls(tx, "h2")) == []
    store.write(
        lambda tx: migrations.store_progress(tx, {("h1", row.action_id): {"memory_total": 2**40}})
    )
    assert store.read(lambda tx: migrations.page(tx, source="h1"))[0].progress == {
        "memory_total": 2**40
    }
    store.write(
        lambda tx: migrations.update(
            tx, {uuids[0]: {"status": "cancelled"}, uuids[1]: {"status": "error"}}
        )
    )
    assert store.read(lambda tx: migrations.requested_controls(tx, "h1")) == []


def test_find_unconfirmed_returns_resizes_older_than_limit_until_revert(
    cloud: Cloud, store: Store
) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "resize", BIGGER)
    cloud.settle()
    assert store.read(lambda tx: migrations.find_unconfirmed(tx, 60 * SECOND, 10)) == []
    set_migration(store, server, updated_at=now() - 61 * SECOND)
    assert [
        row.id for row in store.read(lambda tx: migrations.find_unconfirmed(tx, 60 * SECOND, 10))
    ] == [server]
    cloud.close(server, "revertResize")
    assert store.read(lambda tx: migrations.find_unconfirmed(tx, 60 * SECOND, 10)) == []


def test_evacuation_stays_done_while_source_has_pending_removal(store: Store) -> None:
    uuids = add_migrations(store, 2)
    pending, removed = (row.server_id for row in store.read(lambda tx: migrations.page(tx))[::-1])
    store.write(lambda tx: migrations.update(tx, {uuid: {"status": "done"} for uuid in uuids}))
    store.write(
        lambda tx: guests.add(
            tx,
            [
                {"server_id": pending, "host": "h1", "fence": 1, "wanted": GuestState.ABSENT},
                {"server_id": removed, "host": "h1", "fence": 1},
            ],
        )
    )
    store.write(lambda tx: migrations.complete_evacuations(tx, [pending, removed]))
    assert {row.server_id: row.status for row in store.read(lambda tx: migrations.page(tx))} == {
        pending: "done",
        removed: "completed",
    }


# --- commands on dead hosts ---
def test_commands_to_down_or_forced_down_destination_are_listed_to_give_up(
    cloud: Cloud, store: Store
) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "resize", BIGGER)
    cloud.advance()
    # The source offers the files.
    cloud.hosts["h1"].work()
    cloud.sync(cloud.hosts["h1"])
    assert (
        store.read(
            lambda tx: tx.scalar(
                sa.select(schema.actions.c.step).where(schema.actions.c.state == "waiting")
            )
        )
        == "prepare"
    )

    def list_given_up(*abandoned: tuple[str, str]) -> list[bool]:
        commands = store.read(lambda tx: actions.commands_on_dead_hosts(tx, abandoned, 30, 10))
        assert all(row.server_id == server for row in commands)
        return [bool(row.dead) for row in commands]

    heartbeat = sa.update(schema.heartbeats).where(schema.heartbeats.c.host == "h2")
    assert list_given_up(("resize", "prepare")) == []
    store.write(lambda tx: tx.execute(heartbeat.values(up=False)))
    assert list_given_up(("migrate", "prepare"), ("resize", "copy")) == []
    assert list_given_up(("resize", "copy"), ("resize", "prepare")) == [False]
    store.write(lambda tx: tx.execute(heartbeat.values(up=True)))
    cloud.force_down("h2")
    assert list_given_up(("resize", "copy")) == [True]
    cloud.force_down("h2", down=False)
    cloud.force_down("h1")
    assert list_given_up(("resize", "prepare")) == []
    assert [
        row.source
        for row in store.read(
            lambda tx: migrations.reading_from_the_dead(
                tx, [("live_migrate", "prepare"), ("resize", "prepare")], 10
            )
        )
    ] == ["h1"]
    assert (
        store.read(lambda tx: migrations.reading_from_the_dead(tx, [("resize", "copy")], 10)) == []
    )


# --- under races ---
def test_parallel_moves_and_reverts_keep_allocations_exact(store: Store) -> None:
    for name in ("h1", "h2", "h3"):
        store.write(
            lambda tx, name=name: hosts.register(  # type: ignore[misc]
                tx, name, "boot", HostInventory("memory", 1, name, 24, 10240, 1000)
            )
        )
    places = {ids.new(): f"h{number % 3 + 1}" for number in range(12)}

    def claim(server: str, host: str, leaves: tuple[str, str] | None) -> str:
        request = ClaimRequest(
            server, "project", "user", {"VCPU": 1, "MEMORY_MB": 64}, [host], leaves=leaves
        )

        def work(tx: sa.Connection) -> None:
            allocations.claim(tx, [request])
            if leaves is not None:
                guests.hold(tx, server, leaves[0], leaves[1])
            guests.add(tx, [{"server_id": server, "host": host, "fence": 1}])

        store.write(work)
        assert request.host is not None
        return request.host

    for server, host in places.items():
        claim(server, host, None)

    def move_and_return(number: int) -> None:
        server, host = list(places.items())[number]
        other, migration = f"h{int(host[1]) % 3 + 1}", ids.new()
        claim(server, other, (host, migration))
        used_by_place = read_allocations(store)
        assert {migration, server} == {
            consumer for consumer, _ in used_by_place if consumer in (migration, server)
        }

        def undo_move(tx: sa.Connection) -> None:
            guests.add_removal(tx, server, 1, host=other)
            guests.hold(tx, server, host, None)
            allocations.hand_back(tx, migration, server, host)

        store.write(undo_move)
        store.write(lambda tx: guests.confirm_removals(tx, [(server, other, 1)]))

    assert run_in_parallel(len(places), move_and_return) == [None] * len(places)
    assert read_allocations(store) == {
        place: {"VCPU": 1, "MEMORY_MB": 64} for place in places.items()
    }
    assert [
        finding
        for finding in store.read(doctor.check)
        if finding.invariant in ("capacity", "consumer")
    ] == []


def test_host_registration_during_fencing_clears_forced_down(cloud: Cloud, store: Store) -> None:
    """The registration waits for the end of the fencing, and then clears the forced-down state."""
    if store.dialect_name == "sqlite":
        # SQLite has a single writer.
        return
    inventory = cloud.hosts["h1"].driver.inventory()
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            assert not services.are_dead(tx, "h1", locked=True)
            registration = pool.submit(
                lambda: store.write(
                    lambda connection: hosts.open_session(connection, "h1", "boot-2", inventory)
                )
            )
            wait([registration], timeout=1)
            assert not registration.done(), "it must wait for what becomes of the fencing"
            services.fence(tx, "h1")
        registration.result(timeout=20)
    assert not store.read(lambda tx: services.are_dead(tx, "h1"))


def test_host_registration_keeps_forced_down_of_admin_and_clears_fencing(
    cloud: Cloud, store: Store
) -> None:
    cloud.force_down("h1")
    store.write(
        lambda tx: hosts.open_session(tx, "h1", "boot-2", cloud.hosts["h1"].driver.inventory())
    )
    assert store.read(lambda tx: services.are_dead(tx, "h1"))
    store.write(lambda tx: services.fence(tx, "h1"))
    store.write(
        lambda tx: hosts.open_session(tx, "h1", "boot-3", cloud.hosts["h1"].driver.inventory())
    )
    assert store.read(lambda tx: services.are_dead(tx, "h1")), "the admin has not changed that"
    store.write(lambda tx: services.fence(tx, "h2"))
    assert store.read(lambda tx: services.are_dead(tx, "h2"))
    store.write(
        lambda tx: hosts.open_session(tx, "h2", "boot-2", cloud.hosts["h2"].driver.inventory())
    )
    assert not store.read(lambda tx: services.are_dead(tx, "h2"))
