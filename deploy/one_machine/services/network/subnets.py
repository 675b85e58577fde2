# SPDX-License-Identifier: Apache-2.0
"""/v2.0/subnets: the addresses of a network, with pools, gateway, routes and DHCP options.

Subnets of one network never overlap, but subnets of different networks may. A network with DHCP in
a subnet has one port network:dhcp, the same on every host (`update_dhcp_port`).
"""

import ipaddress
from itertools import pairwise

from sqlalchemy import ColumnElement, delete, or_, select

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.addresses import (
    choose_addresses,
    free_mac,
    is_from_mac,
    store,
    subnets_of,
)
from deploy.one_machine.services.network.attributes import (
    ADDRESS,
    CIDR,
    ID,
    REQUIRED,
    ROUTES,
    STANDARD,
    UNSET,
    Attribute,
    Attributes,
)
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change
from deploy.one_machine.services.network.faults import fault, invalid
from deploy.one_machine.services.network.networks import visible_network
from deploy.one_machine.services.network.quotas import spend
from deploy.one_machine.services.network.resource import NetworkResource
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import TRUTH, array, mapping, nullable, one_of

SUBNETS, PORTS, ADDRESSES = schema.subnets, schema.ports, schema.addresses
MODE = nullable(one_of("slaac", "dhcpv6-stateful", "dhcpv6-stateless"))
DHCP_OWNER = "network:dhcp"
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class SubnetsApi(NetworkResource):
    """The API of subnets, /v2.0/subnets."""

    name, plural, table, missing = "subnet", "subnets", SUBNETS, "SubnetNotFound"
    attributes = Attributes(
        {
            **STANDARD,
            "network_id": Attribute(ID, REQUIRED, put=False),
            "ip_version": Attribute(one_of(4, 6), REQUIRED, put=False),
            "cidr": Attribute(CIDR, REQUIRED, put=False),
            "gateway_ip": Attribute(nullable(ADDRESS)),
            "enable_dhcp": Attribute(TRUTH, True),
            "ipv6_address_mode": Attribute(MODE, None, put=False),
            "ipv6_ra_mode": Attribute(MODE, None, put=False),
            "allocation_pools": Attribute(
                nullable(array(mapping({"start": ADDRESS, "end": ADDRESS})))
            ),
            "dns_nameservers": Attribute({**array(ADDRESS, 5), "null_is": []}, []),
            "host_routes": Attribute({**ROUTES, "maxItems": 20}, []),
            "subnetpool_id": Attribute({"type": "null"}, UNSET, put=False),
        }
    )

    constant = {"subnetpool_id": None, "service_types": [], "segment_id": None}

    def visible_to(self, project_id: str) -> ColumnElement[bool]:
        networks = schema.networks.c
        visible_networks = select(networks.id).where(
            or_(networks.shared, networks.project_id == project_id)
        )
        return or_(SUBNETS.c.project_id == project_id, SUBNETS.c.network_id.in_(visible_networks))

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        network = visible_network(change, caller, body["network_id"])
        caller.require_owner(network.project_id, "(rule:create_subnet)")
        body["project_id"] = network.project_id if not caller.is_admin else body["project_id"]
        spend(change, body["project_id"], "subnet")
        net = _parse_cidr(body)
        for other in subnets_of(change.connection, network.id):
            if other.ip_version == net.version and ipaddress.ip_network(other.cidr).overlaps(net):
                raise invalid(
                    f"Requested subnet with cidr: {net} for network: {network.id} overlaps"
                    f" with another subnet ({other.id})"
                )
        first = 1 if net.num_addresses > 1 and net.prefixlen < 31 else 0
        body.setdefault("gateway_ip", str(net[first]))
        _check_gateway(body["gateway_ip"], net, body["ipv6_address_mode"])
        if body.get("allocation_pools") is None:
            body["allocation_pools"] = default_pools(net, body["gateway_ip"])
        check_pools(body["allocation_pools"], net, body["gateway_ip"])
        key = change.add(SUBNETS, self.columns(body))
        update_dhcp_port(change, network)
        change.touch(networks=[network.id])
        return key

    def update(self, change: Change, caller: NetworkCaller, row: DbRow, body: Body) -> None:
        net = ipaddress.ip_network(row.cidr)
        gateway = body.get("gateway_ip", row.gateway_ip)
        if "gateway_ip" in body and gateway != row.gateway_ip:
            _check_gateway(gateway, net, row.ipv6_address_mode)
            _require_unused_gateway(change, row)
        if body.get("allocation_pools") is None:
            body.pop("allocation_pools", None)
        check_pools(body.get("allocation_pools", row.allocation_pools), net, gateway)
        change.set(SUBNETS, row.id, body)
        update_dhcp_port(change, change.get_existing(schema.networks, row.network_id))
        change.touch(networks=[row.network_id])

    def delete(self, change: Change, caller: NetworkCaller, row: DbRow) -> None:
        users = select(PORTS).join(ADDRESSES).where(ADDRESSES.c.subnet_id == row.id)
        users = users.where(
            PORTS.c.device_owner.like("network:router%")
            if is_from_mac(row)
            else PORTS.c.device_owner != DHCP_OWNER
        )
        user = change.first(users.limit(1))
        if user is not None:
            why = (
                "One or more ports have an IP allocation from this subnet, such as port"
                f" {user.id} ({user.device_owner or 'without owner'})"
            )
            raise fault("SubnetInUse", id=row.id, why=why)
        change.touch(networks=[row.network_id])
        change.remove(SUBNETS, row.id)
        update_dhcp_port(change, change.get_existing(schema.networks, row.network_id))


