# SPDX-License-Identifier: Apache-2.0
"""Where a request wants its servers: zone, host and node, parsed and looked up in the database.

Used by create, unshelve and the operator's ``explain``, so that all three give the same errors. The
caller checks first whether the user may name a host, so that nobody else learns which hosts there
are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.hosts import aggregates, hosts
from common.store.placement import zones


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a server shall be. node: what the host's hypervisor calls itself. forced: the
    operator's filters are not asked, as for a host in availability_zone; else they must let the
    host."""

    zone: str | None = None
    host: str | None = None
    node: str | None = None
    forced: bool = False

    @property
    def args(self) -> JsonObject:
        """What the workflow gets of it."""
        return {"zone": self.zone, "host": self.host, "forced": self.forced}


def parse(text: str | None, default_zone: str | None = None) -> Destination:
    """ZONE, ZONE:HOST, ZONE:HOST:NODE or ZONE::NODE; an empty zone is the one where servers go that
    name none."""
    zone, *rest = (text or "").split(":")
    if len(rest) > 2:
        raise errors.BadRequest(
            "Unable to parse availability_zone: give ZONE, ZONE:HOST or ZONE:HOST:NODE."
        )
    host, node = [*rest, "", ""][:2]
    return Destination(zone or default_zone, host or None, node or None, forced=bool(host or node))


def resolve(tx: Connection, where: Destination, default_zone: str) -> Destination:
    """The place by its host's name. A zone must exist; one beside a forced host is that host's own.

    Args:
        default_zone: of hosts in no aggregate that is a zone.
    Raises:
        BadRequest: there is no such zone, or no such host.
    """
    if where.zone is not None and not where.forced:
        check_zone(tx, where.zone, default_zone)
    if where.host is None and where.node is None:
        return where
    rows = hosts.list_all(tx, where.host)
    for row in rows:
        if where.node in (None, row["hypervisor_hostname"]):
            name = str(row["name"])
            if where.forced and where.zone is not None:
                return replace(
                    where, host=name, zone=aggregates.zones(tx, default_zone, [name])[name]
                )
            return replace(where, host=name)
    other = f" It is there, but its node is not {where.node}." if rows and where.host else ""
    raise errors.BadRequest(f"Compute host {where.host or where.node} could not be found.{other}")


def check_zone(tx: Connection, zone: str, default_zone: str) -> None:
    """Raises BadRequest when there is no such zone, or no enabled host in it."""
    if not zones.is_open(tx, zone, default_zone):
        raise errors.BadRequest("The requested availability zone is not available")


def check_unshelve(tx: Connection, zone: str | None, host: str | None, default_zone: str) -> None:
    """Of a server that comes back to a host: the zone exists, the host exists, and it is in the
    zone.

    Raises:
        BadRequest: one of them does not exist. Conflict: the host is in another zone.
    """
    if zone is not None:
        check_zone(tx, zone, default_zone)
    if host is None:
        return
    resolve(tx, Destination(host=host), default_zone)
    if zone is not None and aggregates.zones(tx, default_zone, [host])[host] != zone:
        raise errors.Conflict(f"Host {host} is not in the availability zone {zone}.")
