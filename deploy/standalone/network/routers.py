# SPDX-License-Identifier: Apache-2.0
"""/v2.0/routers: they join subnets, and lead to an external network; one host carries each
(placing.py).

What a router has are ports: network:router_interface in a subnet that it joins,
network:router_gateway in its external network. Both are bound to the host that carries the router,
so that all hosts of the networks know where it is.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any

import falcon
from sqlalchemy import JSON, Row, Select, delete, func, select, type_coerce, update

from deploy.standalone.network import ports, schema
from deploy.standalone.network.attributes import (
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
from deploy.standalone.network.bindings import ROUTER_OWNERS, bind, bind_to_carrier
from deploy.standalone.network.caller import NetworkCaller
from deploy.standalone.network.fabric import Change, Fabric
from deploy.standalone.network.faults import fault
from deploy.standalone.network.quotas import spend
from deploy.standalone.network.resource import NetworkResource
from deploy.standalone.resource import Body
from deploy.standalone.schemas import TRUTH, mapping, nullable
from deploy.standalone.web import answer, read_json

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

    def select(self) -> Select[Any]:
        mine = (PORTS.c.device_id == ROUTERS.c.id) & (PORTS.c.device_owner == GATEWAY)
        network = select(PORTS.c.network_id).where(mine).scalar_subquery()
        fixed = (
            select(
                func.json_group_array(
                    func.json_object("subnet_id", HELD.c.subnet_id, "ip_address", HELD.c.address)
                )
            )
            .join(PORTS, PORTS.c.id == HELD.c.port_id)
            .where(mine)
        )
        return select(
            ROUTERS,
            network.label("outside"),
            type_coerce(fixed.scalar_subquery(), JSON).label("fixed_ips"),
        )

    def view(self, row: Mapping[Any, Any], caller: NetworkCaller) -> Body:
        outside = row["outside"] and {
            "network_id": row["outside"],
            "enable_snat": row["enable_snat"],
            "external_fixed_ips": row["fixed_ips"],
        }
        return super().view(row, caller) | {
            "status": "ACTIVE",
            "external_gateway_info": outside or None,
            "routes": row["routes"],
            "availability_zones": ["nova"],
            "availability_zone_hints": [],
            "flavor_id": None,
            **({"ha": False, "distributed": False} if caller.is_admin else {}),
        }

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        spend(change, body["project_id"], "router")
        body.pop("availability_zone_hints", None)
        outside = body.pop("external_gateway_info", None)
        key = change.add(ROUTERS, self.attributes.columns(body) | {"host": carrier(change)})
        if outside:
            self._set_gateway(change, caller, key, outside)
        return key

    def update(self, change: Change, caller: NetworkCaller, row: Row[Any], body: Body) -> None:
        values = dict(body)
        outside = values.pop("external_gateway_info", UNSET)
        if values.get("routes"):
            _check_routes(change, row.id, values["routes"])
        change.set(ROUTERS, row.id, values)
        change.touch(hosts=[row.host])
        if outside is not UNSET:
            self._set_gateway(change, caller, row.id, outside or {})

    def delete(self, change: Change, caller: NetworkCaller, row: Row[Any]) -> None:
        if change.connection.execute(_ports_of(row.id, INTERFACE)).first() is not None:
            raise fault("RouterInUse", id=row.id)
        self._set_gateway(change, caller, row.id, {})
        change.touch(hosts=[row.host])
        change.remove(ROUTERS, row.id)

    def _set_gateway(self, change: Change, caller: NetworkCaller, key: str, wanted: Body) -> None:
        """Let the router have this gateway, or none; addresses that it has in the same network
        stay."""
        router = change.one(ROUTERS, key)
        assert router is not None
        port = change.connection.execute(_ports_of(key, GATEWAY)).first()
        network_id = wanted.get("network_id")
        fixed = wanted.get("external_fixed_ips")
        if port is not None and (network_id != port.network_id or fixed):
            used = select(FLOATING.c.id).where(FLOATING.c.router_id == key)
            if (
                network_id != port.network_id
                and change.connection.execute(used).first() is not None
            ):
                raise fault(
                    "RouterExternalGatewayInUseByFloatingIp", id=key, network=port.network_id
                )
            ports.remove(change, port)
            port = None
        if "enable_snat" in wanted and wanted["enable_snat"] != router.enable_snat:
            caller.require_admin("(rule:update_router:external_gateway_info:enable_snat)")
            change.set(ROUTERS, key, {"enable_snat": wanted["enable_snat"]})
        if port is None and network_id:
            network = change.one(schema.networks, network_id)
            if network is None or not (
                caller.is_admin or network.external or network.project_id == caller.project_id
            ):
                raise fault("NetworkNotFound", id=network_id)
            if not network.external:
                raise fault(
                    "BadRequest",
                    what="router",
                    why=f"Network {network_id} is not an external network",
                )
            if fixed:
                caller.require_admin(
                    "(rule:update_router:external_gateway_info:external_fixed_ips)"
                )
            ports.add(
                change,
                network,
                _port(network_id, router, GATEWAY) | ({"fixed_ips": fixed} if fixed else {}),
            )
        change.touch(hosts=[router.host])


class RouterInterfaces:
    """PUT /v2.0/routers/{key}/add_router_interface and .../remove_router_interface."""

    def __init__(self, fabric: Fabric, routers: RoutersApi) -> None:
        self._fabric, self._routers = fabric, routers

    def on_put_add(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller, which = req.context.caller, _which(req)
        with self._fabric.change() as change:
            router = self._owned(change, caller, key, "add")
            port = (
                _join_port(change, caller, router, which["port_id"])
                if "port_id" in which
                else _join_subnet(change, caller, router, which["subnet_id"])
            )
            change.touch(hosts=[router.host])
            shown = _interface(change, router, port)
        self._fabric.settle(change)
        answer(resp, shown)

    def on_put_remove(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller, which = req.context.caller, _which(req)
        with self._fabric.change() as change:
            router = self._owned(change, caller, key, "remove")
            port = _joined(change, router, which)
            shown = _interface(change, router, port.id)
            for subnet in shown["subnet_ids"]:
                _require_unused(change, router, subnet)
            ports.remove(change, port)
            change.touch(hosts=[router.host])
        answer(resp, shown)

    def _owned(self, change: Change, caller: NetworkCaller, key: str, what: str) -> Row[Any]:
        router = self._routers.find(change.connection, caller, key)
        caller.require_owner(router.project_id, f"(rule:{what}_router_interface)")
        return router


def _which(req: falcon.Request) -> Body:
    which = WHICH.checked(read_json(req), "router", req.context.caller, new=True)
    if not which:
        raise fault(
            "BadRequest", what="router", why="Either subnet_id or port_id must be specified"
        )
    return which


def _port(network: str, router: Row[Any], owner: str) -> Body:
    """A port of the router; a gateway is nobody's, so that no tenant finds it among their own."""
    return {
        "network_id": network,
        "project_id": router.project_id if owner == INTERFACE else "",
        "device_id": router.id,
        "device_owner": owner,
        "port_security_enabled": False,
        **({"binding:host_id": router.host} if router.host else {}),
    }


