# SPDX-License-Identifier: Apache-2.0
"""The seams of the product's processes: points at which a process takes orders.

This module has the seams of the database and the scheduler. For the others see ``at_conductors``
and ``at_agents``. ``victim`` installs them in the child process. A point is a tuple of words, and
concerns one or more servers. Without an order, the product runs unchanged, apart from shorter
leases and one wrong clock.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from typing import Any

import sqlalchemy as sa

from tests.fault_matrix.processes import at_agents, at_conductors
from tests.fault_matrix.processes.orders import Folder, Order
from tests.fault_matrix.processes.struck import Process

#: Modules that are imported before the fork, by role.
MODULES = {
    "api": (),
    "conductor": ("conductor.engine.reports", "tests.fault_matrix.registry"),
    "scheduler": ("scheduler.proposals",),
    "agent": ("compute_agent.virt.memory.state.host",),
}


def read_role(name: str) -> str:
    """Return the role of a process, for example "agent" for "agent-2"."""
    return name.rstrip("-0123456789")


def install(name: str, folder: Folder) -> None:
    """Install the seams of this process."""
    process = Process(name, folder)
    _watch_database(process)
    if read_role(name) == "conductor":
        at_conductors.install(process)
    elif read_role(name) == "scheduler":
        _watch_scheduler(process)
    elif read_role(name) == "agent":
        at_agents.install(process)


# --- the database ---
def _watch_database(process: Process) -> None:
    local, is_api = process.local, process.name == "api"

    def entries() -> list[tuple[str, str, str]]:
        if not hasattr(local, "entries"):
            local.entries = []
        entries_of_thread: list[tuple[str, str, str]] = local.entries
        return entries_of_thread

    @sa.event.listens_for(sa.Engine, "begin")
    def clear_entries(connection: sa.Connection) -> None:
        entries().clear()

    @sa.event.listens_for(sa.Engine, "before_cursor_execute")
    def watch_statement(
        connection: sa.Connection, cursor: Any, text: str, parameters: Any, context: Any, *_: Any
    ) -> None:
        if text.startswith("INSERT INTO events"):
            for row in context.compiled_parameters:
                _reach_journal(process, connection, entries(), row)
        elif is_api and text.startswith("INSERT INTO servers"):
            for row in context.compiled_parameters:
                if process.orders.has_order_for(row["name"]):
                    process.folder.record_server_id(row["name"], row["id"])
        elif is_api and text.startswith("INSERT INTO actions"):
            for row in context.compiled_parameters:
                entries().append((row["server_id"], "accept", "accepted"))
                _cut_if_ordered(
                    process.reach(("accept", "statement"), [row["server_id"]]), connection
                )

    @sa.event.listens_for(sa.Engine, "engine_connect")
    def watch_commits(connection: sa.Connection) -> None:
        dialect: Any = connection.engine.dialect
        if "do_commit" in vars(dialect):
            return
        real = dialect.do_commit

        def commit(pooled: Any) -> None:
            committed = list(entries())
            entries().clear()
            for server, step, event in committed:
                order = process.reach(("commit", "before", step, event), [server])
                if order is not None:
                    _cut_connection(pooled)
            real(pooled)
            for server, step, event in committed:
                order = process.reach(("commit", "after", step, event), [server])
                if order is not None:
                    _cut_connection(pooled)
                    pooled.cursor().execute("SELECT 1")

        dialect.do_commit = commit


def _reach_journal(
    process: Process,
    connection: sa.Connection,
    entries: list[tuple[str, str, str]],
    row: dict[str, Any],
) -> None:
    from common.store.schema import actions

    step, event = row["step"], row["event"]
    points = (
        ("journal", step, event),
        *(("commit", at, step, event) for at in ("before", "after")),
    )
    if not process.orders.has_order_at(*points):
        return
    server = connection.scalar(
        sa.select(actions.c.server_id).where(actions.c.id == row["action_id"])
    )
    entries.append((str(server), step, event))
    _cut_if_ordered(process.reach(points[0], [str(server)]), connection)


def _cut_if_ordered(order: Order | None, connection: sa.Connection) -> None:
    if order is not None and order.effect == "cut":
        _cut_connection(connection.connection)


def _cut_connection(pooled: Any) -> None:
    """Shut down the socket to the database server."""
    real = pooled.dbapi_connection
    if isinstance(real, sqlite3.Connection):
        raise sqlite3.OperationalError("there is no connection to cut")
    number = real.fileno() if hasattr(real, "fileno") else real._sock.fileno()
    with socket.socket(fileno=os.dup(number)) as wire:
        wire.shutdown(socket.SHUT_RDWR)


# --- the scheduler ---
def _watch_scheduler(process: Process) -> None:
    from scheduler.proposals import Proposals

    select = Proposals.select

    def select_and_reach(self: Any, specs: Any, fresh: bool = False) -> Any:
        servers = [spec.server for spec in specs]
        process.reach(("scheduler", "asked"), servers)
        selections = select(self, specs, fresh)
        process.reach(("scheduler", "chosen"), servers)
        return selections

    Proposals.select = select_and_reach  # type: ignore[method-assign]
