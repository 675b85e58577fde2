# SPDX-License-Identifier: Apache-2.0
"""/v2.0/networks. Every network is a vxlan segment of its own; an external one is where floating
addresses come from.

A tenant sees its own networks, shared ones and external ones; only an admin shares, makes external
or reads the provider's attributes. A network that has ports of others than its DHCP is not deleted.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    ColumnElement,
    Row,
    Select,
    delete,
    func,
    or_,
    select,
    true,
    type_coerce,
)

from deploy.standalone.network import schema
from deploy.standalone.network.attributes import (
    ADMIN_STATE_UP,
    NAME,
    STANDARD,
    UNSET,
    ZONES,
    Attribute,
    Attributes,
    number,
)
from deploy.standalone.network.caller import NetworkCaller
from deploy.standalone.network.fabric import Change
from deploy.standalone.network.faults import fault
from deploy.standalone.network.quotas import spend
from deploy.standalone.network.resource import NetworkResource
from deploy.standalone.resource import Body
from deploy.standalone.schemas import TRUTH, nullable, one_of

MAX_VNI = 2**24 - 1
NETWORKS = schema.networks


class NetworksApi(NetworkResource):
    """Networks."""

    name, plural, table, missing = "network", "networks", NETWORKS, "NetworkNotFound"
    attributes = Attributes(
        {
            **STANDARD,
            "admin_state_up": ADMIN_STATE_UP,
            "shared": Attribute(TRUTH, False, admin=True),
            "router:external": Attribute(TRUTH, False, admin=True, column="external"),
            "is_default": Attribute(TRUTH, False, admin=True),
            "port_security_enabled": Attribute(TRUTH, True),
            "mtu": Attribute(number(68, 9000)),
            "dns_domain": Attribute(NAME, ""),
            "availability_zone_hints": Attribute(ZONES, UNSET, put=False),
            "provider:network_type": Attribute(
                nullable(one_of("vxlan")), UNSET, put=False, admin=True, hidden=True
            ),
            "provider:physical_network": Attribute(
                {"type": "null"}, UNSET, put=False, admin=True, hidden=True
            ),
            "provider:segmentation_id": Attribute(
                nullable(number(1, MAX_VNI)),
                UNSET,
                put=False,
                admin=True,
                hidden=True,
                column="vni",
            ),
        }
    )

    def select(self) -> Select[Any]:
        inside = select(func.json_group_array(schema.subnets.c.id)).where(
            schema.subnets.c.network_id == NETWORKS.c.id
        )
        return select(NETWORKS, type_coerce(inside.scalar_subquery(), JSON).label("subnets"))

    def visible(self, caller: NetworkCaller) -> ColumnElement[bool]:
        return (
            true()
            if caller.is_admin
            else or_(
                NETWORKS.c.project_id == caller.project_id, NETWORKS.c.shared, NETWORKS.c.external
            )
        )

    def view(self, row: Mapping[Any, Any], caller: NetworkCaller) -> Body:
        shown = super().view(row, caller) | {
            "status": "ACTIVE",
            "subnets": row["subnets"],
            "availability_zone_hints": [],
            "availability_zones": ["nova"],
            "ipv4_address_scope": None,
            "ipv6_address_scope": None,
        }
        if caller.is_admin:
            shown |= {"provider:network_type": "vxlan", "provider:physical_network": None}
        return shown

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        spend(change, body["project_id"], "network")
        limit = change.fabric.settings.mtu
        if body.get("mtu", limit) > limit:
            raise fault("InvalidInput", why=f"Requested MTU is too big, maximum is {limit}")
        for given in (
            "availability_zone_hints",
            "provider:network_type",
            "provider:physical_network",
        ):
            body.pop(given, None)
        values = self.attributes.columns(body)
        values["vni"] = values.get("vni") or self._free_vni(change)
        if change.connection.execute(
            select(NETWORKS.c.id).where(NETWORKS.c.vni == values["vni"])
        ).first():
            raise fault("InvalidInput", why=f"segmentation_id {values['vni']} is in use")
        return change.add(NETWORKS, {"mtu": limit} | values)

    def update(self, change: Change, caller: NetworkCaller, row: Row[Any], body: Body) -> None:
        if body.get("mtu", 0) > change.fabric.settings.mtu:
            raise fault(
                "InvalidInput",
                why=f"Requested MTU is too big, maximum is {change.fabric.settings.mtu}",
            )
        if body.get("shared") is False and row.shared and _has_ports_of_others(change, row):
            raise fault("InvalidSharedSetting", id=row.id)
        if (
            body.get("router:external") is False
            and row.external
            and change.connection.execute(
                select(schema.ports.c.id).where(
                    schema.ports.c.network_id == row.id,
                    schema.ports.c.device_owner.in_(
                        ("network:router_gateway", "network:floatingip")
                    ),
                )
            ).first()
        ):
            raise fault("ExternalNetworkInUse", id=row.id)
        change.set(NETWORKS, row.id, self.attributes.columns(body))
        change.touch(
            networks=[row.id], hosts=gateway_hosts(change) if "router:external" in body else ()
        )

    def delete(self, change: Change, caller: NetworkCaller, row: Row[Any]) -> None:
        ports = schema.ports
        left = (
            change.connection.execute(
                select(ports.c.id)
                .where(ports.c.network_id == row.id, ports.c.device_owner != "network:dhcp")
                .limit(10)
            )
            .scalars()
            .all()
        )
        if left:
            raise fault("NetworkInUse", id=row.id, ports=", ".join(left))
        change.touch(hosts=gateway_hosts(change) if row.external else ())
        change.connection.execute(delete(ports).where(ports.c.network_id == row.id))
        change.remove(NETWORKS, row.id)

    def _free_vni(self, change: Change) -> int:
        first = change.fabric.settings.first_vni
        after = select(func.max(NETWORKS.c.vni) + 1).where(NETWORKS.c.vni >= first)
        found: int = change.connection.execute(after).scalar() or first
        if found <= MAX_VNI:
            return found
        taken = set(change.connection.execute(select(NETWORKS.c.vni)).scalars())
        return next(vni for vni in range(first, MAX_VNI + 1) if vni not in taken)


def gateway_hosts(change: Change) -> list[str]:
    """The hosts that own the gateways of external networks: they know all of those."""
    return list(
        change.connection.execute(
            select(schema.hosts.c.name).where(schema.hosts.c.external_gateway)
        ).scalars()
    )


def _has_ports_of_others(change: Change, row: Row[Any]) -> bool:
    ports = schema.ports.c
    return (
        change.connection.execute(
            select(ports.id).where(
                ports.network_id == row.id,
                ports.project_id != row.project_id,
                ~ports.device_owner.like("network:%"),
            )
        ).first()
        is not None
    )