def _ports_of(router: str, *owners: str) -> Select[Any]:
    return select(PORTS).where(PORTS.c.device_id == router, PORTS.c.device_owner.in_(owners))


def _joined_subnets(change: Change, router: str) -> list[Row[Any]]:
    """The subnets in which the router has an interface."""
    return list(
        change.connection.execute(
            select(schema.subnets)
            .join(HELD, HELD.c.subnet_id == schema.subnets.c.id)
            .join(PORTS, PORTS.c.id == HELD.c.port_id)
            .where(PORTS.c.device_id == router, PORTS.c.device_owner == INTERFACE)
        )
    )


def _require_apart(change: Change, router: Row[Any], subnet: Row[Any]) -> None:
    for other in _joined_subnets(change, router.id):
        if other.id == subnet.id:
            raise fault(
                "BadRequest", what="router", why=f"Router already has a port on subnet {subnet.id}"
            )
        if ipaddress.ip_network(other.cidr).overlaps(ipaddress.ip_network(subnet.cidr)):
            raise fault(
                "BadRequest",
                what="router",
                why=f"Cidr {subnet.cidr} of subnet {subnet.id} overlaps with cidr"
                f" {other.cidr} of subnet {other.id}",
            )


def _join_subnet(change: Change, caller: NetworkCaller, router: Row[Any], subnet_id: str) -> str:
    subnet = change.one(schema.subnets, subnet_id)
    network = subnet and change.one(schema.networks, subnet.network_id)
    if subnet is None or network is None or not (caller.owns(network.project_id) or network.shared):
        raise fault("SubnetNotFound", id=subnet_id)
    caller.require_owner(network.project_id, "(rule:create_port:fixed_ips)")
    if subnet.gateway_ip is None:
        raise fault(
            "BadRequest", what="router", why="Subnet for router interface must have a gateway IP"
        )
    _require_apart(change, router, subnet)
    return ports.add(
        change,
        network,
        _port(network.id, router, INTERFACE)
        | {"fixed_ips": [{"subnet_id": subnet.id, "ip_address": subnet.gateway_ip}]},
    )


def _join_port(change: Change, caller: NetworkCaller, router: Row[Any], port_id: str) -> str:
    port = change.one(PORTS, port_id)
    if port is None or not caller.owns(port.project_id):
        raise fault("PortNotFound", id=port_id)
    if port.device_id or port.device_owner:
        raise fault("PortInUse", id=port.id, network=port.network_id, device=port.device_id)
    subnets = change.connection.execute(
        select(schema.subnets)
        .join(HELD, HELD.c.subnet_id == schema.subnets.c.id)
        .where(HELD.c.port_id == port.id)
    ).all()
    if not subnets:
        raise fault("BadRequest", what="router", why="Router port must have at least one fixed IP")
    for subnet in subnets:
        _require_apart(change, router, subnet)
    change.connection.execute(
        delete(schema.port_groups).where(schema.port_groups.c.port_id == port.id)
    )
    change.set(
        PORTS,
        port.id,
        {"device_id": router.id, "device_owner": INTERFACE, "port_security_enabled": False}
        | bind_to_carrier(change, router.host),
    )
    change.touch(networks=[port.network_id])
    return str(port.id)


