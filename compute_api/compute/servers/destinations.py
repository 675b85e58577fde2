# SPDX-License-Identifier: Apache-2.0
"""Parse and look up the zone, host and node that a request names for its servers.

Create, moves, unshelve and the operator's ``explain`` use this module, so they raise the same
errors. The API first checks that the caller may choose a host, because the errors reveal which
hosts exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.hosts import aggregates, hosts
from common.store.placement import zones


@dataclass(frozen=True, slots=True)
class Destination:
    """The requested place of a server. None in a field means no requirement."""

    zone: str | None = None
    host: str | None = None
    #: The hypervisor_hostname of the host.
    node: str | None = None
    #: Skip the operator's filters, as for a host in availability_zone.
    forced: bool = False

    @property
    def args(self) -> JsonObject:
        """The arguments of the workflow: zone, host and forced, without the node."""
        return {"zone": self.zone, "host": self.host, "forced": self.forced}


def parse(text: str | None, default_zone: str | None = None) -> Destination:
    """Parse ZONE, ZONE:HOST, ZONE:HOST:NODE or ZONE::NODE, the forms of availability_zone.

    A destination with a host or a node is forced.

    Args:
        text: The value of availability_zone, or None.
        default_zone: Zone for a text without a zone.

    Raises:
        BadRequest: The text has more than two colons.
    """
    zone, *rest = (text or "").split(":")
    if len(rest) > 2:
        raise errors.BadRequest(
            "Unable to parse availability_zone: give ZONE, ZONE:HOST or ZONE:HOST:NODE."
        )
    host, node = [*rest, "", ""][:2]
    return Destination(zone or default_zone, host or None, node or None, forced=bool(host or node))


def resolve(tx: Connection, where: Destination, default_zone: str) -> Destination:
    """Check that zone and host exist, and return the destination with the name of its host.

    The zone beside a forced host is not checked. The result has the zone of that host instead.

    Args:
        tx: The transaction.
        where: The requested destination.
        default_zone: Zone of hosts outside all zone aggregates.

    Raises:
        BadRequest: The zone has no enabled host, no host has this name or node, or the host has
            another node.
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
    other = (
        f" A host with this name exists, but its node is not {where.node}."
        if rows and where.host
        else ""
    )
    raise errors.BadRequest(f"Compute host {where.host or where.node} could not be found.{other}")


def check_zone(tx: Connection, zone: str, default_zone: str) -> None:
    """Raise BadRequest if the zone does not exist, or has no enabled host."""
    if not zones.is_open(tx, zone, default_zone):
        raise errors.BadRequest("The requested availability zone is not available")


def check_unshelve(tx: Connection, zone: str | None, host: str | None, default_zone: str) -> None:
    """Check the zone and the host for an unshelve. None means that the request does not name one.

    Raises:
        BadRequest: The zone or the host does not exist, or the zone has no enabled host.
        Conflict: The host is in another zone.
    """
    if zone is not None:
        check_zone(tx, zone, default_zone)
    if host is None:
        return
    resolve(tx, Destination(host=host), default_zone)
    if zone is not None and aggregates.zones(tx, default_zone, [host])[host] != zone:
        raise errors.Conflict(f"Host {host} is not in the availability zone {zone}.")
