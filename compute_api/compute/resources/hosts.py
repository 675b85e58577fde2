# SPDX-License-Identifier: Apache-2.0
"""/os-hosts (until 2.42): services by host, and what projects use of a host.

Maintenance mode and power management of hosts are answered as by Nova's libvirt driver: 501."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.service_binaries import Binary
from common.store.engine import Connection
from common.store.hosts import aggregates, hosts, services
from common.store.servers import servers
from compute_api.compute.request.request import Request
from compute_api.compute.resources.services import INTERNAL
from compute_api.compute.views.hypervisors import stock

_PREFIX = "nova-"


def index(request: Request) -> JsonObject:
    """GET /os-hosts, of all zones or of one"""

    def work(tx: Connection) -> list[dict[str, str]]:
        zones = aggregates.zones(tx, request.services.settings.default_zone)
        return [
            {
                "host_name": row.host,
                "service": row.binary.removeprefix(_PREFIX),
                "zone": zones[row.host] if row.binary == Binary.COMPUTE else INTERNAL,
            }
            for row in services.list_all(tx)
        ]

    zone = request.first("zone")
    return {"hosts": [one for one in request.read(work) if zone in (None, "", one["zone"])]}


def show(request: Request, host: str) -> JsonObject:
    """GET /os-hosts/{host}: all of it, what is used of it, and by which projects"""

    def work(tx: Connection) -> tuple[JsonObject, list[servers.FlavorCount]]:
        return _found(tx, host), servers.flavors_on(tx, host)

    row, flavors = request.read(work)
    used: dict[str, Counter[str]] = {"(used_max)": Counter()}
    for project, flavor, number in flavors:
        for name in ("(used_max)", project):
            used.setdefault(name, Counter()).update(
                {
                    "cpu": number * flavor.vcpus,
                    "memory_mb": number * flavor.memory_mb,
                    "disk_gb": number * (flavor.root_gb + flavor.ephemeral_gb),
                }
            )
    amounts = {
        "(total)": _stock(row, lambda of: of["total"]),
        "(used_now)": _stock(row, lambda of: of["used"] + of["reserved"]),
        **used,
    }
    return {
        "host": [
            {
                "resource": {
                    "host": host,
                    "project": name,
                    **{key: of[key] for key in ("cpu", "memory_mb", "disk_gb")},
                }
            }
            for name, of in amounts.items()
        ]
    }


def _found(tx: Connection, host: str) -> JsonObject:
    row = next(iter(hosts.list_all(tx, host)), None)
    if row is None:
        raise errors.NotFound(f"Compute host {host[:80]} could not be found.")
    return row


def _stock(row: JsonObject, amount: Callable[[dict[str, int]], int]) -> Counter[str]:
    found = {
        key: stock(row, name)
        for key, name in (("cpu", "VCPU"), ("memory_mb", "MEMORY_MB"), ("disk_gb", "DISK_GB"))
    }
    return Counter({key: amount(of) for key, of in found.items()})


def update(request: Request, host: str) -> JsonObject:
    """PUT /os-hosts/{host}: whether it takes new servers"""
    if "maintenance_mode" in request.body:
        request.read(_found, host)
        raise errors.NotImplementedHere("Virt driver does not implement host maintenance mode.")
    disabled = request.body["status"].lower() == "disable"

    def work(tx: Connection) -> None:
        service = _found(tx, host)["service_uuid"]
        services.set_state(tx, service, disabled=disabled, disabled_reason=None)

    request.write(work)
    request.services.wakeup.wake()
    return {"host": host, "status": "disabled" if disabled else "enabled"}


def refused_power(request: Request, host: str) -> None:
    """GET /os-hosts/{host}/startup, shutdown and reboot"""
    request.read(_found, host)
    raise errors.NotImplementedHere("Virt driver does not implement host power management.")
