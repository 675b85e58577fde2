# SPDX-License-Identifier: Apache-2.0
"""The choice of a port's addresses.

A port gets the requested addresses, or an address of each IP version, and all addresses that follow
from the MAC address. The functions run in the caller's transaction, which holds the only write
lock, so a free address stays free until the commit. A small subnet gives the lowest free address, a
large one a random one, which needs no search.
"""

import ipaddress
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from sqlalchemy import Connection, insert, select

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.faults import fault, invalid
from deploy.one_machine.services.resource import Body

ADDRESSES = schema.addresses
SMALL_SUBNET_SIZE, GUESSES = 256, 64
FROM_MAC = ("slaac", "dhcpv6-stateless")
MAC_PREFIX = "fa:16:3e"
Fixed = tuple[str, str]
"""(subnet id, address)"""


def free_mac(
    connection: Connection,
    network_id: str,
    draw: Callable[[], bytes] = lambda: secrets.token_bytes(3),
) -> str:
    """Return a random MAC address that no port of the network has.

    Why: in 3 % of networks with 1000 ports, two random addresses are equal.

    Args:
        connection: The connection of the transaction.
        network_id: The network.
        draw: Returns the last three bytes of an address.
    """
    while True:
        mac = f"{MAC_PREFIX}:{draw().hex(':')}"
        if not has_mac(connection, network_id, mac):
            return mac


def has_mac(connection: Connection, network_id: str, mac: str) -> bool:
    """Return True if a port of the network has this MAC address."""
    query = select(schema.ports.c.id).filter_by(network_id=network_id, mac_address=mac)
    return connection.scalar(query) is not None


def subnets_of(connection: Connection, network_id: str) -> Sequence[DbRow]:
    """Return the subnets of a network, oldest first."""
    query = select(schema.subnets).filter_by(network_id=network_id)
    ordered_query = query.order_by(schema.subnets.c.created_at, schema.subnets.c.id)
    return connection.execute(ordered_query).all()


def is_from_mac(subnet: DbRow) -> bool:
    """Return True if guests in the subnet derive their addresses from their MAC addresses."""
    return subnet.ipv6_address_mode in FROM_MAC


def choose_addresses(
    connection: Connection,
    network_id: str,
    mac: str,
    requested: list[Body] | None,
    keep: Iterable[Fixed] = (),
    *,
    router: bool = False,
) -> list[Fixed]:
    """Choose and return the addresses for a port. The caller stores them with `store`.

    Args:
        connection: The connection of the transaction.
        network_id: The port's network.
        mac: The port's MAC address.
        requested: The requested fixed_ips, each with a subnet, an address or both. Addresses
            derived from the MAC address in other subnets are added. An empty list gives no
            addresses. None gives an address of each IP version that has a subnet, and all addresses
            derived from the MAC address.
        keep: The present addresses of the port. They are not in use for this port, and a request
            with only a subnet gets the present address there. Ignored if `requested` is None.
        router: True for a port of a router. Then no derived addresses are added to requested
            addresses.

    Raises:
        Fault: 400, an address or subnet does not belong to the network, an address is the
            network or broadcast address of an IPv4 subnet, or a request is empty. 409, an address
            is in use, or no address is free.
    """
    subnets = subnets_of(connection, network_id)
    if requested is None:
        return _choose_default(connection, network_id, subnets, mac)
    chosen: list[Fixed] = []
    present = set(keep)
    for request in requested:
        subnet = _find_subnet(network_id, subnets, request)
        if "ip_address" in request:
            fixed = (subnet.id, request["ip_address"])
            _require_free(connection, network_id, subnet, fixed, present, chosen)
        elif is_from_mac(subnet) and not router:
            fixed = (subnet.id, derive_from_mac(subnet.cidr, mac))
        else:
            reusable = (fixed for fixed in present if fixed[0] == subnet.id and fixed not in chosen)
            fixed = next(reusable, None) or _choose_free(
                connection, subnet, [address for _, address in chosen]
            )
        chosen.append(fixed)
    # After a router's advertisement, every guest on the network takes such an address, requested or
    # not.
    subnet_ids = {key for key, _ in chosen}
    if requested and not router:
        chosen += [
            fixed for fixed in _list_mac_addresses(subnets, mac) if fixed[0] not in subnet_ids
        ]
    return chosen


def store(connection: Connection, port_id: str, fixed: Sequence[Fixed]) -> None:
    """Insert the addresses of a port."""
    rows = [{"subnet_id": key, "address": address, "port_id": port_id} for key, address in fixed]
    if rows:
        connection.execute(insert(ADDRESSES), rows)


