# SPDX-License-Identifier: Apache-2.0
"""The description: the networks that this host must wire, parsed and validated.

`parse` turns the JSON into records. Every value that later becomes part of a rule or a
configuration file is a number, an address in canonical form, or a word of a small alphabet. A
tenant's host names and groups therefore cannot inject anything into nft or dnsmasq. An invalid part
only affects itself. An invalid port is in ``failed`` with the reason. An invalid rule of a group,
which could only permit traffic, is left out.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)
from typing import TypeVar

from deploy.one_machine.services.json_types import Body, JsonValue

Address = IPv4Address | IPv6Address
Interface = IPv4Interface | IPv6Interface
Prefix = IPv4Network | IPv6Network
Item = TypeVar("Item")

ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{7,63}")
MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
HOSTNAME = re.compile(
    r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)
PROTOCOLS = {
    "icmp": 1,
    "igmp": 2,
    "ipip": 4,
    "tcp": 6,
    "egp": 8,
    "udp": 17,
    "dccp": 33,
    "ipv6-encap": 41,
    "ipv6-route": 43,
    "ipv6-frag": 44,
    "rsvp": 46,
    "gre": 47,
    "esp": 50,
    "ah": 51,
    "icmpv6": 58,
    "ipv6-icmp": 58,
    "ipv6-nonxt": 59,
    "ipv6-opts": 60,
    "ospf": 89,
    "vrrp": 112,
    "pgm": 113,
    "sctp": 132,
    "udplite": 136,
}
ICMP, TCP, ICMP6 = 1, 6, 58
WITH_PORTS = (6, 17, 33, 132, 136)
PARTS = {"networks": dict, "ports": dict, "groups": dict, "routers": dict, "dns": list}
# A description differs little from the one before.
CACHED_ADDRESSES = 65536
MAX_VNI, MAX_MTU, MIN_MTU = 2**24 - 1, 65535, 68


@dataclass(frozen=True, slots=True)
class Subnet:
    """A subnet of a network. Without a gateway the guests get no default route."""

    id: str
    cidr: Prefix
    gateway: Address | None
    dhcp: bool
    dns: tuple[Address, ...]
    routes: tuple[tuple[Prefix, Address], ...]
    ipv6_mode: str | None


@dataclass(frozen=True, slots=True)
class Dhcp:
    """The DHCP port of a network, with the same address and MAC on every host."""

    mac: str
    addresses: tuple[Interface, ...]


@dataclass(frozen=True, slots=True)
class Network:
    """A network that this host wires. ``peers`` are the tunnel addresses of its other hosts."""

    id: str
    vni: int
    mtu: int
    external: bool
    peers: tuple[Address, ...]
    dhcp: Dhcp | None
    subnets: tuple[Subnet, ...]


@dataclass(frozen=True, slots=True)
class GuestPort:
    """A guest's port on this host.

    Attributes:
        id: The port's id.
        network: The id of the network.
        mac: The MAC address.
        addresses: The fixed addresses.
        pairs: More prefixes and MAC addresses from which the guest may send.
        security: True if packets are filtered.
        groups: Ids of the security groups.
        server: The id of the server, or "".
        project: The id of the project, or "".
        hostname: The host name, or "".
        arrived: True if the guest was migrated here and has connections that this host does not
            know.
    """

    id: str
    network: str
    mac: str
    addresses: tuple[Address, ...]
    pairs: tuple[tuple[Prefix, str], ...]
    security: bool
    groups: tuple[str, ...]
    server: str
    project: str
    hostname: str
    arrived: bool = False


@dataclass(frozen=True, slots=True)
class SecurityRule:
    """A rule that permits traffic.

    For ICMP, ``low`` and ``high`` are type and code, otherwise ports. The other end has an address
    in ``prefix``, or is a member of the security group with the id ``group``. None permits all.
    """

    ingress: bool
    version: int
    protocol: int | None
    low: int | None
    high: int | None
    prefix: Prefix | None
    group: str | None


@dataclass(frozen=True, slots=True)
class SecurityGroup:
    """A security group. ``members`` are the addresses of its ports on all hosts."""

    rules: tuple[SecurityRule, ...]
    members: tuple[Prefix, ...]


@dataclass(frozen=True, slots=True)
class RouterInterface:
    """An interface of a router in a network."""

    network: str
    mac: str
    addresses: tuple[Interface, ...]


@dataclass(frozen=True, slots=True)
class Router:
    """A router that this host carries. ``floating`` has pairs of floating and fixed address.

    ``external`` is the interface in the external network, ``gateway`` the next hop there. ``snat``
    lets guests without a floating address use the router's address.
    """

    id: str
    external: RouterInterface | None
    gateway: Address | None
    snat: bool
    interfaces: tuple[RouterInterface, ...]
    floating: tuple[tuple[IPv4Address, IPv4Address], ...]
    routes: tuple[tuple[Prefix, Address], ...]


@dataclass(frozen=True, slots=True)
class Description:
    """A whole description, with its objects by id."""

    revision: int = 0
    dns: tuple[Address, ...] = ()
    networks: Mapping[str, Network] = field(default_factory=dict)
    ports: Mapping[str, GuestPort] = field(default_factory=dict)
    groups: Mapping[str, SecurityGroup] = field(default_factory=dict)
    routers: Mapping[str, Router] = field(default_factory=dict)
    #: Invalid ports -> reason.
    failed: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def parse(tree: JsonValue) -> Description:
    """Parse a description from the network service, and return the valid objects.

    An invalid object is left out. So is an invalid entry of a group's rules or members, of a
    router's floating IPs, or of the DNS servers, and a port or router that names a missing or
    invalid network. Ports that are left out are in ``failed``, and ``warnings`` has a text for each
    other object. A port with ``up`` False is left out without a report.

    Raises:
        ValueError: The description is not an object, has no revision, or has a part of ``PARTS``
            that is not empty and has the wrong type.
    """
    if not isinstance(tree, dict) or not isinstance(tree.get("revision"), int):
        raise ValueError("The description is no object with a revision.")
    if wrong_keys := [
        key for key, kind in PARTS.items() if not isinstance(tree.get(key) or kind(), kind)
    ]:
        raise ValueError(
            f"The description is no object with valid types of: {', '.join(wrong_keys)}."
        )
    problems: dict[str, str] = {}
    networks = _take_each(tree, "networks", _network, problems)
    groups = _take_each(tree, "groups", lambda id_, item: _group(id_, item, problems), problems)
    routers = _take_each(tree, "routers", lambda id_, item: _router(id_, item, problems), problems)
    failed: dict[str, str] = {}
    ports = _take_each(tree, "ports", _port, failed)
    for port in list(ports.values()):
        if port.network not in networks:
            failed[port.id] = f"its network {port.network} is missing or invalid in the description"
            del ports[port.id]
    for id_, router in list(routers.items()):
        interfaces = (*router.interfaces, *([router.external] if router.external else []))
        if unknown_networks := [
            interface.network for interface in interfaces if interface.network not in networks
        ]:
            problems[id_] = (
                f"its network {unknown_networks[0]} is missing or invalid in the description"
            )
            del routers[id_]
    return Description(
        tree["revision"],
        tuple(_take_valid(tree.get("dns") or (), _address, problems)),
        networks,
        ports,
        groups,
        routers,
        failed,
        tuple(f"{id_}: {why}" for id_, why in problems.items()),
    )


def _take_each(
    tree: Body, key: str, take: Callable[[str, JsonValue], Item | None], problems: dict[str, str]
) -> dict[str, Item]:
    items: dict[str, Item] = {}
    for id_, item in (tree.get(key) or {}).items():
        try:
            record = take(_word(ID, id_), item)
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            problems[str(id_)] = f"invalid: {type(problem).__name__} {problem}"[:300]
        else:
            if record is not None:
                items[id_] = record
    return items


def _take_valid(
    items: JsonValue,
    take: Callable[[JsonValue], Item],
    problems: dict[str, str],
    name: str = "list",
) -> list[Item]:
    """Return the results of ``take`` for the valid items of a list.

    Invalid items are left out, and ``problems[name]`` is set to the error of the last.
    """
    values = []
    for item in items:
        try:
            values.append(take(item))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            problems[name] = f"left out {str(item)[:100]!r}: {problem}"[:300]
    return values


def _word(shape: re.Pattern[str], value: JsonValue) -> str:
    if not isinstance(value, str) or not shape.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} has characters or a length that are not allowed")
    return value


def _optional_word(shape: re.Pattern[str], value: JsonValue) -> str:
    """Return the value if it is a text that matches ``shape``, otherwise ""."""
    return value if isinstance(value, str) and shape.fullmatch(value) else ""


def _require_plain(value: JsonValue) -> str:
    """Return the value if it is a text without an IPv6 zone.

    Why: Python accepts any letters behind a "%" as a zone.

    Raises:
        ValueError: The value is no text, or has a zone.
    """
    if not isinstance(value, str) or "%" in value:
        raise ValueError(f"{str(value)[:80]!r} is no address, or has an IPv6 zone")
    return value


@lru_cache(CACHED_ADDRESSES)
def _address(value: JsonValue) -> Address:
    return ipaddress.ip_address(_require_plain(value))


@lru_cache(CACHED_ADDRESSES)
def _interface(value: JsonValue) -> Interface:
    return ipaddress.ip_interface(_require_plain(value))


@lru_cache(CACHED_ADDRESSES)
def _prefix(value: JsonValue) -> Prefix:
    return ipaddress.ip_network(_require_plain(value), strict=False)


def _number(value: JsonValue, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{str(value)[:40]!r} is no number between {low} and {high}")
    return value


def _mac(value: JsonValue) -> str:
    mac = _word(MAC, str(value).lower())
    if int(mac[:2], 16) & 1:
        raise ValueError(f"the MAC address {mac} is a multicast address")
    return mac


def _network(id_: str, item: JsonValue) -> Network:
    dhcp_item = item.get("dhcp")
    dhcp = (
        Dhcp(_mac(dhcp_item["mac"]), tuple(_interface(one) for one in dhcp_item["addresses"]))
        if dhcp_item
        else None
    )
    return Network(
        id_,
        _number(item["vni"], 1, MAX_VNI),
        _number(item["mtu"], MIN_MTU, MAX_MTU),
        bool(item.get("external")),
        tuple(sorted({_address(one) for one in item.get("peers") or ()}, key=str)),
        dhcp,
        tuple(_subnet(*pair) for pair in sorted((item.get("subnets") or {}).items())),
    )


def _subnet(id_: str, item: JsonValue) -> Subnet:
    return Subnet(
        _word(ID, id_),
        _prefix(item["cidr"]),
        _address(item["gateway"]) if item.get("gateway") else None,
        bool(item.get("dhcp")),
        tuple(_address(one) for one in item.get("dns") or ()),
        _routes(item.get("routes")),
        str(item["ipv6_mode"]) if item.get("ipv6_mode") else None,
    )


def _routes(items: JsonValue) -> tuple[tuple[Prefix, Address], ...]:
    return tuple((_prefix(item["destination"]), _address(item["nexthop"])) for item in items or ())


def _port(id_: str, item: JsonValue) -> GuestPort | None:
    if not item.get("up", True):
        return None
    pairs = tuple(
        (_prefix(pair["ip_address"]), _mac(pair.get("mac_address") or item["mac"]))
        for pair in item.get("allowed_pairs") or ()
    )
    return GuestPort(
        id_,
        _word(ID, item["network"]),
        _mac(item["mac"]),
        tuple(_address(one["address"]) for one in item.get("addresses") or ()),
        pairs,
        bool(item.get("security", True)),
        tuple(sorted(_word(ID, one) for one in item.get("groups") or ())),
        _optional_word(ID, item.get("server")),
        _optional_word(ID, item.get("project_id")),
        _optional_word(HOSTNAME, item.get("hostname")),
        bool(item.get("arrived")),
    )


def _group(id_: str, item: JsonValue, problems: dict[str, str]) -> SecurityGroup:
    return SecurityGroup(
        tuple(_take_valid(item.get("rules") or (), _rule, problems, id_)),
        tuple(_take_valid(item.get("members") or (), _prefix, problems, id_)),
    )


def _rule(item: JsonValue) -> SecurityRule:
    version = item.get("version", 4)
    if item["direction"] not in ("ingress", "egress") or version not in (4, 6):
        raise ValueError("the direction or the IP version of the rule is unknown")
    protocol = _protocol(item.get("protocol"), version)
    low, high = item.get("port_min"), item.get("port_max")
    if (low, high) != (None, None) and protocol not in (ICMP, ICMP6, *WITH_PORTS):
        raise ValueError(f"the rule has a range of ports, but protocol {protocol} has no ports")
    highest = 255 if protocol in (ICMP, ICMP6) else 65535
    prefix = _prefix(item["remote_prefix"]) if item.get("remote_prefix") else None
    if prefix is not None and prefix.version != version:
        raise ValueError(f"the remote prefix {prefix} is not of IP version {version}")
    return SecurityRule(
        item["direction"] == "ingress",
        version,
        protocol,
        None if low is None else _number(low, 0, highest),
        None if high is None else _number(high, 0, highest),
        prefix,
        _word(ID, item["remote_group"]) if item.get("remote_group") else None,
    )


def _protocol(value: JsonValue, version: int) -> int | None:
    if value in (None, "", "any", 0, "0"):
        return None
    number = PROTOCOLS.get(str(value).lower())
    number = _number(int(value), 1, 255) if number is None else number
    return ICMP6 if number == ICMP and version == 6 else number


def _router(id_: str, item: JsonValue, problems: dict[str, str]) -> Router:
    external_item = item.get("external")
    external = external_item and RouterInterface(
        _word(ID, external_item["network"]),
        _mac(external_item["mac"]),
        tuple(_interface(one) for one in external_item["addresses"]),
    )
    # A port with two addresses comes as two interfaces.
    interfaces: dict[tuple[str, str], RouterInterface] = {}
    for interface in item.get("interfaces") or ():
        key = (_word(ID, interface["network"]), _mac(interface["mac"]))
        present = interfaces[key].addresses if key in interfaces else ()
        interfaces[key] = RouterInterface(*key, (*present, _interface(interface["address"])))
    floating = tuple(_take_valid(item.get("floating") or (), _floating, problems, id_))
    return Router(
        id_,
        external or None,
        _address(external_item["gateway"])
        if external_item and external_item.get("gateway")
        else None,
        bool(external_item and external_item.get("snat", True)),
        tuple(interfaces.values()),
        floating,
        _routes(item.get("routes")),
    )


def _floating(item: JsonValue) -> tuple[IPv4Address, IPv4Address]:
    return IPv4Address(_require_plain(item["floating"])), IPv4Address(_require_plain(item["fixed"]))
