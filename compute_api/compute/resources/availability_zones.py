# SPDX-License-Identifier: Apache-2.0
"""Handlers of availability zones, and of the services in each zone."""

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
    """Return the zones of compute hosts, for GET /os-availability-zone.

    A zone is available if at least one of its compute services is enabled.
    """
    rows, by_host = _read_services_and_zones(request)
    zones: dict[str, bool] = {}
    for row in rows:
        if row.binary == Binary.COMPUTE:
            zone = by_host[row.host]
            zones[zone] = zones.get(zone, False) or not row.disabled
    return {
        "availabilityZoneInfo": [
            {"zoneName": zone, "zoneState": {"available": available}, "hosts": None}
            for zone, available in sorted(zones.items(), key=lambda item: (not item[1], item[0]))
        ]
    }


def detail(request: Request) -> JsonObject:
    """Return all zones with hosts and services, for GET /os-availability-zone/detail.

    Services other than compute services are in the zone ``INTERNAL``. A zone without an enabled
    service is not available, and has no hosts in the response.
    """
    rows, by_host = _read_services_and_zones(request)
    hosts_by_zone: dict[str, dict[str, JsonObject]] = {}
    enabled: dict[str, bool] = {}
    for row in rows:
        zone = by_host[row.host] if row.binary == Binary.COMPUTE else INTERNAL
        enabled[zone] = enabled.get(zone, False) or not row.disabled
        hosts_by_zone.setdefault(zone, {}).setdefault(row.host, {})[row.binary] = {
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
                hosts_by_zone.items(), key=lambda item: (not enabled[item[0]], item[0])
            )
        ]
    }


def _read_services_and_zones(request: Request) -> tuple[list[HeardServiceRow], dict[str, str]]:
    """Return the services of all binaries, also of the control plane, and hosts -> zones.

    Hosts outside all zone aggregates have the default zone.
    """

    def work(tx: Connection) -> tuple[list[HeardServiceRow], dict[str, str]]:
        return services.list_all(tx), aggregates.zones(tx, request.services.settings.default_zone)

    return request.read(work)
