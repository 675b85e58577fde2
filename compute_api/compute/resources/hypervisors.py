# SPDX-License-Identifier: Apache-2.0
"""Handlers of /os-hypervisors: hosts with their capacity and their servers.

Before 2.53 the id is the number of the host's service. Since 2.53 it is the UUID of the host's
resource provider, as in Placement. The uptime is read from the host itself. In the details (since
2.88) the uptime is null if the host is down or does not answer.
"""

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
    """Return hypervisors with id, name and state for GET /os-hypervisors before 2.53.

    Since 2.33 the list has pages.

    Raises:
        BadRequest: No hypervisor has the marker as id.
    """
    return _list(request, "os-hypervisors", view.NAMES, "service_id")


def detail(request: Request) -> JsonObject:
    """Return hypervisors with details for GET /os-hypervisors/detail before 2.53.

    Since 2.33 the list has pages.

    Raises:
        BadRequest: No hypervisor has the marker as id.
    """
    return _list(request, "os-hypervisors/detail", view.FIELDS, "service_id")


def index_by_uuid(request: Request) -> JsonObject:
    """Return hypervisors with id, name and state for GET /os-hypervisors since 2.53.

    With a pattern in the query return all hypervisors with matching names, otherwise one page.

    Raises:
        BadRequest: No hypervisor has the marker as id, or the query has a pattern and paging.
        NotFound: No hypervisor_hostname contains the pattern.
    """
    return _list(request, "os-hypervisors", view.NAMES, "provider_uuid")


def detail_by_uuid(request: Request) -> JsonObject:
    """Return hypervisors with details for GET /os-hypervisors/detail since 2.53.

    With a pattern in the query return all hypervisors with matching names, otherwise one page.

    Raises:
        BadRequest: No hypervisor has the marker as id, or the query has a pattern and paging.
        NotFound: No hypervisor_hostname contains the pattern.
    """
    return _list(request, "os-hypervisors/detail", view.FIELDS, "provider_uuid")


def _list(request: Request, path: str, fields: tuple[Field, ...], key: str) -> JsonObject:
    parameters = (
        request.route.query.at(request.version).document["properties"]
        if request.route.query
        else {}
    )
    pattern = (
        request.query_value("hypervisor_hostname_pattern")
        if "hypervisor_hostname_pattern" in parameters
        else None
    )
    is_paged = "limit" in parameters and pattern is None
    if pattern is not None:
        if {"limit", "marker"} & set(request.query):
            raise errors.BadRequest(
                "Paging over hypervisors with the hypervisor_hostname_pattern query parameter is "
                "not supported."
            )
        rows = _find_by_pattern(request, pattern)
    elif is_paged:
        rows = request.read(hosts.list_all, after=_find_marker(request, key), limit=request.limit)
    else:
        rows = request.read(hosts.list_all)
    _add_uptimes(request, rows, fields)
    items = view.many(rows, request.version, _read_servers(request, rows), fields)
    if not is_paged:
        return {"hypervisors": items}
    return request.page("hypervisors", path, items, str(rows[-1][key]) if rows else None)


def _find_marker(request: Request, key: str) -> int | None:
    """Return the number of the service after which the page begins, or None for the first page.

    Raises:
        BadRequest: No hypervisor has the marker as id.
    """
    marker = request.query_value("marker")
    if marker is None:
        return None
    row = _find_row(request, marker, key)
    if row is None:
        raise errors.BadRequest(f"marker [{marker[:80]}] not found")
    return int(row["service_id"])


def _find_row(request: Request, hypervisor_id: str, key: str) -> Row | None:
    """Return the row of a hypervisor, or None if no hypervisor has this id.

    Args:
        request: The request.
        hypervisor_id: Number or UUID in the request.
        key: The kind of the id: service_id (a number) or provider_uuid.
    """
    value = ids.number(hypervisor_id) if key == "service_id" else hypervisor_id
    if value is None:
        return None
    return next(iter(request.read(hosts.list_all, **{key: value})), None)


def _read_servers(
    request: Request, rows: list[Row], always: bool = False
) -> dict[str, list[dict[str, str]]] | None:
    """Return host -> servers, or None if the response does not show servers.

    The response shows them if ``always`` is True or the query has with_servers (since 2.53).
    """
    parameters = (
        request.route.query.at(request.version).document["properties"]
        if request.route.query
        else {}
    )
    if not always and not (
        "with_servers" in parameters and is_true(request.query_value("with_servers"))
    ):
        return None
    return request.read(servers.on_hosts, [row["name"] for row in rows])


