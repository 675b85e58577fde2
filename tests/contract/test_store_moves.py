# SPDX-License-Identifier: Apache-2.0
"""Servers that move, on SQLite, PostgreSQL and MariaDB: the record of a move, who holds what, and
whose silence counts.

Whole moves run here by the real workflows, so that each statement of theirs is asked of each
database once.
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
from tests.contract.test_store import Realtime, in_parallel
from tests.workflows.simulator import FLAVOR, Cloud

ADMIN = RequestContext(user_id="admin", project_id="admins", roles=("admin",), request_id="req-a")
BIGGER = replace(FLAVOR, id="2", name="m1.bigger", vcpus=2, memory_mb=256, root_gb=2)


@pytest.fixture
def cloud(store: Store) -> Cloud:
    """Two hosts that have registered."""
    made = Cloud(store, Realtime())
    made.round()
    return made


def server_on(cloud: Cloud, host: str) -> str:
    server = cloud.create(host=host)[0]
    cloud.settle()
    assert cloud.show(server).host == host
    return server


def held(store: Store) -> dict[tuple[str, str], dict[str, int]]:
    """(consumer, host) -> what it holds there."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in store.read(
        lambda tx: list(
            tx.execute(
                sa.select(schema.allocations, schema.providers.c.host).join(
                    schema.providers, schema.providers.c.id == schema.allocations.c.provider_id
                )
            )
        )
    ):
        found.setdefault((row.consumer_id, row.host), {})[row.resource_class] = row.used
    return found


def wanted(store: Store, server: str) -> dict[str, str]:
    """Host -> what is wanted of the server's guest there."""
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
def test_resize_is_confirmed(cloud: Cloud, store: Store) -> None:
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
    assert sorted(held(store)) == sorted([(move.uuid, "h1"), (server, "h2")])
    assert wanted(store, server) == {"h1": "kept", "h2": "running"}
    cloud.close(server, "confirmResize")
    cloud.settle()
    found = cloud.show(server)
    assert (found.vm_state, found.host, found.vcpus, found.memory_mb) == (
        states.ACTIVE,
        "h2",
        2,
        256,
    )
    assert (cloud.migration(server).status, list(held(store))) == ("confirmed", [(server, "h2")])
    assert cloud.findings() == []


def test_migration_is_reverted(cloud: Cloud, store: Store) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "migrate")
    cloud.settle()
    cloud.close(server, "revertResize")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    assert (cloud.migration(server).status, list(held(store))) == ("reverted", [(server, "h1")])
    assert wanted(store, server) == {"h1": "running"}
    assert cloud.findings() == []


@pytest.mark.parametrize("ending", ["confirmResize", "revertResize"])
def test_resize_stays_on_its_host(store: Store, ending: str) -> None:
    cloud = Cloud(store, Realtime(), hosts=1)
    cloud.engine = replace(cloud.engine, allow_resize_to_same_host=True)
    cloud.round()
    server = server_on(cloud, "h1")
    smaller = replace(BIGGER, memory_mb=64)
    cloud.move(server, "resize", smaller)
    cloud.settle()
    move = cloud.migration(server)
    assert held(store) == {
        (server, "h1"): {"VCPU": 2, "MEMORY_MB": 64, "DISK_GB": 2},
        (move.uuid, "h1"): {"MEMORY_MB": 64},
    }
    assert cloud.findings() == []
    cloud.close(server, ending)
    cloud.settle()
    flavor = smaller if ending == "confirmResize" else FLAVOR
    assert held(store) == {
        (server, "h1"): {
            "VCPU": flavor.vcpus,
            "MEMORY_MB": flavor.memory_mb,
            "DISK_GB": flavor.root_gb,
        }
    }
    found = cloud.show(server)
    assert (found.vm_state, found.vcpus, found.memory_mb) == (
        states.ACTIVE,
        flavor.vcpus,
        flavor.memory_mb,
    )
    assert cloud.findings() == []


def test_live_migration_is_completed(cloud: Cloud, store: Store) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "os-migrateLive")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h2")
    assert (cloud.migration(server).status, list(held(store))) == ("completed", [(server, "h2")])
    assert cloud.findings() == []


