# SPDX-License-Identifier: Apache-2.0
"""Claims a second when eight workers compete for fifty hosts: ``python -m tests.bench.claims``.

Each worker is a process with its own connections, as a conductor is. A claim is the placement part
of the conductor's transaction (locked providers, sums, allocations, guest record), without the
journal. The benchmark claims one server at a time, and sixteen at a time as under load. The servers
are plain, in one hard server group, or have dedicated CPUs. Commits are durable. Compare the ratios
between the databases of one run, because the numbers depend on the machine.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from common.domain import ids
from common.domain.hardware import Hardware, NumaNodeRequest
from common.domain.models import HostInventory, NumaNode
from common.domain.wire import to_wire
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.hosts import hosts
from common.store.placement import allocations
from common.store.servers import guests
from common.store.tenants import server_groups
from deploy.operator import doctor
from deploy.progress import say
from deploy.testing.servers import Servers
from tests.bench.figures import machine

HOSTS, WORKERS, SECONDS, GROUPED = 50, 8, 4.0, 16
PINNED = Hardware(numa_nodes=(NumaNodeRequest((0,), 64),), dedicated=frozenset({0}))
KINDS = ("plain", "in a hard group", "with a CPU of its own")
FIRST = ("postgresql", "mariadb", "sqlite")


def fill(store: Store) -> None:
    """Register fifty hosts with room for all claims."""
    upgrades.upgrade(store)
    for number in range(HOSTS):
        numa_node = NumaNode(0, list(range(8)), list(range(8, 264)), 1 << 20)
        store.write(
            lambda tx, name=f"h{number}", numa_node=numa_node: hosts.register(
                tx,
                name,
                "boot",
                HostInventory(
                    "memory", 1, name, 100_000, 1 << 24, 1 << 20, pcpus=256, numa_nodes=[numa_node]
                ),
            )
        )


def group(store: Store) -> str:
    """Create a hard anti-affinity group with a limit that is never reached. Return the id."""
    return str(
        store.write(
            lambda tx: server_groups.create(
                tx,
                {
                    "project_id": "p",
                    "user_id": "u",
                    "name": "g",
                    "policy": "anti-affinity",
                    "rules": {"max_server_per_host": 100_000},
                },
            )
        ).id
    )


def request(draw: random.Random, kind: str, member_of: str) -> allocations.ClaimRequest:
    """Return the claim of one server, with hosts drawn at random as from a scheduler."""
    order = [f"h{number}" for number in draw.sample(range(HOSTS), 3)]
    own = kind == KINDS[2]
    amounts = {"PCPU" if own else "VCPU": 1, "MEMORY_MB": 64, "DISK_GB": 1}
    return allocations.ClaimRequest(
        ids.new(),
        "p",
        "u",
        amounts,
        order,
        group=member_of if kind == KINDS[1] else None,
        hardware=PINNED if own else None,
    )


def commit(store: Store, requests: Sequence[allocations.ClaimRequest]) -> int:
    """Run the placement part of the conductor's transaction and return the number of placements."""

    def work(tx: Connection) -> int:
        allocations.claim(tx, requests)
        placed = [claim for claim in requests if claim.host]
        server_groups.join(
            tx,
            [
                {"group_id": claim.group, "server_id": claim.consumer}
                for claim in placed
                if claim.group
            ],
        )
        guests.add(
            tx,
            [
                {
                    "server_id": claim.consumer,
                    "host": claim.host,
                    "fence": 1,
                    "assignment": to_wire(claim.assignment) if claim.assignment else None,
                }
                for claim in placed
            ],
        )
        return len(placed)

    return store.write(work)


def work(
    url: str, number: int, kind: str, at_once: int, member_of: str, start: Any, result: Any
) -> None:
    """Claim for some seconds in one worker, and put (placed, requested) into the result queue."""
    store, draw = Store(url), random.Random(number)
    store.now()
    start.wait()
    placed = requested = 0
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        placed += commit(store, [request(draw, kind, member_of) for _ in range(at_once)])
        requested += at_once
    store.close()
    result.put((placed, requested))


def compete(url: str, kind: str, at_once: int, member_of: str) -> dict[str, float]:
    """Run eight workers at the same time and return their figures."""
    context = multiprocessing.get_context("spawn")
    start, result = context.Barrier(WORKERS), context.Queue()
    workers = [
        context.Process(target=work, args=(url, number, kind, at_once, member_of, start, result))
        for number in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    results = [result.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    placed, requested = (sum(numbers) for numbers in zip(*results, strict=True))
    return {
        "claims a second": round(placed / SECONDS),
        "not placed at first, %": round(100 * (1 - placed / requested), 1),
    }


def measure(url: str) -> dict[str, Any]:
    """Return all figures of one database."""
    store = Store(url)
    fill(store)
    member_of = group(store)
    figures = {
        f"{kind}, {at_once} in a transaction": compete(url, kind, at_once, member_of)
        for kind in KINDS
        for at_once in (1, GROUPED)
    }
    broken = [
        finding
        for finding in store.read(doctor.check)
        if finding.invariant in ("capacity", "assignment-exact", "group-policy", "consumer")
        and "does not ask for" not in finding.text
    ]
    store.close()
    return {**figures, "hosts that gave out more than they have": len(broken)}


def new_database(servers: Servers, kind: str, folder: Path) -> str:
    """Create an empty database with durable commits and return its URL."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'claims.db'}"
    url = servers.start(kind)
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE claims")
        durable = (
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1"
            if kind == "mariadb"
            else "ALTER SYSTEM SET fsync = on"
        )
        connection.exec_driver_sql(durable)
        if kind == "postgresql":
            connection.exec_driver_sql("SELECT pg_reload_conf()")
    return sa.make_url(url).set(database="claims").render_as_string(hide_password=False)


def main(kinds: Sequence[str] = FIRST) -> int:
    """Start the databases, measure, print, stop them."""
    with (
        tempfile.TemporaryDirectory(prefix="kilonova-claims-") as name,
        Servers(Path(name) / "servers") as servers,
    ):
        Path(name).chmod(0o755)
        say(f"Machine: {machine()}; {WORKERS} workers, {HOSTS} hosts, {SECONDS:g} s each")
        for kind in kinds:
            say(json.dumps({kind: measure(new_database(servers, kind, Path(name)))}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or FIRST))
