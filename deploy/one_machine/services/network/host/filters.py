# SPDX-License-Identifier: Apache-2.0
"""The rules of the host's bridges: two tables of nft, made from the description.

The table of the family bridge matches devices. A frame from a guest must carry the port's own MAC
and addresses, also inside of ARP, RARP and neighbour discovery, and few reports of multicast
groups; only our dnsmasq answers DHCP; an unknown device reaches no known one; the bridge itself
reaches nobody. It marks each packet with the number of the port that it comes from, later of the
one that it goes to. The table inet follows flows (br_netfilter brings bridged packets there): when
a packet comes in, it enters the chains of the groups of the port it comes from; on its way out,
those of the port it goes to. A flow is matched by its first packet's addresses in either direction,
and stamped with the generation, a hash of these rules: when the rules differ, every flow is matched
anew with its next packet, so what is no longer allowed ends at once. Where this host is the gateway
of an external network, what comes from there reaches no listener of a host's. A guest that came
here running brings connections of which the kernel sees only the middle: they pass when the groups
allow either end to have begun them, and nothing can begin in one (no SYN passes). Must stay true:
pure, and only records of description.py get in, so nothing of a guest's reaches nft as it is.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address, ip_network
from typing import NamedTuple

from deploy.one_machine.services.network.host.description import (
    Address,
    GuestPort,
    Prefix,
    SecurityGroup,
)
from deploy.one_machine.services.network.host.group_chains import (
    DIRECTIONS,
    group_chain,
    group_members,
    midstream_chain,
)
from deploy.one_machine.services.network.host.names import digest, tap
from deploy.one_machine.services.network.host.nft import (
    chain_of,
    indent,
    map_of,
    replace_table,
    set_of,
)

#: The mark of what no group filters: tunnels, our namespaces, ports without security. Guests' marks
#: are lower.
UNFILTERED = 0xFFFF
#: QEMU announces with it where a guest has arrived, in a request for the address of its own MAC.
RARP, RARP_REQUEST = "0x8035", "0x0001080006040003"
#: Reports of multicast groups go to everybody, on all hosts: a guest may send so many.
REPORT_LIMIT = "limit rate over 10/second burst 50 packets drop"
#: In a flow's mark, beside the stamp: its beginning was not seen here.
MIDSTREAM, STAMP = "0x80000000", 0x7FFFFFFF
#: Stands in the text for its own hash.
GENERATION = "@generation@"
CACHED_SOURCES = 65536
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
    ether type {rarp} ether daddr ff:ff:ff:ff:ff:ff goto guest_rarp
    drop
  }}
  chain guest_arp {{
    arp htype != 1 drop
    arp ptype != ip drop
    iifname . arp saddr ether . arp saddr ip @own4 return
    arp operation request arp saddr ip 0.0.0.0 iifname . arp saddr ether @macs return
{pairs_arp}    drop
  }}
  chain guest_rarp {{
    @nh,0,64 != {rarp_request} drop
    iifname . @nh,64,48 != @announced drop
    @nh,112,32 != 0 drop
    iifname . @nh,144,48 @announced return
    drop
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
    icmpv6 type {{ 130-132, 143 }} iifname vmap @reports
    ip6 saddr :: icmpv6 type {{ 131, 132, nd-router-solicit, 143 }} return
    ip6 saddr :: icmpv6 type nd-neighbor-solicit goto guest_target
    icmpv6 type nd-neighbor-advert goto guest_target
    iifname . ether saddr . ip6 saddr @own6 return
{pairs_6}    drop
  }}
  chain guest_target {{
    iifname . @th,64,128 @targets return
{targets}    drop
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
    ct mark & {midstream} == {midstream} meta mark @arrived goto leaving_midstream
    ct direction original meta mark vmap @egress
    ct direction reply meta mark vmap @ingress
  }}
  chain leaving_midstream {{
    ct direction original meta mark vmap @egress_midstream
    ct direction reply meta mark vmap @ingress_midstream
  }}
  chain forward {{
    type filter hook forward priority -150; policy accept;
    iifname . oifname @bridged goto entering
    iifname @bridges drop
    oifname @bridges drop
{peers}  }}
  chain entering {{
    jump always
    jump arrived
    ct mark & {midstream} == {midstream} meta mark @arrived goto entering_midstream
    ct direction original meta mark vmap @ingress
    ct direction reply meta mark vmap @egress
    goto stamp
  }}
  chain entering_midstream {{
    ct direction original meta mark vmap @ingress_midstream
    ct direction reply meta mark vmap @egress_midstream
    goto stamp
  }}
  chain arrived {{
    meta mark @arrived ct state new ct mark 0 tcp flags & syn == 0 ct mark set {midstream}
  }}
  chain stamped {{
    ct mark & {bits:#x} == {stamp} accept
  }}
  chain stamp {{
    ct mark set ct mark & {midstream} | {stamp}
  }}
  chain always {{
    meta mark 0 drop
    icmpv6 type {{ 130-137, 143 }} accept
    udp sport 68 udp dport 67 accept
    udp sport 67 udp dport 68 accept
    udp sport 546 udp dport 547 accept
    udp sport 547 udp dport 546 accept
    ct state invalid drop
    ct mark & {midstream} == {midstream} tcp flags & syn == syn drop
    {one} jump stamped
    ct direction reply meta l4proto {{ icmp, icmpv6 }} ct mark != 0 accept
  }}
  chain input {{
    type filter hook input priority -150; policy accept;
    iifname @bridges drop
    iifname @gateways goto host
{underlay}  }}
  chain host {{
    ct direction reply accept
    ct state related accept
    icmp type echo-request accept
    icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert, echo-request }} accept
    drop
  }}
  chain output {{
    type filter hook output priority -150; policy accept;
    oifname @bridges drop
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
{masquerade}  }}
"""