def update_dhcp_port(change: Change, network: DbRow) -> None:
    """Give the network's DHCP port exactly one address in each subnet with DHCP.

    A missing port is created. Without a subnet with DHCP the port is removed. Subnets whose guests
    derive their addresses from the MAC address do not count.

    Raises:
        Fault: 409, a subnet has no free address.
    """
    connection = change.connection
    dhcp_subnets = {
        subnet.id
        for subnet in subnets_of(connection, network.id)
        if subnet.enable_dhcp and not is_from_mac(subnet)
    }
    port = change.first(select(PORTS).filter_by(network_id=network.id, device_owner=DHCP_OWNER))
    if not dhcp_subnets:
        if port is not None:
            change.remove(PORTS, port.id)
        return
    if port is None:
        mac = free_mac(connection, network.id)
        columns = {
            "project_id": network.project_id,
            "network_id": network.id,
            "mac_address": mac,
            "device_owner": DHCP_OWNER,
            "device_id": f"dhcp-{network.id}",
            "status": "ACTIVE",
            "port_security_enabled": False,
        }
        key = change.add(PORTS, columns)
    else:
        mac, key = port.mac_address, port.id
    old_subnets = set(
        change.scalars(select(ADDRESSES.c.subnet_id).where(ADDRESSES.c.port_id == key))
    )
    is_obsolete = ADDRESSES.c.subnet_id.in_(old_subnets - dhcp_subnets)
    change.execute(delete(ADDRESSES).where(ADDRESSES.c.port_id == key, is_obsolete))
    new_addresses = [{"subnet_id": subnet} for subnet in sorted(dhcp_subnets - old_subnets)]
    store(
        connection, key, choose_addresses(connection, network.id, mac, new_addresses, router=True)
    )