def test_evacuation_is_completed_when_the_host_has_paid(cloud: Cloud, store: Store) -> None:
    server = server_on(cloud, "h1")
    cloud.hosts["h1"].power_cut()
    cloud.force_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h2")
    assert (cloud.migration(server).status, sorted(held(store))) == (
        "done",
        [(server, "h1"), (server, "h2")],
    )
    assert wanted(store, server) == {"h1": "absent", "h2": "running"}
    cloud.force_down("h1", down=False)
    cloud.hosts["h1"].power_on()
    cloud.settle()
    assert (cloud.migration(server).status, list(held(store))) == ("completed", [(server, "h2")])
    assert cloud.findings() == []


def test_admin_ends_a_move_that_waits_to_be_confirmed(cloud: Cloud, store: Store) -> None:
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
    assert (cloud.migration(server).status, wanted(store, server)) == (
        "confirmed",
        {"h1": "absent", "h2": "running"},
    )
    cloud.settle()
    assert (list(held(store)), cloud.findings()) == ([(server, "h2")], [])


# --- the record ---
def test_who_comes_first_moves_the_server(cloud: Cloud, store: Store) -> None:
    server = server_on(cloud, "h1")
    asked = in_parallel(6, lambda number: cloud.move(server, "resize", BIGGER))
    begun = [one for one in asked if isinstance(one, str)]
    assert len(begun) == 1
    assert all(isinstance(one, (str, errors.WrongState, errors.Busy)) for one in asked)
    [row] = store.read(lambda tx: migrations.page(tx))
    assert (row.action_id, row.status, row.was) == (begun[0], "accepted", states.ACTIVE)
    assert from_wire(Flavor, row.old_flavor) == FLAVOR
    assert from_wire(Flavor, row.new_flavor) == BIGGER
    action = store.read(lambda tx: actions.show_by_id(tx, begun[0]))
    assert action is not None
    assert (action.args["migration"], action.args["source"]) == (row.uuid, "h1")


