# SPDX-License-Identifier: Apache-2.0
"""/v2.0/routers: routers connect subnets with each other and with an external network.

One host carries each router, which means that the host forwards the router's packets.

A router has ports: network:router_interface in each joined subnet, and network:router_gateway in
its external network. Both are bound to the host that carries the router, so that all hosts of the
networks send packets there. A router without a living host moves to another host
(`place_routers`).
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

ROUTERS, PORTS, ADDRESSES, FLOATING = (
    schema.routers,
    schema.ports,
    schema.addresses,
    schema.floating_ips,
)
HOSTS = schema.hosts
INTERFACE, GATEWAY = ROUTER_OWNERS
GATEWAY_INFO = nullable(
    mapping(
        {"network_id": ID, "enable_snat": TRUTH, "external_fixed_ips": {**FIXED_IPS, "maxItems": 5}}
    )
)
INTERFACE_BODY = Attributes(subnet_id=Attribute(ID), port_id=Attribute(ID))


class RoutersApi(NetworkResource):
    """The API of routers, /v2.0/routers."""

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
        is_gateway = (PORTS.c.device_id == ROUTERS.c.id) & (PORTS.c.device_owner == GATEWAY)
        network = select(PORTS.c.network_id).where(is_gateway).scalar_subquery()
        fixed = collect(schema.FIXED_IP, is_gateway, within=ADDRESSES.join(PORTS))
        return select(ROUTERS, network.label("outside"), fixed.label("fixed_ips"))

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        gateway = row["outside"] and {
            "network_id": row["outside"],
            "enable_snat": row["enable_snat"],
            "external_fixed_ips": row["fixed_ips"],
        }
        view = super().view(row, caller) | {"external_gateway_info": gateway or None}
        return view | ({"ha": False, "distributed": False} if caller.is_admin else {})

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        spend(change, body["project_id"], "router")
        key = change.add(ROUTERS, self.columns(body) | {"host": choose_carrier(change)})
        if gateway := body.get("external_gateway_info"):
            self._set_gateway(change, caller, key, gateway)
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

    def _set_gateway(self, change: Change, caller: NetworkCaller, key: str, gateway: Body) -> None:
        """Give the router this gateway, or remove the gateway if `gateway` is empty.

        Without new addresses, a gateway in the same network keeps its port.

        Args:
            change: The transaction.
            caller: The caller.
            key: The id of the router.
            gateway: The validated external_gateway_info.

        Raises:
            Fault: 400, the network is not external. 403, only an admin may choose addresses or
                change enable_snat. 404, the network is unknown, or neither external nor the
                caller's. 409, floating IPs use the present gateway, and the network would change.
                The errors of `ports.add`.
        """
        router = change.get_existing(ROUTERS, key)
        port = change.first(_ports_of(key, GATEWAY))
        network_id, fixed_ips = gateway.get("network_id"), gateway.get("external_fixed_ips")
        if port is not None and (network_id != port.network_id or fixed_ips):
            floating_query = select(FLOATING.c.id).where(FLOATING.c.router_id == key)
            if (old_network := port.network_id) != network_id and change.has(floating_query):
                raise fault("RouterExternalGatewayInUseByFloatingIp", id=key, network=old_network)
            ports.remove(change, port)
            port = None
        if "enable_snat" in gateway and gateway["enable_snat"] != router.enable_snat:
            caller.require_admin("(rule:update_router:external_gateway_info:enable_snat)")
            change.set(ROUTERS, key, {"enable_snat": gateway["enable_snat"]})
        if port is None and network_id:
            network = change.one(schema.networks, network_id)
            if network is None or not (network.external or caller.owns(network.project_id)):
                raise fault("NetworkNotFound", id=network_id)
            if not network.external:
                raise bad_request("router", f"Network {network_id} is not an external network")
            if fixed_ips:
                rule = "(rule:update_router:external_gateway_info:external_fixed_ips)"
                caller.require_admin(rule)
            address_attributes = {"fixed_ips": fixed_ips} if fixed_ips else {}
            ports.add(change, network, _port(network_id, router, GATEWAY) | address_attributes)
        change.touch(hosts=[router.host])


class RouterInterfaces(Handler[Fabric]):
    """PUT /v2.0/routers/{key}/add_router_interface and .../remove_router_interface."""

    def on_put_add(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller, request = req.context.caller, _read_interface(req)
        with self._service.change() as change:
            router = _find_owned_router(change, caller, key, "add")
            join = _join_port if "port_id" in request else _join_subnet
            port = join(change, caller, router, request.get("port_id") or request["subnet_id"])
            change.touch(hosts=[router.host])
            view = _interface(change, router, port)
        self._service.settle(change)
        answer(resp, view)

    def on_put_remove(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller, request = req.context.caller, _read_interface(req)
        with self._service.change() as change:
            router = _find_owned_router(change, caller, key, "remove")
            port = _find_interface(change, router, request)
            view = _interface(change, router, port.id)
            for subnet in view["subnet_ids"]:
                _require_unused(change, router, subnet)
            ports.remove(change, port)
            change.touch(hosts=[router.host])
        answer(resp, view)


def _find_owned_router(change: Change, caller: NetworkCaller, key: str, verb: str) -> DbRow:
    router = RoutersApi().find(change.connection, caller, key)
    caller.require_owner(router.project_id, f"(rule:{verb}_router_interface)")
    return router


def _read_interface(req: falcon.Request) -> Body:
    request = INTERFACE_BODY.validate(read_json(req), "router", req.context.caller, new=True)
    if not request:
        raise bad_request("router", "Either subnet_id or port_id must be specified")
    return request


def _port(network: str, router: DbRow, owner: str) -> Body:
    """Return the attributes for a new port of the router. `owner` is the device_owner.

    A gateway belongs to no project, so that tenants do not find it among their ports.
    """
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


def _find_joined_subnets(change: Change, router: str, *owners: str) -> Sequence[DbRow]:
    """Return the subnets in which the router has ports with one of these device_owners."""
    is_router_port = (PORTS.c.device_id == router) & PORTS.c.device_owner.in_(owners)
    joined_tables = PORTS.join(ADDRESSES).join(
        schema.subnets, schema.subnets.c.id == ADDRESSES.c.subnet_id
    )
    return change.rows(select(schema.subnets).select_from(joined_tables).where(is_router_port))


def _require_no_overlap(change: Change, router: DbRow, subnet: DbRow) -> None:
    for other in _find_joined_subnets(change, router.id, INTERFACE):
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
    _require_no_overlap(change, router, subnet)
    fixed_ip = {"subnet_id": subnet.id, "ip_address": subnet.gateway_ip}
    return ports.add(
        change, network, _port(network.id, router, INTERFACE) | {"fixed_ips": [fixed_ip]}
    )


def _join_port(change: Change, caller: NetworkCaller, router: DbRow, port_id: str) -> str:
    port = change.one(PORTS, port_id)
    if port is None or not caller.owns(port.project_id):
        raise fault("PortNotFound", id=port_id)
    if port.device_id or port.device_owner:
        raise fault("PortInUse", id=port.id, network=port.network_id, device=port.device_id)
    subnets = change.rows(
        select(schema.subnets).join(ADDRESSES).where(ADDRESSES.c.port_id == port.id)
    )
    if not subnets:
        raise bad_request("router", "Router port must have at least one fixed IP")
    for subnet in subnets:
        _require_no_overlap(change, router, subnet)
    change.execute(delete(schema.port_groups).where(schema.port_groups.c.port_id == port.id))
    columns = {"device_id": router.id, "device_owner": INTERFACE, "port_security_enabled": False}
    change.set(PORTS, port.id, columns | bind_to_carrier(change, router.host))
    change.touch(networks=[port.network_id])
    return str(port.id)


def _find_interface(change: Change, router: DbRow, request: Body) -> DbRow:
    """Return the port of the router's interface with the requested port_id, or else subnet_id.

    Raises:
        Fault: 404, the router has no such interface.
    """
    query = _ports_of(router.id, INTERFACE)
    if key := request.get("port_id"):
        query = query.where(PORTS.c.id == key)
        not_found = fault("RouterInterfaceNotFound", id=router.id, port=key)
    else:
        key = request["subnet_id"]
        query = query.join(ADDRESSES).where(ADDRESSES.c.subnet_id == key)
        not_found = fault("RouterInterfaceNotFoundForSubnet", id=router.id, subnet=key)
    port = change.first(query)
    if port is None:
        raise not_found
    return port


def _interface(change: Change, router: DbRow, port_id: str) -> Body:
    port = change.get_existing(PORTS, port_id)
    subnets = change.scalars(select(ADDRESSES.c.subnet_id).where(ADDRESSES.c.port_id == port_id))
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
    is_translated = (ADDRESSES.c.port_id == FLOATING.c.port_id) & (
        ADDRESSES.c.address == FLOATING.c.fixed_ip_address
    )
    floating = (
        select(FLOATING.c.id)
        .join(ADDRESSES, is_translated)
        .where(FLOATING.c.router_id == router.id)
    )
    if change.has(floating.where(ADDRESSES.c.subnet_id == subnet_id)):
        raise fault("RouterInterfaceInUseByFloatingIP", id=router.id, subnet=subnet_id)
    network = ipaddress.ip_network(change.get_existing(schema.subnets, subnet_id).cidr)
    if any(ipaddress.ip_address(route["nexthop"]) in network for route in router.routes):
        raise fault("RouterInterfaceInUseByRoute", id=router.id, subnet=subnet_id)


def _check_routes(change: Change, router: str, routes: list[Body]) -> None:
    networks = [
        ipaddress.ip_network(subnet.cidr)
        for subnet in _find_joined_subnets(change, router, *ROUTER_OWNERS)
    ]
    for route in routes:
        if len(route) < 2:
            raise fault("InvalidRoutes", why="a route must have a destination and a nexthop")
        if not any(ipaddress.ip_address(route["nexthop"]) in network for network in networks):
            why = f"the nexthop {route['nexthop']} is in no subnet of the router"
            raise fault("InvalidRoutes", why=why)


def choose_carrier(change: Change) -> str:
    """Return the living host that is to carry a router, or "" if no host is alive.

    Hosts that are gateways of external networks come first, then the order of names decides.
    """
    query = select(HOSTS.c.name).where(HOSTS.c.name.in_(change.fabric.hosts.alive()))
    best_first = query.order_by(HOSTS.c.external_gateway.desc(), HOSTS.c.name).limit(1)
    return change.scalar(best_first) or ""


def place_router(change: Change, router_id: str, before: str, host: str) -> None:
    """Store `host` as the host of the router, and bind the router's ports to it.

    Both hosts, and the hosts of the router's networks, get a new revision.

    Args:
        change: The transaction.
        router_id: The router.
        before: The former host, or "".
        host: The new host, which must be alive.
    """
    is_router_port = [PORTS.c.device_id == router_id, PORTS.c.device_owner.in_(ROUTER_OWNERS)]
    change.execute(update(ROUTERS).where(ROUTERS.c.id == router_id).values(host=host))
    change.execute(update(PORTS).where(*is_router_port).values(**bind(change, host)))
    networks = change.scalars(select(PORTS.c.network_id).where(*is_router_port))
    change.touch(networks=networks, hosts=[before, host])


def place_routers(fabric: Fabric) -> None:
    """Move every router without a living host to the host of `choose_carrier`.

    If no host is alive, or in a cloud without hosts, the routers stay.
    """
    alive = fabric.hosts.alive()
    if not fabric.settings.has_hosts or not alive:
        return
    lost_routers = select(ROUTERS.c.id, ROUTERS.c.host).where(ROUTERS.c.host.not_in(alive))
    if fabric.database.first(lost_routers) is None:
        return
    with fabric.change() as change:
        host = choose_carrier(change)
        for row in change.rows(lost_routers) if host else ():
            place_router(change, row.id, row.host, host)
