# SPDX-License-Identifier: Apache-2.0
"""More servers than there is room for, all at once: no host ever gives out more than it has, all
that fits is placed, and the rest are told the right reason; a hard group holds under a hundred
creates in parallel.

Two conductors and two schedulers compete on PostgreSQL and MariaDB; SQLite is for one of each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.models import HostInventory
from common.store import schema
from tests.functional.cloud import FLAVOR, Cloud

HOSTS, THERE, ASKED, IN_GROUP, THREADS = 10, 1, 80, 30, 8
PROCESSES = {"sqlite": 1, "postgresql": 2, "mariadb": 2}
KINDS = [
    pytest.param(kind, marks=pytest.mark.slice("default" if kind == "mariadb" else "operations"))
    for kind in PROCESSES
]
#: servers that fit on each host beside those there
ROOMS = [3 + number % 5 for number in range(HOSTS)]


def size(name: str, servers: int) -> HostInventory:
    """A host whose memory is enough for so many servers."""
    return HostInventory("memory", 1, name, 64, servers * FLAVOR.memory_mb, 1000)


def start(new_cloud: Callable[..., Cloud], kind: str) -> Cloud:
    cloud = new_cloud(kind)
    count = PROCESSES[kind]
    cloud.start(
        conductors=count,
        schedulers=count,
        sizes=[size(f"h{number}", THERE + room) for number, room in enumerate(ROOMS, 1)],
    )
    return cloud


def create(cloud: Cloud, count: int, **more: Any) -> list[str]:
    """So many requests for one server each, from several threads at the same time."""
    with ThreadPoolExecutor(THREADS) as pool:
        return [
            server
            for servers in pool.map(lambda number: cloud.create(**more), range(count))
            for server in servers
        ]


def until_ended(cloud: Cloud, seconds: float = 180) -> None:
    """Wait until no action is left, and look all the time whether some host gives out more than it
    has."""
    busy = (
        sa.select(sa.func.count())
        .select_from(schema.servers)
        .where(schema.servers.c.action.is_not(None))
    )

    def ended() -> bool:
        assert cloud.watcher.read(overfull) == []
        time.sleep(0.05)  # the look above would take the processor from those who are looked at
        return not cloud.watcher.read(lambda tx: tx.scalar(busy))

    cloud.await_true(ended, seconds, "every create has ended")


def overfull(tx: sa.Connection) -> list[Any]:
    """(host, class, used, total) wherever more is used than there is."""
    held, stock = schema.allocations.c, schema.inventories.c
    query = sa.select(
        schema.providers.c.name, held.resource_class, sa.func.sum(held.used), stock.total
    ).select_from(
        schema.allocations.join(
            schema.inventories,
            sa.and_(
                stock.provider_id == held.provider_id, stock.resource_class == held.resource_class
            ),
        ).join(schema.providers, schema.providers.c.id == held.provider_id)
    )
    return list(
        tx.execute(
            query.group_by(schema.providers.c.name, held.resource_class, stock.total).having(
                sa.func.sum(held.used) > stock.total
            )
        )
    )


def placed(cloud: Cloud, servers: list[str]) -> tuple[Counter[str], Counter[str]]:
    """How many servers each host got, and how many were refused with which words."""
    rows = cloud.watcher.read(
        lambda tx: tx.execute(
            sa.select(schema.servers).where(schema.servers.c.id.in_(servers))
        ).all()
    )
    assert {(row.vm_state, row.host is None) for row in rows} <= {
        (states.ACTIVE, False),
        (states.ERROR, True),
    }
    return (
        Counter(row.host for row in rows if row.host),
        Counter(
            row.fault["message"].removeprefix("No valid host was found. ")
            for row in rows
            if row.host is None
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_is_placed_and_the_rest_are_told_why(
    new_cloud: Callable[..., Cloud], kind: str
) -> None:
    cloud = start(new_cloud, kind)
    for number in range(1, HOSTS + 1):
        cloud.create(THERE, host=f"h{number}")
    until_ended(cloud)
    began = time.monotonic()
    servers = create(cloud, ASKED)
    until_ended(cloud)
    seconds = time.monotonic() - began
    hosts, reasons = placed(cloud, servers)
    print(
        f"\n{kind}: {ASKED} creates on {HOSTS} nearly full hosts took {seconds:.1f} s, {hosts.total()} fitted"
    )
    assert hosts == {f"h{number}": room for number, room in enumerate(ROOMS, 1)}
    assert reasons == {
        f"{HOSTS} hosts: {HOSTS} short of MEMORY_MB (need {FLAVOR.memory_mb}, most free 0)": ASKED
        - sum(ROOMS)
    }
    cloud.await_idle()
    assert cloud.findings() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["anti-affinity", "affinity"])
def test_a_hard_group_holds(new_cloud: Callable[..., Cloud], kind: str, policy: str) -> None:
    cloud = start(new_cloud, kind)
    began = time.monotonic()
    servers = create(cloud, IN_GROUP, group=cloud.group(policy))
    until_ended(cloud)
    seconds = time.monotonic() - began
    hosts, reasons = placed(cloud, servers)
    print(f"\n{kind}: {IN_GROUP} creates in one group of {policy} took {seconds:.1f} s")
    if policy == "anti-affinity":
        assert hosts == {f"h{number}": 1 for number in range(1, HOSTS + 1)}
        assert reasons == {f"{HOSTS} hosts: {HOSTS} with a server of the group": IN_GROUP - HOSTS}
    else:
        ((host, number),) = hosts.items()
        assert number == THERE + ROOMS[int(host[1:]) - 1], "the host is full"
        assert sum(reasons.values()) == IN_GROUP - number
        assert all(
            f"{HOSTS - 1} away from the servers of the group" in reason
            and "1 short of MEMORY_MB" in reason
            for reason in reasons
        ), reasons
    cloud.await_idle()
    assert cloud.findings() == []
