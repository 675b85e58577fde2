# SPDX-License-Identifier: Apache-2.0
"""The doctor's findings about placement on SQLite, PostgreSQL and MariaDB.

Each test breaks one invariant by SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.clock import SECOND
from common.domain.models import (
    AssignedNumaNode,
    Device,
    HardwareAssignment,
    HostInventory,
    NumaNode,
)
from common.domain.wire import to_wire
from common.store import schema
from common.store.engine import Connection, Store, now
from common.store.hosts import hosts, services
from common.store.notifications import outbox
from common.store.placement import allocations, inventories
from common.store.servers import guests
from common.store.tenants import server_groups
from deploy.operator import doctor
from tests.server_rows import server_row

Broken = Callable[[Connection], Any]


@pytest.fixture
def store(upgraded_url: str) -> Iterator[Store]:
    """Yield a store with two hosts.

    Each host has two servers of a group that allows two servers per host.
    """
    store = Store(upgraded_url)
    store.write(fill)
    yield store
    store.close()


def fill(tx: Connection) -> None:
    numa_node = NumaNode(0, [0, 1], [4, 5], 4096, pages={"2048": 8})
    for host in ("h1", "h2"):
        hosts.register(
            tx,
            host,
            "boot",
            HostInventory(
                "memory",
                1,
                host,
                8,
                4096,
                100,
                numa_nodes=[numa_node],
                devices=[Device("0000:81:00.0", "8086", "10ed")],
            ),
        )
    group = server_groups.create(
        tx,
        {
            "project_id": "p",
            "user_id": "u",
            "name": "g",
            "policy": "anti-affinity",
            "rules": {"max_server_per_host": 2},
        },
    ).id
    for number, host in enumerate(("h1", "h1", "h2", "h2")):
        place(tx, f"s{number}", host)
        server_groups.join(tx, [{"group_id": group, "server_id": f"s{number}"}])
    tx.execute(
        sa.insert(schema.aggregates).values(
            id=1, uuid="1", name="a1", meta={"availability_zone": "az1"}, created_at=now()
        )
    )
    tx.execute(
        sa.insert(schema.aggregates).values(id=2, uuid="2", name="a2", meta={}, created_at=now())
    )
    tx.execute(
        sa.insert(schema.aggregate_hosts),
        [{"aggregate_id": number, "host": "h1"} for number in (1, 2)],
    )
    service = tx.scalar(sa.select(schema.services.c.uuid).where(schema.services.c.host == "h2"))
    services.set_state(tx, str(service), disabled=True)


def place(tx: Connection, server: str, host: str) -> None:
    """Insert a server with one VCPU, and a guest for the server."""
    tx.execute(
        sa.insert(schema.servers).values(
            **server_row(
                server,
                name=server,
                hostname=server,
                host=host,
                flavor={"id": "1", "name": "f", "vcpus": 1, "memory_mb": 64, "root_gb": 1},
                memory_mb=64,
            )
        )
    )
    allocations.claim(
        tx,
        [
            allocations.ClaimRequest(
                server, "p", "u", {"VCPU": 1, "MEMORY_MB": 64, "DISK_GB": 1}, [host]
            )
        ],
    )
    guests.add(tx, [{"server_id": server, "host": host, "fence": 1}])


def assign(*assignments: tuple[str, HardwareAssignment]) -> Broken:
    """Set the hardware assignments of these servers."""

    def work(tx: Connection) -> None:
        for server, assignment in assignments:
            tx.execute(
                sa.update(schema.guests)
                .where(schema.guests.c.server_id == server)
                .values(assignment=to_wire(assignment))
            )

    return work


def numa_node(cpu: int, memory_mb: int = 4, page_kb: int = 0) -> HardwareAssignment:
    return HardwareAssignment([AssignedNumaNode(0, [0], {"0": cpu}, memory_mb, page_kb)])


def move(server: str, host: str) -> Broken:
    """Place the server, with a guest and allocations, on another host."""

    def work(tx: Connection) -> None:
        allocations.release(tx, [(server, "h2")])
        tx.execute(sa.delete(schema.guests).where(schema.guests.c.server_id == server))
        tx.execute(sa.delete(schema.servers).where(schema.servers.c.id == server))
        place(tx, server, host)

    return work


def update_rows(table: sa.Table, condition: Any, **values: Any) -> Broken:
    return lambda tx: tx.execute(sa.update(table).where(condition).values(**values))


def add_unsent_notification(age: int) -> Broken:
    """Insert a notification that has waited for this time."""
    return lambda tx: tx.execute(
        sa.insert(schema.notifications).values(
            event="flavor.create", key="1", publisher="nova-api:a", body={}, created_at=now() - age
        )
    )


INVENTORY, ALLOCATION = schema.inventories.c, schema.allocations.c
BREAKS: dict[str, tuple[Broken, set[tuple[str, str]], str]] = {
    "more held": (
        update_rows(
            schema.allocations,
            sa.and_(ALLOCATION.consumer_id == "s1", ALLOCATION.resource_class == "VCPU"),
            used=2,
        ),
        {("allocation-exact", "s1")},
        "'VCPU': 2",
    ),
    "capacity": (
        update_rows(schema.inventories, INVENTORY.resource_class == "VCPU", total=1),
        {("capacity", "h1"), ("capacity", "h2")},
        "2 VCPU are allocated, but the capacity is 1",
    ),
    "no inventory": (
        lambda tx: tx.execute(
            sa.delete(schema.inventories).where(
                INVENTORY.resource_class == "DISK_GB", INVENTORY.provider_id == 1
            )
        ),
        {("capacity", "1")},
        "without an inventory",
    ),
    "not asked for": (
        assign(("s0", HardwareAssignment(devices=["0000:81:00.0"]))),
        {("assignment-exact", "s0")},
        "does not ask for",
    ),
    "one CPU twice": (
        assign(("s0", numa_node(4)), ("s1", numa_node(4))),
        {("assignment-exact", "h1")},
        "CPU 4 is held by s0, s1",
    ),
    "one device twice": (
        assign(
            ("s2", HardwareAssignment(devices=["0000:81:00.0"])),
            ("s3", HardwareAssignment(devices=["0000:81:00.0"])),
        ),
        {("assignment-exact", "h2")},
        "device 0000:81:00.0 is held by s2, s3",
    ),
    "a CPU that is none": (
        assign(("s0", numa_node(1))),
        {("assignment-exact", "s0")},
        "holds CPUs [1] that NUMA node 0 of h1",
    ),
    "a device that is none": (
        assign(("s0", HardwareAssignment(devices=["0000:99:00.0"]))),
        {("assignment-exact", "s0")},
        "that h1 does not report",
    ),
    "pages": (
        assign(("s0", numa_node(4, 10, 2048)), ("s1", numa_node(5, 8, 2048))),
        {("assignment-exact", "h1")},
        "9 of 8 pages of 2048 KiB in NUMA node 0 are held",
    ),
    "counted for the quota": (
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == "s1").values(vcpus=2)
        ),
        {("counted", "s1")},
        "the server has or may get {'vcpus': 1, 'memory_mb': 64}",
    ),
    "anti-affinity": (move("s2", "h1"), {("group-policy", "*")}, "3 of its servers are on h1"),
    "affinity": (
        update_rows(schema.server_groups, sa.true(), policy="affinity"),
        {("group-policy", "*")},
        "affinity, but its servers are on h1, h2",
    ),
    "enabled": (
        update_rows(schema.services, schema.services.c.host == "h2", disabled=False),
        {("disabled-trait", "h2")},
        "is not disabled and has the trait",
    ),
    "disabled": (
        update_rows(schema.services, schema.services.c.host == "h1", disabled=True),
        {("disabled-trait", "h1")},
        "is disabled and has not the trait",
    ),
    "no host": (
        lambda tx: tx.execute(sa.insert(schema.aggregate_hosts).values(aggregate_id=1, host="h9")),
        {("aggregate-host", "h9")},
        "no such host",
    ),
    "no aggregate": (
        lambda tx: tx.execute(sa.insert(schema.aggregate_hosts).values(aggregate_id=9, host="h2")),
        {("aggregate-host", "h2")},
        "no such aggregate",
    ),
    "notifications": (
        add_unsent_notification(outbox.LATE + SECOND),
        {("notifications-sent", "outbox")},
        "the oldest notification waits since",
    ),
    "two zones": (
        update_rows(
            schema.aggregates, schema.aggregates.c.id == 2, meta={"availability_zone": "az2"}
        ),
        {("one-zone", "h1")},
        "is in the zones az1, az2",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_doctor_reports_broken_invariant_with_subject_and_text(store: Store, name: str) -> None:
    assert store.read(doctor.check) == []
    break_it, expected, text = BREAKS[name]
    store.write(break_it)
    findings = store.read(doctor.check)
    # The flavor does not request the assignments that the tests set.
    extra = {("assignment-exact", row) for row in ("s0", "s1", "s2", "s3")}
    reported_pairs = {
        (finding.invariant, "*" if finding.invariant == "group-policy" else finding.subject)
        for finding in findings
    }
    assert expected <= reported_pairs <= expected | extra
    assert any(text in finding.text for finding in findings), findings


def test_doctor_ignores_notifications_unsent_for_a_short_time(store: Store) -> None:
    store.write(add_unsent_notification(outbox.LATE - 60 * SECOND))
    assert store.read(doctor.check) == []


def test_doctor_ignores_use_above_capacity_when_host_reduced_capacity(store: Store) -> None:
    def reduce_capacity(tx: Connection) -> None:
        hosts.describe(tx, "h1", HostInventory("memory", 1, "h1", 1, 4096, 100))

    store.write(reduce_capacity)
    row = store.read(
        lambda tx: tx.execute(
            sa.select(schema.inventories).where(
                INVENTORY.resource_class == "VCPU", INVENTORY.excess > 0
            )
        ).one()
    )
    assert (inventories.capacity(row), row.excess) == (1, 2)
    assert store.read(doctor.check) == []


def test_doctor_compare_reports_guest_missing_on_answering_host(store: Store) -> None:
    """Hosts without an answer are not compared. A server in ERROR may be without a guest."""
    guests_by_host = {
        "h1": {"s0": states.RUNNING, "s1": states.SHUTDOWN},
        "h2": {"s2": states.RUNNING, "s3": states.RUNNING},
    }
    assert store.read(lambda tx: doctor.compare(guests_by_host, tx)) == []
    del guests_by_host["h1"]["s0"], guests_by_host["h2"]["s2"]
    first_host = {"h1": guests_by_host["h1"]}
    expected = [("guest-there", "s0")]
    findings = store.read(lambda tx: doctor.compare(first_host, tx))
    assert [(finding.invariant, finding.subject) for finding in findings] == expected
    for change in ({"action": "a"}, {"action": None, "vm_state": states.ERROR}):
        store.write(update_rows(schema.servers, schema.servers.c.id == "s0", **change))
        assert store.read(lambda tx: doctor.compare(first_host, tx)) == []