@dataclass(frozen=True, slots=True)
class BridgeDevice:
    """A device on a bridge that is no guest's."""

    name: str
    kind: str = "other"  # dhcp, tunnel (of a network with DHCP) or other


@dataclass(frozen=True, slots=True)
class FilterInput:
    """All that the rules depend on."""

    zones: Mapping[str, int]  #: every bridge of ours -> its conntrack zone
    marks: Mapping[str, int]  #: port -> its mark
    ports: tuple[GuestPort, ...] = ()
    devices: tuple[BridgeDevice, ...] = ()
    groups: Mapping[str, SecurityGroup] = field(default_factory=dict)
    tunnel: Address | None = None  #: this host's end of the tunnels
    tunnel_port: int = 4789
    peers: tuple[Address, ...] = ()  #: the other ends
    external: tuple[
        Prefix, ...
    ] = ()  #: masqueraded when they leave by another device than ``gateways``
    gateways: tuple[str, ...] = ()


class Source(NamedTuple):
    """What a device may send from."""

    device: str
    mac: str
    prefix: Prefix
    device_mac: str  # as nft has it in sets

    @property
    def is_single(self) -> bool:
        return self.prefix.prefixlen == self.prefix.max_prefixlen


def ruleset(table: str, given: FilterInput) -> str:
    """The document that replaces both tables."""
    inet = _inet(given)
    generation = int(hashlib.sha256(inet.encode()).hexdigest()[:8], 16) & STAMP or 1
    return replace_table("bridge", table, _bridge(given)) + replace_table(
        "inet", table, inet.replace(GENERATION, f"{generation:#x}")
    )


@lru_cache(CACHED_SOURCES)
def link_local(mac: str) -> IPv6Address:
    """The address that a guest gives itself from its MAC."""
    octets = bytes.fromhex(mac.replace(":", ""))
    host = bytes([octets[0] ^ 2, *octets[1:3], 0xFF, 0xFE, *octets[3:]])
    return IPv6Address((0xFE80 << 112) | int.from_bytes(host, "big"))


# fmt: off
def _bridge(given: FilterInput) -> str:
    sources = [source for port in given.ports for source in _sources(port)]
    single = [source for source in sources if source.is_single]
    wide = [source for source in sources if not source.is_single]
    guarded = [tap(port.id) for port in given.ports if port.security]
    unguarded = [tap(port.id) for port in given.ports if not port.security]
    devices = [device.name for device in given.devices]
    marks = {tap(port.id): given.marks[port.id] for port in given.ports if port.security}
    marks |= dict.fromkeys([*unguarded, *devices], UNFILTERED)
    return "".join([
        _device_set("members", [*guarded, *unguarded, *devices]),
        _device_set("guarded", guarded),
        _device_set("unguarded", unguarded),
        _device_set("dhcp", (device.name for device in given.devices if device.kind == "dhcp")),
        _device_set("served", (device.name for device in given.devices if device.kind == "tunnel")),
        set_of("macs", "type ifname . ether_addr", (source.device_mac for source in sources)),
        *(set_of(f"own{version}", f"type ifname . ether_addr . ipv{version}_addr", (
            f"{source.device_mac} . {source.prefix.network_address}" for source in single
            if source.prefix.version == version)) for version in (4, 6)),
        set_of("targets", "typeof iifname . @th,64,128", (
            f'"{source.device}" . {int(source.prefix.network_address):#x}'
            for source in single if source.prefix.version == 6)),
        set_of("announced", "typeof iifname . @nh,64,48", (
            f'"{source.device}" . 0x{source.mac.replace(":", "")}' for source in sources)),
        *(chain_of(f"reports_{device}", [REPORT_LIMIT]) for device in guarded),
        map_of("reports", "type ifname : verdict", {f'"{device}"': f"jump reports_{device}" for device in guarded}),
        map_of("numbers", "type ifname : mark", {f'"{device}"': f"{mark:#010x}" for device, mark in marks.items()}),
        BRIDGE.format(
            one=ONE_RECEIVER, rarp=RARP, rarp_request=RARP_REQUEST,
            pairs_arp=indent(f'iifname "{device}" arp saddr ether {mac} arp saddr ip {prefix} return'
                               for device, mac, prefix, _ in wide if prefix.version == 4),
            pairs_4=indent(f'iifname "{device}" ether saddr {mac} ip saddr {prefix} return'
                             for device, mac, prefix, _ in wide if prefix.version == 4),
            pairs_6=indent(f'iifname "{device}" ether saddr {mac} ip6 saddr {prefix} return'
                             for device, mac, prefix, _ in wide if prefix.version == 6),
            targets=indent(f'iifname "{device}" {_target(prefix)}return'
                             for device, _, prefix, _ in wide if prefix.version == 6))])
