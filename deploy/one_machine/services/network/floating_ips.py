# SPDX-License-Identifier: Apache-2.0
"""/v2.0/floatingips: addresses of an external network that a router translates to a port's address.

A port network:floatingip of the external network reserves the address. The router joins the port's
subnet and has its gateway in the external network. The router's host and the compute service are
notified when the port changes.
"""

import uuid

from sqlalchemy import ColumnElement, func, or_, select

from deploy.one_machine.services.database import DbRow, DbSelect, DbValues
from deploy.one_machine.services.listing import collect
from deploy.one_machine.services.network import ports, schema
from deploy.one_machine.services.network.addresses import subnets_of
from deploy.one_machine.services.network.attributes import (
    ADDRESS,
    ID,
    NAME,
    REQUIRED,
    UNSET,
    Attribute,
    Attributes,
)
from deploy.one_machine.services.network.bindings import ROUTER_OWNERS, notify_changed
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change
from deploy.one_machine.services.network.faults import bad_request, fault
from deploy.one_machine.services.network.quotas import spend
from deploy.one_machine.services.network.resource import NetworkResource
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import nullable

FLOATING, PORTS, ADDRESSES, ROUTERS = (
    schema.floating_ips,
    schema.ports,
    schema.addresses,
    schema.routers,
)
INTERFACE, GATEWAY = ROUTER_OWNERS
OWNER = "network:floatingip"
DETAILS = (
    "name",
    "network_id",
    "mac_address",
    "admin_state_up",
    "status",
    "device_id",
    "device_owner",
)


def by_status(values: list[str]) -> ColumnElement[bool]:
    """Return the condition for any of these statuses, in any case of letters.

    A floating IP with a port is ACTIVE, and otherwise DOWN. Other words match no row.
    """
    conditions = {"ACTIVE": FLOATING.c.port_id.is_not(None), "DOWN": FLOATING.c.port_id.is_(None)}
    return or_(
        *[conditions[value.upper()] for value in values if value.upper() in conditions],
        FLOATING.c.id == "",
    )


class FloatingIpsApi(NetworkResource):
    """Floating IPs."""

    name, plural, table, missing = "floatingip", "floatingips", FLOATING, "FloatingIPNotFound"
    attributes = Attributes(
        {
            "description": Attribute(NAME, ""),
            "project_id": Attribute(ID, put=False),
            "floating_network_id": Attribute(ID, REQUIRED, put=False),
            "floating_ip_address": Attribute(nullable(ADDRESS), None, put=False, admin=True),
            "subnet_id": Attribute(nullable(ID), UNSET, put=False),
            "port_id": Attribute(nullable(ID)),
            "fixed_ip_address": Attribute(nullable(ADDRESS)),
            "dns_name": Attribute(NAME, "", put=False),
            "dns_domain": Attribute(NAME, "", put=False),
        }
    )
    filters = {"status": by_status, "router_id": FLOATING.c.router_id.in_}

    def select(self) -> DbSelect:
        parts = [part for name in DETAILS for part in (name, PORTS.c[name])]
        details = collect(func.json_object(*parts), PORTS.c.id == FLOATING.c.port_id)
        return select(FLOATING, details.label("details"))

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        details = [
            detail | {"admin_state_up": bool(detail["admin_state_up"])} for detail in row["details"]
        ]
        return super().view(row, caller) | {
            "router_id": row["router_id"],
            "status": "ACTIVE" if row["port_id"] else "DOWN",
            "port_details": details[0] if details else None,
        }

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        _require_port_for_fixed_address(body)
        network = change.one(schema.networks, body["floating_network_id"])
        if network is None or not (network.external or caller.owns(network.project_id)):
            raise fault("NetworkNotFound", id=body["floating_network_id"])
        if not network.external:
            raise bad_request("floatingip", f"Network {network.id} is not a valid external network")
        spend(change, body["project_id"], "floatingip")
        key = str(uuid.uuid4())
        port_id = ports.add(
            change,
            network,
            {
                "network_id": network.id,
                "project_id": "",
                "device_id": key,
                "device_owner": OWNER,
                "port_security_enabled": False,
                "fixed_ips": [_choose_address(change, network.id, body)],
            },
        )
        address = change.execute(
            select(ADDRESSES.c.address).where(ADDRESSES.c.port_id == port_id)
        ).scalar_one()
        if ":" in address:
            raise bad_request("floatingip", f"The address {address} is not an IPv4 address")
        columns = {
            name: body[name] for name in ("project_id", "description", "dns_name", "dns_domain")
        }
        change.add(
            FLOATING,
            columns
            | {
                "id": key,
                "floating_network_id": network.id,
                "floating_ip_address": address,
                "floating_port_id": port_id,
            },
        )
        if body.get("port_id"):
            self._associate(change, caller, key, network.id, body)
        return key

    def update(self, change: Change, caller: NetworkCaller, row: DbRow, body: Body) -> None:
        _require_port_for_fixed_address(body)
        if "description" in body:
            change.set(FLOATING, row.id, {"description": body["description"]})
        if "port_id" not in body:
            return
        _disassociate(change, row)
        if body["port_id"]:
            self._associate(change, caller, row.id, row.floating_network_id, body)

    def delete(self, change: Change, caller: NetworkCaller, row: DbRow) -> None:
        _disassociate(change, row)
        change.remove(FLOATING, row.id)
        ports.remove(change, change.get_existing(PORTS, row.floating_port_id))

    def _associate(
        self, change: Change, caller: NetworkCaller, key: str, network: str, body: Body
    ) -> None:
        port_id, fixed_ip = body["port_id"], body.get("fixed_ip_address")
        port = change.one(PORTS, port_id)
        if port is None or not caller.owns(port.project_id):
            raise fault("PortNotFound", id=port_id)
        fixed_row = _find_fixed_address(change, port_id, fixed_ip)
        columns = {"port_id": port_id, "fixed_ip_address": fixed_row.address}
        query = select(FLOATING).filter_by(floating_network_id=network, **columns)
        words = {"port": port_id, "network": network}
        if change.has(query.where(FLOATING.c.id != key)):
            raise fault("FloatingIPPortAlreadyAssociated", ip=fixed_row.address, **words)
        router = _find_router(change, network, fixed_row.subnet_id)
        if router is None:
            raise fault("ExternalGatewayForFloatingIPNotFound", subnet=fixed_row.subnet_id, **words)
        change.set(FLOATING, key, columns | {"router_id": router.id})
        change.touch(hosts=[router.host])
        notify_changed(change, port)