def default_pools(net: IPNetwork, gateway: str | None) -> list[dict[str, str]]:
    """Return the default allocation pools of a subnet, at most two.

    They contain all addresses except the gateway and, in subnets of more than two addresses, the
    first address and the IPv4 broadcast address.
    """
    first, last = int(net.network_address), int(net.broadcast_address)
    if net.prefixlen < net.max_prefixlen - 1:
        first, last = first + 1, last - (1 if net.version == 4 else 0)
    ranges = [(first, last)]
    if gateway is not None and first <= (middle := int(ipaddress.ip_address(gateway))) <= last:
        ranges = [(first, middle - 1), (middle + 1, last)]
    address_type = type(net.network_address)
    return [
        {"start": str(address_type(low)), "end": str(address_type(high))}
        for low, high in ranges
        if low <= high
    ]


def check_pools(pools: list[dict[str, str]], net: IPNetwork, gateway: str | None) -> None:
    """Check the allocation pools of a subnet.

    Raises:
        Fault: 400, a pool is invalid or outside of the subnet. 409, pools overlap or contain the
            gateway.
    """
    ranges = []
    for pool in pools:
        text = f"{pool.get('start')}-{pool.get('end')}"
        if len(pool) < 2:
            raise fault("InvalidAllocationPool", pool=text)
        start, end = ipaddress.ip_address(pool["start"]), ipaddress.ip_address(pool["end"])
        if start.version != net.version or end.version != net.version or int(start) > int(end):
            raise fault("InvalidAllocationPool", pool=text)
        if start not in net or end not in net:
            raise fault("OutOfBoundsAllocationPool", pool=text, cidr=net)
        if gateway is not None and int(start) <= int(ipaddress.ip_address(gateway)) <= int(end):
            raise fault("GatewayConflictWithAllocationPools", ip=gateway, pool=text)
        ranges.append((int(start), int(end), text))
    for first, second in pairwise(sorted(ranges)):
        if second[0] <= first[1]:
            raise fault("OverlappingAllocationPools", one=first[2], other=second[2], cidr=net)


def _parse_cidr(body: Body) -> IPNetwork:
    net = ipaddress.ip_network(body["cidr"])
    if net.version != body["ip_version"]:
        raise invalid(f"cidr {net} does not match the ip_version {body['ip_version']}")
    modes = (body["ipv6_ra_mode"], body["ipv6_address_mode"])
    if net.version == 4 and modes != (None, None):
        raise invalid("ipv6_ra_mode and ipv6_address_mode are only allowed for IPv6 subnets")
    if None not in modes and modes[0] != modes[1]:
        raise invalid(
            f"ipv6_ra_mode set to '{modes[0]}' with ipv6_address_mode set to '{modes[1]}'"
            " is not valid. If both attributes are set, they must be the same value"
        )
    if modes != (None, None) and not body["enable_dhcp"]:
        raise invalid(
            "ipv6_ra_mode or ipv6_address_mode cannot be set when enable_dhcp is set to False"
        )
    if {"slaac", "dhcpv6-stateless"} & set(modes) and net.prefixlen != 64:
        raise invalid(f"Invalid CIDR {net} for an IPv6 address mode: the prefix length must be 64")
    if net.prefixlen == 0 or net.is_multicast or net.is_loopback:
        raise invalid(f"cidr {net} contains all addresses, or is multicast or loopback")
    return net


def _check_gateway(gateway: str | None, net: IPNetwork, mode: str | None) -> None:
    if gateway is None:
        return
    address = ipaddress.ip_address(gateway)
    if address.version != net.version:
        raise invalid(f"gateway_ip '{gateway}' does not match the ip_version '{net.version}'")
    if address in net and net.version == 4 and net.prefixlen < 31 and address in (net[0], net[-1]):
        raise invalid("Gateway is not valid on subnet")


def _require_unused_gateway(change: Change, row: DbRow) -> None:
    has_gateway = (ADDRESSES.c.subnet_id == row.id) & (ADDRESSES.c.address == row.gateway_ip)
    is_router_port = PORTS.c.device_owner.like("network:router%")
    user = change.scalar(select(PORTS.c.id).join(ADDRESSES).where(has_gateway, is_router_port))
    if user is not None:
        raise fault("GatewayIpInUse", ip=row.gateway_ip, port=user)