# fmt: on


# fmt: off
def _inet(given: FilterInput) -> str:
    guarded = [port for port in given.ports if port.security]
    chains = {given.marks[port.id]: digest(" ".join(port.groups), 12) for port in guarded}
    used = sorted({port.groups for port in guarded})
    arrived = {given.marks[port.id]: port.groups for port in guarded if port.arrived}
    remote = sorted({rule.group for names in used for name in names if name in given.groups
                     for rule in given.groups[name].rules if rule.group})
    parts = [
        _device_set("bridges", given.zones),
        _device_set("gateways", given.gateways),
        set_of("bridged", "type ifname . ifname", (f'"{bridge}" . "{bridge}"' for bridge in given.zones)),
        map_of("zones", "typeof iifname : ct zone", {f'"{name}"': str(zone) for name, zone in given.zones.items()}),
        set_of("arrived", "type mark", (f"{mark:#010x}" for mark in arrived)),
        *(group_members(name, version, given.groups.get(name)) for name in remote for version in (4, 6))]
    for direction in DIRECTIONS:
        parts += [chain_of(f"{direction}_{digest(' '.join(names), 12)}", group_chain(direction, names, given.groups))
                  for names in used]
        parts += [chain_of(f"{direction}_midstream_{digest(' '.join(names), 12)}",
                           midstream_chain(direction, names, given.groups)) for names in sorted(set(arrived.values()))]
        parts.append(map_of(direction, "type mark : verdict", {
            f"{mark:#010x}": f"jump {direction}_{chain}" for mark, chain in chains.items()}))
        parts.append(map_of(f"{direction}_midstream", "type mark : verdict", {
            f"{mark:#010x}": f"jump {direction}_midstream_{chains[mark]}" for mark in arrived}))
    return "".join(parts) + INET.format(
        one=ONE_RECEIVER, stamp=GENERATION, midstream=MIDSTREAM, bits=STAMP, underlay=_underlay(given),
        masquerade=_masquerade(given), peers=_peers(given))
# fmt: on


@lru_cache(CACHED_SOURCES)
def _sources(port: GuestPort) -> tuple[Source, ...]:
    """What a guest may send from: its own addresses, and the pairs that it was allowed."""
    macs = sorted({port.mac, *(mac for _, mac in port.pairs)})
    own = [(ip_network(address), port.mac) for address in port.addresses]
    own += [*port.pairs, *((ip_network(link_local(mac)), mac) for mac in macs)]
    return tuple(
        Source(tap(port.id), mac, prefix, f'"{tap(port.id)}" . {mac}')
        for prefix, mac in dict.fromkeys(own)
    )


def _target(prefix: Prefix) -> str:
    if prefix.prefixlen == 0:
        return ""
    wanted = int(prefix.network_address) >> (128 - prefix.prefixlen)
    return f"@th,64,{prefix.prefixlen} {wanted:#x} "


def _underlay(given: FilterInput) -> str:
    """Only the peers may put frames into our tunnels."""
    if given.tunnel is None:
        return ""
    family = "ip" if given.tunnel.version == 4 else "ip6"
    to_us = f"{family} daddr {given.tunnel} udp dport {given.tunnel_port}"
    peers = ", ".join(str(peer) for peer in given.peers if peer.version == given.tunnel.version)
    return indent([f"{to_us} {family} saddr != {{ {peers} }} drop" if peers else f"{to_us} drop"])


def _peers(given: FilterInput) -> str:
    """What comes from an external network begins no flow with a host: it may answer one, and go
    anywhere else."""
    families = {4: "ip", 6: "ip6"}
    return indent(
        f"iifname @gateways ct direction original {families[peer.version]} daddr {peer} drop"
        for peer in given.peers
    )


def _masquerade(given: FilterInput) -> str:
    if not given.gateways:
        return ""
    devices = ", ".join(f'"{name}"' for name in given.gateways)
    return indent(
        f"oifname != @bridges oifname != {{ {devices} }} ip saddr {prefix} masquerade"
        for prefix in given.external
        if prefix.version == 4
    )


def _device_set(name: str, devices: Iterable[str]) -> str:
    return set_of(name, "type ifname", (f'"{device}"' for device in devices))