def show(request: Request, hypervisor_id: str) -> JsonObject:
    """Return one hypervisor for GET /os-hypervisors/{number} before 2.53.

    Raises:
        NotFound: The hypervisor does not exist.
    """
    return _show(request, hypervisor_id, "service_id")


def show_by_uuid(request: Request, hypervisor_id: str) -> JsonObject:
    """Return one hypervisor for GET /os-hypervisors/{uuid} since 2.53.

    Raises:
        BadRequest: The id is not a UUID.
        NotFound: The hypervisor does not exist.
    """
    return _show(request, _check_uuid(hypervisor_id), "provider_uuid")


def _check_uuid(text: str) -> str:
    if not ids.is_uuid(text):
        raise errors.BadRequest(f"Invalid uuid {text[:80]}")
    return text


def _get_row(request: Request, hypervisor_id: str, key: str) -> Row:
    row = _find_row(request, hypervisor_id, key)
    if row is None:
        raise errors.NotFound(f"Hypervisor with ID '{hypervisor_id[:80]}' could not be found.")
    return row


def _show(request: Request, hypervisor_id: str, key: str) -> JsonObject:
    row = _get_row(request, hypervisor_id, key)
    _add_uptimes(request, [row], view.FIELDS)
    return {"hypervisor": view.one(row, request.version, _read_servers(request, [row]))}


def uptime(request: Request, hypervisor_id: str) -> JsonObject:
    """Return the uptime of a host for GET /os-hypervisors/{number}/uptime before 2.53.

    Raises:
        NotFound: The hypervisor does not exist.
        BadRequest: The host is down or does not answer.
        Unavailable: Too many requests are waiting for hosts, or the host has no key.
        Problem: The host reports an error.
    """
    return _read_uptime(request, _get_row(request, hypervisor_id, "service_id"))


def uptime_by_uuid(request: Request, hypervisor_id: str) -> JsonObject:
    """Return the uptime of a host for GET /os-hypervisors/{uuid}/uptime, from 2.53 to 2.87.

    Raises:
        NotFound: The hypervisor does not exist.
        BadRequest: The id is not a UUID, or the host is down or does not answer.
        Unavailable: Too many requests are waiting for hosts, or the host has no key.
        Problem: The host reports an error.
    """
    return _read_uptime(request, _get_row(request, _check_uuid(hypervisor_id), "provider_uuid"))


def _read_uptime(request: Request, row: Row) -> JsonObject:
    unavailable = errors.BadRequest(
        f"Compute service of {row['name']} is unavailable at this time."
    )
    if view.state(row) != HostState.UP:
        raise unavailable
    answer = query_hosts(request, [row["name"]], "uptime").get(row["name"])
    if answer is None or isinstance(answer, errors.NoAnswer):
        raise unavailable from answer
    if isinstance(answer, errors.Problem):
        raise answer
    return {
        "hypervisor": view.one(
            {**row, "uptime": answer["uptime"]}, request.version, None, view.UPTIME
        )
    }


def _add_uptimes(request: Request, rows: list[Row], fields: tuple[Field, ...]) -> None:
    """Add the uptime to rows if the response shows details, since 2.88.

    The uptime is None if the host is down, has no key, does not answer in time or reports an error,
    or if too many requests are waiting.
    """
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
    """Return the hypervisors with matching names for GET /os-hypervisors/{pattern}/search.

    Raises:
        NotFound: No hypervisor_hostname contains the pattern.
    """
    return {
        "hypervisors": view.many(
            _find_by_pattern(request, hypervisor_id), request.version, None, view.NAMES
        )
    }


def servers_of(request: Request, hypervisor_id: str) -> JsonObject:
    """Return matching hypervisors with their servers for GET /os-hypervisors/{pattern}/servers.

    Raises:
        NotFound: No hypervisor_hostname contains the pattern.
    """
    rows = _find_by_pattern(request, hypervisor_id)
    return {
        "hypervisors": view.many(
            rows, request.version, _read_servers(request, rows, always=True), view.NAMES
        )
    }


def _find_by_pattern(request: Request, pattern: str) -> list[Row]:
    rows = request.read(hosts.list_all, pattern=pattern)
    if not rows:
        raise errors.NotFound(f"No hypervisor matching '{pattern[:80]}' could be found.")
    return rows


def refused_node(request: Request, **ignored: str) -> None:
    """Refuse POST and DELETE of /os-baremetal-nodes with BadRequest and Nova's text."""
    raise errors.BadRequest("Command Not supported. Please use the bare metal service for this.")


def statistics(request: Request) -> JsonObject:
    """Return the count of enabled hosts, and sums of their fields, for GET …/statistics."""
    return {"hypervisor_statistics": view.statistics(request.read(hosts.list_all), request.version)}
