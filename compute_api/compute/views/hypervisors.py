# SPDX-License-Identifier: Apache-2.0
"""Hypervisors in responses: hosts with their capacity and usage.

Rows come from ``store.hosts``. ``view`` is a mapping of hosts to servers, or None if the request
does not include servers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from common.domain.json_types import JsonMapping, JsonObject
from common.domain.statuses import HostState
from compute_api.compute.views.fields import (
    OMITTED,
    Field,
    Get,
    render,
    render_readable,
    visible_fields,
)
from compute_api.http.microversions import Range


def state(row: JsonMapping) -> HostState:
    """Return UP if the conductors count the host as up and it is not forced down, else DOWN."""
    return HostState.UP if row["up"] and not row["forced_down"] else HostState.DOWN


def _build_service(row: JsonMapping, ident: object) -> JsonObject:
    return {"id": ident, "host": row["name"], "disabled_reason": row["disabled_reason"]}


def stock(row: JsonMapping, resource: str) -> dict[str, int]:
    """Return the total, used and reserved amounts of a host's resource class, 0 if unknown."""
    inventory = row["inventory"].get(resource, {})
    return {key: int(inventory.get(key, 0)) for key in ("total", "used", "reserved")}


def _get_total(resource: str) -> Get:
    return lambda row, view: stock(row, resource)["total"]


def _get_used(resource: str) -> Get:
    def get(row: JsonMapping, view: object) -> int:
        amounts = stock(row, resource)
        return amounts["used"] + amounts["reserved"]

    return get


def _get_free(resource: str) -> Get:
    def get(row: JsonMapping, view: object) -> int:
        amounts = stock(row, resource)
        return amounts["total"] - amounts["used"] - amounts["reserved"]

    return get


def _get_servers(row: JsonMapping, view: JsonMapping | None) -> object:
    servers = [] if view is None else view.get(row["name"], [])
    return servers or OMITTED


def _get_servers_always(row: JsonMapping, view: JsonMapping | None) -> object:
    return OMITTED if view is None else view.get(row["name"], [])


NAMES: tuple[Field, ...] = (
    Field("id", lambda row, view: row["service_id"], until="2.52"),
    Field("id", lambda row, view: row["provider_uuid"], since="2.53"),
    Field("hypervisor_hostname", lambda row, view: row["hypervisor_hostname"]),
    Field("state", lambda row, view: state(row)),
    Field("status", lambda row, view: "disabled" if row["disabled"] else "enabled"),
    Field("servers", _get_servers, until="2.74", optional=True),
    Field("servers", _get_servers_always, since="2.75", optional=True),
)
UPTIME: tuple[Field, ...] = (*NAMES, Field("uptime", lambda row, view: row["uptime"]))
#: The versions with the uptime in the details.
WITH_UPTIME = Range("2.88")
FIELDS: tuple[Field, ...] = (
    *NAMES,
    Field("service", lambda row, view: _build_service(row, row["service_id"]), until="2.52"),
    Field("service", lambda row, view: _build_service(row, row["service_uuid"]), since="2.53"),
    Field("hypervisor_type", lambda row, view: row["hypervisor_type"]),
    Field("hypervisor_version", lambda row, view: row["hypervisor_version"]),
    Field("host_ip", lambda row, view: row["host_ip"]),
    Field("cpu_info", lambda row, view: json.dumps(row["cpu_info"]), until="2.27"),
    Field("cpu_info", lambda row, view: row["cpu_info"], since="2.28", until="2.87"),
    Field("vcpus", _get_total("VCPU"), until="2.87"),
    Field("vcpus_used", lambda row, view: stock(row, "VCPU")["used"], until="2.87"),
    Field("memory_mb", _get_total("MEMORY_MB"), until="2.87"),
    Field("memory_mb_used", _get_used("MEMORY_MB"), until="2.87"),
    Field("free_ram_mb", _get_free("MEMORY_MB"), until="2.87"),
    Field("local_gb", _get_total("DISK_GB"), until="2.87"),
    Field("local_gb_used", _get_used("DISK_GB"), until="2.87"),
    Field("free_disk_gb", _get_free("DISK_GB"), until="2.87"),
    Field("disk_available_least", _get_free("DISK_GB"), until="2.87"),
    Field("running_vms", lambda row, view: row["running_vms"], until="2.87"),
    Field("current_workload", lambda row, view: 0, until="2.87"),
    Field("uptime", lambda row, view: row["uptime"], since=WITH_UPTIME.since),
)
_SUMMED = (
    "vcpus",
    "vcpus_used",
    "memory_mb",
    "memory_mb_used",
    "free_ram_mb",
    "local_gb",
    "local_gb_used",
    "free_disk_gb",
    "disk_available_least",
    "running_vms",
    "current_workload",
)


def one(
    row: JsonMapping, version: int, servers: object, fields: tuple[Field, ...] = FIELDS
) -> JsonObject:
    """Return the body of one hypervisor.

    Before 2.75 an empty list of servers is left out.

    Args:
        row: The row of the host.
        version: The microversion of the request.
        servers: Host -> servers, or None to leave the servers out.
        fields: The fields of the body.
    """
    return render(visible_fields(fields, version), row, servers)


def many(
    rows: Sequence[JsonMapping], version: int, servers: object, fields: tuple[Field, ...]
) -> list[JsonObject]:
    """Return the items of a list of hypervisors. A field that cannot be computed is null.

    Args:
        rows: Rows of hosts.
        version: The minor number of the microversion.
        servers: Host -> servers, or None to leave the servers out.
        fields: The fields of an item.
    """
    getters = visible_fields(fields, version)
    return [render_readable(getters, row, servers) for row in rows]


def statistics(rows: Sequence[JsonMapping], version: int) -> dict[str, int]:
    """Return the count of enabled hosts, and the sums of their capacity and usage (``_SUMMED``).

    A field that cannot be computed counts as 0. ``version`` must be below 2.88, because later
    versions do not have these fields.
    """
    items = many([row for row in rows if not row["disabled"]], version, None, FIELDS)
    return {
        "count": len(items),
        **{name: sum(item[name] or 0 for item in items) for name in _SUMMED},
    }
