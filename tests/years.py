# SPDX-License-Identifier: Apache-2.0
"""An idle cloud with years of ended rows, and one round of each loop of its conductor.

tests/contract/test_idle_round.py checks the query plans, and tests/bench/years.py measures the
time. Add new loops of ``conductor.service`` to ``IdleConductor.round``.
"""

from __future__ import annotations

import math
from typing import Any

import sqlalchemy as sa

from common.domain.clock import Clock
from common.domain.models import HostInventory
from common.domain.service_binaries import Binary
from common.notifications.periods import Periods
from common.store import schema
from common.store.engine import Store, insert_many
from common.store.hosts import host_keys, hosts, services
from common.store.servers import console_tokens
from common.store.views import gauges
from conductor.engine import heartbeats, runner
from conductor.engine.engine import Lane
from conductor.engine.sweep import Watch, sweep
from conductor.engine.workflow_engine import WorkflowEngine
from conductor.hosts import automatic_evacuation, prefetch
from conductor.hosts.automatic_evacuation import EvacuationPolicy
from conductor.hosts.host_actions import HostActions
from conductor.notifications import notices as notifications
from conductor.notifications.notification_sender import NotificationSender
from conductor.steps import cleanups
from conductor.workflows import WORKFLOWS

LONG_AGO = 1_700_000_000_000_000
HOSTS = ("h1", "h2", "h3")
#: Tables that keep ended rows until a purge.
KEEPING = (
    "servers",
    "actions",
    "events",
    "migrations",
    "idempotency_keys",
    "console_tokens",
    "host_actions",
    "host_action_events",
)
Row = dict[str, Any]
WHO: Row = {"project_id": "p", "user_id": "u"}
WHEN: Row = {"created_at": LONG_AGO, "updated_at": LONG_AGO}


def _server(name: str) -> Row:
    state = {"vm_state": "deleted", "deleted": 1, "deleted_at": LONG_AGO, "host": None}
    size = {"flavor": {}, "flavor_id": "1", "vcpus": 1, "memory_mb": 1, "disk_gb": 1}
    lists = {"meta": {}, "tags": [], "scheduler_hints": {}, "security_groups": []}
    names = {"id": name, "name": "n", "hostname": "n", "reservation_id": "r"}
    # The server was shelved, then soft-deleted, then reclaimed, so no chore is due for it.
    times = {"shelved_at": LONG_AGO, "soft_deleted_at": LONG_AGO}
    return names | WHO | WHEN | state | size | lists | times


def _action(name: str) -> Row:
    columns = {"name": "migrate", "workflow": "migrate", "version": 1, "args": {}, "data": {}}
    outcome = {"fence": 1, "state": "done", "host": "h1", "finished_at": LONG_AGO}
    return {"id": name, "server_id": name, "request_id": name} | WHO | WHEN | columns | outcome


def _migration(name: str) -> Row:
    columns = {"type": "migration", "status": "confirmed", "was": "active"}
    hosts_and_flavors = {"source_host": "h1", "dest_host": "h2", "old_flavor": {}, "new_flavor": {}}
    return (
        {"uuid": name, "server_id": name, "action_id": name}
        | WHO
        | WHEN
        | columns
        | hosts_and_flavors
    )


def _host_action(name: str) -> Row:
    columns = {
        "name": "drain",
        "state": "done",
        "args": {},
        "progress": {},
        "message": "",
        "next_seq": 2,
    }
    return (
        {"id": name, "host": "h1", "request_id": "r", "locked_until": 0, "finished_at": LONG_AGO}
        | WHO
        | WHEN
        | columns
    )


