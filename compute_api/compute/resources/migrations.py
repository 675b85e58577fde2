# SPDX-License-Identifier: Apache-2.0
"""Migrations: all of them, those of a server that are on their way, and what can be requested of
one that runs.

A request is written into the record, which is what counts: the conductor tells the source's agent
with every exchange. The agent is told here once at once as well, so that it does not come late.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.domain import errors, ids, states
from common.domain.command_key import CommandKey, CommandKind
from common.domain.json_types import JsonObject
from common.domain.models import Command, Control
from common.domain.statuses import ActionState, MigrationStatus, MigrationType
from common.domain.verbs import control_command
from common.store.engine import Connection
from common.store.hosts import hosts
from common.store.notifications import outbox
from common.store.rows import ServerRecord, ShownMigrationRow
from common.store.servers import actions, immediate_actions, migrations
from compute_api.compute.request.request import Request
from compute_api.compute.views import migrations as view
from compute_api.http.microversions import Range

_API = "os_compute_api:"
_PAGED, _QUEUED = Range("2.59"), Range("2.65")
#: Parameter -> what the store calls it.
_FILTERS = {
    "host": "host",
    "source_compute": "source",
    "status": "status",
    "migration_type": "type",
    "instance_uuid": "server_id",
    "user_id": "user_id",
    "project_id": "project_id",
}
_STEERED = "migrate"  #: the step whose command is steered


def index(request: Request) -> JsonObject:
    """GET /os-migrations: newest first, in pages from 2.59 on. Who asks for more than their own
    project's must be allowed that."""
    assert request.route.query is not None
    known = request.route.query.at(request.version).document["properties"]
    wanted: JsonObject = {
        column: value
        for name, column in _FILTERS.items()
        if name in known and (value := request.first(name)) is not None
    }
    if wanted.get("project_id") != request.context.project_id:
        request.require(_API + "os-migrations:index:all_projects")
    if request.version in _PAGED:
        since, before = request.changed
        wanted |= {
            "marker": request.first("marker"),
            "changed_since": since,
            "changed_before": before,
        }
    limit = request.limit if request.version in _PAGED else request.services.settings.max_limit
    if limit == 0:
        return {"migrations": []}

    rows = request.read(lambda tx: migrations.page(tx, limit=limit, **wanted))
    shown = view.MigrationView(request.links, request.allows(_API + "os-migrations:index:host"))
    items = view.many(rows, shown, request.version)
    if request.version not in _PAGED:
        return {"migrations": items}
    return request.page("migrations", "os-migrations", items, rows[-1].uuid if rows else None)


# --- of a server ---
def of_server(request: Request, server: ServerRecord) -> JsonObject:
    """GET /servers/{id}/migrations: the live ones that are on their way."""
    rows = [
        row for row in request.read(migrations.in_progress, server.id) if view.is_on_its_way(row)
    ]
    knows_hosts = request.allows(_API + "servers:migrations:index:host", _target(server))
    shown = view.MigrationView(request.links, knows_hosts)
    return {"migrations": [view.below_server(row, shown, request.version) for row in rows]}


def _target(server: ServerRecord) -> dict[str, str]:
    return {"project_id": server.project_id, "user_id": server.user_id}


def show(request: Request, server: ServerRecord, migration_id: str) -> JsonObject:
    """GET /servers/{id}/migrations/{id}"""
    row = request.read(_found, server.id, migration_id)
    if row is None:
        raise errors.NotFound(
            f"In-progress live migration {migration_id[:40]} is not found for server {server.id}."
        )
    if row.type != MigrationType.LIVE:
        raise errors.NotFound(
            f"Migration {migration_id} for server {server.id} is not live-migration."
        )
    if not view.is_on_its_way(row):
        raise errors.NotFound(
            f"Live migration {migration_id} for server {server.id} is not in progress."
        )
    return {
        "migration": view.below_server(
            row, view.MigrationView(request.links, with_hosts=True), request.version
        )
    }


