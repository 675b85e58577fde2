# SPDX-License-Identifier: Apache-2.0
"""The description of a host: the networks, ports, groups and routers that the host must wire.

The description is computed as a whole in the read transaction that also reads the host's revision.
There is no cache, so nothing is missing after a crash or restart. The number of queries does not
depend on the number of objects. A port is wired in the same way on each host where it has a
binding, active or not. A live-migrated guest therefore finds a wired port at the destination, and
the first frame there redirects the bridges and tunnels of all hosts.
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

PORTS, PLACES, ADDRESSES, GROUPS = schema.ports, schema.PLACES, schema.addresses, schema.port_groups
RULES, HOSTS, FLOATING = schema.security_group_rules, schema.hosts, schema.floating_ips
ARRIVALS = schema.arrivals
Addresses = dict[str, list[DbRow]]


def describe(connection: Connection, host: DbRow, dns: Sequence[str]) -> Body:
    """Return the description of a host, with the host's revision.

    The description contains the networks, ports, groups and routers that the host must wire.

    Args:
        connection: The connection of the read transaction.
        host: The row of the host.
        dns: The operator's DNS servers.
    """
    transaction = Transaction(connection)
    local_port_ids = select(PLACES.c.port_id).where(PLACES.c.host == host.name)
    ports = transaction.rows(select(PORTS).where(PORTS.c.id.in_(local_port_ids)))
    guest_ports = [port for port in ports if port.device_owner not in ROUTER_OWNERS]
    router_ports = [port for port in ports if port.device_owner in ROUTER_OWNERS]
    network_ids = {port.network_id for port in ports}
    rule: ColumnElement[bool] = schema.networks.c.id.in_(network_ids)
    if host.external_gateway:
        rule = or_(rule, schema.networks.c.external)
    networks = transaction.rows(select(schema.networks).where(rule))
    network_ids = {network.id for network in networks}
    subnet_query = select(schema.subnets).where(schema.subnets.c.network_id.in_(network_ids))
    subnets = {row.id: row for row in transaction.rows(subnet_query)}
    dhcp = PORTS.c.device_owner == "network:dhcp"
    servers = transaction.rows(select(PORTS).where(PORTS.c.network_id.in_(network_ids), dhcp))
    addresses = _addresses(connection, [port.id for port in [*ports, *servers]])
    arrived_ids = transaction.scalars(
        select(ARRIVALS.c.port_id).where(ARRIVALS.c.host == host.name)
    )
    groups = _find_group_ids(
        connection, [port.id for port in guest_ports if port.port_security_enabled]
    )
    return {
        "revision": host.changed,
        "host": host.name,
        "dns": list(dns),
        "networks": _networks(
            networks, subnets, addresses, servers, _find_peers(connection, host, networks)
        ),
        "ports": {
            port.id: _port(port, addresses, groups[port.id], port.id in arrived_ids)
            for port in guest_ports
        },
        "groups": _groups(connection, {group for ids in groups.values() for group in ids}),
        "routers": _routers(connection, host, router_ports, addresses, subnets),
    }


def _addresses(connection: Connection, keys: list[str]) -> Addresses:
    addresses: Addresses = defaultdict(list)
    query = select(ADDRESSES).where(ADDRESSES.c.port_id.in_(keys)).order_by(ADDRESSES.c.address)
    for row in connection.execute(query):
        addresses[row.port_id].append(row)
    return addresses


def _find_group_ids(connection: Connection, keys: list[str]) -> dict[str, list[str]]:
    group_ids: dict[str, list[str]] = defaultdict(list)
    query = select(GROUPS).where(GROUPS.c.port_id.in_(keys)).order_by(GROUPS.c.group_id)
    for row in connection.execute(query):
        group_ids[row.port_id].append(row.group_id)
    return group_ids


def _find_peers(
    connection: Connection, host: DbRow, networks: Sequence[DbRow]
) -> dict[str, list[str]]:
    """Return network -> the tunnel addresses of the other hosts that wire the network.

    An external network is also wired on hosts that are external gateways.
    """
    has_tunnel = HOSTS.c.tunnel_address.is_not(None)
    others = connection.execute(select(HOSTS).where(HOSTS.c.name != host.name, has_tunnel)).all()
    rule = PLACES.c.network_id.in_([network.id for network in networks])
    places = select(PLACES.c.network_id, PLACES.c.host).distinct().where(rule)
    pairs = {(row.network_id, row.host) for row in connection.execute(places)}
    return {
        network.id: sorted(
            {
                other.tunnel_address
                for other in others
                if (network.id, other.name) in pairs
                or (network.external and other.external_gateway)
            }
        )
        for network in networks
    }


def _networks(
    networks: Sequence[DbRow],
    subnets: dict[str, DbRow],
    port_addresses: Addresses,
    servers: Iterable[DbRow],
    peers: dict[str, list[str]],
) -> Body:
    result: dict[str, Body] = {
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
        addresses = [_with_prefix(address, subnets) for address in port_addresses[server.id]]
        result[server.network_id]["dhcp"] = {"mac": server.mac_address, "addresses": addresses}
    for row in subnets.values():
        result[row.network_id]["subnets"][row.id] = {
            "cidr": row.cidr,
            "gateway": row.gateway_ip,
            "dhcp": row.enable_dhcp,
            "dns": row.dns_nameservers,
            "routes": row.host_routes,
            "ipv6_mode": row.ipv6_ra_mode or row.ipv6_address_mode,
        }
    return result


def _port(row: DbRow, port_addresses: Addresses, groups: list[str], arrived: bool) -> Body:
    return {
        "network": row.network_id,
        "mac": row.mac_address,
        "device": tap(row.id),
        "addresses": [{"address": item.address} for item in port_addresses[row.id]],
        "allowed_pairs": [
            {"mac_address": row.mac_address} | item for item in row.allowed_address_pairs
        ],
        "security": row.port_security_enabled,
        "groups": groups,
        "server": row.device_id,
        "project_id": row.project_id,
        "hostname": row.dns_name,
        "up": row.admin_state_up,
        "arrived": arrived,
    }


def _groups(connection: Connection, local_groups: set[str]) -> Body:
    """Return security group -> rules and member addresses.

    The groups are ``local_groups``, of ports on the host, and the remote groups in their rules.
    Only local groups get their rules, and only remote groups get their members.
    """
    rules: dict[str, list[Body]] = defaultdict(list)
    remote_groups: set[str] = set()
    query = select(RULES).where(RULES.c.security_group_id.in_(local_groups)).order_by(RULES.c.id)
    for row in connection.execute(query):
        remote_groups |= {row.remote_group_id} - {None}
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
    members = _members(connection, remote_groups)
    return {
        group: {"rules": rules[group], "members": sorted(members[group])}
        for group in sorted(local_groups | remote_groups)
    }


def _members(connection: Connection, groups: Iterable[str]) -> dict[str, set[str]]:
    members: dict[str, set[str]] = defaultdict(set)
    of_groups = GROUPS.c.group_id.in_(groups)
    query = select(GROUPS.c.group_id, ADDRESSES.c.address).where(
        ADDRESSES.c.port_id == GROUPS.c.port_id
    )
    for group, address in connection.execute(query.where(of_groups)):
        members[group].add(address)
    pairs_query = select(GROUPS.c.group_id, PORTS.c.allowed_address_pairs).join_from(GROUPS, PORTS)
    for group, pairs in connection.execute(
        pairs_query.where(of_groups, PORTS.c.allowed_address_pairs != [])
    ):
        members[group].update(_strip_prefix_length(pair["ip_address"]) for pair in pairs)
    return members


def _routers(
    connection: Connection,
    host: DbRow,
    ports: Sequence[DbRow],
    port_addresses: Addresses,
    subnets: dict[str, DbRow],
) -> Body:
    router_query = select(schema.routers).filter_by(host=host.name, admin_state_up=True)
    routers = connection.execute(router_query).all()
    floating: dict[str, list[Body]] = defaultdict(list)
    of_routers = FLOATING.c.router_id.in_([router_row.id for router_row in routers])
    for row in connection.execute(
        select(FLOATING).where(of_routers, FLOATING.c.fixed_ip_address.is_not(None))
    ):
        floating[row.router_id].append(
            {"floating": row.floating_ip_address, "fixed": row.fixed_ip_address}
        )
    result: Body = {}
    for router in routers:
        router_ports = [port for port in ports if port.device_id == router.id]
        gateway = next(
            (port for port in router_ports if port.device_owner == ROUTER_OWNERS[1]), None
        )
        result[router.id] = {
            "external": None
            if gateway is None
            else _external(gateway, router, port_addresses, subnets),
            "interfaces": [
                {
                    "network": port.network_id,
                    "mac": port.mac_address,
                    "address": _with_prefix(address, subnets),
                }
                for port in router_ports
                if port is not gateway
                for address in port_addresses[port.id]
            ],
            "floating": floating[router.id],
            "routes": router.routes,
        }
    return result


def _external(
    port: DbRow, router: DbRow, port_addresses: Addresses, subnets: dict[str, DbRow]
) -> Body:
    gateways = [subnets[address.subnet_id].gateway_ip for address in port_addresses[port.id]]
    return {
        "network": port.network_id,
        "mac": port.mac_address,
        "snat": router.enable_snat,
        "addresses": [_with_prefix(address, subnets) for address in port_addresses[port.id]],
        "gateway": next((gateway for gateway in gateways if gateway), None),
    }


def _with_prefix(row: DbRow, subnets: dict[str, DbRow]) -> str:
    return f"{row.address}/{ipaddress.ip_network(subnets[row.subnet_id].cidr).prefixlen}"


def _strip_prefix_length(cidr: str) -> str:
    """Return a /32 or /128 prefix without the length, and any other prefix unchanged."""
    return cidr.removesuffix("/32") if "." in cidr else cidr.removesuffix("/128")
