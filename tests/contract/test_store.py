# SPDX-License-Identifier: Apache-2.0
"""The store on SQLite, PostgreSQL and MariaDB, also under concurrent transactions.

The tests cover transactions, claims, actions, heartbeats and registrations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.clock import SECOND, Clock
from common.domain.context import RequestContext
from common.domain.models import HostInventory, Result, Sync
from common.domain.service_binaries import Binary
from common.store import schema
from common.store.engine import Store, for_update, insert_ignore, now
from common.store.hosts import hosts, services
from common.store.placement import allocations
from common.store.servers import actions, guests
from conductor.engine import reports
from deploy.operator import doctor
from tests.log_lines import logged_fields
from tests.workflows.simulator import Cloud, Time

USER = RequestContext(user_id="user", project_id="project", roles=("member",), request_id="req-1")


class Realtime(Time):
    """The simulator's clock in real time, because a database server uses real time, too."""

    look = 0.0

    def monotonic(self) -> float:
        return time.monotonic()

    def pass_by(self, seconds: float) -> None:
        pass


def run_in_parallel(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(n)`` in ``count`` threads that start together.

    Return the results. A raised Problem takes the place of a result.
    """
    start = threading.Barrier(count)

    def run(number: int) -> Any:
        start.wait()
        try:
            return work(number)
        except errors.Problem as problem:
            return problem

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def new_host(store: Store, name: str, vcpus: int = 10) -> None:
    store.write(
        lambda tx: hosts.register(
            tx, name, "boot", HostInventory("memory", 1, name, vcpus, 10240, 1000)
        )
    )


def active_server(store: Store) -> str:
    """Create a server with a guest by the real workflow."""
    cloud = Cloud(store, Realtime())
    cloud.round()
    server = cloud.create()[0]
    cloud.settle()
    return server


def test_now_advances_within_transaction(store: Store) -> None:
    def twice(tx: sa.Connection) -> tuple[int, int]:
        first = tx.scalar(sa.select(now()))
        # The clock of a database server cannot be changed.
        time.sleep(0.05)
        return first, tx.scalar(sa.select(now()))

    first, second = store.write(twice)
    assert second - first >= 0.04 * SECOND
    assert abs(first / SECOND - time.time()) < 5


def test_mariadb_session_time_zone_is_utc(store: Store) -> None:
    """In local time one hour of autumn occurs twice, and no lease would expire in the second hour.

    SQLite and PostgreSQL count seconds.
    """
    if store.dialect_name == "mysql":
        assert store.read(lambda tx: tx.scalar(sa.text("SELECT @@session.time_zone"))) == "+00:00"


def test_server_is_created_stopped_started_rebooted_and_deleted(store: Store) -> None:
    cloud = Cloud(store, Realtime())
    cloud.round()
    server = cloud.create()[0]
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    for request, state in (
        (("os-stop", None), states.STOPPED),
        (("os-start", None), states.ACTIVE),
        (("reboot", "HARD"), states.ACTIVE),
        (("delete", None), states.DELETED),
    ):
        cloud.ask(server, *request)
        cloud.settle()
        assert cloud.show(server).vm_state == state
    assert cloud.findings() == []
    assert (
        store.read(lambda tx: tx.scalar(sa.select(sa.func.count()).select_from(schema.allocations)))
        == 0
    )


def test_parallel_claims_never_exceed_capacity(store: Store) -> None:
    new_host(store, "h1")

    def claim(number: int) -> str | None:
        request = allocations.ClaimRequest(
            ids.new(), "project", "user", {"VCPU": 1, "MEMORY_MB": 64}, ["h1"]
        )

        def work(tx: sa.Connection) -> str | None:
            allocations.claim(tx, [request])
            if request.host:
                guests.add(tx, [{"server_id": request.consumer, "host": request.host, "fence": 1}])
            return request.host

        return store.write(work)

    claimed_hosts = run_in_parallel(24, claim)
    assert claimed_hosts.count("h1") == 10
    assert claimed_hosts.count(None) == 14
    used = store.read(
        lambda tx: tx.scalar(
            sa.select(sa.func.sum(schema.allocations.c.used)).where(
                schema.allocations.c.resource_class == "VCPU"
            )
        )
    )
    assert int(used) == 10


def test_claim_respects_reserved_and_max_unit(store: Store) -> None:
    new_host(store, "h1")
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.inventories)
            .where(schema.inventories.c.resource_class == "VCPU")
            .values(reserved=4, max_unit=3)
        )
    )

    def claim(vcpus: int) -> str | None:
        request = allocations.ClaimRequest(ids.new(), "project", "user", {"VCPU": vcpus}, ["h1"])
        store.write(lambda tx: allocations.claim(tx, [request]))
        return request.host

    assert [claim(4), claim(3), claim(3), claim(1)] == [None, "h1", "h1", None]


def test_parallel_stops_of_one_server_begin_exactly_one_action(store: Store) -> None:
    server = active_server(store)
    row = states.action("os-stop")
    assert row is not None
    results = run_in_parallel(
        12,
        lambda number: store.write(
            lambda tx: actions.begin(tx, row, server, context=USER, project_id="project")
        ),
    )
    assert sum(isinstance(result, str) for result in results) == 1
    assert {type(result) for result in results if not isinstance(result, str)} == {
        errors.WrongState
    }
    assert store.read(doctor.check) == []


def test_action_begin_on_busy_server_raises_busy_and_names_running_action(store: Store) -> None:
    server = active_server(store)

    def attach() -> str:
        return store.write(
            lambda tx: actions.begin(tx, states.row("attach_interface"), server, context=USER)
        )

    attach()
    with pytest.raises(
        errors.Busy, match="is busy with the action 'attach_interface'; try again when it has ended"
    ):
        attach()


def test_delete_supersedes_parallel_stops_and_reboots(store: Store) -> None:
    server = active_server(store)
    rows = [states.action("delete"), states.action("os-stop"), states.action("reboot", "HARD")]
    run_in_parallel(
        9,
        lambda number: store.write(
            lambda tx: actions.begin(
                tx, rows[number % 3], server, context=USER, project_id="project"
            )
        ),
    )  # type: ignore
    assert store.read(doctor.check) == []
    live = store.read(
        lambda tx: tx.execute(
            sa.select(schema.actions).where(schema.actions.c.state.in_(actions.LIVE))
        ).all()
    )
    assert [action.name for action in live] == ["delete"]


def test_action_begin_on_foreign_or_unknown_server_raises_not_found(store: Store) -> None:
    server = active_server(store)
    row = states.action("os-stop")
    assert row is not None
    for server_id, project in ((server, "another"), (ids.new(), "project"), (ids.new(), None)):
        with pytest.raises(errors.NotFound, match=f"Instance {server_id} could not be found."):
            store.write(
                lambda tx, server_id=server_id, project=project: actions.begin(
                    tx, row, server_id, context=USER, project_id=project
                )
            )


def test_actions_take_by_parallel_conductors_returns_each_action_once(store: Store) -> None:
    cloud = Cloud(store, Realtime())
    cloud.create(40)
    batches = run_in_parallel(
        4,
        lambda number: [
            row.id
            for row in store.write(lambda tx: actions.take(tx, f"c{number}/1", {"create": 1}, 20))
        ],
    )
    action_ids = [action for batch in batches for action in batch]
    assert len(action_ids) == len(set(action_ids))
    remaining_rows = store.write(lambda tx: actions.take(tx, "c9/1", {"create": 1}, 100))
    assert len(action_ids) + len(remaining_rows) == 40


def test_actions_take_by_older_conductor_skips_newer_workflow_version(store: Store) -> None:
    cloud = Cloud(store, Realtime())
    cloud.create()
    store.write(lambda tx: tx.execute(sa.update(schema.actions).values(version=2)))
    assert store.write(lambda tx: actions.take(tx, "c1/1", {"create": 1}, 10)) == []
    assert len(store.write(lambda tx: actions.take(tx, "c1/1", {"create": 2}, 10))) == 1


def test_actions_take_query_has_one_condition_for_workflows_of_same_version(store: Store) -> None:
    """Conductors take actions all the time.

    A condition for each workflow costs four times as much.
    """
    Cloud(store, Realtime()).create()
    statements: list[str] = []
    sa.event.listen(
        store.engine, "before_cursor_execute", lambda *event_args: statements.append(event_args[2])
    )
    mixed = {f"other-{number}": 2 for number in range(40)} | {"create": 1}
    assert len(store.write(lambda tx: actions.take(tx, "c1/1", mixed, 10))) == 1
    assert sum(statement.count(".version <=") for statement in statements) == 2


def test_store_snapshot_is_consistent_and_restores_isolation_level(upgraded_url: str) -> None:
    store, other = Store(upgraded_url, pool=1), Store(upgraded_url)

    def count_twice(tx: sa.Connection, name: str) -> list[int]:
        """Count the projects before and after another connection adds one."""
        count = sa.select(sa.func.count()).select_from(schema.projects)
        before = tx.scalar(count)
        other.write(
            lambda there: insert_ignore(there, schema.projects, {"id": name, "quota_seq": 0})
        )
        return [int(before or 0), int(tx.scalar(count) or 0)]

    assert store.snapshot(lambda tx: count_twice(tx, "a")) == [0, 0]
    assert store.read(lambda tx: count_twice(tx, "b")) == [1, 2], (
        "the connection that the snapshot had"
    )
    assert store.snapshot(lambda tx: count_twice(tx, "c")) == [2, 2]
    assert store.write(lambda tx: insert_ignore(tx, schema.projects, {"id": "d", "quota_seq": 0}))
    assert store.snapshot(lambda tx: count_twice(tx, "e")) == [4, 4]
    with pytest.raises(ZeroDivisionError):
        store.snapshot(lambda tx: count_twice(tx, "f") and 1 // 0)
    assert store.read(lambda tx: count_twice(tx, "g")) == [6, 7]
    assert store.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    store.close()
    other.close()


def test_deadlocked_transactions_are_repeated(store: Store) -> None:
    for name in ("a", "b"):
        store.write(
            lambda tx, name=name: insert_ignore(tx, schema.projects, {"id": name, "quota_seq": 0})
        )
    tries: list[int] = []
    both = threading.Barrier(2)

    def lock_in_opposite_order(number: int) -> None:
        names = ["a", "b"] if number else ["b", "a"]
        first = [True]

        def work(tx: sa.Connection) -> None:
            tries.append(number)
            for name in names:
                tx.execute(
                    for_update(sa.select(schema.projects).where(schema.projects.c.id == name))
                ).one()
                if store.dialect_name != "sqlite" and len(first) == 1:
                    first.clear()
                    both.wait(timeout=10)
            tx.execute(
                sa.update(schema.projects)
                .where(schema.projects.c.id.in_(names))
                .values(quota_seq=schema.projects.c.quota_seq + 1)
            )

        store.write(work)

    assert run_in_parallel(2, lock_in_opposite_order) == [None, None]
    assert store.read(lambda tx: list(tx.scalars(sa.select(schema.projects.c.quota_seq)))) == [2, 2]
    if store.dialect_name == "sqlite":
        assert len(tries) == 2
    else:
        # The victim may lock its row again before the winner continues, and deadlock again.
        assert len(tries) >= 3


def test_failed_transaction_is_rolled_back(store: Store) -> None:
    def work(tx: sa.Connection) -> None:
        insert_ignore(tx, schema.projects, {"id": "x", "quota_seq": 0})
        raise errors.Conflict("no")

    with pytest.raises(errors.Conflict):
        store.write(work)
    assert (
        store.read(lambda tx: tx.scalar(sa.select(sa.func.count()).select_from(schema.projects)))
        == 0
    )


def test_insert_ignore_keeps_existing_row(store: Store) -> None:
    store.write(lambda tx: insert_ignore(tx, schema.projects, {"id": "x", "quota_seq": 1}))
    store.write(lambda tx: insert_ignore(tx, schema.projects, {"id": "x", "quota_seq": 7}))
    assert store.read(lambda tx: tx.scalar(sa.select(schema.projects.c.quota_seq))) == 1


def test_confirm_removals_with_matching_host_and_fence_frees_allocation(store: Store) -> None:
    server = active_server(store)
    host = store.read(lambda tx: tx.scalar(sa.select(schema.servers.c.host)))
    store.write(lambda tx: guests.add_removal(tx, server, 5))
    assert store.write(lambda tx: guests.confirm_removals(tx, [(server, host, 4)])) == set()
    assert store.write(lambda tx: guests.confirm_removals(tx, [(server, "elsewhere", 5)])) == set()
    assert store.write(lambda tx: guests.confirm_removals(tx, [(server, host, 5)])) == {server}
    for table in (schema.guests, schema.allocations, schema.consumers):
        assert (
            store.read(
                lambda tx, table=table: tx.scalar(sa.select(sa.func.count()).select_from(table))
            )
            == 0
        )


def test_silent_hosts_are_marked_down_only_if_most_other_hosts_report(store: Store) -> None:
    for number in range(10):
        new_host(store, f"h{number}")

    def set_silent(names: list[str], seconds: int) -> None:
        store.write(
            lambda tx: tx.execute(
                sa.update(schema.heartbeats)
                .where(schema.heartbeats.c.host.in_(names))
                .values(seen_at=now() - seconds * SECOND)
            )
        )

    set_silent(["h1"], 20)
    assert store.write(lambda tx: services.judge(tx, 30)) == ([], False)
    set_silent([f"h{number}" for number in range(3)], 60)
    assert store.write(lambda tx: services.judge(tx, 30)) == ([], True)
    assert store.read(lambda tx: services.is_up(tx, "h1"))
    store.write(lambda tx: services.beat(tx, ["h0"], Binary.COMPUTE))
    assert store.write(lambda tx: services.judge(tx, 30)) == (["h1", "h2"], False)
    assert not store.read(lambda tx: services.is_up(tx, "h1"))
    store.write(lambda tx: services.beat(tx, ["h1"], Binary.COMPUTE))
    assert store.read(lambda tx: services.is_up(tx, "h1"))


def hypervisors(store: Store) -> dict[str, tuple[str, str | None]]:
    rows = store.read(hosts.list_all)
    return {row["name"]: (row["hypervisor_hostname"], row["refused_hostname"]) for row in rows}


def report_hypervisor(store: Store, host: str, hostname: str) -> None:
    inventory = HostInventory("memory", 1, hostname, 4, 1024, 10)
    store.write(lambda tx: hosts.register(tx, host, "boot", inventory))


def test_host_registration_refuses_hypervisor_name_of_another_host(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for host, hostname in (("h1", "h1"), ("h2", "n2.cloud"), ("h3", "n3.cloud")):
        report_hypervisor(store, host, hostname)
    for stolen in ("n2.cloud", "h1", "n2.cloud"):
        report_hypervisor(store, "h3", stolen)
        assert hypervisors(store) == {
            "h1": ("h1", None),
            "h2": ("n2.cloud", None),
            "h3": ("n3.cloud", stolen),
        }
    fields = {"host": "h3", "reported": "n2.cloud", "other_host": "h2", "shown": "n3.cloud"}
    assert fields in logged_fields(
        caplog, "a host reports the hypervisor name of another host, so the API shows another name"
    )
    report_hypervisor(store, "h4", "n2.cloud")
    assert hypervisors(store)["h4"] == ("h4", "n2.cloud"), "a new host has no previous name"
    report_hypervisor(store, "h3", "n3.cloud")
    assert hypervisors(store)["h3"] == ("n3.cloud", None)


def test_host_registration_takes_own_name_back_from_other_host_using_it(store: Store) -> None:
    report_hypervisor(store, "h3", "h4")
    assert hypervisors(store)["h3"] == ("h4", None)
    report_hypervisor(store, "h4", "h4")
    assert hypervisors(store) == {"h3": ("h3", "h4"), "h4": ("h4", None)}


def test_host_registration_leaves_duplicate_hypervisor_name_to_older_host(store: Store) -> None:
    """An earlier version of Kilonova accepted the same name from two hosts."""
    for host in ("h1", "h2"):
        report_hypervisor(store, host, host)
        with store.begin() as tx:
            tx.execute(sa.update(schema.hosts).values(hypervisor_hostname="n.cloud"))
    for host in ("h1", "h2"):
        report_hypervisor(store, host, "n.cloud")
    assert hypervisors(store) == {"h1": ("n.cloud", None), "h2": ("h2", "n.cloud")}


def test_host_registration_opens_new_session_and_detects_new_boot(store: Store) -> None:
    inventory = HostInventory("memory", 1, "h1", 4, 1024, 10, traits=["COMPUTE_NODE"])

    def registration(boot: str) -> tuple[int, bool]:
        return store.write(lambda tx: hosts.register(tx, "h1", boot, inventory))

    sessions, booted = zip(*(registration(boot) for boot in ("b1", "b1", "b2")), strict=True)
    assert (len({0, *sessions}), booted) == (4, (False, False, True))
    host = store.read(hosts.list_all)[0]
    assert (host["up"], host["disabled"], host["running_vms"]) == (True, False, 0)
    assert host["inventory"]["MEMORY_MB"] == {
        "total": 1024,
        "reserved": 0,
        "ratio": 1.0,
        "used": 0,
    }


def test_store_raises_unavailable_when_database_does_not_answer() -> None:
    store = Store("mysql+pymysql://nobody@127.0.0.1:9/none")
    with pytest.raises(errors.Unavailable, match="database does not answer"):
        store.write(lambda tx: None)
    with pytest.raises(errors.Unavailable):
        store.read(lambda tx: None)


def test_clock_monotonic_never_decreases() -> None:
    clock = Clock()
    assert clock.monotonic() <= clock.monotonic()


def test_reports_batch_locks_servers_before_provider_of_registering_host(store: Store) -> None:
    """Claims lock in the same order. Otherwise a claim and a report could deadlock."""
    if store.dialect_name == "sqlite":
        # SQLite has a single writer.
        return
    cloud = Cloud(store, Realtime())
    cloud.round()
    server = cloud.create()[0]
    cloud.settle()
    registration = Sync("h1", 0, "boot-2", inventory=cloud.hosts["h1"].driver.inventory())
    report = Sync(
        "h2",
        store.read(lambda tx: hosts.sessions(tx, ["h2"]))["h2"],
        "boot",
        results=[Result(f"do/{ids.new()}/build/1", server, 1, "done")],
    )
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as tx:
            actions.lock_servers(tx, [server])
            future = pool.submit(reports.handle, cloud.engine, [registration, report])
            wait([future], timeout=1)
            assert not future.done()
            free = (
                sa.select(schema.providers.c.id)
                .where(schema.providers.c.host == "h1")
                .with_for_update(nowait=True)
            )
            assert tx.scalar(free) is not None
        assert next(answer.session > 1 for answer in future.result(timeout=20))


def test_list_refused_hosts_omits_refusals_older_than_given_seconds(store: Store) -> None:
    for host in ("h1", "h2", "h3"):
        report_hypervisor(store, host, "h1" if host == "h3" else host)
    store.write(lambda tx: hosts.note_refusals(tx, {"h2": 7}))
    refused = store.read(lambda tx: hosts.list_refused(tx, 60))
    assert [(row.name, row.refused_messages, row.refused_hostname) for row in refused] == [
        ("h2", 7, None),
        ("h3", 0, "h1"),
    ]
    assert refused[0].refused_ago in range(5) and refused[1].refused_ago is None
    assert [row.name for row in store.read(lambda tx: hosts.list_refused(tx, -60))] == ["h3"]
