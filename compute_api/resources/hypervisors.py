# SPDX-License-Identifier: Apache-2.0
"""Hypervisors: the hosts, what they have and what runs there.

Known by the number of their service, since 2.53 by its uuid.
"""
from __future__ import annotations

from typing import Any

from common import errors, ids
from common.store import hosts, servers
from compute_api.request import Request
from compute_api.validation import truth
from compute_api.views import hypervisors as view

Row = dict[str, Any]


def index(request: Request) -> dict[str, Any]:
    """GET /os-hypervisors"""
    return _list(request, "os-hypervisors", view.NAMES, "service_id")


def detail(request: Request) -> dict[str, Any]:
    """GET /os-hypervisors/detail"""
    return _list(request, "os-hypervisors/detail", view.FIELDS, "service_id")


def index_by_uuid(request: Request) -> dict[str, Any]:
    """GET /os-hypervisors (since 2.53)"""
    return _list(request, "os-hypervisors", view.NAMES, "service_uuid")


def detail_by_uuid(request: Request) -> dict[str, Any]:
    """GET /os-hypervisors/detail (since 2.53)"""
    return _list(request, "os-hypervisors/detail", view.FIELDS, "service_uuid")


def _list(request: Request, path: str, fields: Any, key: str) -> dict[str, Any]:
    known = request.route.query.at(request.version).document["properties"] if request.route.query else {}
    pattern = request.first("hypervisor_hostname_pattern") if "hypervisor_hostname_pattern" in known else None
    if pattern is not None and {"limit", "marker"} & set(request.query):
        raise errors.BadRequest("Paging over hypervisors with the hypervisor_hostname_pattern query parameter is not "
                                "supported.")
    rows = _matching(request.read(hosts.list_all), pattern)
    if pattern is not None and not rows:
        raise errors.NotFound(f"No hypervisor matching '{pattern}' could be found.")
    if "limit" in known and pattern is None:
        rows = _after(rows, request.first("marker"), key)[:request.limit]
    items = view.many(rows, request.version, _servers(request, rows), fields)
    if "limit" not in known:
        return {"hypervisors": items}
    return request.page("hypervisors", path, items, str(rows[-1][key]) if rows else None)


def _matching(rows: list[Row], pattern: str | None) -> list[Row]:
    return [row for row in rows if pattern is None or pattern in row["hypervisor_hostname"]]


def _after(rows: list[Row], marker: str | None, key: str) -> list[Row]:
    """The rows behind the one that the marker names; their order is that of their numbers."""
    if marker is None:
        return rows
    for index, row in enumerate(rows):
        if str(row[key]) == marker:
            return rows[index + 1:]
    raise errors.BadRequest(f"marker [{marker}] not found")


def _servers(request: Request, rows: list[Row], always: bool = False) -> dict[str, list[dict[str, str]]] | None:
    """Host to servers, when they were asked for (a parameter since 2.53)."""
    known = request.route.query.at(request.version).document["properties"] if request.route.query else {}
    if not always and not ("with_servers" in known and truth(request.first("with_servers"))):
        return None
    return request.read(servers.on_hosts, [row["name"] for row in rows])


def show(request: Request, hypervisor_id: str) -> dict[str, Any]:
    """GET /os-hypervisors/{number}"""
    return _show(request, hypervisor_id, "service_id")


def show_by_uuid(request: Request, hypervisor_id: str) -> dict[str, Any]:
    """GET /os-hypervisors/{uuid}"""
    return _show(request, _uuid(hypervisor_id), "service_uuid")


def _uuid(text: str) -> str:
    if not ids.is_uuid(text):
        raise errors.BadRequest(f"Invalid uuid {text[:80]}")
    return text


def _one(request: Request, hypervisor_id: str, key: str) -> Row:
    for row in request.read(hosts.list_all):
        if str(row[key]) == hypervisor_id:
            return row
    raise errors.NotFound(f"Hypervisor with ID '{hypervisor_id}' could not be found.")


def _show(request: Request, hypervisor_id: str, key: str) -> dict[str, Any]:
    row = _one(request, hypervisor_id, key)
    return {"hypervisor": view.one(row, request.version, _servers(request, [row]))}


def uptime(request: Request, hypervisor_id: str) -> dict[str, Any]:
    """GET /os-hypervisors/{number}/uptime: hosts do not tell it."""
    return _uptime(_one(request, hypervisor_id, "service_id"))


def uptime_by_uuid(request: Request, hypervisor_id: str) -> dict[str, Any]:
    """GET /os-hypervisors/{uuid}/uptime"""
    return _uptime(_one(request, _uuid(hypervisor_id), "service_uuid"))


def _uptime(row: Row) -> dict[str, Any]:
    raise errors.NotImplementedHere(f"The driver of host {row['name']} does not tell its uptime.")


def search(request: Request, hypervisor_id: str) -> dict[str, Any]:
    """GET /os-hypervisors/{pattern}/search"""
    return {"hypervisors": view.many(_found(request, hypervisor_id), request.version, None, view.NAMES)}


def servers_of(request: Request, hypervisor_id: str) -> dict[str, Any]:
    """GET /os-hypervisors/{pattern}/servers"""
    rows = _found(request, hypervisor_id)
    return {"hypervisors": view.many(rows, request.version, _servers(request, rows, always=True), view.NAMES)}


def _found(request: Request, pattern: str) -> list[Row]:
    rows = _matching(request.read(hosts.list_all), pattern)
    if not rows:
        raise errors.NotFound(f"No hypervisor matching '{pattern}' could be found.")
    return rows


def refused_node(request: Request, **ignored: str) -> None:
    """POST and DELETE of /os-baremetal-nodes, which were never carried out here."""
    raise errors.BadRequest("Command Not supported. Please use the bare metal service for this.")


def statistics(request: Request) -> dict[str, Any]:
    """GET /os-hypervisors/statistics"""
    return {"hypervisor_statistics": view.statistics(request.read(hosts.list_all), request.version)}
