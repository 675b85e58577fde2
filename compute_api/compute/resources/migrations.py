# SPDX-License-Identifier: Apache-2.0
"""Handlers of migrations: all migrations, live migrations of a server, and their controls.

A control, such as an abort, is written to the migration's row. The conductor then sends the control
to the source's agent in every exchange. The API also sends it once directly, to save time.
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
#: Query parameter -> argument of ``migrations.page``.
_FILTERS = {
    "host": "host",
    "source_compute": "source",
    "status": "status",
    "migration_type": "type",
    "instance_uuid": "server_id",
    "user_id": "user_id",
    "project_id": "project_id",
}
#: The step whose command the controls affect.
_CONTROLLED_STEP = "migrate"


def index(request: Request) -> JsonObject:
    """Return migrations, newest first, for GET /os-migrations.

    Since 2.59 the list has pages. Before 2.59 the list ends after the newest ``max_limit``.

    Raises:
        Forbidden: The query is not limited to the caller's project, and the policy does not allow
            that.
    """
    assert request.route.query is not None
    parameters = request.route.query.at(request.version).document["properties"]
    filters: JsonObject = {
        column: value
        for name, column in _FILTERS.items()
        if name in parameters and (value := request.query_value(name)) is not None
    }
    if filters.get("project_id") != request.context.project_id:
        request.require(_API + "os-migrations:index:all_projects")
    if request.version in _PAGED:
        since, before = request.changed
        filters |= {
            "marker": request.query_value("marker"),
            "changed_since": since,
            "changed_before": before,
        }
    limit = request.limit if request.version in _PAGED else request.services.settings.max_limit
    if limit == 0:
        return {"migrations": []}

    rows = request.read(lambda tx: migrations.page(tx, limit=limit, **filters))
    migration_view = view.MigrationView(
        request.links, request.allows(_API + "os-migrations:index:host")
    )
    items = view.many(rows, migration_view, request.version)
    if request.version not in _PAGED:
        return {"migrations": items}
    return request.page("migrations", "os-migrations", items, rows[-1].uuid if rows else None)


# --- live migrations of a server ---
def of_server(request: Request, server: ServerRecord) -> JsonObject:
    """Return the live migrations in progress for GET /servers/{id}/migrations."""
    rows = [
        row for row in request.read(migrations.in_progress, server.id) if view.is_on_its_way(row)
    ]
    shows_hosts = request.allows(_API + "servers:migrations:index:host", _make_target(server))
    migration_view = view.MigrationView(request.links, shows_hosts)
    return {"migrations": [view.below_server(row, migration_view, request.version) for row in rows]}


def _make_target(server: ServerRecord) -> dict[str, str]:
    return {"project_id": server.project_id, "user_id": server.user_id}


def show(request: Request, server: ServerRecord, migration_id: str) -> JsonObject:
    """Return a live migration in progress for GET /servers/{id}/migrations/{migration_id}.

    Raises:
        NotFound: The server has no such migration, or this is no live migration in progress.
    """
    row = request.read(_find_migration, server.id, migration_id)
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


def _find_migration(tx: Connection, server_id: str, migration_id: str) -> ShownMigrationRow | None:
    """Return a migration of the server, or None if the id is unknown or is not a number."""
    number = ids.number(migration_id)
    return None if number is None else migrations.show(tx, server_id, number)


# --- controls of live migrations ---
@dataclass(frozen=True)
class LiveMigrationControl:
    """A control of a live migration: abort or force_complete."""

    control: Control
    #: Defines the states of the server that allow the control.
    row: states.Action
    #: Name of the instance action.
    journal: str
    #: The error if the migration does not exist.
    unknown: type[errors.Problem]


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
    """Request the abort of a live migration. Since 2.65 this includes queued migrations.

    Raises:
        NotFound: The server has no such migration.
        BadRequest: The status of the migration does not allow an abort.
        Conflict: The server is not migrating, or is locked.
    """
    statuses = migrations.ABORTABLE + (migrations.QUEUED if request.version in _QUEUED else ())
    _request_control(request, server, migration_id, ABORT, statuses)


def force_complete(request: Request, server: ServerRecord, migration_id: str) -> None:
    """Request the forced completion of a live migration (action force_complete).

    Raises:
        BadRequest: The server has no such migration, its status does not allow this, or it is being
            aborted.
        Conflict: The server is not active, is not migrating, or is locked.
    """
    _request_control(request, server, migration_id, COMPLETE, migrations.ABORTABLE)


def _request_control(
    request: Request,
    server: ServerRecord,
    migration_id: str,
    action: LiveMigrationControl,
    statuses: tuple[MigrationStatus, ...],
) -> None:
    """Record a control in the migration's row, and send the control to the source host.

    Without a running command on the host, the control is only recorded. The server's journal gets
    an entry too.

    Args:
        request: The request.
        server: The row of the server.
        migration_id: Id of the migration in the request.
        action: The control.
        statuses: Statuses of migrations that allow the control.

    Raises:
        Problem: The server has no such migration. The class is ``action.unknown``.
        BadRequest: The status does not allow the control, or a completion follows an abort.
        Conflict: The server's state or a lock does not allow the control.
        NotFound: The server does not exist for the caller.
    """

    def work(tx: Connection) -> tuple[str, Command] | None:
        server_state = actions.take_lock(tx, server.id, request.scope)
        actions.check(action.row, server.id, server_state, request.context)
        move = _find_migration(tx, server.id, migration_id)
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
            tx, action.journal, server.id, server_state, request.context, {"migration": move.uuid}
        )
        outbox.add_done(tx, action.row, server.id, request.context, server_state)
        return _make_control_command(tx, move, action.control)

    sending = request.write(work)
    if sending is not None:
        request.services.agents.do(sending[0], [sending[1]], None)
    request.services.wakeup.wake()


def _make_control_command(
    tx: Connection, move: ShownMigrationRow, control: Control
) -> tuple[str, Command] | None:
    """Return the source host and the command that passes ``control`` to the running migration.

    The result is None if the migration's action does not wait for a host at ``_CONTROLLED_STEP``.
    """
    action = actions.show_by_id(tx, move.action_id)
    if (
        action is None
        or (action.state, action.step) != (ActionState.WAITING, _CONTROLLED_STEP)
        or action.host is None
    ):
        return None
    session = hosts.sessions(tx, [action.host]).get(action.host, 0)
    migration = CommandKey(CommandKind.DO, action.id, _CONTROLLED_STEP, action.attempt)
    return action.host, control_command(
        migration, control, server=move.server_id, fence=action.fence, session=session
    )
