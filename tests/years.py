# SPDX-License-Identifier: Apache-2.0
"""A cloud that has run for years and has nothing to do: ended rows in every table that keeps some,
and what one conductor's threads ask in a round.

Used by tests/contract/test_idle_round.py, which judges the plans, and by tests/bench/years.py,
which takes the time. A new loop of ``conductor.service`` belongs into ``IdleConductor.round``.
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
#: Tables of which ended rows stay until somebody purges them.
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
    what = {"vm_state": "deleted", "deleted": 1, "deleted_at": LONG_AGO, "host": None}
    size = {"flavor": {}, "flavor_id": "1", "vcpus": 1, "memory_mb": 1, "disk_gb": 1}
    lists = {"meta": {}, "tags": [], "scheduler_hints": {}, "security_groups": []}
    named = {"id": name, "name": "n", "hostname": "n", "reservation_id": "r"}
    # As one that was shelved, then soft-deleted, then reclaimed: nothing is due for it any more.
    rested = {"shelved_at": LONG_AGO, "soft_deleted_at": LONG_AGO}
    return named | WHO | WHEN | what | size | lists | rested


def _action(name: str) -> Row:
    what = {"name": "migrate", "workflow": "migrate", "version": 1, "args": {}, "data": {}}
    how = {"fence": 1, "state": "done", "host": "h1", "finished_at": LONG_AGO}
    return {"id": name, "server_id": name, "request_id": name} | WHO | WHEN | what | how


def _migration(name: str) -> Row:
    what = {"type": "migration", "status": "confirmed", "was": "active"}
    where = {"source_host": "h1", "dest_host": "h2", "old_flavor": {}, "new_flavor": {}}
    return {"uuid": name, "server_id": name, "action_id": name} | WHO | WHEN | what | where


def _host_action(name: str) -> Row:
    what = {
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
        | what
    )


def ended(table: str, name: str) -> Row:
    """A row of a table of ``KEEPING`` that is over; ``name``: its id, or its server's."""
    match table:
        case "servers":
            return _server(name)
        case "actions":
            return _action(name)
        case "events":
            what = {"step": "guest", "attempt": 1, "event": "succeeded"}
            return {"action_id": name, "seq": 1, "at": LONG_AGO} | what
        case "migrations":
            return _migration(name)
        case "idempotency_keys":
            what = {"key": name, "digest": "d", "reservation_id": "r", "server_id": name}
            return {"project_id": "p", "created_at": LONG_AGO} | what
        case "console_tokens":
            what = {"server_id": name, "host": "h1", "fence": 1, "kind": "novnc"}
            when = {"created_at": LONG_AGO, "expires_at": LONG_AGO}
            return {"hash": console_tokens.hash_token(name)} | what | WHO | when
        case "host_actions":
            return _host_action(name)
    what = {"event": "begun", "message": ""}
    return {"action_id": name, "seq": 1, "server_id": name, "at": LONG_AGO} | what


def fill(store: Store, first: int, last: int) -> None:
    """Rows of these numbers, that are over, in every table of ``KEEPING``."""
    for number in range(first, last, 5000):
        names = [f"{one:036}" for one in range(number, min(last, number + 5000))]
        with store.begin() as tx:
            for table in KEEPING:
                insert_many(tx, schema.metadata.tables[table], [ended(table, one) for one in names])


def analyze(store: Store) -> None:
    """Let the planner know of all rows."""
    told = {
        "mysql": "ANALYZE TABLE " + ", ".join(KEEPING),
        "postgresql": "ANALYZE",
        "sqlite": "SELECT 1",  # nobody does it for an operator, whose planner would know less
    }
    with store.engine.connect() as tx:
        tx.exec_driver_sql(told[store.dialect_name])
        tx.commit()


class IdleConductor:
    """A conductor with three hosts that are up, and with all turned on that looks for something."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.engine = WorkflowEngine(
            store,
            Clock(),
            None,  # type: ignore[arg-type]  # nothing is sent
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
            made = HostInventory("memory", 1, host, 64, 65536, 1000)
            store.write(lambda tx, host=host, made=made: self._enrol(tx, host, made))

    @staticmethod
    def _enrol(tx: sa.Connection, host: str, made: HostInventory) -> None:
        hosts.register(tx, host, "boot", made)
        hosts.describe(tx, host, made)
        host_keys.ensure(tx, host)
        services.enrol(tx, "c1", Binary.CONDUCTOR)

    def round(self) -> None:
        """What each thread of ``conductor.service`` does when its time has come, and Prometheus."""
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
    """Statements with their parameters, while it is entered; changes too."""

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