def test_who_is_on_no_host_does_not_move_and_who_has_not_moved_is_not_confirmed(
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


def rows(store: Store, count: int) -> list[str]:
    """So many moves of different servers, two of each moment; their uuids, the oldest first."""
    made = [
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
        tx.execute(sa.insert(schema.migrations), made)
    return [str(row["uuid"]) for row in made]


def test_pages_hold_every_move_once_newest_first(store: Store) -> None:
    made = rows(store, 7)

    def page(marker: str | None) -> list[str]:
        return [
            row.uuid for row in store.read(lambda tx: migrations.page(tx, limit=2, marker=marker))
        ]

    paged = page(None)
    while found := page(paged[-1]):
        paged += found
    assert paged == made[::-1]
    with pytest.raises(errors.BadRequest, match="Marker"):
        store.read(lambda tx: migrations.page(tx, marker="nobody"))


@pytest.mark.parametrize(
    ("asked", "found"),
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
def test_pages_hold_what_is_asked_for(store: Store, asked: dict[str, Any], found: str) -> None:
    made = rows(store, 6)
    page = store.read(lambda tx: migrations.page(tx, **asked))
    assert "".join(str(made.index(row.uuid)) for row in page) == found


def test_wishes_are_heard_in_their_statuses_only(store: Store) -> None:
    made = rows(store, 2)
    assert not store.write(
        lambda tx: migrations.request_control(tx, made[0], Control.ABORT, migrations.QUEUED)
    )
    assert store.write(
        lambda tx: migrations.request_control(tx, made[0], Control.ABORT, migrations.ABORTABLE)
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
            tx, {made[0]: {"status": "cancelled"}, made[1]: {"status": "error"}}
        )
    )
    assert store.read(lambda tx: migrations.requested_controls(tx, "h1")) == []


def test_what_nobody_confirms_is_found_when_it_is_old(cloud: Cloud, store: Store) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "resize", BIGGER)
    cloud.settle()
    assert store.read(lambda tx: migrations.unconfirmed(tx, 60 * SECOND, 10)) == []
    set_migration(store, server, updated_at=now() - 61 * SECOND)
    assert [
        row.id for row in store.read(lambda tx: migrations.unconfirmed(tx, 60 * SECOND, 10))
    ] == [server]
    cloud.close(server, "revertResize")
    assert store.read(lambda tx: migrations.unconfirmed(tx, 60 * SECOND, 10)) == []


def test_evacuation_is_not_completed_while_its_source_owes(store: Store) -> None:
    made = rows(store, 2)
    owing, paid = (row.server_id for row in store.read(lambda tx: migrations.page(tx))[::-1])
    store.write(lambda tx: migrations.update(tx, {uuid: {"status": "done"} for uuid in made}))
    store.write(
        lambda tx: guests.add(
            tx,
            [
                {"server_id": owing, "host": "h1", "fence": 1, "wanted": GuestState.ABSENT},
                {"server_id": paid, "host": "h1", "fence": 1},
            ],
        )
    )
    store.write(lambda tx: migrations.complete_evacuations(tx, [owing, paid]))
    assert {row.server_id: row.status for row in store.read(lambda tx: migrations.page(tx))} == {
        owing: "done",
        paid: "completed",
    }


# --- who waits in vain ---
def test_only_silent_hosts_that_start_nothing_and_dead_ones_are_given_up(
    cloud: Cloud, store: Store
) -> None:
    server = server_on(cloud, "h1")
    cloud.move(server, "resize", BIGGER)
    cloud.advance()
    cloud.hosts["h1"].work()  # it offers the files
    cloud.sync(cloud.hosts["h1"])
    assert (
        store.read(
            lambda tx: tx.scalar(
                sa.select(schema.actions.c.step).where(schema.actions.c.state == "waiting")
            )
        )
        == "prepare"
    )

    def given_up(*abandoned: tuple[str, str]) -> list[bool]:
        found = store.read(lambda tx: actions.commands_on_dead_hosts(tx, abandoned, 30, 10))
        assert all(row.server_id == server for row in found)
        return [bool(row.dead) for row in found]

    heard = sa.update(schema.heartbeats).where(schema.heartbeats.c.host == "h2")
    assert given_up(("resize", "prepare")) == []
    store.write(lambda tx: tx.execute(heard.values(up=False)))
    assert given_up(("migrate", "prepare"), ("resize", "copy")) == []
    assert given_up(("resize", "copy"), ("resize", "prepare")) == [False]
    store.write(lambda tx: tx.execute(heard.values(up=True)))
    cloud.force_down("h2")
    assert given_up(("resize", "copy")) == [True]
    cloud.force_down("h2", down=False)
    cloud.force_down("h1")
    assert given_up(("resize", "prepare")) == []
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
def test_moves_in_both_directions_at_once_lose_and_double_nothing(store: Store) -> None:
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

    def there_and_back(number: int) -> None:
        server, host = list(places.items())[number]
        other, migration = f"h{int(host[1]) % 3 + 1}", ids.new()
        claim(server, other, (host, migration))
        found = held(store)
        assert {migration, server} == {
            consumer for consumer, _ in found if consumer in (migration, server)
        }

        def give_up(tx: sa.Connection) -> None:
            guests.add_debt(tx, server, 1, host=other)
            guests.hold(tx, server, host, None)
            allocations.hand_back(tx, migration, server, host)

        store.write(give_up)
        store.write(lambda tx: guests.confirm_debts(tx, [(server, other, 1)]))

    assert in_parallel(len(places), there_and_back) == [None] * len(places)
    assert held(store) == {place: {"VCPU": 1, "MEMORY_MB": 64} for place in places.items()}
    assert [
        one for one in store.read(doctor.check) if one.invariant in ("capacity", "consumer")
    ] == []


def test_a_host_that_registers_while_it_is_fenced_is_not_forced_down(
    cloud: Cloud, store: Store
) -> None:
    """Whoever is first: what the second writes counts, and it has seen the first."""
    if store.dialect_name == "sqlite":
        return  # its writers are alone
    inventory = cloud.hosts["h1"].driver.inventory()
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            assert not services.are_dead(tx, "h1", locked=True)
            done = pool.submit(
                lambda: store.write(lambda one: hosts.open_session(one, "h1", "boot-2", inventory))
            )
            wait([done], timeout=1)
            assert not done.done(), "it must wait for what becomes of the fencing"
            services.fence(tx, "h1")
        done.result(timeout=20)
    assert not store.read(lambda tx: services.are_dead(tx, "h1"))


def test_an_admins_word_outlives_a_registration(cloud: Cloud, store: Store) -> None:
    cloud.force_down("h1")
    store.write(
        lambda tx: hosts.open_session(tx, "h1", "boot-2", cloud.hosts["h1"].driver.inventory())
    )
    assert store.read(lambda tx: services.are_dead(tx, "h1"))
    store.write(lambda tx: services.fence(tx, "h2"))
    assert store.read(lambda tx: services.are_dead(tx, "h2"))
    store.write(
        lambda tx: hosts.open_session(tx, "h2", "boot-2", cloud.hosts["h2"].driver.inventory())
    )
    assert not store.read(lambda tx: services.are_dead(tx, "h2"))
