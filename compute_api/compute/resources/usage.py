# SPDX-License-Identifier: Apache-2.0
"""/os-simple-tenant-usage: hours of servers, CPUs, memory and disks of projects in a period.

The database computes the sums of projects. Single servers are read only if the response shows them,
in pages since 2.40.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import groupby

from common.domain import clock, errors
from common.domain.clock import SECOND
from common.domain.json_types import JsonObject
from common.domain.models import Flavor
from common.store.engine import Connection, moment
from common.store.tenants import usage
from common.store.tenants.usage import Period, Used
from compute_api.compute.request.request import Request
from compute_api.compute.views.times import format_micros
from compute_api.http.microversions import Range

_PAGED = Range("2.40")
_FORMATS = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S.%f", "%Y-%m-%d %H:%M:%S.%f")
_HOUR = 3600 * SECOND


def index(request: Request) -> JsonObject:
    """Return the usage by project in a period, for GET /os-simple-tenant-usage.

    Projects without a launched server in the period are left out. With ``detailed=1`` the response
    contains the servers too. Since 2.40 the response is one page, whose limit counts servers.
    """
    detailed = request.query_value("detailed") == "1"
    items, marker = _read_usages(request, None, detailed)
    if request.version not in _PAGED:
        return {"tenant_usages": items}
    return _build_page(request, "tenant_usages", "os-simple-tenant-usage", items, marker)


def show(request: Request, project_id: str) -> JsonObject:
    """Return the usage of one project with its servers, for GET /os-simple-tenant-usage/{project}.

    The usage is an empty object if the period (since 2.40, this page) has no launched server.
    """
    request.require("os_compute_api:os-simple-tenant-usage:show", {"project_id": project_id})
    items, marker = _read_usages(request, project_id, detailed=True)
    item = items[0] if items else {}
    if request.version not in _PAGED:
        return {"tenant_usage": item}
    return _build_page(
        request, "tenant_usage", f"os-simple-tenant-usage/{project_id}", item, marker
    )


def _build_page(
    request: Request, name: str, path: str, content: object, marker: str | None
) -> JsonObject:
    """Build the body of a page.

    Args:
        request: The request.
        name: Key of the content in the body.
        path: Path of the list below the versioned root.
        content: The usages of this page.
        marker: Id of the last server of a full page. None means that no page follows.
    """
    body = {name: content}
    if marker is not None:
        body[f"{name}_links"] = request.links.next(path, request.query, marker)
    return body


def _read_usages(
    request: Request, project_id: str | None, detailed: bool
) -> tuple[list[JsonObject], str | None]:
    """Return the usages by project, and the id of the last server if the page is full.

    Otherwise the id is None.

    Args:
        request: The request, whose query has the period and the page.
        project_id: Id of the project, or None for all projects.
        detailed: Whether the usages contain the servers.

    Raises:
        BadRequest: The period or the marker is invalid.
    """
    paged = request.version in _PAGED

    def work(tx: Connection) -> tuple[list[JsonObject], str | None]:
        now = moment(tx)
        period = _parse_period(request, now)
        if not (paged or detailed):
            usage_rows = list(usage.sums(tx, period, project_id))
        else:
            usage_rows = list(
                usage.of_servers(
                    tx,
                    period,
                    project_id,
                    *((request.query_value("marker"), request.limit) if paged else ()),
                )
            )
        is_full = paged and bool(usage_rows) and len(usage_rows) == request.limit
        return [
            _build_usage(project, list(project_rows), period, detailed, now)
            for project, project_rows in groupby(usage_rows, lambda row: row.project_id)
        ], usage_rows[-1].id if is_full else None

    return request.read(work)


def _parse_period(request: Request, now: int) -> Period:
    """Return the period of the query. Both ends default to now.

    If the query has neither end, the period is empty, which is no error.

    Raises:
        BadRequest: A time is invalid, or the start is not before the end.
    """
    since, until = (_parse_time(request.query_value(name), now) for name in ("start", "end"))
    if since >= until and (request.query_value("start") or request.query_value("end")):
        raise errors.BadRequest(
            "Invalid start time. The start time cannot occur after the end time."
        )
    return Period(since, until)


def _parse_time(text: str | None, now: int) -> int:
    if not text:
        return now
    for form in _FORMATS:
        try:
            return clock.parse(datetime.strptime(text, form).replace(tzinfo=UTC).isoformat())
        except ValueError:
            continue
    raise errors.BadRequest(
        f"Invalid datetime string: {text[:80]}; write the time like 2026-01-31T23:59:59."
    )


def _build_usage(
    project: str, rows: list[Used], period: Period, detailed: bool, now: int
) -> JsonObject:
    """Return the usage of a project, if ``detailed`` with its servers.

    The uptime of a server that still exists ends at ``now``.
    """
    details = {"server_usages": [_build_server(row, now) for row in rows]} if detailed else {}
    return {
        "tenant_id": project,
        "start": format_micros(period.since),
        "stop": format_micros(period.until),
        "total_hours": _sum_hours(rows),
        "total_memory_mb_usage": _sum_hours(rows, lambda flavor: flavor.memory_mb),
        "total_vcpus_usage": _sum_hours(rows, lambda flavor: flavor.vcpus),
        "total_local_gb_usage": _sum_hours(rows, _local_gb),
        **details,
    }


def _local_gb(flavor: Flavor) -> int:
    return int(flavor.root_gb + flavor.ephemeral_gb)


def _sum_hours(rows: Iterable[Used], amount: Callable[[Flavor], int] = lambda flavor: 1) -> float:
    """Return the sum over servers of hours multiplied by an amount of the flavor.

    Without ``amount`` this is the sum of the hours.
    """
    return float(sum(row.micros * amount(row.flavor) for row in rows) / _HOUR)


def _build_server(row: Used, now: int) -> JsonObject:
    return {
        "instance_id": row.id,
        "name": row.name,
        "tenant_id": row.project_id,
        "flavor": row.flavor.name,
        "hours": row.micros / _HOUR,
        "vcpus": row.flavor.vcpus,
        "memory_mb": row.flavor.memory_mb,
        "local_gb": _local_gb(row.flavor),
        "started_at": format_micros(row.launched_at),
        "ended_at": format_micros(row.terminated_at),
        "state": row.vm_state if row.terminated_at is None else "terminated",
        "uptime": ((row.terminated_at or now) - row.launched_at) // SECOND,
    }
