# SPDX-License-Identifier: Apache-2.0
"""Handlers of /os-hosts (until 2.42): services by host, and the usage of a host by project.

Maintenance mode and power management of hosts are 501, as with Nova's libvirt driver.
"""

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
    """Return the services of all hosts, or of one zone, for GET /os-hosts."""

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

    zone = request.query_value("zone")
    return {
        "hosts": [service for service in request.read(work) if zone in (None, "", service["zone"])]
    }


def show(request: Request, host: str) -> JsonObject:
    """Return capacity and usage of a host, in total and by project, for GET /os-hosts/{host}.

    Raises:
        NotFound: The host does not exist.
    """

    def work(tx: Connection) -> tuple[JsonObject, list[servers.FlavorCount]]:
        return _find_host(tx, host), servers.flavors_on(tx, host)

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
        "(total)": _count_stock(row, lambda resource: resource["total"]),
        "(used_now)": _count_stock(row, lambda resource: resource["used"] + resource["reserved"]),
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


def _find_host(tx: Connection, host: str) -> JsonObject:
    row = next(iter(hosts.list_all(tx, host)), None)
    if row is None:
        raise errors.NotFound(f"Compute host {host[:80]} could not be found.")
    return row


def _count_stock(row: JsonObject, amount: Callable[[dict[str, int]], int]) -> Counter[str]:
    stocks = {
        key: stock(row, name)
        for key, name in (("cpu", "VCPU"), ("memory_mb", "MEMORY_MB"), ("disk_gb", "DISK_GB"))
    }
    return Counter({key: amount(resource) for key, resource in stocks.items()})


def update(request: Request, host: str) -> JsonObject:
    """Enable or disable a host for new servers, and clear the reason, for PUT /os-hosts/{host}.

    Raises:
        NotFound: The host does not exist.
        NotImplementedHere: The body contains maintenance_mode.
    """
    if "maintenance_mode" in request.body:
        request.read(_find_host, host)
        raise errors.NotImplementedHere("Virt driver does not implement host maintenance mode.")
    disabled = request.body["status"].lower() == "disable"

    def work(tx: Connection) -> None:
        service = _find_host(tx, host)["service_uuid"]
        services.set_state(tx, service, disabled=disabled, disabled_reason=None)

    request.write(work)
    request.services.wakeup.wake()
    return {"host": host, "status": "disabled" if disabled else "enabled"}


def refused_power(request: Request, host: str) -> None:
    """Refuse GET /os-hosts/{host}/startup, shutdown and reboot.

    Raises:
        NotFound: The host does not exist.
        NotImplementedHere: The host exists.
    """
    request.read(_find_host, host)
    raise errors.NotImplementedHere("Virt driver does not implement host power management.")
