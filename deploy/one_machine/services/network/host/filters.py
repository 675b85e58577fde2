# SPDX-License-Identifier: Apache-2.0
"""The rules of the host's bridges, as two tables of nft, made from the description.

The table of the family bridge matches devices. A frame from a guest must have the port's own MAC
and addresses, also inside of ARP, RARP and neighbour discovery, and the rate of multicast reports
is limited. Only our dnsmasq may answer DHCP. Unknown devices cannot reach known ones, and the
bridge itself can reach no device. The table marks each packet with the number of its source port,
and later of its destination port.

The table of the family inet matches flows, because br_netfilter passes bridged packets to it. An
incoming packet enters the chains of the source port's groups, and on its way out the chains of the
destination port's groups. A flow is matched by its first packet's addresses, and stamped with the
generation, a hash of these rules. When the rules change, every flow is matched again with its next
packet, so forbidden flows end at once. If this host is the gateway of an external network, packets
from there cannot reach listeners of a host.

A live-migrated guest has connections of which the kernel sees only the middle. They pass if the
groups allow either end to have begun them. No connection can begin in this way, because no SYN
passes. Invariant: the functions are pure and only accept records of description.py, so no text of a
guest reaches nft.
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

#: The mark of unfiltered packets: of tunnels, our namespaces, and ports without security. Guests'
#: marks are lower.
UNFILTERED = 0xFFFF
#: QEMU announces a migrated guest with a RARP request for the guest's own MAC address.
RARP, RARP_REQUEST = "0x8035", "0x0001080006040003"
#: Reports of multicast groups reach all ports on all hosts, so each guest's rate is limited.
REPORT_LIMIT = "limit rate over 10/second burst 50 packets drop"
#: A bit of a flow's mark beside the stamp: this host did not see the beginning of the flow.
MIDSTREAM, STAMP = "0x80000000", 0x7FFFFFFF
#: The placeholder for the hash of the rules.
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
    """A device on a bridge that belongs to no guest.

    Attributes:
        name: The name.
        kind: "dhcp", "tunnel" (of a network with DHCP) or "other".
    """

    name: str
    kind: str = "other"


@dataclass(frozen=True, slots=True)
class FilterInput:
    """The input of the rules.

    Attributes:
        zones: Bridge -> conntrack zone.
        marks: Port -> mark.
        ports: The guests' ports.
        devices: Other devices on the bridges.
        groups: The security groups.
        tunnel: This host's end of the tunnels, or None.
        tunnel_port: The UDP port of the tunnels.
        peers: The other ends of the tunnels.
        external: Prefixes to masquerade when packets leave by another device than ``gateways``.
        gateways: The devices with which this host is the gateway of external networks.
    """

    zones: Mapping[str, int]
    marks: Mapping[str, int]
    ports: tuple[GuestPort, ...] = ()
    devices: tuple[BridgeDevice, ...] = ()
    groups: Mapping[str, SecurityGroup] = field(default_factory=dict)
    tunnel: Address | None = None
    tunnel_port: int = 4789
    peers: tuple[Address, ...] = ()
    external: tuple[Prefix, ...] = ()
    gateways: tuple[str, ...] = ()


class Source(NamedTuple):
    """A MAC address and a prefix from which a guest's device may send.

    ``device_mac`` has device and MAC address as an element of nft's sets.
    """

    device: str
    mac: str
    prefix: Prefix
    device_mac: str

    @property
    def is_single(self) -> bool:
        return self.prefix.prefixlen == self.prefix.max_prefixlen


def ruleset(table: str, inputs: FilterInput) -> str:
    """Return the nft document that replaces this table of the families bridge and inet."""
    inet = _inet(inputs)
    generation = int(hashlib.sha256(inet.encode()).hexdigest()[:8], 16) & STAMP or 1
    return replace_table("bridge", table, _bridge(inputs)) + replace_table(
        "inet", table, inet.replace(GENERATION, f"{generation:#x}")
    )


@lru_cache(CACHED_SOURCES)
def link_local(mac: str) -> IPv6Address:
    """Return the IPv6 link-local address that a guest derives from a MAC address (EUI-64)."""
    octets = bytes.fromhex(mac.replace(":", ""))
    host = bytes([octets[0] ^ 2, *octets[1:3], 0xFF, 0xFE, *octets[3:]])
    return IPv6Address((0xFE80 << 112) | int.from_bytes(host, "big"))


# fmt: off
def _bridge(inputs: FilterInput) -> str:
    sources = [source for port in inputs.ports for source in _sources(port)]
    single = [source for source in sources if source.is_single]
    wide = [source for source in sources if not source.is_single]
    guarded = [tap(port.id) for port in inputs.ports if port.security]
    unguarded = [tap(port.id) for port in inputs.ports if not port.security]
    devices = [device.name for device in inputs.devices]
    marks = {tap(port.id): inputs.marks[port.id] for port in inputs.ports if port.security}
    marks |= dict.fromkeys([*unguarded, *devices], UNFILTERED)
    return "".join([
        _device_set("members", [*guarded, *unguarded, *devices]),
        _device_set("guarded", guarded),
        _device_set("unguarded", unguarded),
        _device_set("dhcp", (device.name for device in inputs.devices if device.kind == "dhcp")),
        _device_set("served", (device.name for device in inputs.devices if device.kind == "tunnel")),
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
def _inet(inputs: FilterInput) -> str:
    guarded = [port for port in inputs.ports if port.security]
    chains = {inputs.marks[port.id]: digest(" ".join(port.groups), 12) for port in guarded}
    used = sorted({port.groups for port in guarded})
    arrived = {inputs.marks[port.id]: port.groups for port in guarded if port.arrived}
    remote = sorted({rule.group for names in used for name in names if name in inputs.groups
                     for rule in inputs.groups[name].rules if rule.group})
    parts = [
        _device_set("bridges", inputs.zones),
        _device_set("gateways", inputs.gateways),
        set_of("bridged", "type ifname . ifname", (f'"{bridge}" . "{bridge}"' for bridge in inputs.zones)),
        map_of("zones", "typeof iifname : ct zone", {f'"{name}"': str(zone) for name, zone in inputs.zones.items()}),
        set_of("arrived", "type mark", (f"{mark:#010x}" for mark in arrived)),
        *(group_members(name, version, inputs.groups.get(name)) for name in remote for version in (4, 6))]
    for direction in DIRECTIONS:
        parts += [chain_of(f"{direction}_{digest(' '.join(names), 12)}", group_chain(direction, names, inputs.groups))
                  for names in used]
        parts += [chain_of(f"{direction}_midstream_{digest(' '.join(names), 12)}",
                           midstream_chain(direction, names, inputs.groups)) for names in sorted(set(arrived.values()))]
        parts.append(map_of(direction, "type mark : verdict", {
            f"{mark:#010x}": f"jump {direction}_{chain}" for mark, chain in chains.items()}))
        parts.append(map_of(f"{direction}_midstream", "type mark : verdict", {
            f"{mark:#010x}": f"jump {direction}_midstream_{chains[mark]}" for mark in arrived}))
    return "".join(parts) + INET.format(
        one=ONE_RECEIVER, stamp=GENERATION, midstream=MIDSTREAM, bits=STAMP, underlay=_underlay(inputs),
        masquerade=_masquerade(inputs), peers=_peers(inputs))
# fmt: on


@lru_cache(CACHED_SOURCES)
def _sources(port: GuestPort) -> tuple[Source, ...]:
    """Return the sources from which a port may send, without duplicates.

    They are the port's addresses, the allowed pairs, and a link-local address for each MAC address
    of the port and of the pairs.
    """
    macs = sorted({port.mac, *(mac for _, mac in port.pairs)})
    sources = [(ip_network(address), port.mac) for address in port.addresses]
    sources += [*port.pairs, *((ip_network(link_local(mac)), mac) for mac in macs)]
    return tuple(
        Source(tap(port.id), mac, prefix, f'"{tap(port.id)}" . {mac}')
        for prefix, mac in dict.fromkeys(sources)
    )


def _target(prefix: Prefix) -> str:
    if prefix.prefixlen == 0:
        return ""
    leading_bits = int(prefix.network_address) >> (128 - prefix.prefixlen)
    return f"@th,64,{prefix.prefixlen} {leading_bits:#x} "


def _underlay(inputs: FilterInput) -> str:
    """Return the rules that drop packets to this host's tunnel port, except packets of peers.

    If ``tunnel`` is None, the result is "".
    """
    if inputs.tunnel is None:
        return ""
    family = "ip" if inputs.tunnel.version == 4 else "ip6"
    match = f"{family} daddr {inputs.tunnel} udp dport {inputs.tunnel_port}"
    peers = ", ".join(str(peer) for peer in inputs.peers if peer.version == inputs.tunnel.version)
    return indent([f"{match} {family} saddr != {{ {peers} }} drop" if peers else f"{match} drop"])


def _peers(inputs: FilterInput) -> str:
    """Return the rules that drop packets from an external network to a peer, except replies.

    The peers are the other hosts' ends of the tunnels. Packets to other addresses are not dropped
    here.
    """
    families = {4: "ip", 6: "ip6"}
    return indent(
        f"iifname @gateways ct direction original {families[peer.version]} daddr {peer} drop"
        for peer in inputs.peers
    )


def _masquerade(inputs: FilterInput) -> str:
    if not inputs.gateways:
        return ""
    devices = ", ".join(f'"{name}"' for name in inputs.gateways)
    return indent(
        f"oifname != @bridges oifname != {{ {devices} }} ip saddr {prefix} masquerade"
        for prefix in inputs.external
        if prefix.version == 4
    )


def _device_set(name: str, devices: Iterable[str]) -> str:
    return set_of(name, "type ifname", (f'"{device}"' for device in devices))
