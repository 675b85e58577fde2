# SPDX-License-Identifier: Apache-2.0
"""/v2.0/routers: they join subnets, and lead to an external network; one host carries each
(placing.py).

What a router has are ports: network:router_interface in a subnet that it joins,
network:router_gateway in its external network. Both are bound to the host that carries the router,
so that all hosts of the networks know where it is.
"""

import ipaddress
from collections.abc import Sequence

import falcon
from sqlalchemy import delete, select, update

from deploy.one_machine.services.database import DbRow, DbSelect, DbValues
from deploy.one_machine.services.listing import collect
from deploy.one_machine.services.network import ports, schema
from deploy.one_machine.services.network.attributes import (
    ADMIN_STATE_UP,
    FIXED_IPS,
    ID,
    ROUTES,
    STANDARD,
    UNSET,
    ZONES,
    Attribute,
    Attributes,
)
from deploy.one_machine.services.network.bindings import ROUTER_OWNERS, bind, bind_to_carrier
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change, Fabric
from deploy.one_machine.services.network.faults import bad_request, fault
from deploy.one_machine.services.network.quotas import spend
from deploy.one_machine.services.network.resource import NetworkResource
from deploy.one_machine.services.resource import Body, Handler
from deploy.one_machine.services.schemas import TRUTH, mapping, nullable
from deploy.one_machine.services.web import answer, read_json

ROUTERS, PORTS, HELD, FLOATING = schema.routers, schema.ports, schema.addresses, schema.floating_ips
HOSTS = schema.hosts
INTERFACE, GATEWAY = ROUTER_OWNERS
GATEWAY_INFO = nullable(
    mapping(
        {"network_id": ID, "enable_snat": TRUTH, "external_fixed_ips": {**FIXED_IPS, "maxItems": 5}}
    )
)
WHICH = Attributes(subnet_id=Attribute(ID), port_id=Attribute(ID))


class RoutersApi(NetworkResource):
    """Routers."""

    name, plural, table, missing = "router", "routers", ROUTERS, "RouterNotFound"
    attributes = Attributes(
        {
            **STANDARD,
            "admin_state_up": ADMIN_STATE_UP,
            "external_gateway_info": Attribute(GATEWAY_INFO),
            "routes": Attribute(ROUTES, post=False),
            "availability_zone_hints": Attribute(ZONES, UNSET, put=False),
        }
    )

    constant = {
        "status": "ACTIVE",
        "availability_zones": ["nova"],
        "availability_zone_hints": [],
        "flavor_id": None,
    }

    def select(self) -> DbSelect:
        mine = (PORTS.c.device_id == ROUTERS.c.id) & (PORTS.c.device_owner == GATEWAY)
        network = select(PORTS.c.network_id).where(mine).scalar_subquery()
        fixed = collect(schema.FIXED_IP, mine, within=HELD.join(PORTS))
        return select(ROUTERS, network.label("outside"), fixed.label("fixed_ips"))

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        outside = row["outside"] and {
            "network_id": row["outside"],
            "enable_snat": row["enable_snat"],
            "external_fixed_ips": row["fixed_ips"],
        }
        shown = super().view(row, caller) | {"external_gateway_info": outside or None}
        return shown | ({"ha": False, "distributed": False} if caller.is_admin else {})

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        spend(change, body["project_id"], "router")
        key = change.add(ROUTERS, self.columns(body) | {"host": carrier(change)})
        if outside := body.get("external_gateway_info"):
            self._set_gateway(change, caller, key, outside)
        return key

    def update(self, change: Change, caller: NetworkCaller, row: DbRow, body: Body) -> None:
        if body.get("routes"):
            _check_routes(change, row.id, body["routes"])
        change.set(ROUTERS, row.id, self.columns(body))
        change.touch(hosts=[row.host])
        if "external_gateway_info" in body:
            self._set_gateway(change, caller, row.id, body["external_gateway_info"] or {})

    def delete(self, change: Change, caller: NetworkCaller, row: DbRow) -> None:
        if change.has(_ports_of(row.id, INTERFACE)):
            raise fault("RouterInUse", id=row.id)
        self._set_gateway(change, caller, row.id, {})
        change.touch(hosts=[row.host])
        change.remove(ROUTERS, row.id)

    def _set_gateway(self, change: Change, caller: NetworkCaller, key: str, wanted: Body) -> None:
        """Let the router have this gateway, or none; addresses that it has in the same network
        stay."""
        router = change.get_existing(ROUTERS, key)
        port = change.first(_ports_of(key, GATEWAY))
        network_id, fixed = wanted.get("network_id"), wanted.get("external_fixed_ips")
        if port is not None and (network_id != port.network_id or fixed):
            used = select(FLOATING.c.id).where(FLOATING.c.router_id == key)
            if (before := port.network_id) != network_id and change.has(used):
                raise fault("RouterExternalGatewayInUseByFloatingIp", id=key, network=before)
            ports.remove(change, port)
            port = None
        if "enable_snat" in wanted and wanted["enable_snat"] != router.enable_snat:
            caller.require_admin("(rule:update_router:external_gateway_info:enable_snat)")
            change.set(ROUTERS, key, {"enable_snat": wanted["enable_snat"]})
        if port is None and network_id:
            network = change.one(schema.networks, network_id)
            if network is None or not (network.external or caller.owns(network.project_id)):
                raise fault("NetworkNotFound", id=network_id)
            if not network.external:
                raise bad_request("router", f"Network {network_id} is not an external network")
            if fixed:
                rule = "(rule:update_router:external_gateway_info:external_fixed_ips)"
                caller.require_admin(rule)
            own = {"fixed_ips": fixed} if fixed else {}
            ports.add(change, network, _port(network_id, router, GATEWAY) | own)
        change.touch(hosts=[router.host])


