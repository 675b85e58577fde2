# SPDX-License-Identifier: Apache-2.0
"""Repeated queries of the services use an index, also with many old rows.

A new repeated query (of the runner, the sweep, an exchange with a host, or a waiting request) gets
an entry in ``POLLS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from common.domain import ids, states
from common.store import schema
from common.store.engine import Store, insert_many, update_grouped
from common.store.hosts import hosts
from common.store.servers import actions, console_tokens, guests, migrations, servers
from common.store.tenants import quotas
from conductor.workflows import WORKFLOWS
from deploy.operator.store import journals

AGO = 1_700_000_000_000_000
ROWS, HOSTS = 2500, 250
MANY = ROWS // 4
#: Tables that keep their rows, or are as large as the cloud.
GROWING = (
    "servers",
    "actions",
    "events",
    "migrations",
    "idempotency_keys",
    "guests",
    "allocations",
    "console_tokens",
)
SOME = [f"{number:036}" for number in range(3)]
Poll = Callable[[sa.Connection], Any]
POLLS: dict[str, Poll] = {
    # runner
    "take": lambda tx: actions.take(
        tx, "c/1", WORKFLOWS.versions, 64, but=WORKFLOWS.steps_with_calls
    ),
    "take for a neighbour": lambda tx: actions.take(
        tx, "c/1", WORKFLOWS.versions, 64, only=WORKFLOWS.steps_with_calls
    ),
    "lock_servers": lambda tx: actions.lock_servers(tx, SOME),
    "lock": lambda tx: actions.lock(tx, SOME),
    "removals_of": lambda tx: guests.removals_of(tx, SOME),
    "free_leases_of": lambda tx: actions.free_leases_of(tx, "c/1"),
    # sweep
    "to be reclaimed": lambda tx: actions.resting(
        tx, vm_state=states.SOFT_DELETED, since="soft_deleted_at", longer_than=1, limit=64
    ),
    "to be offloaded": lambda tx: actions.resting(
        tx, vm_state=states.SHELVED, since="shelved_at", longer_than=1, limit=64
    ),
    "unconfirmed": lambda tx: migrations.find_unconfirmed(tx, 1, 64),
    "commands_on_dead_hosts": lambda tx: actions.commands_on_dead_hosts(
        tx, WORKFLOWS.failing_with_host, 30, 64
    ),
    "reading_from_the_dead": lambda tx: migrations.reading_from_the_dead(
        tx, WORKFLOWS.reading_source, 64
    ),
    # exchange with hosts
    "waited_for": hosts.waited_for,
    "outstanding": lambda tx: actions.outstanding(tx, "h1", 1, 64),
    "waiting": lambda tx: actions.waiting(tx, SOME),
    "ended_of": lambda tx: actions.ended_of(tx, SOME),
    "measured": lambda tx: migrations.store_progress(tx, {("h1", SOME[0]): {"memory_total": 1}}),
    "requested_controls": lambda tx: migrations.requested_controls(tx, "h1"),
    "completed": lambda tx: migrations.complete_evacuations(tx, SOME),
    "removals": lambda tx: guests.removals(tx, "h1", 1, 64),
    "fences_on": lambda tx: guests.fences_on(tx, "h1"),
    "off_on": lambda tx: guests.off_on(tx, "h1", SOME),
    "wanted_running_on": lambda tx: guests.wanted_running_on(tx, "h1"),
    # API
    "wake": lambda tx: actions.wake(tx, SOME, "plug"),
    "action that a request waits for": lambda tx: actions.show_by_id(tx, SOME[0]),
    "step_outcome": lambda tx: actions.step_outcome(tx, SOME[0], "guest"),
    "idempotent": lambda tx: servers.idempotent(tx, "p", ["k"]),
    "usage": lambda tx: quotas.usage(tx, "none"),
    "held": lambda tx: quotas.count_resources(tx, "none"),
    "open_of": lambda tx: migrations.open_of(tx, SOME),
    "actions of a server": lambda tx: actions.list_for(tx, SOME[0]),
    "actions of a request": lambda tx: journals.of_request(tx, "r1"),
    "token": lambda tx: console_tokens.find(tx, "token"),
}


# fmt: off
def fill(tx: sa.Connection) -> None:
    """Insert as many active as deleted servers, with all their remaining rows."""
    names = [f"{number:036}" for number in range(ROWS)]
    insert_many(tx, schema.servers, [{
        "id": name, "project_id": f"p{number % 7}", "user_id": "u", "name": "n", "hostname": "n",
        "vm_state": "deleted" if number % 2 else "active",
        "flavor": {}, "flavor_id": "1", "vcpus": 1, "memory_mb": 1, "disk_gb": 1, "meta": {}, "tags": [],
        "scheduler_hints": {}, "security_groups": [], "reservation_id": "r", "created_at": AGO, "updated_at": AGO,
        "deleted": number % 2, "host": f"h{number % HOSTS}", "soft_deleted_at": AGO + number if number % 2 else None,
        "shelved_at": AGO + number if number % 2 else None}
        for number, name in enumerate(names)])
    insert_many(tx, schema.actions, [{
        "id": name, "server_id": name, "project_id": "p", "user_id": "u", "request_id": f"r{number}", "name": "migrate",
        "workflow": "migrate", "version": 1, "args": {}, "fence": 1, "state": "done", "data": {}, "created_at": AGO,
        "updated_at": AGO, "host": f"h{number % HOSTS}", "owner": f"c/{number % 3}", "sent_at": AGO}
        for number, name in enumerate(names)])
    insert_many(tx, schema.events, [{"action_id": name, "seq": 1, "step": "guest", "attempt": 1, "event": "started",
                                     "at": AGO} for name in names])
    insert_many(tx, schema.migrations, [{
        "uuid": ids.new(), "server_id": name, "action_id": name, "project_id": "p", "user_id": "u",
        "type": "migration", "status": "confirmed", "source_host": f"h{number % HOSTS}", "dest_host": "h1",
        "old_flavor": {}, "new_flavor": {}, "was": "active", "created_at": AGO, "updated_at": AGO}
        for number, name in enumerate(names)])
    insert_many(tx, schema.guests, [{
        "server_id": name, "host": f"h{number % HOSTS}", "fence": 1, "wanted": "running", "may_run": True,
        "changed_at": AGO} for number, name in enumerate(names)])
    insert_many(tx, schema.idempotency_keys, [{
        "project_id": f"p{number % 7}", "key": name, "digest": "d", "reservation_id": "r", "server_id": name,
        "created_at": AGO} for number, name in enumerate(names)])
    insert_many(tx, schema.console_tokens, [{
        "hash": name if number else console_tokens.hash_token("token"), "server_id": name,
        "host": f"h{number % HOSTS}", "fence": 1, "kind": "novnc", "project_id": "p", "user_id": "u",
        "created_at": AGO, "expires_at": 2 * AGO} for number, name in enumerate(names)])
# fmt: on


def whole_reads(tx: sa.Connection, statement: str, parameters: Any) -> list[str]:
    """Return the growing tables that the database would read completely for this statement."""
    if tx.dialect.name == "sqlite":
        plan = tx.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        steps = [str(row[3]).split() for row in plan]
        return [step[1] for step in steps if step[0] == "SCAN" and step[1] in GROWING]
    if tx.dialect.name == "postgresql":
        return _scans(
            tx.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
            ).scalar_one()
        )
    plan = tx.exec_driver_sql(f"EXPLAIN {statement}", parameters)
    return [
        row.table
        for row in plan
        if row.table in GROWING
        and (row.type in ("ALL", "index") or int(str(row.rows or 0).split()[0]) > MANY)
    ]


def _scans(plan: Any) -> list[str]:
    """Return the PostgreSQL scans that no index condition narrows, or not enough."""
    if isinstance(plan, list):
        return [name for part in plan for name in _scans(part)]
    if not isinstance(plan, dict) or not plan.get("Actual Loops", 1):
        return []
    bare = plan.get("Node Type") == "Seq Scan" or (
        "Index" in plan.get("Node Type", "") and "Index Cond" not in plan
    )
    row_count = (plan.get("Actual Rows", 0) + plan.get("Rows Removed by Filter", 0)) * plan.get(
        "Actual Loops", 1
    )
    tables = (
        [plan["Relation Name"]]
        if (bare or row_count > MANY) and plan.get("Relation Name") in GROWING
        else []
    )
    return tables + [name for part in plan.values() for name in _scans(part)]


def test_repeated_queries_read_no_growing_table_completely(store: Store) -> None:
    with store.begin() as tx:
        fill(tx)
    with store.engine.connect() as tx:
        analyze = {
            "mysql": "ANALYZE TABLE " + ", ".join(GROWING),
            "postgresql": "ANALYZE",
            "sqlite": "SELECT 1",
        }
        tx.exec_driver_sql(analyze[store.dialect_name])
        tx.commit()
    statements: list[tuple[str, Any]] = []
    sa.event.listen(
        store.engine,
        "before_cursor_execute",
        lambda *arguments: statements.append((arguments[2], arguments[3])),
    )
    reads: dict[str, list[str]] = {}
    for name, poll in POLLS.items():
        with store.engine.connect() as tx:
            statements.clear()
            poll(tx)
            queries = [
                (statement, parameters)
                for statement, parameters in statements
                if statement[0] in "SUDW"
            ]
            reads[name] = [
                table
                for statement, parameters in queries
                for table in whole_reads(tx, statement, parameters)
            ]
            tx.rollback()
    assert {name: tables for name, tables in reads.items() if tables} == {}


def test_update_of_many_rows_runs_one_statement_per_distinct_value(store: Store) -> None:
    """This includes values that are expressions. Different values stay in separate statements."""
    with store.begin() as tx:
        fill(tx)
    statements: list[str] = []
    sa.event.listen(
        store.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2])
    )
    names = [f"{number:036}" for number in range(40)]
    with store.begin() as tx:
        statements.clear()
        actions.update(tx, {name: {"state": "done", "owner": None} for name in names})
        assert len(statements) == 1
        statements.clear()
        update_grouped(
            tx,
            schema.actions,
            schema.actions.c.id,
            {name: {"due_at": actions.now() + number % 2} for number, name in enumerate(names)},
        )
        assert len(statements) == 2
