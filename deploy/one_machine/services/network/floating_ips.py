# SPDX-License-Identifier: Apache-2.0
"""/v2.0/floatingips: addresses of an external network that lead, through a router, to the fixed
address of a port.

The address itself is held by a port network:floatingip of the external network. The router is the
one that joins the port's subnet and has its gateway in that network; its host learns of every
change, and so does the compute service.
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

FLOATING, PORTS, HELD, ROUTERS = schema.floating_ips, schema.ports, schema.addresses, schema.routers
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
    """ACTIVE are those that lead to a port."""
    leads = {"ACTIVE": FLOATING.c.port_id.is_not(None), "DOWN": FLOATING.c.port_id.is_(None)}
    return or_(
        *[leads[value.upper()] for value in values if value.upper() in leads], FLOATING.c.id == ""
    )


class FloatingIpsApi(NetworkResource):
    """Floating addresses."""

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
        details = [one | {"admin_state_up": bool(one["admin_state_up"])} for one in row["details"]]
        return super().view(row, caller) | {
            "router_id": row["router_id"],
            "status": "ACTIVE" if row["port_id"] else "DOWN",
            "port_details": details[0] if details else None,
        }

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        network = change.one(schema.networks, body["floating_network_id"])
        if network is None or not (network.external or caller.owns(network.project_id)):
            raise fault("NetworkNotFound", id=body["floating_network_id"])
        if not network.external:
            raise bad_request("floatingip", f"Network {network.id} is not a valid external network")
        spend(change, body["project_id"], "floatingip")
        key = str(uuid.uuid4())
        held = ports.add(
            change,
            network,
            {
                "network_id": network.id,
                "project_id": "",
                "device_id": key,
                "device_owner": OWNER,
                "port_security_enabled": False,
                "fixed_ips": [_wanted_address(change, network.id, body)],
            },
        )
        taken = change.execute(select(HELD.c.address).where(HELD.c.port_id == held)).scalar_one()
        own = {name: body[name] for name in ("project_id", "description", "dns_name", "dns_domain")}
        change.add(
            FLOATING,
            own
            | {
                "id": key,
                "floating_network_id": network.id,
                "floating_ip_address": taken,
                "floating_port_id": held,
            },
        )
        if body.get("port_id"):
            self._associate(change, caller, key, network.id, body)
        return key

    def update(self, change: Change, caller: NetworkCaller, row: DbRow, body: Body) -> None:
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
        port_id, fixed = body["port_id"], body.get("fixed_ip_address")
        port = change.one(PORTS, port_id)
        if port is None or not caller.owns(port.project_id):
            raise fault("PortNotFound", id=port_id)
        inside = _inside(change, port_id, fixed)
        wanted = {"port_id": port_id, "fixed_ip_address": inside.address}
        alike = select(FLOATING).filter_by(floating_network_id=network, **wanted)
        words = {"port": port_id, "network": network}
        if change.has(alike.where(FLOATING.c.id != key)):
            raise fault("FloatingIPPortAlreadyAssociated", ip=inside.address, **words)
        router = _router(change, network, inside.subnet_id)
        if router is None:
            raise fault("ExternalGatewayForFloatingIPNotFound", subnet=inside.subnet_id, **words)
        change.set(FLOATING, key, wanted | {"router_id": router.id})
        change.touch(hosts=[router.host])
        notify_changed(change, port)


def _wanted_address(change: Change, network: str, body: Body) -> Body:
    """Which address the new one shall be: always of IPv4."""
    if body.get("floating_ip_address"):
        return {"ip_address": body["floating_ip_address"]}
    if body.get("subnet_id"):
        return {"subnet_id": body["subnet_id"]}
    for subnet in subnets_of(change.connection, network):
        if subnet.ip_version == 4:
            return {"subnet_id": subnet.id}
    raise bad_request("floatingip", f"Network {network} does not contain any IPv4 subnet")


def _disassociate(change: Change, row: DbRow) -> None:
    """Let it lead to no port; the server of the one that it led to gets an event."""
    if row.port_id is None:
        return
    change.set(FLOATING, row.id, ports.NOWHERE)
    router, port = change.one(ROUTERS, row.router_id or ""), change.one(PORTS, row.port_id)
    change.touch(hosts=[router.host] if router is not None else ())
    if port is not None:
        notify_changed(change, port)


def _inside(change: Change, port_id: str, fixed: str | None) -> DbRow:
    """The port's address of IPv4 that is meant."""
    held = change.rows(select(HELD).where(HELD.c.port_id == port_id))
    found = [one for one in held if "." in one.address and fixed in (None, one.address)]
    if fixed and not found:
        raise bad_request("floatingip", f"Port {port_id} does not have fixed ip {fixed}")
    if not found:
        raise bad_request(
            "floatingip",
            f"Cannot add floating IP to port {port_id} that has no fixed IPv4 addresses",
        )
    if len(found) > 1:
        raise bad_request(
            "floatingip",
            f"Port {port_id} has multiple fixed IPv4 addresses. Must provide a specific IPv4"
            " address when assigning one",
        )
    return found[0]


def _router(change: Change, network: str, subnet: str) -> DbRow | None:
    """The router that joins this subnet and has its gateway in this network."""
    led = select(PORTS.c.device_id).filter_by(device_owner=GATEWAY, network_id=network)
    joining = select(PORTS.c.device_id).filter_by(device_owner=INTERFACE)
    joining = joining.join(HELD).where(HELD.c.subnet_id == subnet)
    mine = select(ROUTERS).where(ROUTERS.c.id.in_(led), ROUTERS.c.id.in_(joining))
    return change.first(mine.order_by(ROUTERS.c.created_at, ROUTERS.c.id))
