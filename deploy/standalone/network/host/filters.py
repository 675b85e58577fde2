# SPDX-License-Identifier: Apache-2.0
"""Who may send what to whom on our bridges: two nft tables, made from the description.

The table of the family bridge sees devices. There a frame from a guest must carry the port's own MAC and
addresses; nobody but our dnsmasq answers DHCP; an unknown device reaches no known one; the bridge itself reaches
nobody. It marks each packet with the number of the port that it comes from, later of the one that it goes to.
The table inet sees flows (br_netfilter brings bridged packets there): when a packet comes in, the groups of the
port it comes from judge it; on its way out, those of the port it goes to. A flow is judged by its first packet's
addresses in either direction, and stamped with the generation, a hash of these rules: as soon as the rules
differ, every flow is judged anew with its next packet, so what is no longer allowed ends at once.
A guest that came here running brings connections of which the kernel sees only the middle, never who began them: they
are good when the groups allow either end to have begun them, and nothing can begin in one (no SYN passes).
Must stay true: pure, and only records of description.py get in, so nothing of a guest's reaches nft as it is.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address, ip_network
from typing import NamedTuple

from deploy.standalone.network.host.description import Address, Group, Port, Prefix
from deploy.standalone.network.host.judging import DIRECTIONS, group_members, group_set, judge, judge_middle
from deploy.standalone.network.host.names import digest, tap
from deploy.standalone.network.host.nft import Set, Table, read_chains

#: The mark of what no group judges: tunnels, our namespaces, ports without security. Guests' are lower.
FREE = 0xFFFF
#: RARP: QEMU says with it where a guest has arrived. It tells only the bridges anything, of a MAC that was checked.
ANNOUNCED = "0x8035"
#: In a flow's mark, beside the stamp: its beginning was not seen here.
MIDDLE, STAMP = "0x80000000", 0x7FFFFFFF
#: Stands in the text for its own hash.
GENERATION = "@generation@"
REMEMBERED = 65536
Content = tuple[dict[str, Set], dict[str, tuple[str, ...]]]
ONE_RECEIVER = "ether daddr & 01:00:00:00:00:00 == 00:00:00:00:00:00"
BRIDGE = """\
  chain prerouting {{
    type filter hook prerouting priority -200; policy accept;
    iifname @members meta mark set iifname map @numbers
    iifname @guarded jump guest
  }}
  chain guest {{
    iifname . ether saddr != @macs drop
    ether type arp goto guest_arp
    ether type ip goto guest_ip4
    ether type ip6 goto guest_ip6
    ether type {announced} ether daddr ff:ff:ff:ff:ff:ff return
    drop
  }}
  chain guest_arp {{
    arp htype != 1 drop
    arp ptype != ip drop
    iifname . arp saddr ether . arp saddr ip @own4 return
    arp operation request arp saddr ip 0.0.0.0 iifname . arp saddr ether @macs return
{pairs_arp}    drop
  }}
  chain guest_ip4 {{
    udp dport 68 drop
    ip saddr 0.0.0.0 udp sport 68 udp dport 67 return
    iifname . ether saddr . ip saddr @own4 return
{pairs_4}    drop
  }}
  chain guest_ip6 {{
    icmpv6 type {{ nd-router-advert, nd-redirect }} drop
    udp dport 546 drop
    ip6 saddr :: icmpv6 type {{ 131, 132, nd-router-solicit, nd-neighbor-solicit, 143 }} return
    icmpv6 type nd-neighbor-advert goto guest_advert
    iifname . ether saddr . ip6 saddr @own6 return
{pairs_6}    drop
  }}
  chain guest_advert {{
    iifname . @th,64,128 @adverts return
{adverts}    drop
  }}
  chain forward {{
    type filter hook forward priority -200; policy accept;
    iifname @members oifname @members goto known
    iifname @members drop
    oifname @members drop
  }}
  chain known {{
    meta mark set oifname map @numbers
    iifname @served oifname @dhcp drop
    iifname @dhcp oifname @served drop
    iifname @unguarded oifname @dhcp jump guest
    oifname @guarded ether type ip udp dport 67 drop
    oifname @guarded ether type ip6 udp dport 547 drop
    oifname @served ether type ip udp dport 67-68 drop
    oifname @served ether type ip6 udp dport 546-547 drop
    iifname @served ether type ip6 icmpv6 type nd-router-advert drop
    oifname @guarded {one} oifname . ether daddr != @macs drop
  }}
  chain input {{
    type filter hook input priority -200; policy accept;
    iifname @members drop
  }}
  chain output {{
    type filter hook output priority -200; policy accept;
    oifname @members drop
  }}
  chain postrouting {{
    type filter hook postrouting priority 300; policy accept;
    oifname @members meta mark set 0
  }}
