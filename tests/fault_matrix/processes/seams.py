# SPDX-License-Identifier: Apache-2.0
"""Where the product's processes are watched, as the simulator watches its own: here what the
database is asked and the scheduler; the others' are in ``at_conductors`` and ``at_agents``. In the
child of ``victim``.

A point is a tuple of words, with the servers that it concerns; where an order is there, its deed is
done. The product itself is as it is.
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

#: What is imported before the child is forked, by role.
MODULES = {
    "api": (),
    "conductor": ("conductor.engine.reports", "tests.fault_matrix.registry"),
    "scheduler": ("scheduler.proposals",),
    "agent": ("compute_agent.virt.memory.state.host",),
}


def role(name: str) -> str:
    """ "agent-2" is an agent."""
    return name.rstrip("-0123456789")


def install(name: str, folder: Folder) -> None:
    """Put the seams of this process in."""
    process = Process(name, folder)
    _database(process)
    if role(name) == "conductor":
        at_conductors.install(process)
    elif role(name) == "scheduler":
        _scheduler(process)
    elif role(name) == "agent":
        at_agents.install(process)


# --- the database ---
def _database(process: Process) -> None:
    local, is_api = process.local, process.name == "api"

    def entries() -> list[tuple[str, str, str]]:
        if not hasattr(local, "entries"):
            local.entries = []
        found: list[tuple[str, str, str]] = local.entries
        return found

    @sa.event.listens_for(sa.Engine, "begin")
    def begins(connection: sa.Connection) -> None:
        entries().clear()

    @sa.event.listens_for(sa.Engine, "before_cursor_execute")
    def statement(
        connection: sa.Connection, cursor: Any, text: str, parameters: Any, context: Any, *_: Any
    ) -> None:
        if text.startswith("INSERT INTO events"):
            for row in context.compiled_parameters:
                _journal(process, connection, entries(), row)
        elif is_api and text.startswith("INSERT INTO servers"):
            for row in context.compiled_parameters:
                if process.orders.wants_name(row["name"]):
                    process.folder.name(row["name"], row["id"])
        elif is_api and text.startswith("INSERT INTO actions"):
            for row in context.compiled_parameters:
                entries().append((row["server_id"], "accept", "accepted"))
                _cut(process.reached(("accept", "statement"), [row["server_id"]]), connection)

    @sa.event.listens_for(sa.Engine, "engine_connect")
    def connected(connection: sa.Connection) -> None:
        dialect: Any = connection.engine.dialect
        if "do_commit" in vars(dialect):
            return
        real = dialect.do_commit

        def commit(pooled: Any) -> None:
            made = list(entries())
            entries().clear()
            for server, step, event in made:
                order = process.reached(("commit", "before", step, event), [server])
                if order is not None:
                    _break(pooled)
            real(pooled)
            for server, step, event in made:
                order = process.reached(("commit", "after", step, event), [server])
                if order is not None:
                    _break(pooled)
                    pooled.cursor().execute("SELECT 1")

        dialect.do_commit = commit


def _journal(
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
    if not process.orders.wants(*points):
        return
    server = connection.scalar(
        sa.select(actions.c.server_id).where(actions.c.id == row["action_id"])
    )
    entries.append((str(server), step, event))
    _cut(process.reached(points[0], [str(server)]), connection)


def _cut(order: Order | None, connection: sa.Connection) -> None:
    if order is not None and order.deed == "cut":
        _break(connection.connection)


def _break(pooled: Any) -> None:
    """The connection to the server is gone."""
    real = pooled.dbapi_connection
    if isinstance(real, sqlite3.Connection):
        raise sqlite3.OperationalError("there is no connection to cut")
    number = real.fileno() if hasattr(real, "fileno") else real._sock.fileno()
    with socket.socket(fileno=os.dup(number)) as wire:
        wire.shutdown(socket.SHUT_RDWR)


# --- the scheduler ---
def _scheduler(process: Process) -> None:
    from scheduler.proposals import Proposals

    select = Proposals.select

    def watched(self: Any, specs: Any, fresh: bool = False) -> Any:
        servers = [spec.server for spec in specs]
        process.reached(("scheduler", "asked"), servers)
        found = select(self, specs, fresh)
        process.reached(("scheduler", "chosen"), servers)
        return found

    Proposals.select = watched  # type: ignore[method-assign]
