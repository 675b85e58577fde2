# SPDX-License-Identifier: Apache-2.0
"""Timeouts of PostgreSQL and MariaDB: silent servers, vanished clients and held locks.

Each wait ends, and delays only the work that needs the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.store import schema
from common.store.engine import ConnectionLimits, Store, for_update, insert_ignore
from common.store.tenants import quotas
from compute_api.compute.request.creation import Creation, Creator
from conductor.engine import reports, runner
from tests.contract.test_store import Realtime
from tests.contract.test_store_servers import LIMITS, creation
from tests.faults import Wire
from tests.waiting import await_true
from tests.workflows.simulator import Cloud

SHORT = ConnectionLimits(connect=1, lock=1, statement=2, idle=1)
#: These tests wait for seconds, and no other test checks the timeouts.
pytestmark = pytest.mark.slice("operations")
SLEEP = {"postgresql": "SELECT pg_sleep(20)", "mysql": "SELECT SLEEP(20) FROM projects"}


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, upgraded_database: Callable[[str], str]) -> str:
    return upgraded_database(request.param)


@pytest.fixture
def wire(url: str) -> Iterator[Wire]:
    wire = Wire(url)
    yield wire
    wire.close()


@pytest.fixture
def stores(url: str) -> Iterator[Callable[..., Store]]:
    opened: list[Store] = []

    def make(to: Any = url, limits: ConnectionLimits = SHORT) -> Store:
        opened.append(Store(to, limits=limits))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def add(store: Store, name: str) -> None:
    store.write(lambda tx: insert_ignore(tx, schema.projects, {"id": name, "quota_seq": 0}))


def lock(tx: sa.Connection, name: str) -> None:
    tx.execute(for_update(sa.select(schema.projects).where(schema.projects.c.id == name))).one()


def measure_seconds(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def test_vanished_database_client_releases_row_lock_within_seconds(
    wire: Wire, stores: Callable[..., Store]
) -> None:
    """The database server frees the rows. The client itself fails with a timeout."""
    direct, cut_off = stores(), stores(wire.url)
    add(direct, "p")
    is_locked = threading.Event()

    def vanish(tx: sa.Connection) -> None:
        lock(tx, "p")
        wire.freeze()
        is_locked.set()
        tx.execute(sa.select(schema.projects))

    with ThreadPoolExecutor(1) as pool:
        vanished_client = pool.submit(
            measure_seconds, lambda: pytest.raises(errors.NoStore, cut_off.write, vanish)
        )
        assert is_locked.wait(5)
        assert measure_seconds(lambda: direct.write(lambda tx: lock(tx, "p"))) < 4
        assert vanished_client.result(10) < 6


def test_store_raises_no_store_in_time_when_database_is_unreachable(
    wire: Wire, stores: Callable[..., Store]
) -> None:
    wire.freeze()
    store = stores(wire.url)
    assert measure_seconds(lambda: pytest.raises(errors.NoStore, store.now)) < 5.5


def test_store_write_retries_after_lock_timeout(stores: Callable[..., Store]) -> None:
    # On PostgreSQL the second waiter waits twice in one statement: for its turn and for the row.
    store, runs = stores(limits=replace(SHORT, statement=10)), []
    add(store, "p")

    def work(tx: sa.Connection) -> None:
        runs.append(1)
        lock(tx, "p")

    with stores(limits=ConnectionLimits()).begin() as other, ThreadPoolExecutor(1) as pool:
        lock(other, "p")
        waiting = pool.submit(store.write, work)
        with pytest.raises(errors.TooBusy):
            store.write(lambda tx: lock(tx, "p"), alone=False)
        await_true(lambda: len(runs) == 2)
        other.commit()
        waiting.result(5)


def test_store_cancels_statement_over_timeout(stores: Callable[..., Store]) -> None:
    store = stores()
    add(store, "p")
    statement = SLEEP[store.dialect_name]
    assert (
        measure_seconds(
            lambda: pytest.raises(
                errors.Unavailable, store.read, lambda tx: tx.execute(sa.text(statement))
            )
        )
        < 3.5
    )
    assert store.now()


def test_store_raises_no_store_when_all_connections_are_in_use(
    stores: Callable[..., Store],
) -> None:
    store = stores()
    connections = [store.engine.connect() for _ in range(40)]
    with pytest.raises(errors.NoStore, match="no free connection"):
        store.now()
    for connection in connections:
        connection.close()


def test_store_transaction_sends_no_ping(wire: Wire, stores: Callable[..., Store]) -> None:
    store = stores(wire.url)
    store.now()
    before = wire.chunks
    store.now()
    # PostgreSQL: begin, select and rollback. MariaDB: select and rollback.
    assert wire.chunks - before == {"postgresql": 3, "mysql": 2}[store.dialect_name]


def test_row_lock_of_project_does_not_delay_creates_of_other_projects(
    stores: Callable[..., Store],
) -> None:
    store = stores()
    add(store, "held")
    creator, responses = Creator(store, LIMITS), {}
    leader, is_leading, is_released = (
        creation(project="leader"),
        threading.Event(),
        threading.Event(),
    )

    def rows(count: int) -> Any:
        is_leading.set()
        assert is_released.wait(30)
        return leader.rows(count)

    def projects() -> set[str]:
        return set(store.read(lambda tx: tx.scalars(sa.select(schema.servers.c.project_id)).all()))

    def post(request: Creation) -> None:
        responses[request.project_id] = creator.create(request)

    with stores(limits=ConnectionLimits()).begin() as other, ThreadPoolExecutor(3) as pool:
        # The first create holds the turn until both others wait, so that they share the next
        # transaction.
        posts = [pool.submit(post, replace(leader, rows=rows))]
        assert is_leading.wait(30)
        posts += [pool.submit(post, creation(project=project)) for project in ("free", "held")]
        await_true(lambda: creator.waiting == 2)
        quotas.lock(other, "held")
        is_released.set()
        await_true(lambda: projects() == {"leader", "free"})
        other.commit()
        for future in posts:
            future.result(10)
    assert sorted(responses) == ["free", "held", "leader"]


def test_row_lock_of_server_does_not_delay_work_on_other_servers(
    stores: Callable[..., Store],
) -> None:
    """This holds for a round of the runner and for a batch of reports."""
    store = stores()
    cloud = Cloud(store, Realtime())
    cloud.round()
    held, free = (cloud.create(host=host, forced=True, networks=[])[0] for host in ("h1", "h2"))
    cloud.settle()
    for server in (held, free):
        cloud.ask(server, "os-stop")
    syncs = [cloud.hosts[host].agent.request(True, None, None) for host in ("h1", "h2")]
    with stores(limits=ConnectionLimits()).begin() as other:
        other.execute(
            for_update(sa.select(schema.servers.c.id).where(schema.servers.c.id == held))
        ).one()
        assert measure_seconds(lambda: runner.advance(cloud.engine)) < 4
        assert [
            command.server for _, command in cloud.sent if command.verb == "ensure_stopped"
        ] == [free]
        assert all(
            not isinstance(answer, Exception) for answer in reports.handle(cloud.engine, syncs)
        )
    cloud.engine.locked_servers.clear()  # The runner looks at locked servers only after some seconds.
    cloud.settle()
    assert {cloud.show(server).vm_state for server in (held, free)} == {"stopped"}
