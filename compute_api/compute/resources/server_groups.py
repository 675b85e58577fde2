# SPDX-License-Identifier: Apache-2.0
"""Handlers of server groups, whose policy places their servers together or apart."""

from __future__ import annotations

from common.domain import errors, ids
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.rows import ServerGroupRow
from common.store.tenants import quotas, server_groups
from compute_api.compute.request.request import Request
from compute_api.compute.views.fields import Field, render, render_readable, visible_fields

_RULE = "os_compute_api:os-server-groups:"
#: ``view`` is the list of ids of the group's servers.
FIELDS: tuple[Field, ...] = (
    Field("id", "id"),
    Field("name", "name"),
    Field("policies", lambda row, view: [row.policy], until="2.63"),
    Field("policy", "policy", since="2.64"),
    Field("rules", "rules", since="2.64"),
    Field("members", lambda row, view: view),
    Field("metadata", lambda row, view: {}, until="2.63"),
    Field("project_id", "project_id", since="2.13"),
    Field("user_id", "user_id", since="2.13"),
)


def index(request: Request) -> JsonObject:
    """Return one page of server groups for GET /os-server-groups.

    The groups are those of the caller's project, or of all projects if the query has
    ``all_projects`` and the policy allows that.
    """
    all_projects = "all_projects" in request.query and request.allows(_RULE + "index:all_projects")
    offset = int((request.query_value("offset") or "0")[:9])

    def work(tx: Connection) -> list[JsonObject]:
        project_id = None if all_projects else request.context.project_id
        rows = server_groups.page(tx, project_id, request.limit, offset)
        members = server_groups.members(tx, [row.id for row in rows])
        getters = visible_fields(FIELDS, request.version)
        return [render_readable(getters, row, members[row.id]) for row in rows]

    return {"server_groups": request.read(work)}


def _find(tx: Connection, request: Request, group_id: str, operation: str) -> ServerGroupRow:
    """Return the row of a group after the check of the policy.

    ``operation`` is the last part of the policy rule, for example show.

    Raises:
        NotFound: The group does not exist for the caller.
        Forbidden: The policy denies the operation.
    """
    row = server_groups.show(tx, group_id, request.scope)
    request.require(_RULE + operation, {"project_id": row.project_id})
    return row


def show(request: Request, group_id: str) -> JsonObject:
    """Return one server group for GET /os-server-groups/{id}.

    Raises:
        NotFound: The group does not exist for the caller.
    """

    def work(tx: Connection) -> JsonObject:
        row = _find(tx, request, group_id, "show")
        return render(
            visible_fields(FIELDS, request.version),
            row,
            server_groups.members(tx, [row.id])[row.id],
        )

    return {"server_group": request.read(work)}


def create(request: Request) -> JsonObject:
    """Create a server group for POST /os-server-groups.

    Raises:
        BadRequest: The body has rules, and the policy is not anti-affinity.
        Forbidden: The quota is exhausted.
    """
    body = request.body["server_group"]
    policy = body["policy"] if "policy" in body else body["policies"][0]
    rules = {key: int(value) for key, value in body.get("rules", {}).items()}
    if rules and policy != "anti-affinity":
        raise errors.BadRequest("Only anti-affinity policy supports rules.")
    context, group = request.context, ids.new()
    limits = request.services.quota.source(context.project_id)

    def work(tx: Connection) -> ServerGroupRow:
        quotas.lock(tx, context.project_id)
        limit = limits(tx).of("server_groups")
        if 0 <= limit <= quotas.server_groups_used(tx, context.project_id):
            raise errors.Forbidden("Quota exceeded, too many server groups.")
        return server_groups.create(
            tx,
            {
                "id": group,
                "project_id": context.project_id,
                "user_id": context.user_id,
                "name": body["name"].strip(),
                "policy": policy,
                "rules": rules,
            },
        )

    return {
        "server_group": render(
            visible_fields(FIELDS, request.version), request.make(server_groups.is_made, work), []
        )
    }


def delete(request: Request, group_id: str) -> None:
    """Delete a server group for DELETE /os-server-groups/{id}. The servers stay.

    Raises:
        NotFound: The group does not exist for the caller.
    """
    request.write(lambda tx: server_groups.delete(tx, _find(tx, request, group_id, "delete").id))