def _found(tx: Connection, server_id: str, migration_id: str) -> ShownMigrationRow | None:
    number = ids.number(migration_id)
    return None if number is None else migrations.show(tx, server_id, number)


# --- controls of live migrations ---
@dataclass(frozen=True)
class LiveMigrationControl:
    """What can be asked of a live migration."""

    control: Control
    row: states.Action  #: from which states of the server
    journal: str  #: what its instance action is called
    unknown: type[errors.Problem]  #: the error when there is no such migration


_RULE = _API + "servers:migrations:"
ABORT = LiveMigrationControl(
    Control.ABORT,
    states.Action(
        "",
        "abort live migration",
        _RULE + "delete",
        task=(states.MIGRATING,),
        immediate="control",
        notification="live_migration_abort",
    ),
    "live_migration_cancel",
    errors.NotFound,
)
COMPLETE = LiveMigrationControl(
    Control.COMPLETE,
    states.Action(
        "",
        "force_complete",
        _RULE + "force_complete",
        vm=(states.ACTIVE,),
        task=(states.MIGRATING,),
        immediate="control",
        notification="live_migration_force_complete",
    ),
    "live_migration_force_complete",
    errors.BadRequest,
)


def abort(request: Request, server: ServerRecord, migration_id: str) -> None:
    """DELETE /servers/{id}/migrations/{id}: also of one that waits for its turn, from 2.65 on."""
    statuses = migrations.ABORTABLE + (migrations.QUEUED if request.version in _QUEUED else ())
    _ask(request, server, migration_id, ABORT, statuses)


def force_complete(request: Request, server: ServerRecord, migration_id: str) -> None:
    """POST /servers/{id}/migrations/{id}/action"""
    _ask(request, server, migration_id, COMPLETE, migrations.ABORTABLE)


def _ask(
    request: Request,
    server: ServerRecord,
    migration_id: str,
    action: LiveMigrationControl,
    statuses: tuple[MigrationStatus, ...],
) -> None:
    def work(tx: Connection) -> tuple[str, Command] | None:
        found = actions.take_lock(tx, server.id, request.scope)
        actions.check(action.row, server.id, found, request.context)
        move = _found(tx, server.id, migration_id)
        if move is None:
            raise action.unknown(
                f"Migration {migration_id[:40]} not found for instance {server.id}"
            )
        if action is COMPLETE and move.requested_control == Control.ABORT:
            raise errors.BadRequest(
                f"Migration {migration_id} of instance {server.id} is being aborted."
            )
        if not migrations.request_control(tx, move.uuid, action.control, statuses):
            raise errors.BadRequest(
                f"Migration {migration_id} state of instance {server.id} is {move.status}. Cannot "
                f"{action.row.name.replace('_', ' ')} while the migration is in this state."
            )
        immediate_actions.note(
            tx, action.journal, server.id, found, request.context, {"migration": move.uuid}
        )
        outbox.add_done(tx, action.row, server.id, request.context, found)
        return _control_command(tx, move, action.control)

    sending = request.write(work)
    if sending is not None:
        request.services.agents.do(sending[0], [sending[1]], None)
    request.services.wakeup.wake()


def _control_command(
    tx: Connection, move: ShownMigrationRow, control: Control
) -> tuple[str, Command] | None:
    """Return the source's host and the command that controls the migration. None if the host has no
    command for the migration yet."""
    action = actions.show_by_id(tx, move.action_id)
    if (
        action is None
        or (action.state, action.step) != (ActionState.WAITING, _STEERED)
        or action.host is None
    ):
        return None
    session = hosts.sessions(tx, [action.host]).get(action.host, 0)
    migration = CommandKey(CommandKind.DO, action.id, _STEERED, action.attempt)
    return action.host, control_command(
        migration, control, server=move.server_id, fence=action.fence, session=session
    )