def _joined(change: Change, router: Row[Any], which: Body) -> Row[Any]:
    """The interface that is meant."""
    query = _ports_of(router.id, INTERFACE)
    if "port_id" in which:
        port = change.connection.execute(query.where(PORTS.c.id == which["port_id"])).first()
        if port is None:
            raise fault("RouterInterfaceNotFound", id=router.id, port=which["port_id"])
        return port
    port = change.connection.execute(
        query.join(HELD, HELD.c.port_id == PORTS.c.id).where(HELD.c.subnet_id == which["subnet_id"])
    ).first()
    if port is None:
        raise fault("RouterInterfaceNotFoundForSubnet", id=router.id, subnet=which["subnet_id"])
    return port


def _interface(change: Change, router: Row[Any], port_id: str) -> Body:
    port = change.one(PORTS, port_id)
    assert port is not None
    subnets = (
        change.connection.execute(select(HELD.c.subnet_id).where(HELD.c.port_id == port_id))
        .scalars()
        .all()
    )
    return {
        "id": router.id,
        "project_id": router.project_id,
        "tenant_id": router.project_id,
        "port_id": port_id,
        "network_id": port.network_id,
        "subnet_id": next(iter(subnets), None),
        "subnet_ids": list(subnets),
        "tags": port.tags,
    }


def _require_unused(change: Change, router: Row[Any], subnet_id: str) -> None:
    floating = (
        select(FLOATING.c.id)
        .join(
            HELD,
            (HELD.c.port_id == FLOATING.c.port_id)
            & (HELD.c.address == FLOATING.c.fixed_ip_address),
        )
        .where(FLOATING.c.router_id == router.id, HELD.c.subnet_id == subnet_id)
    )
    if change.connection.execute(floating).first() is not None:
        raise fault("RouterInterfaceInUseByFloatingIP", id=router.id, subnet=subnet_id)
    subnet = change.one(schema.subnets, subnet_id)
    assert subnet is not None
    if any(
        ipaddress.ip_address(route["nexthop"]) in ipaddress.ip_network(subnet.cidr)
        for route in router.routes
    ):
        raise fault("RouterInterfaceInUseByRoute", id=router.id, subnet=subnet_id)


def _check_routes(change: Change, router: str, routes: list[Body]) -> None:
    outside = change.connection.execute(
        select(schema.subnets)
        .join(HELD, HELD.c.subnet_id == schema.subnets.c.id)
        .join(PORTS, PORTS.c.id == HELD.c.port_id)
        .where(PORTS.c.device_id == router, PORTS.c.device_owner == GATEWAY)
    ).all()
    joined = [
        ipaddress.ip_network(subnet.cidr) for subnet in [*_joined_subnets(change, router), *outside]
    ]
    for route in routes:
        if len(route) < 2:
            raise fault("InvalidRoutes", why="a route has a destination and a nexthop")
        if not any(ipaddress.ip_address(route["nexthop"]) in network for network in joined):
            raise fault(
                "InvalidRoutes",
                why=f"the nexthop {route['nexthop']} is not connected with the router",
            )


def carrier(change: Change) -> str:
    """The host for a new router; "" while none is alive."""
    return (
        change.connection.execute(
            select(HOSTS.c.name)
            .where(HOSTS.c.name.in_(change.fabric.hosts.alive()))
            .order_by(HOSTS.c.external_gateway.desc(), HOSTS.c.name)
            .limit(1)
        ).scalar()
        or ""
    )


def place(change: Change, router_id: str, before: str, host: str) -> None:
    """Let `host` carry the router from now on."""
    mine = [PORTS.c.device_id == router_id, PORTS.c.device_owner.in_(ROUTER_OWNERS)]
    change.connection.execute(update(ROUTERS).where(ROUTERS.c.id == router_id).values(host=host))
    change.connection.execute(update(PORTS).where(*mine).values(**bind(change, host)))
    networks = change.connection.execute(select(PORTS.c.network_id).where(*mine)).scalars().all()
    change.touch(networks=networks, hosts=[before, host])


def place_routers(fabric: Fabric) -> None:
    """Give every router without a living host another one, if there is any."""
    alive = fabric.hosts.alive()
    if not fabric.settings.has_hosts or not alive:
        return
    lost = select(ROUTERS.c.id, ROUTERS.c.host).where(ROUTERS.c.host.not_in(alive))
    with fabric.database.read() as connection:
        if connection.execute(lost).first() is None:
            return
    with fabric.change() as change:
        host = carrier(change)
        for row in change.connection.execute(lost).all() if host else ():
            place(change, row.id, row.host, host)
