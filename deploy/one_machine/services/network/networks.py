# SPDX-License-Identifier: Apache-2.0
"""/v2.0/networks. Every network is a vxlan segment. External networks provide floating IPs.

A tenant sees own, shared and external networks. Only an admin may share a network,
make it external, or read the provider's attributes. A network with ports other than the DHCP port
cannot be deleted.
"""

from sqlalchemy import ColumnElement, delete, func, or_, select

from deploy.one_machine.services.database import DbRow, DbSelect, DbValues
from deploy.one_machine.services.listing import collect
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.attributes import (
    ADMIN_STATE_UP,
    NAME,
    STANDARD,
    UNSET,
    ZONES,
    Attribute,
    Attributes,
    number,
)
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change
from deploy.one_machine.services.network.faults import fault, invalid
from deploy.one_machine.services.network.quotas import spend
from deploy.one_machine.services.network.resource import NetworkResource
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import TRUTH, nullable, one_of

MAX_VNI = 2**24 - 1
NETWORKS, PORTS = schema.networks, schema.ports


class NetworksApi(NetworkResource):
    """The API of networks, /v2.0/networks."""

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

    constant = {
        "status": "ACTIVE",
        "availability_zone_hints": [],
        "availability_zones": ["nova"],
        "ipv4_address_scope": None,
        "ipv6_address_scope": None,
    }

    def select(self) -> DbSelect:
        of_network = schema.subnets.c.network_id == NETWORKS.c.id
        return select(NETWORKS, collect(schema.subnets.c.id, of_network).label("subnets"))

    def visible_to(self, project_id: str) -> ColumnElement[bool]:
        return or_(NETWORKS.c.project_id == project_id, NETWORKS.c.shared, NETWORKS.c.external)

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        provider = {"provider:network_type": "vxlan", "provider:physical_network": None}
        shown = super().view(row, caller) | {"subnets": row["subnets"]}
        return shown | (provider if caller.is_admin else {})

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        spend(change, body["project_id"], "network")
        _check_mtu(change, body)
        values = self.columns(body)
        values["vni"] = values.get("vni") or self._free_vni(change)
        if change.has(select(NETWORKS.c.id).where(NETWORKS.c.vni == values["vni"])):
            raise invalid(f"another network has the segmentation_id {values['vni']}")
        return change.add(NETWORKS, {"mtu": change.fabric.settings.mtu} | values)

    def update(self, change: Change, caller: NetworkCaller, row: DbRow, body: Body) -> None:
        _check_mtu(change, body)
        if body.get("shared") is False and row.shared and _has_ports_of_others(change, row):
            raise fault("InvalidSharedSetting", id=row.id)
        is_gateway_port = PORTS.c.device_owner.in_(("network:router_gateway", "network:floatingip"))
        if (
            body.get("router:external") is False
            and row.external
            and change.has(select(PORTS).where(PORTS.c.network_id == row.id, is_gateway_port))
        ):
            raise fault("ExternalNetworkInUse", id=row.id)
        change.set(NETWORKS, row.id, self.columns(body))
        change.touch(
            networks=[row.id], hosts=gateway_hosts(change) if "router:external" in body else ()
        )

    def delete(self, change: Change, caller: NetworkCaller, row: DbRow) -> None:
        of_network = PORTS.c.network_id == row.id
        remaining_ports = (
            select(PORTS.c.id).where(of_network, PORTS.c.device_owner != "network:dhcp").limit(10)
        )
        if keys := change.scalars(remaining_ports):
            raise fault("NetworkInUse", id=row.id, ports=", ".join(keys))
        change.touch(hosts=gateway_hosts(change) if row.external else ())
        change.execute(delete(PORTS).where(of_network))
        change.remove(NETWORKS, row.id)

    def _free_vni(self, change: Change) -> int:
        first = change.fabric.settings.first_vni
        query = select(func.max(NETWORKS.c.vni) + 1).where(NETWORKS.c.vni >= first)
        free_vni: int = change.scalar(query) or first
        if free_vni <= MAX_VNI:
            return free_vni
        used_vnis = set(change.scalars(select(NETWORKS.c.vni)))
        return next(vni for vni in range(first, MAX_VNI + 1) if vni not in used_vnis)


def visible_network(change: Change, caller: NetworkCaller, key: str) -> DbRow:
    """Return a network that the caller may see.

    Raises:
        Fault: 404, there is no such network, or the caller may not see it.
    """
    return NetworksApi().find(change.connection, caller, key)


def gateway_hosts(change: Change) -> list[str]:
    """Return the names of the hosts that are gateways of external networks.

    Their descriptions contain all external networks.
    """
    return change.scalars(select(schema.hosts.c.name).where(schema.hosts.c.external_gateway))


def _check_mtu(change: Change, body: Body) -> None:
    limit = change.fabric.settings.mtu
    if body.get("mtu", limit) > limit:
        raise invalid(f"Requested MTU is too big, maximum is {limit}")


def _has_ports_of_others(change: Change, row: DbRow) -> bool:
    is_foreign = (PORTS.c.project_id != row.project_id) & ~PORTS.c.device_owner.like("network:%")
    return change.has(select(PORTS.c.id).where(PORTS.c.network_id == row.id, is_foreign))
