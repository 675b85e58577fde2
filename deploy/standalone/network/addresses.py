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
from collections.abc import Callable, Iterable, Iterator, Sequence

from sqlalchemy import Connection, insert, select

from deploy.standalone.database import DbRow
from deploy.standalone.network import schema
from deploy.standalone.network.faults import fault
from deploy.standalone.resource import Body

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
    while has_mac(
        connection,
        network_id,
        found := ":".join([MAC_PREFIX, *(f"{octet:02x}" for octet in draw())]),
    ):
        pass
    return found


def has_mac(connection: Connection, network_id: str, mac: str) -> bool:
    """Does a port of the network have it?"""
    ports = schema.ports.c
    return (
        connection.execute(
            select(ports.id).where(ports.network_id == network_id, ports.mac_address == mac)
        ).first()
        is not None
    )


def subnets_of(connection: Connection, network_id: str) -> Sequence[DbRow]:
    """The subnets of a network, oldest first."""
    return connection.execute(
        select(schema.subnets)
        .where(schema.subnets.c.network_id == network_id)
        .order_by(schema.subnets.c.created_at, schema.subnets.c.id)
    ).all()


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
            mine = [fixed for fixed in own if fixed[0] == subnet.id and fixed not in found]
            fixed = (
                mine[0]
                if mine
                else (subnet.id, _free(connection, subnet, [one for _, one in found]))
            )
        found.append(fixed)
    # A router's advertisement makes every guest on the network take such an address, requested or
    # not.
    given = {key for key, _ in found}
    automatic = (
        []
        if router or not requested
        else [
            (subnet.id, from_mac(subnet.cidr, mac))
            for subnet in subnets
            if is_from_mac(subnet) and subnet.id not in given
        ]
    )
    return found + automatic


def store(connection: Connection, port_id: str, fixed: Sequence[Fixed]) -> None:
    """Write down that the port has these addresses."""
    if fixed:
        connection.execute(
            insert(ADDRESSES),
            [
                {"subnet_id": subnet, "address": address, "port_id": port_id}
                for subnet, address in fixed
            ],
        )


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
        managed = [
            subnet for subnet in subnets if subnet.ip_version == version and not is_from_mac(subnet)
        ]
        for subnet in managed:
            if (address := _lowest(connection, subnet, ())) is not None:
                found.append((subnet.id, address))
                break
        else:
            if managed:
                raise fault("IpAddressGenerationFailure", network=network_id)
    return found + [
        (subnet.id, from_mac(subnet.cidr, mac)) for subnet in subnets if is_from_mac(subnet)
    ]


def _subnet(network_id: str, subnets: Sequence[DbRow], request: Body) -> DbRow:
    address = request.get("ip_address")
    if request.get("subnet_id"):
        for subnet in subnets:
            if subnet.id == request["subnet_id"]:
                if address and ipaddress.ip_address(address) not in ipaddress.ip_network(
                    subnet.cidr
                ):
                    raise fault("InvalidIpForSubnet", ip=address, subnet=subnet.id)
                return subnet
        raise fault(
            "InvalidInput",
            why=f"Failed to create port on network {network_id}, because fixed_ips included"
            f" invalid subnet {request['subnet_id']}",
        )
    if not address:
        raise fault("InvalidInput", why="IP allocation requires subnet_id or ip_address")
    for subnet in subnets:
        if ipaddress.ip_address(address) in ipaddress.ip_network(subnet.cidr):
            return subnet
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
    taken = select(ADDRESSES.c.port_id).where(
        ADDRESSES.c.subnet_id == fixed[0], ADDRESSES.c.address == fixed[1]
    )
    if fixed in found or (fixed not in own and connection.execute(taken).first() is not None):
        raise fault("IpAddressInUse", network=network_id, ip=fixed[1])


def _free(connection: Connection, subnet: DbRow, reserved: Iterable[str]) -> str:
    address = _lowest(connection, subnet, reserved)
    if address is None:
        raise fault("IpAddressGenerationFailure", network=subnet.network_id)
    return address


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
        guesses = [str(make(_nth(pools, random.randrange(size)))) for _ in range(GUESSES)]
        taken.update(connection.scalars(query.where(ADDRESSES.c.address.in_(guesses))))
        for guess in guesses:
            if guess not in taken:
                return guess
    taken.update(connection.scalars(query))
    return next(
        (address for address in map(str, map(make, _numbers(pools))) if address not in taken), None
    )


def _nth(pools: Sequence[tuple[int, int]], place: int) -> int:
    for first, last in pools:
        if place <= last - first:
            return first + place
        place -= last - first + 1
    raise IndexError(place)


def _numbers(pools: Sequence[tuple[int, int]]) -> Iterator[int]:
    for first, last in pools:
        yield from range(first, last + 1)