def ended_row(table: str, name: str) -> Row:
    """Return an ended row for a table of ``KEEPING``.

    Args:
        table: Name of the table.
        name: Id of the row, or of its server or action.
    """
    match table:
        case "servers":
            return _server(name)
        case "actions":
            return _action(name)
        case "events":
            columns = {"step": "guest", "attempt": 1, "event": "succeeded"}
            return {"action_id": name, "seq": 1, "at": LONG_AGO} | columns
        case "migrations":
            return _migration(name)
        case "idempotency_keys":
            columns = {"key": name, "digest": "d", "reservation_id": "r", "server_id": name}
            return {"project_id": "p", "created_at": LONG_AGO} | columns
        case "console_tokens":
            columns = {"server_id": name, "host": "h1", "fence": 1, "kind": "novnc"}
            times = {"created_at": LONG_AGO, "expires_at": LONG_AGO}
            return {"hash": console_tokens.hash_token(name)} | columns | WHO | times
        case "host_actions":
            return _host_action(name)
    columns = {"event": "begun", "message": ""}
    return {"action_id": name, "seq": 1, "server_id": name, "at": LONG_AGO} | columns


def fill(store: Store, first: int, last: int) -> None:
    """Insert the ended rows with the numbers ``first`` to ``last`` - 1 into each table."""
    for number in range(first, last, 5000):
        names = [f"{name:036}" for name in range(number, min(last, number + 5000))]
        with store.begin() as tx:
            for table in KEEPING:
                insert_many(
                    tx, schema.metadata.tables[table], [ended_row(table, name) for name in names]
                )


def analyze(store: Store) -> None:
    """Update the statistics of the query planner."""
    statements = {
        "mysql": "ANALYZE TABLE " + ", ".join(KEEPING),
        "postgresql": "ANALYZE",
        # Operators do not run ANALYZE on SQLite, so the test does not either.
        "sqlite": "SELECT 1",
    }
    with store.engine.connect() as tx:
        tx.exec_driver_sql(statements[store.dialect_name])
        tx.commit()


class IdleConductor:
    """A conductor with three hosts that are up and with all periodic chores enabled."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.engine = WorkflowEngine(
            store,
            Clock(),
            None,  # type: ignore[arg-type]  # No message is sent.
            "c1/1",
            reclaim_interval=1,
            shelved_offload_time=1,
            resize_confirm_window=1,
            workflows=WORKFLOWS,
            notices=notifications.of,
            chores=(prefetch.CHORE, automatic_evacuation.chore(EvacuationPolicy(60, 1))),
        )
        self._host_actions = HostActions(self.engine)
        self._sender = NotificationSender(
            store,
            Clock(),
            None,  # type: ignore[arg-type]
            "c1/1",
            "versioned",
            100,
            audit=Periods.of("month"),
        )
        self._watch = Watch()
        for host in HOSTS:
            inventory = HostInventory("memory", 1, host, 64, 65536, 1000)
            store.write(lambda tx, host=host, inventory=inventory: self._enrol(tx, host, inventory))

    @staticmethod
    def _enrol(tx: sa.Connection, host: str, inventory: HostInventory) -> None:
        hosts.register(tx, host, "boot", inventory)
        hosts.describe(tx, host, inventory)
        host_keys.ensure(tx, host)
        services.enrol(tx, "c1", Binary.CONDUCTOR)

    def round(self) -> None:
        """Run one round of each thread of ``conductor.service``, and read the gauges."""
        engine = self.engine
        for lane in (Lane.INSIDE, *WORKFLOWS.lanes):
            assert runner.advance(engine, lane) == 0
        self._watch.listening_since = -math.inf
        self._watch.chores_at.clear()
        assert sweep(engine, self._watch, HOSTS, True) == []
        assert cleanups.retry(engine) == 0
        self._host_actions.advance()
        self._sender.audited_at = -math.inf
        self._sender.audit_usage()
        assert self._sender.send_batch() == 0
        heartbeats.Heartbeats(self.store, engine.clock)._look(0)
        self.store.read(host_keys.generations)
        self.store.read(lambda tx: list(gauges.read(tx)))


class Asked:
    """A context that records the statements of a store with their parameters."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.statements: list[tuple[str, Any]] = []

    def _keep(self, conn: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if statement.startswith(("SELECT", "UPDATE", "DELETE", "WITH", "INSERT")):
            self.statements.append((statement, parameters))

    def __enter__(self) -> list[tuple[str, Any]]:
        sa.event.listen(self._store.engine, "before_cursor_execute", self._keep)
        return self.statements

    def __exit__(self, *exc: object) -> None:
        sa.event.remove(self._store.engine, "before_cursor_execute", self._keep)