def derive_from_mac(cidr: str, mac: str) -> str:
    """Return the IPv6 address that a guest with this MAC address derives for a subnet (EUI-64)."""
    octets = bytes.fromhex(mac.replace(":", ""))
    interface = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return str(ipaddress.ip_network(cidr)[int.from_bytes(interface, "big")])


def _choose_default(
    connection: Connection, network_id: str, subnets: Sequence[DbRow], mac: str
) -> list[Fixed]:
    chosen: list[Fixed] = []
    for version in (4, 6):
        same_version = [subnet for subnet in subnets if subnet.ip_version == version]
        managed = [subnet for subnet in same_version if not is_from_mac(subnet)]
        for subnet in managed:
            if (address := _find_free_address(connection, subnet, ())) is not None:
                chosen.append((subnet.id, address))
                break
        else:
            if managed:
                raise fault("IpAddressGenerationFailure", network=network_id)
    return chosen + _list_mac_addresses(subnets, mac)


def _list_mac_addresses(subnets: Sequence[DbRow], mac: str) -> list[Fixed]:
    return [
        (subnet.id, derive_from_mac(subnet.cidr, mac)) for subnet in subnets if is_from_mac(subnet)
    ]


def _find_subnet(network_id: str, subnets: Sequence[DbRow], request: Body) -> DbRow:
    address, key = request.get("ip_address"), request.get("subnet_id")
    if not address and not key:
        raise invalid("IP allocation requires subnet_id or ip_address")
    candidates = [subnet for subnet in subnets if not key or subnet.id == key]
    if key and not candidates:
        why = f"because fixed_ips included invalid subnet {key}"
        raise invalid(f"Failed to create port on network {network_id}, {why}")
    for subnet in candidates:
        if not address or ipaddress.ip_address(address) in ipaddress.ip_network(subnet.cidr):
            return subnet
    if key:
        raise fault("InvalidIpForSubnet", ip=address, subnet=key)
    raise fault("InvalidIpForNetwork", ip=address, id=network_id)


def _require_free(
    connection: Connection,
    network_id: str,
    subnet: DbRow,
    fixed: Fixed,
    present: set[Fixed],
    chosen: Sequence[Fixed],
) -> None:
    network, address = ipaddress.ip_network(subnet.cidr), ipaddress.ip_address(fixed[1])
    if network.version == 4 and network.prefixlen < 31 and address in (network[0], network[-1]):
        raise fault("InvalidIpForSubnet", ip=fixed[1], subnet=subnet.id)
    query = select(ADDRESSES.c.port_id).filter_by(subnet_id=fixed[0], address=fixed[1])
    if fixed in chosen or (fixed not in present and connection.scalar(query) is not None):
        raise fault("IpAddressInUse", network=network_id, ip=fixed[1])


def _choose_free(connection: Connection, subnet: DbRow, reserved: Iterable[str]) -> Fixed:
    address = _find_free_address(connection, subnet, reserved)
    if address is None:
        raise fault("IpAddressGenerationFailure", network=subnet.network_id)
    return subnet.id, address


def _find_free_address(
    connection: Connection, subnet: DbRow, reserved: Iterable[str]
) -> str | None:
    """Return a free address from the subnet's pools, or None if all are in use or `reserved`."""
    pools = [
        (int(ipaddress.ip_address(pool["start"])), int(ipaddress.ip_address(pool["end"])))
        for pool in subnet.allocation_pools
    ]
    make = ipaddress.IPv4Address if subnet.ip_version == 4 else ipaddress.IPv6Address
    size, taken = sum(last - first + 1 for first, last in pools), set(reserved)
    query = select(ADDRESSES.c.address).where(ADDRESSES.c.subnet_id == subnet.id)
    if size > SMALL_SUBNET_SIZE:
        guesses = [str(make(_nth(pools, random.randrange(size)))) for _ in range(GUESSES)]  # noqa: S311 - needs no cryptography
        taken.update(connection.scalars(query.where(ADDRESSES.c.address.in_(guesses))))
        for guess in guesses:
            if guess not in taken:
                return guess
    taken.update(connection.scalars(query))
    all_addresses = map(
        str, map(make, chain.from_iterable(range(low, high + 1) for low, high in pools))
    )
    return next((address for address in all_addresses if address not in taken), None)


def _nth(pools: Sequence[tuple[int, int]], place: int) -> int:
    for first, last in pools:
        if place <= last - first:
            return first + place
        place -= last - first + 1
    raise IndexError(place)
