# SPDX-License-Identifier: Apache-2.0
"""Parallel creates of more servers than the hosts have room for.

No host is ever overcommitted, the hosts are filled, and the other creates fail with the right
reason. A hard server group holds. On PostgreSQL and MariaDB two conductors and two schedulers
compete. SQLite allows one of each.
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

HOSTS, EXISTING_PER_HOST, CREATES, IN_GROUP, THREADS = 10, 1, 80, 30, 8
PROCESSES = {"sqlite": 1, "postgresql": 2, "mariadb": 2}
KINDS = [
    pytest.param(kind, marks=pytest.mark.slice("default" if kind == "mariadb" else "operations"))
    for kind in PROCESSES
]
#: Number of further servers that fit on each host.
ROOMS = [3 + number % 5 for number in range(HOSTS)]


def make_inventory(name: str, servers: int) -> HostInventory:
    """Return the inventory of a host with memory for ``servers`` servers."""
    return HostInventory("memory", 1, name, 64, servers * FLAVOR.memory_mb, 1000)


def start_cloud(new_cloud: Callable[..., Cloud], kind: str) -> Cloud:
    cloud = new_cloud(kind)
    count = PROCESSES[kind]
    cloud.start(
        conductors=count,
        schedulers=count,
        sizes=[
            make_inventory(f"h{number}", EXISTING_PER_HOST + room)
            for number, room in enumerate(ROOMS, 1)
        ],
    )
    return cloud


def create_in_parallel(cloud: Cloud, count: int, **more: Any) -> list[str]:
    """Send ``count`` requests for one server each from several threads, and return the servers."""
    with ThreadPoolExecutor(THREADS) as pool:
        return [
            server
            for servers in pool.map(lambda number: cloud.create(**more), range(count))
            for server in servers
        ]


def await_creates(cloud: Cloud, seconds: float = 180) -> None:
    """Wait until no action is left, and check meanwhile that no host is overcommitted."""
    busy = (
        sa.select(sa.func.count())
        .select_from(schema.servers)
        .where(schema.servers.c.action.is_not(None))
    )

    def are_creates_ended() -> bool:
        assert cloud.watcher.read(find_overused_resources) == []
        # Without a pause, the query above would slow the cloud down.
        time.sleep(0.05)
        return not cloud.watcher.read(lambda tx: tx.scalar(busy))

    cloud.await_true(are_creates_ended, seconds, "every create has ended")


def find_overused_resources(tx: sa.Connection) -> list[Any]:
    """Return (host, class, used, total) of resources with allocations above the total."""
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


def count_placements(cloud: Cloud, servers: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Return the number of servers by host, and the number of failed servers by reason."""
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
def test_parallel_creates_fill_hosts_and_the_rest_fail_with_reason(
    new_cloud: Callable[..., Cloud], kind: str
) -> None:
    cloud = start_cloud(new_cloud, kind)
    for number in range(1, HOSTS + 1):
        cloud.create(EXISTING_PER_HOST, host=f"h{number}")
    await_creates(cloud)
    began = time.monotonic()
    servers = create_in_parallel(cloud, CREATES)
    await_creates(cloud)
    seconds = time.monotonic() - began
    hosts, reasons = count_placements(cloud, servers)
    print(
        f"\n{kind}: {CREATES} creates on {HOSTS} nearly full hosts took {seconds:.1f} s, {hosts.total()} fitted"
    )
    assert hosts == {f"h{number}": room for number, room in enumerate(ROOMS, 1)}
    assert reasons == {
        f"{HOSTS} hosts: {HOSTS} short of MEMORY_MB (need {FLAVOR.memory_mb}, most free 0)": CREATES
        - sum(ROOMS)
    }
    cloud.await_idle()
    assert cloud.findings() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["anti-affinity", "affinity"])
def test_affinity_and_anti_affinity_groups_hold_under_parallel_creates(
    new_cloud: Callable[..., Cloud], kind: str, policy: str
) -> None:
    cloud = start_cloud(new_cloud, kind)
    began = time.monotonic()
    servers = create_in_parallel(cloud, IN_GROUP, group=cloud.group(policy))
    await_creates(cloud)
    seconds = time.monotonic() - began
    hosts, reasons = count_placements(cloud, servers)
    print(f"\n{kind}: {IN_GROUP} creates in one group of {policy} took {seconds:.1f} s")
    if policy == "anti-affinity":
        assert hosts == {f"h{number}": 1 for number in range(1, HOSTS + 1)}
        assert reasons == {f"{HOSTS} hosts: {HOSTS} with a server of the group": IN_GROUP - HOSTS}
    else:
        ((host, number),) = hosts.items()
        assert number == EXISTING_PER_HOST + ROOMS[int(host[1:]) - 1], "the host is full"
        assert sum(reasons.values()) == IN_GROUP - number
        assert all(
            f"{HOSTS - 1} away from the servers of the group" in reason
            and "1 short of MEMORY_MB" in reason
            for reason in reasons
        ), reasons
    cloud.await_idle()
    assert cloud.findings() == []
