# SPDX-License-Identifier: Apache-2.0
"""What one host must wire, computed whole from the rows of one moment: networks, ports, groups,
routers.

Called in the read transaction that also reads the host's revision. Nothing is remembered between
two calls, so a crash or a restart anywhere leaves nothing out. A fixed number of queries, whatever
the host holds. A port is wired alike wherever it has a binding, active or not: a guest that is
moved while it runs finds all of it where it arrives, and its first frame there tells the bridges
and tunnels of all hosts the new way.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Sequence

from sqlalchemy import ColumnElement, Connection, or_, select

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.bindings import ROUTER_OWNERS
from deploy.one_machine.services.network.host.names import tap
from deploy.one_machine.services.resource import Body, Transaction

PORTS, PLACES, HELD, GROUPS = schema.ports, schema.PLACES, schema.addresses, schema.port_groups
RULES, HOSTS, FLOATING = schema.security_group_rules, schema.hosts, schema.floating_ips
ARRIVALS = schema.arrivals
Addresses = dict[str, list[DbRow]]


def describe(connection: Connection, host: DbRow, dns: Sequence[str]) -> Body:
    """The description for this host (its row)."""
    read = Transaction(connection)
    here = select(PLACES.c.port_id).where(PLACES.c.host == host.name)
    ports = read.rows(select(PORTS).where(PORTS.c.id.in_(here)))
    plugged = [port for port in ports if port.device_owner not in ROUTER_OWNERS]
    routed = [port for port in ports if port.device_owner in ROUTER_OWNERS]
    known = {port.network_id for port in ports}
    rule: ColumnElement[bool] = schema.networks.c.id.in_(known)
    if host.external_gateway:
        rule = or_(rule, schema.networks.c.external)
    networks = read.rows(select(schema.networks).where(rule))
    known = {network.id for network in networks}
    inside = select(schema.subnets).where(schema.subnets.c.network_id.in_(known))
    subnets = {row.id: row for row in read.rows(inside)}
    dhcp = PORTS.c.device_owner == "network:dhcp"
    servers = read.rows(select(PORTS).where(PORTS.c.network_id.in_(known), dhcp))
    held = _addresses(connection, [port.id for port in [*ports, *servers]])
    arrived = read.scalars(select(ARRIVALS.c.port_id).where(ARRIVALS.c.host == host.name))
    groups = _groups_of(connection, [port.id for port in plugged if port.port_security_enabled])
    return {
        "revision": host.changed,
        "host": host.name,
        "dns": list(dns),
        "networks": _networks(networks, subnets, held, servers, _peers(connection, host, networks)),
        "ports": {
            port.id: _port(port, held, groups[port.id], port.id in arrived) for port in plugged
        },
        "groups": _groups(connection, {group for ids in groups.values() for group in ids}),
        "routers": _routers(connection, host, routed, held, subnets),
    }


def _addresses(connection: Connection, keys: list[str]) -> Addresses:
    found: Addresses = defaultdict(list)
    theirs = select(HELD).where(HELD.c.port_id.in_(keys)).order_by(HELD.c.address)
    for row in connection.execute(theirs):
        found[row.port_id].append(row)
    return found


def _groups_of(connection: Connection, keys: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    theirs = select(GROUPS).where(GROUPS.c.port_id.in_(keys)).order_by(GROUPS.c.group_id)
    for row in connection.execute(theirs):
        found[row.port_id].append(row.group_id)
    return found


def _peers(connection: Connection, host: DbRow, networks: Sequence[DbRow]) -> dict[str, list[str]]:
    """network -> tunnel addresses of the other hosts that have it."""
    reached = HOSTS.c.tunnel_address.is_not(None)
    others = connection.execute(select(HOSTS).where(HOSTS.c.name != host.name, reached)).all()
    rule = PLACES.c.network_id.in_([network.id for network in networks])
    places = select(PLACES.c.network_id, PLACES.c.host).distinct().where(rule)
    there = {(row.network_id, row.host) for row in connection.execute(places)}
    return {
        network.id: sorted(
            {
                other.tunnel_address
                for other in others
                if (network.id, other.name) in there
                or (network.external and other.external_gateway)
            }
        )
        for network in networks
    }


def _networks(
    networks: Sequence[DbRow],
    subnets: dict[str, DbRow],
    held: Addresses,
    servers: Iterable[DbRow],
    peers: dict[str, list[str]],
) -> Body:
    found: dict[str, Body] = {
        row.id: {
            "vni": row.vni,
            "mtu": row.mtu,
            "external": row.external,
            "peers": peers[row.id],
            "dhcp": None,
            "subnets": {},
        }
        for row in networks
    }
    for server in servers:
        addresses = [_with_prefix(address, subnets) for address in held[server.id]]
        found[server.network_id]["dhcp"] = {"mac": server.mac_address, "addresses": addresses}
    for row in subnets.values():
        found[row.network_id]["subnets"][row.id] = {
            "cidr": row.cidr,
            "gateway": row.gateway_ip,
            "dhcp": row.enable_dhcp,
            "dns": row.dns_nameservers,
            "routes": row.host_routes,
            "ipv6_mode": row.ipv6_ra_mode or row.ipv6_address_mode,
        }
    return found


def _port(row: DbRow, held: Addresses, groups: list[str], arrived: bool) -> Body:
    return {
        "network": row.network_id,
        "mac": row.mac_address,
        "device": tap(row.id),
        "addresses": [{"address": one.address} for one in held[row.id]],
        "allowed_pairs": [
            {"mac_address": row.mac_address} | one for one in row.allowed_address_pairs
        ],
        "security": row.port_security_enabled,
        "groups": groups,
        "server": row.device_id,
        "project_id": row.project_id,
        "hostname": row.dns_name,
        "up": row.admin_state_up,
        "arrived": arrived,
    }


def _groups(connection: Connection, used: set[str]) -> Body:
    """The groups of local ports with their rules, and those that the rules name, with their
    members."""
    rules: dict[str, list[Body]] = defaultdict(list)
    named: set[str] = set()
    theirs = select(RULES).where(RULES.c.security_group_id.in_(used)).order_by(RULES.c.id)
    for row in connection.execute(theirs):
        named |= {row.remote_group_id} - {None}
        rules[row.security_group_id].append(
            {
                "direction": row.direction,
                "version": int(row.ethertype[-1]),
                "protocol": row.protocol,
                "port_min": row.port_range_min,
                "port_max": row.port_range_max,
                "remote_prefix": row.remote_ip_prefix,
                "remote_group": row.remote_group_id,
            }
        )
    members = _members(connection, named)
    return {
        group: {"rules": rules[group], "members": sorted(members[group])}
        for group in sorted(used | named)
    }


def _members(connection: Connection, groups: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    of_groups = GROUPS.c.group_id.in_(groups)
    held = select(GROUPS.c.group_id, HELD.c.address).where(HELD.c.port_id == GROUPS.c.port_id)
    for group, address in connection.execute(held.where(of_groups)):
        found[group].add(address)
    allowed = select(GROUPS.c.group_id, PORTS.c.allowed_address_pairs).join_from(GROUPS, PORTS)
    for group, pairs in connection.execute(
        allowed.where(of_groups, PORTS.c.allowed_address_pairs != [])
    ):
        found[group].update(_plain(pair["ip_address"]) for pair in pairs)
    return found


def _routers(
    connection: Connection,
    host: DbRow,
    ports: Sequence[DbRow],
    held: Addresses,
    subnets: dict[str, DbRow],
) -> Body:
    mine = select(schema.routers).filter_by(host=host.name, admin_state_up=True)
    routers = connection.execute(mine).all()
    floating: dict[str, list[Body]] = defaultdict(list)
    theirs = FLOATING.c.router_id.in_([one.id for one in routers])
    for row in connection.execute(
        select(FLOATING).where(theirs, FLOATING.c.fixed_ip_address.is_not(None))
    ):
        floating[row.router_id].append(
            {"floating": row.floating_ip_address, "fixed": row.fixed_ip_address}
        )
    found: Body = {}
    for router in routers:
        own = [port for port in ports if port.device_id == router.id]
        gateway = next((port for port in own if port.device_owner == ROUTER_OWNERS[1]), None)
        found[router.id] = {
            "external": None if gateway is None else _external(gateway, router, held, subnets),
            "interfaces": [
                {
                    "network": port.network_id,
                    "mac": port.mac_address,
                    "address": _with_prefix(address, subnets),
                }
                for port in own
                if port is not gateway
                for address in held[port.id]
            ],
            "floating": floating[router.id],
            "routes": router.routes,
        }
    return found


def _external(port: DbRow, router: DbRow, held: Addresses, subnets: dict[str, DbRow]) -> Body:
    gateways = [subnets[address.subnet_id].gateway_ip for address in held[port.id]]
    return {
        "network": port.network_id,
        "mac": port.mac_address,
        "snat": router.enable_snat,
        "addresses": [_with_prefix(address, subnets) for address in held[port.id]],
        "gateway": next((gateway for gateway in gateways if gateway), None),
    }


def _with_prefix(held: DbRow, subnets: dict[str, DbRow]) -> str:
    return f"{held.address}/{ipaddress.ip_network(subnets[held.subnet_id].cidr).prefixlen}"


def _plain(cidr: str) -> str:
    """A pair of one address is written as an address."""
    return cidr.removesuffix("/32") if "." in cidr else cidr.removesuffix("/128")
