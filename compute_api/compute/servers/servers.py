# SPDX-License-Identifier: Apache-2.0
"""Handlers that list, show, update and delete servers. The folder ``create`` has POST /servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.domain import errors, states
from common.domain.json_types import JsonObject
from common.domain.statuses import ActionState
from common.store.engine import Connection
from common.store.rows import ServerRecord
from common.store.servers import actions, migrations, servers, volumes
from common.store.servers.servers import ServerFilters
from compute_api.compute.request.request import Request
from compute_api.compute.servers import fields as server_fields
from compute_api.compute.views.servers import servers as view
from compute_api.http.microversions import Range
from compute_api.http.validation import is_true

_API = "os_compute_api:"
_TAGS = ("tags", "tags-any", "not-tags", "not-tags-any")
#: Filters of all callers, with their microversions. Administrators may filter by every column.
_OPEN_FILTERS: dict[str, Range] = {
    **{name: Range() for name in ("reservation_id", "name", "image", "flavor", "ip")},
    "ip6": Range("2.5"),
    **{
        name: Range("2.83")
        for name in (
            "availability_zone",
            "config_drive",
            "key_name",
            "created_at",
            "launched_at",
            "terminated_at",
            "power_state",
            "task_state",
            "vm_state",
            "progress",
            "user_id",
        )
    },
}
_LOCKED_FILTER = Range("2.73")
_STRICT_STATUS = Range("2.38")
#: Sort keys that reveal the hosts of servers.
_ADMIN_SORT = ("host", "node")
#: Query parameters other than filters on columns.
_OTHER = {
    "limit",
    "marker",
    "sort_key",
    "sort_dir",
    "all_tenants",
    "deleted",
    "soft_deleted",
    "status",
    "changes-since",
    "changes-before",
    "locked",
    "project_id",
    "tenant_id",
    *_TAGS,
}
#: Attributes of a server that Nova refuses as filters.
_NO_FILTER = {
    "block_device_mapping",
    "services",
    "metadata",
    "system_metadata",
    "info_cache",
    "security_groups",
    "pci_devices",
}


def index(request: Request) -> JsonObject:
    """Return one page of ids and names for GET /servers."""
    return _list_servers(request, "servers", names_only=True)


def detail(request: Request) -> JsonObject:
    """Return one page of servers with all fields for GET /servers/detail."""
    return _list_servers(request, "servers/detail", names_only=False)


def _list_servers(request: Request, path: str, names_only: bool) -> JsonObject:
    """Return one page of servers.

    Raises:
        BadRequest: A parameter is invalid, or the list needs an index that the database lacks.
        Forbidden: See ``_parse_query``.
        TooSlow: The list reached the database's time limit for another reason.
    """
    filters = _parse_query(request, "index" if names_only else "detail")
    if filters is None or filters.limit == 0:
        return {"servers": []}
    allowed = frozenset() if names_only else request.allowed(view.RULES)
    server_view = view.ServerView(
        request.links, request.is_admin, allowed, vault=request.services.vault
    )

    def work(tx: Connection) -> Sequence[Any]:
        rows = servers.page(tx, filters, view.shows_user_data(request.version, allowed), names_only)
        if view.shows_hosts(allowed):
            server_view.hosts = servers.host_facts(tx, {row.host for row in rows if row.host})
        ids_with_volumes = [] if names_only else [row.id for row in rows if row.volumes]
        if ids_with_volumes:
            server_view.volumes = volumes.of_some(tx, ids_with_volumes)
        return rows

    try:
        rows = request.read(work)
    except errors.TooSlow as problem:
        raise _explain_slow_list(filters, problem) from problem
    items = view.many(rows, server_view, request.version, names_only)
    return request.page("servers", path, items, rows[-1].id if rows else None)


def _explain_slow_list(filters: ServerFilters, problem: errors.TooSlow) -> errors.Problem:
    """Return a BadRequest with the parts of the list that have no index, or the given problem."""
    unindexed = servers.list_unindexed(filters)
    if not unindexed:
        return problem
    return errors.BadRequest(
        "The database ended this list at its time limit, because it has no index for "
        f"{', '.join(unindexed)}. Leave these out, or narrow the list by one of: "
        f"{', '.join(servers.INDEXED)}, changes-since."
    )


def _parse_query(request: Request, operation: str) -> ServerFilters | None:
    """Return the filters of the query, or before 2.38 None if no requested status exists.

    Args:
        request: The request.
        operation: Part of the policy rule for all_tenants: index or detail.

    Raises:
        BadRequest: A parameter is invalid, or since 2.38 no requested status exists.
        Forbidden: The caller may not list deleted servers or all projects, or use the sort key.
    """
    all_filters = request.allows(_API + "servers:allow_all_filters")
    filters = _parse_filters(request, all_filters)
    listed_states, is_known = _parse_statuses(request.query.get("status", ()))
    if not is_known:
        if request.version in _STRICT_STATUS:
            raise errors.BadRequest("Invalid status value")
        return None
    since, before = request.changed
    deleted = _parse_deleted(request, all_filters, (since, before) != (None, None))
    if listed_states is not None and [vm for vm, _, _ in listed_states] == [states.DELETED]:
        if not all_filters:
            raise errors.Forbidden("Only administrators may list deleted instances")
        deleted = True
    return ServerFilters(
        project_id=_choose_project(request, operation, all_filters),
        deleted=deleted,
        filters=filters,
        states=listed_states,
        tags=_parse_tags(request),
        soft_deleted=_parse_soft_deleted(request, all_filters, deleted, listed_states),
        changed_since=since,
        changed_before=before,
        sort=_parse_sort(request),
        marker=request.query_value("marker"),
        limit=request.limit,
    )


def _parse_filters(request: Request, all_filters: bool) -> JsonObject:
    """Return the filters on fields of servers that the caller may use. Others are ignored.

    ``all_filters`` is True if the policy allows the caller every column as a filter. Other callers
    may use ``_OPEN_FILTERS`` at their microversions. Since 2.73 all callers may use ``locked``.

    Raises:
        BadRequest: Nova refuses the attribute as a filter, the name begins with an underscore, or
            ``locked`` is not a boolean.
    """
    filters: JsonObject = {}
    for name, values in request.query.items():
        if name in _NO_FILTER or name.startswith("_"):
            raise errors.BadRequest(f"Invalid filter field: {name}.")
        usable = (all_filters and name in servers.COLUMNS) or request.version in _OPEN_FILTERS.get(
            name, Range("2.9999")
        )
        if name not in _OTHER and (usable or (all_filters and name in ("ip", "ip6"))):
            filters[name] = is_true(values[-1]) if name == "config_drive" else values[-1]
    if request.version in _LOCKED_FILTER and "locked" in request.query:
        filters["locked"] = _parse_boolean(request, "locked")
    return filters


def _parse_tags(request: Request) -> dict[str, list[str]]:
    """Return the tags of each tag filter in the query, or {} before 2.26.

    A filter in the query separates tags by commas.
    """
    if request.version not in Range("2.26"):
        return {}
    return {name: text.split(",") for name in _TAGS if (text := request.query_value(name))}


def _parse_boolean(request: Request, name: str) -> bool:
    """Return a boolean parameter. Raises BadRequest for a value that is not a boolean."""
    value = (request.query_value(name) or "").strip().lower()
    if value not in ("true", "false", "1", "0", "yes", "no", "on", "off", "t", "f", "y", "n"):
        raise errors.BadRequest(f"Invalid {name} value '{value[:40]}': give true or false.")
    return is_true(value)


States = list[tuple[str, Sequence[str], Sequence[str]]]


def _parse_statuses(statuses: Sequence[str]) -> tuple[States | None, bool]:
    """Return the states with one of these statuses, and whether any of the statuses exists.

    A state is a vm_state with two lists of task_states: the states that match (empty: all) and
    those that do not match. Without statuses the result is (None, True), which means no filter.
    """
    if not statuses:
        return None, True
    matching: States = []
    for status in statuses:
        for vm_state, tasks in states.vm_states_of(status.upper()):
            matching.append((vm_state, tasks, () if tasks else _list_other_tasks(vm_state)))
    return matching, bool(matching)


def _list_other_tasks(vm_state: str) -> tuple[str, ...]:
    """Return the task_states that change the status of a server in this vm_state."""
    task_states = {
        value for name, value in vars(states).items() if name.isupper() and isinstance(value, str)
    }
    return tuple(
        sorted(
            task_state
            for task_state in task_states
            if states.status(vm_state, task_state) != states.status(vm_state, None)
        )
    )


def _parse_deleted(request: Request, all_filters: bool, by_time: bool) -> bool | None:
    """Return the filter on deleted servers: True for deleted servers only, False for existing ones.

    None means both kinds, which is the default of a list by time (``by_time``). Only callers that
    may use all filters can choose.

    Raises:
        BadRequest: The parameter is not a boolean.
    """
    if all_filters and "deleted" in request.query:
        return _parse_boolean(request, "deleted")
    return None if by_time else False


def _parse_soft_deleted(
    request: Request, all_filters: bool, deleted: bool | None, listed: States | None
) -> bool:
    """Return whether the list includes soft-deleted servers.

    The list includes them if a caller that may use all filters requests them, if deleted servers
    are included (``deleted``), or if the states of the status filter (``listed``) contain theirs.

    Raises:
        BadRequest: The parameter is not a boolean.
    """
    requested = (
        all_filters and "soft_deleted" in request.query and _parse_boolean(request, "soft_deleted")
    )
    return (
        requested
        or deleted is not False
        or states.SOFT_DELETED in [vm_state for vm_state, _, _ in listed or ()]
    )


def _choose_project(request: Request, operation: str, all_filters: bool) -> str | None:
    """Return the project of the listed servers, or None for all projects.

    Without all_tenants, or with all_tenants=0, this is the caller's project. With all_tenants, a
    caller that may use all filters can choose a project with project_id or tenant_id.

    Raises:
        Forbidden: The policy does not allow all_tenants.
        BadRequest: all_tenants has a value that is not a boolean.
    """
    all_tenants = request.query_value("all_tenants")
    if all_tenants is None or (all_tenants != "" and not _parse_boolean(request, "all_tenants")):
        return request.context.project_id
    request.require(f"{_API}servers:{operation}:get_all_tenants")
    if not all_filters:
        return None
    return request.query_value("project_id") or request.query_value("tenant_id")


def _parse_sort(request: Request) -> list[tuple[str, bool]]:
    """Return the sort keys, each with True for descending order.

    Keys without a direction are descending. Without keys the first direction applies to created_at.

    Raises:
        BadRequest: A direction is unknown, or the query has keys and more directions than keys.
        Forbidden: Only administrators may use the key (``_ADMIN_SORT``).
    """
    keys, directions = request.query.get("sort_key", []), request.query.get("sort_dir", [])
    if any(direction.lower() not in ("asc", "desc") for direction in directions):
        raise errors.BadRequest("Unknown sort direction, must be one of: asc, desc")
    if len(directions) > len(keys) and keys:
        raise errors.BadRequest("There are more sort directions than sort keys.")
    if not request.is_admin:
        for key in keys:
            if key in _ADMIN_SORT:
                raise errors.Forbidden(f"Only administrators can sort servers by {key}")
    directions = directions + ["desc"] * len(keys)
    keys = keys or (["created_at"] if directions else [])
    return [
        (key, direction.lower() == "desc") for key, direction in zip(keys, directions, strict=False)
    ]


def show(request: Request, server: ServerRecord) -> JsonObject:
    """Return one server for GET /servers/{id}."""
    return view.one(server, _make_view(request, server), request.version)


def show_rebuilt(request: Request, server: ServerRecord, password: str) -> JsonObject:
    """Return the response body of a rebuild, with the new password of the server."""
    return view.rebuilt(server, _make_view(request, server), request.version, password)


def _make_view(request: Request, server: ServerRecord) -> view.ServerView:
    """Return the additional data for the response about one server.

    This reads only volumes, and the facts of the host if the caller may see these.
    """
    server_view = view.ServerView(
        request.links, request.is_admin, request.allowed(view.RULES), vault=request.services.vault
    )

    host = server.host if view.shows_hosts(server_view.allowed) else None

    def work(tx: Connection) -> None:
        if host:
            server_view.hosts = servers.host_facts(tx, [host])
        if server.volumes:
            server_view.volumes = volumes.of_some(tx, [server.id])

    if host or server.volumes:
        request.read(work)
    return server_view


#: Field of PUT /servers/{id} -> column.
_UPDATED = {
    "name": "name",
    "description": "description",
    "accessIPv4": "access_ip_v4",
    "accessIPv6": "access_ip_v6",
    "OS-DCF:diskConfig": "disk_config",
    "hostname": "hostname",
    "pinned_availability_zone": "pinned_availability_zone",
}


def update(request: Request, server: ServerRecord) -> JsonObject:
    """Update fields that need no work on a host, and return the server for PUT /servers/{id}.

    Raises:
        Conflict: A requested zone is not the server's current zone, or is requested while the
            server is being moved.
    """
    body = request.body["server"]
    values = {column: body[key] for key, column in _UPDATED.items() if key in body}
    if "name" in values:
        values["name"] = values["name"].strip()
    values |= {
        column: server_fields.parse_access_ip(values[column])
        for column in ("access_ip_v4", "access_ip_v6")
        if column in values
    }
    zone = body.get("pinned_availability_zone")

    def work(tx: Connection) -> ServerRecord:
        if values:
            # The update also locks the row, so that the server's zone cannot change.
            servers.update(tx, server.id, values)
        row: ServerRecord = servers.show(tx, server.id)
        if zone is not None and zone != row.availability_zone:
            raise errors.Conflict(
                f"Instance {server.id} is in availability zone {row.availability_zone}. Give this "
                "zone as pinned_availability_zone, or null to remove the pin."
            )
        if zone is not None and migrations.open_of(tx, [server.id]):
            raise errors.Conflict(
                f"Instance {server.id} is being moved. Pin the instance after the move has ended, or "
                "after a resize is confirmed or reverted."
            )
        return row

    row = request.write(work)
    return view.one(row, _make_view(request, row), request.version, change=True)


SOFT_DELETE, DELETE = (
    next(row for row in states.ACTIONS if row.key == key) for key in ("softDelete", "delete")
)


def delete(request: Request, server: ServerRecord) -> None:
    """Begin the deletion of a server for DELETE /servers/{id}, even if another action is running.

    With a ``reclaim_interval`` of 0 servers are not soft-deleted. Otherwise a server is
    soft-deleted, and a server that is already soft-deleted stays unchanged. If the server's state
    does not allow a soft delete, for example during another action, the server is deleted without
    a soft delete. For servers in ERROR see ``_begin_broken``.

    Raises:
        Conflict: The server is locked, or its state does not allow the deletion.
    """
    if request.services.settings.reclaim_interval == 0:
        rows: tuple[states.Action, ...] = (DELETE,)
    elif (server.vm_state, server.task_state) == (states.SOFT_DELETED, None):
        return request.check(DELETE, server)
    else:
        rows = (SOFT_DELETE, DELETE)
    request.begin(
        _begin_first if len(rows) == 1 or server.vm_state != states.ERROR else _begin_broken,
        rows,
        server.id,
    )
    request.services.wakeup.wake()
    return None


def _begin_broken(
    tx: Connection,
    rows: Sequence[states.Action],
    server_id: str,
    **named: Any,  # noqa: ANN401 - passed on unchanged
) -> str:
    """Begin the deletion of a server in ERROR, and return the id of the action.

    ``rows`` are the actions softDelete and delete. The server is soft-deleted if it has run, is on
    a host, and its last action is not a soft delete that failed. Otherwise, or if the state does
    not allow a soft delete, the server is deleted without a soft delete.
    """
    row = actions.take_lock(tx, server_id, named["project_id"])
    last = actions.list_for(tx, server_id, limit=1)
    failed = last and (last[0].workflow, last[0].state) == ("soft_delete", ActionState.FAILED)
    kept = row.host is not None and row.launched_at is not None and not failed
    return _begin_first(tx, rows if kept else rows[-1:], server_id, **named)


def _begin_first(
    tx: Connection,
    rows: Sequence[states.Action],
    server_id: str,
    **named: Any,  # noqa: ANN401 - passed on unchanged
) -> str:
    """Begin the first action in ``rows`` that the server's state and running action allow.

    Return the id of the action. If no row is allowed, raise the error of the last row. Other
    errors, for example Locked, are raised at once.
    """
    *others, last = rows
    for row in others:
        try:
            return actions.begin(tx, row, server_id, **named)
        except (errors.WrongState, errors.Busy):
            continue
    return actions.begin(tx, last, server_id, **named)
