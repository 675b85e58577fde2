# SPDX-License-Identifier: Apache-2.0
"""/os-hypervisors: hosts, their capacity and their servers.

The id is the number of the host's service; since 2.53 the UUID of the host's resource provider, by
which Placement knows the host. The uptime is read from the hosts
themselves; a host that is down or does not answer has none."""

from __future__ import annotations

from common.domain import errors, ids
from common.domain.json_types import JsonObject
from common.domain.statuses import HostState
from common.store.hosts import hosts
from common.store.servers import servers
from compute_api.compute.request.host_queries import query_hosts
from compute_api.compute.request.request import Request
from compute_api.compute.views import hypervisors as view
from compute_api.compute.views.fields import Field
from compute_api.http.validation import is_true

Row = JsonObject


def index(request: Request) -> JsonObject:
    """GET /os-hypervisors"""
    return _list(request, "os-hypervisors", view.NAMES, "service_id")


def detail(request: Request) -> JsonObject:
    """GET /os-hypervisors/detail"""
    return _list(request, "os-hypervisors/detail", view.FIELDS, "service_id")


def index_by_uuid(request: Request) -> JsonObject:
    """GET /os-hypervisors (since 2.53)"""
    return _list(request, "os-hypervisors", view.NAMES, "provider_uuid")


def detail_by_uuid(request: Request) -> JsonObject:
    """GET /os-hypervisors/detail (since 2.53)"""
    return _list(request, "os-hypervisors/detail", view.FIELDS, "provider_uuid")


def _list(request: Request, path: str, fields: tuple[Field, ...], key: str) -> JsonObject:
    known = (
        request.route.query.at(request.version).document["properties"]
        if request.route.query
        else {}
    )
    pattern = (
        request.first("hypervisor_hostname_pattern")
        if "hypervisor_hostname_pattern" in known
        else None
    )
    paged = "limit" in known and pattern is None
    if pattern is not None:
        if {"limit", "marker"} & set(request.query):
            raise errors.BadRequest(
                "Paging over hypervisors with the hypervisor_hostname_pattern query parameter is "
                "not supported."
            )
        rows = _found(request, pattern)
    elif paged:
        rows = request.read(hosts.list_all, after=_marked(request, key), limit=request.limit)
    else:
        rows = request.read(hosts.list_all)
    _ask_uptimes(request, rows, fields)
    items = view.many(rows, request.version, _servers(request, rows), fields)
    if not paged:
        return {"hypervisors": items}
    return request.page("hypervisors", path, items, str(rows[-1][key]) if rows else None)


def _marked(request: Request, key: str) -> int | None:
    """The number of the service behind which the page begins."""
    marker = request.first("marker")
    if marker is None:
        return None
    row = _row(request, marker, key)
    if row is None:
        raise errors.BadRequest(f"marker [{marker[:80]}] not found")
    return int(row["service_id"])


def _row(request: Request, hypervisor_id: str, key: str) -> Row | None:
    value = ids.number(hypervisor_id) if key == "service_id" else hypervisor_id
    if value is None:
        return None
    return next(iter(request.read(hosts.list_all, **{key: value})), None)


def _servers(
    request: Request, rows: list[Row], always: bool = False
) -> dict[str, list[dict[str, str]]] | None:
    """Host to servers, when they were asked for (a parameter since 2.53)."""
    known = (
        request.route.query.at(request.version).document["properties"]
        if request.route.query
        else {}
    )
    if not always and not ("with_servers" in known and is_true(request.first("with_servers"))):
        return None
    return request.read(servers.on_hosts, [row["name"] for row in rows])


def show(request: Request, hypervisor_id: str) -> JsonObject:
    """GET /os-hypervisors/{number}"""
    return _show(request, hypervisor_id, "service_id")


def show_by_uuid(request: Request, hypervisor_id: str) -> JsonObject:
    """GET /os-hypervisors/{uuid}"""
    return _show(request, _uuid(hypervisor_id), "provider_uuid")


def _uuid(text: str) -> str:
    if not ids.is_uuid(text):
        raise errors.BadRequest(f"Invalid uuid {text[:80]}")
    return text


def _one(request: Request, hypervisor_id: str, key: str) -> Row:
    row = _row(request, hypervisor_id, key)
    if row is None:
        raise errors.NotFound(f"Hypervisor with ID '{hypervisor_id[:80]}' could not be found.")
    return row


def _show(request: Request, hypervisor_id: str, key: str) -> JsonObject:
    row = _one(request, hypervisor_id, key)
    _ask_uptimes(request, [row], view.FIELDS)
    return {"hypervisor": view.one(row, request.version, _servers(request, [row]))}


def uptime(request: Request, hypervisor_id: str) -> JsonObject:
    """GET /os-hypervisors/{number}/uptime"""
    return _uptime(request, _one(request, hypervisor_id, "service_id"))


def uptime_by_uuid(request: Request, hypervisor_id: str) -> JsonObject:
    """GET /os-hypervisors/{uuid}/uptime"""
    return _uptime(request, _one(request, _uuid(hypervisor_id), "provider_uuid"))


def _uptime(request: Request, row: Row) -> JsonObject:
    silent = errors.BadRequest(f"Compute service of {row['name']} is unavailable at this time.")
    if view.state(row) != HostState.UP:
        raise silent
    answer = query_hosts(request, [row["name"]], "uptime")[row["name"]]
    if isinstance(answer, errors.NoAnswer):
        raise silent from answer
    if isinstance(answer, errors.Problem):
        raise answer
    return {
        "hypervisor": view.one(
            {**row, "uptime": answer["uptime"]}, request.version, None, view.UPTIME
        )
    }


def _ask_uptimes(request: Request, rows: list[Row], fields: tuple[Field, ...]) -> None:
    """Since 2.88 a hypervisor's details tell it, if the host does, and is asked: not when too many
    requests wait."""
    if fields is not view.FIELDS or request.version not in view.WITH_UPTIME:
        return
    try:
        answers = query_hosts(
            request, [row["name"] for row in rows if view.state(row) == HostState.UP], "uptime"
        )
    except errors.Unavailable:
        answers = {}
    for row in rows:
        answer = answers.get(row["name"])
        row["uptime"] = answer["uptime"] if isinstance(answer, dict) else None


def search(request: Request, hypervisor_id: str) -> JsonObject:
    """GET /os-hypervisors/{pattern}/search"""
    return {
        "hypervisors": view.many(_found(request, hypervisor_id), request.version, None, view.NAMES)
    }


def servers_of(request: Request, hypervisor_id: str) -> JsonObject:
    """GET /os-hypervisors/{pattern}/servers"""
    rows = _found(request, hypervisor_id)
    return {
        "hypervisors": view.many(
            rows, request.version, _servers(request, rows, always=True), view.NAMES
        )
    }


def _found(request: Request, pattern: str) -> list[Row]:
    rows = request.read(hosts.list_all, pattern=pattern)
    if not rows:
        raise errors.NotFound(f"No hypervisor matching '{pattern[:80]}' could be found.")
    return rows


def refused_node(request: Request, **ignored: str) -> None:
    """POST and DELETE of /os-baremetal-nodes, which were never carried out here."""
    raise errors.BadRequest("Command Not supported. Please use the bare metal service for this.")


def statistics(request: Request) -> JsonObject:
    """GET /os-hypervisors/statistics"""
    return {"hypervisor_statistics": view.statistics(request.read(hosts.list_all), request.version)}