class RouterInterfaces(Handler[Fabric]):
    """PUT /v2.0/routers/{key}/add_router_interface and .../remove_router_interface."""

    def on_put_add(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller, which = req.context.caller, _which(req)
        with self._service.change() as change:
            router = _owned(change, caller, key, "add")
            join = _join_port if "port_id" in which else _join_subnet
            port = join(change, caller, router, which.get("port_id") or which["subnet_id"])
            change.touch(hosts=[router.host])
            shown = _interface(change, router, port)
        self._service.settle(change)
        answer(resp, shown)

    def on_put_remove(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller, which = req.context.caller, _which(req)
        with self._service.change() as change:
            router = _owned(change, caller, key, "remove")
            port = _joined(change, router, which)
            shown = _interface(change, router, port.id)
            for subnet in shown["subnet_ids"]:
                _require_unused(change, router, subnet)
            ports.remove(change, port)
            change.touch(hosts=[router.host])
        answer(resp, shown)


def _owned(change: Change, caller: NetworkCaller, key: str, what: str) -> DbRow:
    router = RoutersApi().find(change.connection, caller, key)
    caller.require_owner(router.project_id, f"(rule:{what}_router_interface)")
    return router


def _which(req: falcon.Request) -> Body:
    which = WHICH.validate(read_json(req), "router", req.context.caller, new=True)
    if not which:
        raise bad_request("router", "Either subnet_id or port_id must be specified")
    return which


def _port(network: str, router: DbRow, owner: str) -> Body:
    """A port of the router; a gateway is nobody's, so that no tenant finds it among their own."""
    return {
        "network_id": network,
        "project_id": router.project_id if owner == INTERFACE else "",
        "device_id": router.id,
        "device_owner": owner,
        "port_security_enabled": False,
        **({"binding:host_id": router.host} if router.host else {}),
    }


def _ports_of(router: str, *owners: str) -> DbSelect:
    return select(PORTS).where(PORTS.c.device_id == router, PORTS.c.device_owner.in_(owners))


def _joined_subnets(change: Change, router: str, *owners: str) -> Sequence[DbRow]:
    """The subnets in which the router has ports of these owners."""
    mine = (PORTS.c.device_id == router) & PORTS.c.device_owner.in_(owners)
    held = PORTS.join(HELD).join(schema.subnets, schema.subnets.c.id == HELD.c.subnet_id)
    return change.rows(select(schema.subnets).select_from(held).where(mine))


def _require_apart(change: Change, router: DbRow, subnet: DbRow) -> None:
    for other in _joined_subnets(change, router.id, INTERFACE):
        if other.id == subnet.id:
            raise bad_request("router", f"Router already has a port on subnet {subnet.id}")
        if ipaddress.ip_network(other.cidr).overlaps(ipaddress.ip_network(subnet.cidr)):
            raise bad_request(
                "router",
                f"Cidr {subnet.cidr} of subnet {subnet.id} overlaps with cidr"
                f" {other.cidr} of subnet {other.id}",
            )


def _join_subnet(change: Change, caller: NetworkCaller, router: DbRow, subnet_id: str) -> str:
    subnet = change.one(schema.subnets, subnet_id)
    network = subnet and change.one(schema.networks, subnet.network_id)
    if subnet is None or network is None or not (caller.owns(network.project_id) or network.shared):
        raise fault("SubnetNotFound", id=subnet_id)
    caller.require_owner(network.project_id, "(rule:create_port:fixed_ips)")
    if subnet.gateway_ip is None:
        raise bad_request("router", "Subnet for router interface must have a gateway IP")
    _require_apart(change, router, subnet)
    fixed = {"subnet_id": subnet.id, "ip_address": subnet.gateway_ip}
    return ports.add(change, network, _port(network.id, router, INTERFACE) | {"fixed_ips": [fixed]})


def _join_port(change: Change, caller: NetworkCaller, router: DbRow, port_id: str) -> str:
    port = change.one(PORTS, port_id)
    if port is None or not caller.owns(port.project_id):
        raise fault("PortNotFound", id=port_id)
    if port.device_id or port.device_owner:
        raise fault("PortInUse", id=port.id, network=port.network_id, device=port.device_id)
    subnets = change.rows(select(schema.subnets).join(HELD).where(HELD.c.port_id == port.id))
    if not subnets:
        raise bad_request("router", "Router port must have at least one fixed IP")
    for subnet in subnets:
        _require_apart(change, router, subnet)
    change.execute(delete(schema.port_groups).where(schema.port_groups.c.port_id == port.id))
    own = {"device_id": router.id, "device_owner": INTERFACE, "port_security_enabled": False}
    change.set(PORTS, port.id, own | bind_to_carrier(change, router.host))
    change.touch(networks=[port.network_id])
    return str(port.id)


def _joined(change: Change, router: DbRow, which: Body) -> DbRow:
    """The interface that is meant."""
    query = _ports_of(router.id, INTERFACE)
    if key := which.get("port_id"):
        query = query.where(PORTS.c.id == key)
        missing = fault("RouterInterfaceNotFound", id=router.id, port=key)
    else:
        key = which["subnet_id"]
        query = query.join(HELD).where(HELD.c.subnet_id == key)
        missing = fault("RouterInterfaceNotFoundForSubnet", id=router.id, subnet=key)
    port = change.first(query)
    if port is None:
        raise missing
    return port


def _interface(change: Change, router: DbRow, port_id: str) -> Body:
    port = change.get_existing(PORTS, port_id)
    subnets = change.scalars(select(HELD.c.subnet_id).where(HELD.c.port_id == port_id))
    return {
        "id": router.id,
        "project_id": router.project_id,
        "tenant_id": router.project_id,
        "port_id": port_id,
        "network_id": port.network_id,
        "subnet_id": next(iter(subnets), None),
        "subnet_ids": subnets,
        "tags": port.tags,
    }


def _require_unused(change: Change, router: DbRow, subnet_id: str) -> None:
    led_to = (HELD.c.port_id == FLOATING.c.port_id) & (
        HELD.c.address == FLOATING.c.fixed_ip_address
    )
    floating = select(FLOATING.c.id).join(HELD, led_to).where(FLOATING.c.router_id == router.id)
    if change.has(floating.where(HELD.c.subnet_id == subnet_id)):
        raise fault("RouterInterfaceInUseByFloatingIP", id=router.id, subnet=subnet_id)
    inside = ipaddress.ip_network(change.get_existing(schema.subnets, subnet_id).cidr)
    if any(ipaddress.ip_address(route["nexthop"]) in inside for route in router.routes):
        raise fault("RouterInterfaceInUseByRoute", id=router.id, subnet=subnet_id)


def _check_routes(change: Change, router: str, routes: list[Body]) -> None:
    joined = [
        ipaddress.ip_network(subnet.cidr)
        for subnet in _joined_subnets(change, router, *ROUTER_OWNERS)
    ]
    for route in routes:
        if len(route) < 2:
            raise fault("InvalidRoutes", why="a route has a destination and a nexthop")
        if not any(ipaddress.ip_address(route["nexthop"]) in network for network in joined):
            why = f"the nexthop {route['nexthop']} is not connected with the router"
            raise fault("InvalidRoutes", why=why)


def carrier(change: Change) -> str:
    """The host for a new router; "" while none is alive."""
    alive = select(HOSTS.c.name).where(HOSTS.c.name.in_(change.fabric.hosts.alive()))
    best = alive.order_by(HOSTS.c.external_gateway.desc(), HOSTS.c.name).limit(1)
    return change.scalar(best) or ""


def place(change: Change, router_id: str, before: str, host: str) -> None:
    """Let `host` carry the router from now on."""
    mine = [PORTS.c.device_id == router_id, PORTS.c.device_owner.in_(ROUTER_OWNERS)]
    change.execute(update(ROUTERS).where(ROUTERS.c.id == router_id).values(host=host))
    change.execute(update(PORTS).where(*mine).values(**bind(change, host)))
    networks = change.scalars(select(PORTS.c.network_id).where(*mine))
    change.touch(networks=networks, hosts=[before, host])


def place_routers(fabric: Fabric) -> None:
    """Give every router without a living host another one, if there is any."""
    alive = fabric.hosts.alive()
    if not fabric.settings.has_hosts or not alive:
        return
    lost = select(ROUTERS.c.id, ROUTERS.c.host).where(ROUTERS.c.host.not_in(alive))
    if fabric.database.first(lost) is None:
        return
    with fabric.change() as change:
        host = carrier(change)
        for row in change.rows(lost) if host else ():
            place(change, row.id, row.host, host)