"""
INET = """\
  chain zone {{
    type filter hook prerouting priority -300; policy accept;
    iifname @bridges ct zone set iifname map @zones
  }}
  chain prerouting {{
    type filter hook prerouting priority -150; policy accept;
    iifname @bridges goto leaving
  }}
  chain leaving {{
    jump always
    jump arrived
    ct mark & {middle} == {middle} meta mark @arrived goto leaving_middle
    ct direction original meta mark vmap @egress
    ct direction reply meta mark vmap @ingress
  }}
  chain leaving_middle {{
    ct direction original meta mark vmap @egress_middle
    ct direction reply meta mark vmap @ingress_middle
  }}
  chain forward {{
    type filter hook forward priority -150; policy accept;
    iifname . oifname @bridged goto entering
    iifname @bridges drop
    oifname @bridges drop
  }}
  chain entering {{
    jump always
    jump arrived
    ct mark & {middle} == {middle} meta mark @arrived goto entering_middle
    ct direction original meta mark vmap @ingress
    ct direction reply meta mark vmap @egress
    goto stamp
  }}
  chain entering_middle {{
    ct direction original meta mark vmap @ingress_middle
    ct direction reply meta mark vmap @egress_middle
    goto stamp
  }}
  chain arrived {{
    meta mark @arrived ct state new ct mark 0 tcp flags & syn == 0 ct mark set {middle}
  }}
  chain stamped {{
    ct mark & {bits:#x} == {stamp} accept
  }}
  chain stamp {{
    ct mark set ct mark & {middle} | {stamp}
  }}
  chain always {{
    meta mark 0 drop
    icmpv6 type {{ 130-137, 143 }} accept
    udp sport 68 udp dport 67 accept
    udp sport 67 udp dport 68 accept
    udp sport 546 udp dport 547 accept
    udp sport 547 udp dport 546 accept
    ct state invalid drop
    ct mark & {middle} == {middle} tcp flags & syn == syn drop
    {one} jump stamped
    ct direction reply meta l4proto {{ icmp, icmpv6 }} ct mark != 0 accept
  }}
  chain input {{
    type filter hook input priority -150; policy accept;
    iifname @bridges drop
{underlay}  }}
  chain output {{
    type filter hook output priority -150; policy accept;
    oifname @bridges drop
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
{masquerade}  }}
"""


@dataclass(frozen=True, slots=True)
class Member:
    """A device on a bridge that is no guest's. ``kind``: dhcp, tunnel (of a network with a dhcp), other."""

    device: str
    kind: str = "other"


@dataclass(frozen=True, slots=True)
class Traffic:
    """All that the rules depend on.

    ``zones``: every bridge of ours -> its conntrack zone. ``numbers``: port -> its mark. ``tunnel``: our end of the
    tunnels, ``peers`` the others'. ``outside``: prefixes that are masqueraded when they leave by another device than
    ``gateways``.
    """

    zones: Mapping[str, int]
    numbers: Mapping[str, int]
    ports: tuple[Port, ...] = ()
    members: tuple[Member, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    tunnel: Address | None = None
    tunnel_port: int = 4789
    peers: tuple[Address, ...] = ()
    outside: tuple[Prefix, ...] = ()
    gateways: tuple[str, ...] = ()


class Source(NamedTuple):
    """What a device may send from. The texts are as nft has them in sets."""

    device: str
    mac: str
    prefix: Prefix
    device_mac: str
    address: str


def ruleset(table: str, traffic: Traffic) -> tuple[Table, Table]:
    """Both tables."""
    bridge = Table("bridge", table, *_bridge(traffic))
    sets, chains = _inet(traffic)
    generation = int(hashlib.sha256(repr((sets, chains)).encode()).hexdigest()[:8], 16) & STAMP or 1
    stamped = {name: tuple(line.replace(GENERATION, f"{generation:#x}") for line in lines)
               for name, lines in chains.items()}
    return bridge, Table("inet", table, sets, stamped)


@lru_cache(REMEMBERED)
def link_local(mac: str) -> IPv6Address:
    """The address that a guest gives itself from its MAC."""
    octets = bytes.fromhex(mac.replace(":", ""))
    host = bytes([octets[0] ^ 2, *octets[1:3], 0xFF, 0xFE, *octets[3:]])
    return IPv6Address((0xFE80 << 112) | int.from_bytes(host, "big"))


def _bridge(traffic: Traffic) -> Content:
    ports, members = traffic.ports, traffic.members
    own = [source for port in ports for source in _own(port)]
    single = [source for source in own if source.prefix.prefixlen == source.prefix.max_prefixlen]
    wide = [source for source in own if source.prefix.prefixlen != source.prefix.max_prefixlen]
    guests = [tap(port.id) for port in ports]
    devices = [member.device for member in members]
    numbers = {tap(port.id): traffic.numbers[port.id] if port.security else FREE for port in ports}
    sets = {
        "members": _devices([*guests, *devices]),
        "guarded": _devices(tap(port.id) for port in ports if port.security),
        "unguarded": _devices(tap(port.id) for port in ports if not port.security),
        "dhcp": _devices(member.device for member in members if member.kind == "dhcp"),
        "served": _devices(member.device for member in members if member.kind == "tunnel"),
        "macs": _set("ifname . ether_addr", (source.device_mac for source in own)),
        **{f"own{version}": _set(f"ifname . ether_addr . ipv{version}_addr", (
            f"{source.device_mac} . {source.address}" for source in single
            if source.prefix.version == version)) for version in (4, 6)},
        "adverts": Set("set", "typeof iifname . @th,64,128", {
            f'"{source.device}" . {int(source.prefix.network_address):#x}': ""
            for source in single if source.prefix.version == 6}),
        "numbers": Set("map", "type ifname : mark", {
            f'"{device}"': f"{mark:#010x}" for device, mark in {**numbers, **dict.fromkeys(devices, FREE)}.items()})}
    return sets, read_chains(BRIDGE.format(
        one=ONE_RECEIVER, announced=ANNOUNCED,
        pairs_arp=_lines(f'iifname "{device}" arp saddr ether {mac} arp saddr ip {prefix} return'
                         for device, mac, prefix, *_ in wide if prefix.version == 4),
        pairs_4=_lines(f'iifname "{device}" ether saddr {mac} ip saddr {prefix} return'
                       for device, mac, prefix, *_ in wide if prefix.version == 4),
        pairs_6=_lines(f'iifname "{device}" ether saddr {mac} ip6 saddr {prefix} return'
                       for device, mac, prefix, *_ in wide if prefix.version == 6),
        adverts=_lines(f'iifname "{device}" {_target(prefix)}return'
                       for device, mac, prefix, *_ in wide if prefix.version == 6)))


def _inet(traffic: Traffic) -> Content:
    guarded = [port for port in traffic.ports if port.security]
    marks = {traffic.numbers[port.id]: digest(" ".join(port.groups), 12) for port in guarded}
    needed = sorted({port.groups for port in guarded})
    arrived = {traffic.numbers[port.id]: port.groups for port in guarded if port.arrived}
    remote = sorted({rule.group for names in needed for name in names if name in traffic.groups
                     for rule in traffic.groups[name].rules if rule.group})
    sets = {
        "bridges": _devices(traffic.zones),
        "bridged": _set("ifname . ifname", (f'"{bridge}" . "{bridge}"' for bridge in traffic.zones)),
        "zones": Set("map", "typeof iifname : ct zone", {
            f'"{name}"': str(zone) for name, zone in traffic.zones.items()}),
        **{group_set(name, version): group_members(version, traffic.groups.get(name))
           for name in remote for version in (4, 6)},
        **{direction: Set("map", "type mark : verdict", {
            f"{mark:#010x}": f"jump {direction}_{chain}" for mark, chain in marks.items()})
           for direction in DIRECTIONS},
        "arrived": _set("mark", (f"{mark:#010x}" for mark in arrived)),
        **{f"{direction}_middle": Set("map", "type mark : verdict", {
            f"{mark:#010x}": f"jump {direction}_middle_{marks[mark]}" for mark in arrived})
           for direction in DIRECTIONS}}
    judges = {f"{direction}_{digest(' '.join(names), 12)}": judge(direction, names, traffic.groups)
              for names in needed for direction in DIRECTIONS}
    judges |= {f"{direction}_middle_{digest(' '.join(names), 12)}": judge_middle(direction, names, traffic.groups)
               for names in sorted(set(arrived.values())) for direction in DIRECTIONS}
    return sets, {**judges, **read_chains(INET.format(
        one=ONE_RECEIVER, stamp=GENERATION, middle=MIDDLE, bits=STAMP, underlay=_underlay(traffic),
        masquerade=_masquerade(traffic)))}


@lru_cache(REMEMBERED)
def _own(port: Port) -> tuple[Source, ...]:
    """What a guest may send from: its own, and the pairs it was allowed."""
    macs = sorted({port.mac, *(mac for _, mac in port.pairs)})
    own = [(ip_network(address), port.mac) for address in port.addresses]
    own += [*port.pairs, *((ip_network(link_local(mac)), mac) for mac in macs)]
    return tuple(Source(tap(port.id), mac, prefix, f'"{tap(port.id)}" . {mac}', str(prefix.network_address))
                 for prefix, mac in dict.fromkeys(own))


def _target(prefix: Prefix) -> str:
    if prefix.prefixlen == 0:
        return ""
    wanted = int(prefix.network_address) >> (128 - prefix.prefixlen)
    return f"@th,64,{prefix.prefixlen} {wanted:#x} "


def _underlay(traffic: Traffic) -> str:
    """Nobody but the peers may put frames into our tunnels."""
    if traffic.tunnel is None:
        return ""
    family = "ip" if traffic.tunnel.version == 4 else "ip6"
    to_us = f"{family} daddr {traffic.tunnel} udp dport {traffic.tunnel_port}"
    peers = ", ".join(str(peer) for peer in traffic.peers if peer.version == traffic.tunnel.version)
    return _lines([f"{to_us} {family} saddr != {{ {peers} }} drop" if peers else f"{to_us} drop"])


def _masquerade(traffic: Traffic) -> str:
    quoted = ", ".join(f'"{name}"' for name in traffic.gateways)
    away = f"oifname != {{ {quoted} }}" if traffic.gateways else ""
    return _lines(f"oifname != @bridges {away} ip saddr {prefix} masquerade"
                  for prefix in traffic.outside if prefix.version == 4 and away)


def _devices(names: Iterable[str]) -> Set:
    return _set("ifname", (f'"{name}"' for name in names))


def _set(kind: str, elements: Iterable[str]) -> Set:
    return Set("set", f"type {kind}", dict.fromkeys(elements, ""))


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