def _require_port_for_fixed_address(body: Body) -> None:
    """Check that a request with a fixed address also names the port.

    Raises:
        Fault: 400, as of Neutron.
    """
    if body.get("fixed_ip_address") and not body.get("port_id"):
        raise bad_request("floatingip", "fixed_ip_address cannot be specified without a port_id")


def _choose_address(change: Change, network: str, body: Body) -> Body:
    """Return the fixed_ips entry for the reserving port of a new floating IP.

    The entry is the requested address, or the requested subnet, or the oldest IPv4 subnet of the
    network.

    Raises:
        Fault: 400, nothing is requested, and the network has no IPv4 subnet.
    """
    if body.get("floating_ip_address"):
        return {"ip_address": body["floating_ip_address"]}
    if body.get("subnet_id"):
        return {"subnet_id": body["subnet_id"]}
    for subnet in subnets_of(change.connection, network):
        if subnet.ip_version == 4:
            return {"subnet_id": subnet.id}
    raise bad_request("floatingip", f"Network {network} does not contain any IPv4 subnet")


def _disassociate(change: Change, row: DbRow) -> None:
    """Remove a floating IP from its port, and notify the router's host and the port's server.

    Without a port do nothing.
    """
    if row.port_id is None:
        return
    change.set(FLOATING, row.id, ports.UNASSOCIATED)
    router, port = change.one(ROUTERS, row.router_id or ""), change.one(PORTS, row.port_id)
    change.touch(hosts=[router.host] if router is not None else ())
    if port is not None:
        notify_changed(change, port)


def _find_fixed_address(change: Change, port_id: str, requested: str | None) -> DbRow:
    """Return the row of the port's IPv4 address to which the floating IP is translated.

    Args:
        change: The transaction.
        port_id: The port.
        requested: The requested address, or None for the only IPv4 address of the port.

    Raises:
        Fault: 400, the port has no such address, or has several and none is requested.
    """
    rows = change.rows(select(ADDRESSES).where(ADDRESSES.c.port_id == port_id))
    matches = [row for row in rows if "." in row.address and requested in (None, row.address)]
    if requested and not matches:
        raise bad_request("floatingip", f"Port {port_id} does not have fixed ip {requested}")
    if not matches:
        raise bad_request(
            "floatingip",
            f"Cannot add floating IP to port {port_id} that has no fixed IPv4 addresses",
        )
    if len(matches) > 1:
        raise bad_request(
            "floatingip",
            f"Port {port_id} has multiple fixed IPv4 addresses. Must provide a specific IPv4"
            " address when assigning one",
        )
    return matches[0]


def _find_router(change: Change, network: str, subnet: str) -> DbRow | None:
    """Return the oldest router with an interface in the subnet and the gateway in the network.

    Without such a router return None.
    """
    with_gateway = select(PORTS.c.device_id).filter_by(device_owner=GATEWAY, network_id=network)
    with_interface = select(PORTS.c.device_id).filter_by(device_owner=INTERFACE)
    with_interface = with_interface.join(ADDRESSES).where(ADDRESSES.c.subnet_id == subnet)
    query = select(ROUTERS).where(ROUTERS.c.id.in_(with_gateway), ROUTERS.c.id.in_(with_interface))
    return change.first(query.order_by(ROUTERS.c.created_at, ROUTERS.c.id))
