# SPDX-License-Identifier: Apache-2.0
"""Availability zones: where servers can be, and which services are there."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from common.domain.service_binaries import Binary
from common.store.engine import Connection
from common.store.hosts import aggregates, services
from common.store.rows import HeardServiceRow
from compute_api.compute.request.request import Request
from compute_api.compute.resources.services import INTERNAL
from compute_api.compute.views.times import format_micros


def index(request: Request) -> JsonObject:
    """GET /os-availability-zone: the zones that servers can be in."""
    rows, by_host = _read(request)
    found: dict[str, bool] = {}
    for row in rows:
        if row.binary == Binary.COMPUTE:
            zone = by_host[row.host]
            found[zone] = found.get(zone, False) or not row.disabled
    return {
        "availabilityZoneInfo": [
            {"zoneName": zone, "zoneState": {"available": available}, "hosts": None}
            for zone, available in sorted(found.items(), key=lambda item: (not item[1], item[0]))
        ]
    }


def detail(request: Request) -> JsonObject:
    """GET /os-availability-zone/detail: also who is in them."""
    rows, by_host = _read(request)
    found: dict[str, dict[str, JsonObject]] = {}
    enabled: dict[str, bool] = {}
    for row in rows:
        zone = by_host[row.host] if row.binary == Binary.COMPUTE else INTERNAL
        enabled[zone] = enabled.get(zone, False) or not row.disabled
        found.setdefault(zone, {}).setdefault(row.host, {})[row.binary] = {
            "active": not row.disabled,
            "available": bool(row.up) and not row.forced_down,
            "updated_at": format_micros(row.seen_at),
        }
    return {
        "availabilityZoneInfo": [
            {
                "zoneName": zone,
                "zoneState": {"available": enabled[zone]},
                "hosts": hosts if enabled[zone] else None,
            }
            for zone, hosts in sorted(
                found.items(), key=lambda item: (not enabled[item[0]], item[0])
            )
        ]
    }


def _read(request: Request) -> tuple[list[HeardServiceRow], dict[str, str]]:
    def work(tx: Connection) -> tuple[list[HeardServiceRow], dict[str, str]]:
        return services.list_all(tx), aggregates.zones(tx, request.services.settings.default_zone)

    return request.read(work)
