# SPDX-License-Identifier: Apache-2.0
"""Handlers of /servers/{id}/os-instance-actions: the actions of a server and their results."""

from __future__ import annotations

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.rows import ActionRow, EventRow, ServerRecord
from common.store.servers import actions
from compute_api.compute.request.request import Request
from compute_api.compute.views.servers import instance_actions as view


def index(request: Request, server: ServerRecord) -> JsonObject:
    """Return the actions of a server for GET /servers/{id}/os-instance-actions before 2.58.

    The list has the newest 1000 actions, newest first.
    """
    rows = request.read(actions.list_for, server.id)
    return {"instanceActions": [view.action(row, request.version) for row in rows]}


def page(request: Request, server: ServerRecord) -> JsonObject:
    """Return one page of a server's actions, newest first, since 2.58.

    changes-since and changes-before limit the list to actions that changed in this time.

    Raises:
        BadRequest: The marker is not the request id of an action of the server, changes-since is
            later than changes-before, or the limit is not a number.
    """
    since, before = request.changed
    if request.limit == 0:
        return {"instanceActions": []}
    rows = request.read(
        actions.list_for,
        server.id,
        limit=request.limit,
        marker=request.query_value("marker"),
        changed_since=since,
        changed_before=before,
    )
    items = [view.action(row, request.version) for row in rows]
    body = request.page(
        "instanceActions",
        f"servers/{server.id}/os-instance-actions",
        items,
        rows[-1].request_id if rows else None,
    )
    if "instanceActions_links" in body:
        body["links"] = body.pop("instanceActions_links")
    return body


def show(request: Request, server: ServerRecord, request_id: str) -> JsonObject:
    """Return an action with its events for GET /servers/{id}/os-instance-actions/{request_id}.

    Raises:
        NotFound: This request began no action on the server.
    """

    def work(tx: Connection) -> tuple[ActionRow, list[EventRow]]:
        row = actions.show(tx, server.id, request_id)
        if row is None:
            raise errors.NotFound(
                f"Action for request_id {request_id} on instance {server.id} not found"
            )
        return row, actions.events_of(tx, row.id)

    row, journal = request.read(work)
    allowed = frozenset(
        rule
        for rule in view.RULES
        if request.allows(rule, {"project_id": server.project_id, "user_id": server.user_id})
    )
    return {"instanceAction": view.action_with_events(row, journal, request.version, allowed)}
