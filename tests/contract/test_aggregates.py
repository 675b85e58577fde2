# SPDX-License-Identifier: Apache-2.0
"""Aggregates, zones and removed hosts under concurrent changes, on the three databases."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import NoResultFound

from common.domain import errors, ids
from common.domain.models import HostInventory, ImageRef
from common.domain.service_binaries import Binary
from common.store import schema
from common.store.engine import Store
from common.store.hosts import aggregates, cached_images, host_images, hosts, services
from common.store.placement import allocations, zones
from common.store.servers import guests
from common.store.views import host_removal
from deploy.operator import doctor

ROUNDS = 8


def new_host(store: Store, name: str) -> None:
    store.write(
        lambda tx: hosts.register(
            tx, name, "boot", HostInventory("memory", 1, name, 10, 10240, 1000)
        )
    )


def make(store: Store, name: str, zone: str | None, *members: str) -> int:
    number = int(store.write(lambda tx: aggregates.create(tx, name, zone)).id)
    for host in members:
        store.write(lambda tx, host=host: aggregates.add_host(tx, number, host, "nova"))
    return number


def at_once(*works: Callable[[], Any]) -> list[errors.Problem | None]:
    """Run these at the same moment and return the problem of each, or None on success."""
    start = Barrier(len(works))

    def run_one(work: Callable[[], Any]) -> errors.Problem | None:
        start.wait()
        try:
            work()
        except errors.Problem as problem:
            return problem
        return None

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run_one, works))


def place(store: Store, host: str, zone: str | None = None) -> Callable[[], None]:
    """Return a function that claims this host for a new server and adds the guest."""
    server = ids.new()

    def work(tx: Any) -> None:
        request = allocations.ClaimRequest(server, "p", "u", {"VCPU": 1}, [host], zone=zone)
        allocations.claim(tx, [request])
        if request.host is None:
            raise errors.Conflict("No valid host was found.")
        guests.add(tx, [{"server_id": server, "host": host, "fence": 1}])

    return lambda: store.write(work)


def join(store: Store, number: int, host: str) -> Callable[[], None]:
    return lambda: store.write(lambda tx: aggregates.add_host(tx, number, host, "nova"))


def test_add_host_to_two_zones_at_once_fails_for_one_zone(
    store: Store,
) -> None:
    for number in range(ROUNDS):
        host = f"h{number}"
        new_host(store, host)
        both = [make(store, f"{zone}-{number}", zone) for zone in ("az1", "az2")]
        refused = at_once(*(join(store, zone, host) for zone in both))
        assert [type(problem) for problem in refused if problem] == [errors.Conflict]


def test_set_zone_of_aggregate_while_host_joins_other_zone_fails_for_one(store: Store) -> None:
    for number in range(ROUNDS):
        host = f"h{number}"
        new_host(store, host)
        plain, zone = (
            make(store, f"plain-{number}", None, host),
            make(store, f"zone-{number}", "az1"),
        )
        refused = at_once(
            join(store, zone, host),
            lambda plain=plain: store.write(
                lambda tx: aggregates.update(tx, plain, "nova", meta={"availability_zone": "az2"})
            ),
        )
        assert len([problem for problem in refused if problem]) == 1, refused


def test_claim_without_zone_succeeds_while_host_moves_to_other_zone(store: Store) -> None:
    """Either the claim is first and the host stays, or the host moves first."""
    for number in range(ROUNDS):
        host = f"h{number}"
        new_host(store, host)
        zone = make(store, f"zone-{number}", "az1")
        claimed, moved = at_once(place(store, host), join(store, zone, host))
        assert claimed is None
        members = store.read(lambda tx, zone=zone: aggregates.show(tx, zone)[1])
        assert members == ([] if moved else [host])


def test_claim_in_zone_while_host_leaves_zone_fails_for_claim_or_move(store: Store) -> None:
    """The proposal may be older than the move, so the claim reads the zone under a lock."""
    for number in range(ROUNDS):
        host = f"h{number}"
        new_host(store, host)
        claimed, moved = at_once(
            place(store, host, "nova"), join(store, make(store, f"zone-{number}", "az1"), host)
        )
        assert [claimed is None, moved is None].count(True) == 1


def test_claim_in_requested_zone_fails_on_host_of_other_zone(store: Store) -> None:
    for host in ("h1", "h2"):
        new_host(store, host)
    make(store, "zone", "az1", "h1")
    place(store, "h1", "az1")()
    place(store, "h2", "nova")()
    for host, zone in (("h1", "nova"), ("h2", "az1")):
        with pytest.raises(errors.Conflict):
            place(store, host, zone)()


def test_zone_is_available_only_while_it_has_enabled_host(store: Store) -> None:
    def is_open(zone: str) -> bool:
        return store.read(lambda tx: zones.is_open(tx, zone, "nova"))

    assert not is_open("nova")
    new_host(store, "h1")
    make(store, "empty", "az2")
    make(store, "rack", None, "h1")
    assert [is_open(zone) for zone in ("nova", "az1", "az2")] == [True, False, False]
    make(store, "zone", "az1", "h1")
    assert [is_open(zone) for zone in ("nova", "az1", "az2")] == [False, True, False]
    [service] = store.read(lambda tx: services.list_all(tx, "h1"))
    store.write(lambda tx: services.set_state(tx, service.uuid, disabled=True))
    assert not is_open("az1")


def test_host_removal_during_claim_fails_for_removal_or_claim(store: Store) -> None:
    kept_hosts = 0
    for number in range(ROUNDS):
        host = f"h{number}"
        new_host(store, host)
        make(store, f"rack-{number}", "az1", host)
        [service] = store.read(lambda tx, host=host: services.list_all(tx, host))

        claimed, removed = at_once(
            place(store, host),
            lambda service=service: store.write(
                lambda tx: host_removal.remove(tx, service, service.uuid)
            ),
        )
        assert (claimed is None) != (removed is None)
        kept_hosts += removed is not None
    with store.begin() as tx:
        rows = {
            table.name: tx.scalar(sa.select(sa.func.count()).select_from(table))
            for table in (
                schema.hosts,
                schema.providers,
                schema.services,
                schema.heartbeats,
                schema.aggregate_hosts,
                schema.allocations,
            )
        }
        stock = tx.scalar(sa.select(sa.func.count(schema.inventories.c.provider_id.distinct())))
    assert {*rows.values(), stock} == {kept_hosts}


def test_host_removal_during_registration_leaves_all_rows_or_no_row(
    store: Store,
) -> None:
    for number in range(ROUNDS):
        host = f"h{number}"
        new_host(store, host)
        [service] = store.read(lambda tx, host=host: services.list_all(tx, host))

        def registration(host: str = host) -> None:
            try:
                new_host(store, host)
            # The host was removed during the registration: the agent registers again.
            except NoResultFound:
                new_host(store, host)

        assert at_once(
            registration,
            lambda service=service: store.write(
                lambda tx: host_removal.remove(tx, service, service.uuid)
            ),
        ) == [None, None]
        rows_by_table = {
            table.name: store.read(
                lambda tx, table=table, column=column, host=host: tx.execute(
                    sa.select(table).where(column == host)
                ).all()
            )
            for table, column in (
                (schema.hosts, schema.hosts.c.name),
                (schema.providers, schema.providers.c.host),
                (schema.services, schema.services.c.host),
                (schema.heartbeats, schema.heartbeats.c.host),
            )
        }
        assert len({len(rows) for rows in rows_by_table.values()}) == 1, rows_by_table


def test_host_removal_while_host_joins_aggregate_leaves_no_membership(store: Store) -> None:
    number = make(store, "rack", None)
    new_host(store, "h1")
    [service] = store.read(lambda tx: services.list_all(tx, "h1"))
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            aggregates.add_host(tx, number, "h1", "nova")
            removed = pool.submit(
                lambda: store.write(lambda tx: host_removal.remove(tx, service, service.uuid))
            )
            # The removal waits for the provider's lock, or on SQLite for the only writer.
            with pytest.raises(NotYet):
                removed.result(timeout=0.5)
        removed.result(timeout=20)
    assert store.read(lambda tx: aggregates.show(tx, number))[1] == []
    assert store.read(doctor.check) == []


def test_removal_of_fenced_host_during_reconnect_fails_keeping_cleanup(store: Store) -> None:
    """The earlier fencing does not apply to the returned host.

    The pending cleanup is neither dropped nor given to another host.
    """
    new_host(store, "h1")
    server = ids.new()
    store.write(lambda tx: guests.add(tx, [{"server_id": server, "host": "h1", "fence": 1}]))
    store.write(lambda tx: guests.add_removal(tx, server, 2))
    store.write(lambda tx: services.fence(tx, "h1"))
    [service] = store.read(lambda tx: services.list_all(tx, "h1"))
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            hosts.open_session(
                tx, "h1", "boot-2", HostInventory("memory", 1, "h1", 10, 10240, 1000)
            )
            removed = pool.submit(
                lambda: store.write(lambda tx: host_removal.remove(tx, service, service.uuid))
            )
            # The removal waits for the host's lock, or on SQLite for the only writer.
            with pytest.raises(NotYet):
                removed.result(timeout=0.5)
        with pytest.raises(errors.Conflict, match="has not removed all guests"):
            removed.result(timeout=20)
    assert [row.host for row in store.read(lambda tx: guests.places(tx, server))] == ["h1"]


def test_concurrent_aggregate_updates_claims_and_heartbeats_all_complete(
    store: Store,
) -> None:
    names = [f"h{number}" for number in range(4)]
    for name in names:
        new_host(store, name)
    racks = [make(store, f"rack-{number}", None, *names) for number in range(3)]

    def ratio(number: int) -> Callable[[], None]:
        return lambda: store.write(
            lambda tx: aggregates.update(
                tx, racks[number % 3], "nova", meta={"cpu_allocation_ratio": str(number + 1)}
            )
        )

    works: list[Callable[[], Any]] = []
    for number in range(ROUNDS):
        works += [
            ratio(number),
            place(store, names[number % 4]),
            lambda: store.write(lambda tx: services.beat(tx, names, Binary.COMPUTE)),
        ]
    assert at_once(*works) == [None] * len(works)


def test_image_to_prefetch_is_sent_by_one_conductor_and_kept_until_cached(
    store: Store,
) -> None:
    images = [ImageRef(ids.new()) for _ in range(3)]
    for host in ("h1", "h2"):
        new_host(store, host)
    store.write(lambda tx: host_images.ask(tx, ["h1", "h2", "gone"], images))
    rows = store.read(lambda tx: host_images.due(tx, 100))
    assert {(row.host, row.image_id) for row in rows} == {
        (host, image.id) for host in ("h1", "h2") for image in images
    }
    batches: list[dict[str, Any]] = []
    assert (
        at_once(*[lambda: batches.append(store.write(lambda tx: host_images.take(tx, rows)))] * 4)
        == [None] * 4
    )
    assert sorted(
        (host, len(batch_images)) for batch in batches for host, batch_images in batch.items()
    ) == [
        ("h1", 3),
        ("h2", 3),
    ]
    assert store.read(lambda tx: host_images.due(tx, 100)) == []
    store.write(
        lambda tx: host_images.record(
            tx,
            "h1",
            {images[0].id: "", images[1].id: "no \x00 room \U0001f4a5", ids.new(): "never asked"},
        )
    )
    with store.begin() as tx:
        tx.execute(
            sa.update(schema.host_images).values(
                sent_at=schema.host_images.c.sent_at - host_images.PAUSE
            )
        )
    due = store.read(lambda tx: host_images.due(tx, 100))
    assert {(row.host, row.image_id) for row in due} == {
        (row.host, row.image_id) for row in rows
    } - {("h1", images[0].id)}
    assert not store.read(cached_images.is_something_over)
    with store.begin() as tx:
        tx.execute(
            sa.update(schema.host_images)
            .where(schema.host_images.c.host == "h1")
            .values(asked_at=0)
        )
    assert store.read(cached_images.is_something_over)
    assert {(row.host, row.error) for row in store.write(host_images.give_up)} == {
        ("h1", "no  room \U0001f4a5"),
        ("h1", None),
    }
    assert len(store.read(lambda tx: tx.execute(sa.select(schema.host_images)).all())) == 6


def test_hosts_are_listed_by_pattern_marker_and_id_and_zones_by_host(store: Store) -> None:
    for number in range(5):
        new_host(store, f"h{number}.100%")
    make(store, "rack", "az1", "h1.100%")
    assert dict(store.read(lambda tx: aggregates.zones(tx, "nova", ["h1.100%", "h2.100%"]))) == {
        "h1.100%": "az1"
    }
    assert store.read(lambda tx: aggregates.zones(tx, "nova"))["h2.100%"] == "nova"

    def names(**filters: Any) -> list[str]:
        return [row["name"][:2] for row in store.read(lambda tx: hosts.list_all(tx, **filters))]

    first = store.read(lambda tx: hosts.list_all(tx, "h0.100%"))[0]
    assert names() == names(pattern="100%") == names(pattern=".") == ["h0", "h1", "h2", "h3", "h4"]
    assert names(pattern="0_%") == names(pattern="%h") == []
    assert names(after=first["service_id"], limit=2) == ["h1", "h2"]
    assert (
        names(service_id=first["service_id"])
        == names(provider_uuid=first["provider_uuid"])
        == ["h0"]
    )
    assert names(name="h9") == names(provider_uuid=first["service_uuid"]) == []
