# SPDX-License-Identifier: Apache-2.0
"""/os-simple-tenant-usage: hours of servers, CPUs, memory and disks of projects in a period.

The database adds up the sums of all projects. Single servers are read only where they are shown, in
pages since 2.40."""

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
    """GET /os-simple-tenant-usage: of every project, in one period; ``detailed`` with its
    servers."""
    detailed = request.first("detailed") == "1"
    items, marker = _usages(request, None, detailed)
    if request.version not in _PAGED:
        return {"tenant_usages": items}
    return _paged(request, "tenant_usages", "os-simple-tenant-usage", items, marker)


def show(request: Request, project_id: str) -> JsonObject:
    """GET /os-simple-tenant-usage/{project}: with its servers."""
    request.require("os_compute_api:os-simple-tenant-usage:show", {"project_id": project_id})
    items, marker = _usages(request, project_id, detailed=True)
    item = items[0] if items else {}
    if request.version not in _PAGED:
        return {"tenant_usage": item}
    return _paged(request, "tenant_usage", f"os-simple-tenant-usage/{project_id}", item, marker)


def _paged(
    request: Request, name: str, path: str, content: object, marker: str | None
) -> JsonObject:
    """``marker``: the last server of a page that is full."""
    body = {name: content}
    if marker is not None:
        body[f"{name}_links"] = request.links.next(path, request.query, marker)
    return body


def _usages(
    request: Request, project_id: str | None, detailed: bool
) -> tuple[list[JsonObject], str | None]:
    paged = request.version in _PAGED

    def work(tx: Connection) -> tuple[list[JsonObject], str | None]:
        now = moment(tx)
        period = _period(request, now)
        if not (paged or detailed):
            used = list(usage.sums(tx, period, project_id))
        else:
            used = list(
                usage.of_servers(
                    tx,
                    period,
                    project_id,
                    *((request.first("marker"), request.limit) if paged else ()),
                )
            )
        full = paged and bool(used) and len(used) == request.limit
        return [
            _usage(project, list(mine), period, detailed, now)
            for project, mine in groupby(used, lambda one: one.project_id)
        ], used[-1].id if full else None

    return request.read(work)


def _period(request: Request, now: int) -> Period:
    """By default the moment at which it is asked."""
    since, until = (_time(request.first(name), now) for name in ("start", "end"))
    if since >= until and (request.first("start") or request.first("end")):
        raise errors.BadRequest(
            "Invalid start time. The start time cannot occur after the end time."
        )
    return Period(since, until)


def _time(text: str | None, now: int) -> int:
    if not text:
        return now
    for form in _FORMATS:
        try:
            return clock.parse(datetime.strptime(text, form).replace(tzinfo=UTC).isoformat())
        except ValueError:
            continue
    raise errors.BadRequest(
        f"Invalid datetime string: {text[:80]}; a time is written like 2026-01-31T23:59:59."
    )


def _usage(project: str, used: list[Used], period: Period, detailed: bool, now: int) -> JsonObject:
    """What a project has used."""
    more = {"server_usages": [_server(one, now) for one in used]} if detailed else {}
    return {
        "tenant_id": project,
        "start": format_micros(period.since),
        "stop": format_micros(period.until),
        "total_hours": _hours(used),
        "total_memory_mb_usage": _hours(used, lambda flavor: flavor.memory_mb),
        "total_vcpus_usage": _hours(used, lambda flavor: flavor.vcpus),
        "total_local_gb_usage": _hours(used, _local_gb),
        **more,
    }


def _local_gb(flavor: Flavor) -> int:
    return int(flavor.root_gb + flavor.ephemeral_gb)


def _hours(used: Iterable[Used], of: Callable[[Flavor], int] = lambda flavor: 1) -> float:
    """Of this much of each server."""
    return float(sum(one.micros * of(one.flavor) for one in used) / _HOUR)


def _server(one: Used, now: int) -> JsonObject:
    return {
        "instance_id": one.id,
        "name": one.name,
        "tenant_id": one.project_id,
        "flavor": one.flavor.name,
        "hours": one.micros / _HOUR,
        "vcpus": one.flavor.vcpus,
        "memory_mb": one.flavor.memory_mb,
        "local_gb": _local_gb(one.flavor),
        "started_at": format_micros(one.launched_at),
        "ended_at": format_micros(one.terminated_at),
        "state": one.vm_state if one.terminated_at is None else "terminated",
        "uptime": ((one.terminated_at or now) - one.launched_at) // SECOND,
    }
