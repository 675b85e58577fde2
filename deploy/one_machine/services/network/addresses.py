# SPDX-License-Identifier: Apache-2.0
"""Which addresses a port gets: those it asks for, or one of each version, and all that follow from
its MAC address.

Works inside the caller's transaction, which holds the only write lock: what is free stays free
until the commit. In a small subnet the lowest free address is given; in a large one a random one,
so that none has to be searched.
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
    """A MAC address that no port of the network has; of 1000 random ones two would be the same in 3
    % of networks."""
    while True:
        found = f"{MAC_PREFIX}:{draw().hex(':')}"
        if not has_mac(connection, network_id, found):
            return found


def has_mac(connection: Connection, network_id: str, mac: str) -> bool:
    """Does a port of the network have it?"""
    taken = select(schema.ports.c.id).filter_by(network_id=network_id, mac_address=mac)
    return connection.scalar(taken) is not None


def subnets_of(connection: Connection, network_id: str) -> Sequence[DbRow]:
    """The subnets of a network, oldest first."""
    inside = select(schema.subnets).filter_by(network_id=network_id)
    oldest_first = inside.order_by(schema.subnets.c.created_at, schema.subnets.c.id)
    return connection.execute(oldest_first).all()


def is_from_mac(subnet: DbRow) -> bool:
    """Do its guests make their addresses themselves?"""
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
    """The addresses for a port; `requested` is its fixed_ips, None when it leaves the choice,
    `keep` what it has.

    Raises 400 for an address outside of the network, 404 for a subnet elsewhere, 409 for one in use
    or none left.
    """
    subnets = subnets_of(connection, network_id)
    if requested is None:
        return _default(connection, network_id, subnets, mac)
    found: list[Fixed] = []
    own = set(keep)
    for request in requested:
        subnet = _subnet(network_id, subnets, request)
        if "ip_address" in request:
            fixed = (subnet.id, request["ip_address"])
            _require_free(connection, network_id, subnet, fixed, own, found)
        elif is_from_mac(subnet) and not router:
            fixed = (subnet.id, from_mac(subnet.cidr, mac))
        else:
            mine = (fixed for fixed in own if fixed[0] == subnet.id and fixed not in found)
            fixed = next(mine, None) or _free(connection, subnet, [one for _, one in found])
        found.append(fixed)
    # A router's advertisement makes every guest on the network take such an address, requested or
    # not.
    given = {key for key, _ in found}
    if requested and not router:
        found += [fixed for fixed in _from_mac(subnets, mac) if fixed[0] not in given]
    return found


def store(connection: Connection, port_id: str, fixed: Sequence[Fixed]) -> None:
    """Write down that the port has these addresses."""
    rows = [{"subnet_id": key, "address": address, "port_id": port_id} for key, address in fixed]
    if rows:
        connection.execute(insert(ADDRESSES), rows)


def from_mac(cidr: str, mac: str) -> str:
    """The address that a guest with this MAC makes for itself in a subnet (EUI-64)."""
    octets = bytes.fromhex(mac.replace(":", ""))
    interface = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return str(ipaddress.ip_network(cidr)[int.from_bytes(interface, "big")])


def _default(
    connection: Connection, network_id: str, subnets: Sequence[DbRow], mac: str
) -> list[Fixed]:
    found: list[Fixed] = []
    for version in (4, 6):
        alike = [subnet for subnet in subnets if subnet.ip_version == version]
        managed = [subnet for subnet in alike if not is_from_mac(subnet)]
        for subnet in managed:
            if (address := _lowest(connection, subnet, ())) is not None:
                found.append((subnet.id, address))
                break
        else:
            if managed:
                raise fault("IpAddressGenerationFailure", network=network_id)
    return found + _from_mac(subnets, mac)


def _from_mac(subnets: Sequence[DbRow], mac: str) -> list[Fixed]:
    return [(subnet.id, from_mac(subnet.cidr, mac)) for subnet in subnets if is_from_mac(subnet)]


def _subnet(network_id: str, subnets: Sequence[DbRow], request: Body) -> DbRow:
    address, key = request.get("ip_address"), request.get("subnet_id")
    if not address and not key:
        raise invalid("IP allocation requires subnet_id or ip_address")
    meant = [subnet for subnet in subnets if not key or subnet.id == key]
    if key and not meant:
        why = f"because fixed_ips included invalid subnet {key}"
        raise invalid(f"Failed to create port on network {network_id}, {why}")
    for subnet in meant:
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
    own: set[Fixed],
    found: Sequence[Fixed],
) -> None:
    network, address = ipaddress.ip_network(subnet.cidr), ipaddress.ip_address(fixed[1])
    if network.version == 4 and network.prefixlen < 31 and address in (network[0], network[-1]):
        raise fault("InvalidIpForSubnet", ip=fixed[1], subnet=subnet.id)
    taken = select(ADDRESSES.c.port_id).filter_by(subnet_id=fixed[0], address=fixed[1])
    if fixed in found or (fixed not in own and connection.scalar(taken) is not None):
        raise fault("IpAddressInUse", network=network_id, ip=fixed[1])


def _free(connection: Connection, subnet: DbRow, reserved: Iterable[str]) -> Fixed:
    address = _lowest(connection, subnet, reserved)
    if address is None:
        raise fault("IpAddressGenerationFailure", network=subnet.network_id)
    return subnet.id, address


def _lowest(connection: Connection, subnet: DbRow, reserved: Iterable[str]) -> str | None:
    """An address of the subnet's pools that nobody has; None when there is none."""
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
    every = map(str, map(make, chain.from_iterable(range(low, up + 1) for low, up in pools)))
    return next((address for address in every if address not in taken), None)


def _nth(pools: Sequence[tuple[int, int]], place: int) -> int:
    for first, last in pools:
        if place <= last - first:
            return first + place
        place -= last - first + 1
    raise IndexError(place)
