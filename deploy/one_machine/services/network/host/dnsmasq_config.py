# SPDX-License-Identifier: Apache-2.0
"""DHCP and DNS of a network: dnsmasq's files, made from the description.

It gives the addresses of this host's ports and no others, and takes no names from guests. It has no
way out of its namespace, so it refuses names that are not the network's; guests get the operator's
DNS servers as the next to ask. A change of ports is a new hosts file and SIGHUP.
Pure: dnsmasq_processes.py runs it.
"""

import re
from dataclasses import dataclass

from deploy.one_machine.services.network.host.description import Address, GuestPort, Network, Subnet
from deploy.one_machine.services.network.host.names import digest
from deploy.one_machine.services.network.host_names import DOMAIN, host_name

METADATA = "169.254.169.254"
LEASE_SECONDS = 86400
KEYWORDS = re.compile(r"ignore|infinite|deprecated|[0-9]+[smhdw]?")
#: Of dnsmasq's modes for IPv6, by the subnet's.
MODES = {
    "slaac": "ra-only",
    "dhcpv6-stateless": "ra-stateless",
    "dhcpv6-stateful": "static",
    None: "static",
}


@dataclass(frozen=True, slots=True)
class DnsmasqConfig:
    """What dnsmasq reads for one network."""

    network: str
    fixed: str  #: needs a restart when it differs; the others a SIGHUP
    hosts: str
    names: str
    options: str
    reserved: tuple[tuple[str, str], ...]  #: (address, MAC)

    @property
    def version(self) -> str:
        """Of what needs a restart."""
        return digest(self.fixed, 12)


def configure(network: Network, ports: list[GuestPort], dns: tuple[Address, ...]) -> DnsmasqConfig:
    """The files for a network's ports on this host; ``dns`` are the operator's servers."""
    served = [(f"s{digest(subnet.id, 8)}", subnet) for subnet in network.subnets if subnet.dhcp]
    ranges = [_range(tag, subnet) for tag, subnet in served]
    fixed = [
        "interface=dhcp",
        "bind-interfaces",
        "except-interface=lo",
        "user=nobody",
        "no-resolv",
        "no-hosts",
        "no-poll",
        "no-ping",
        "dhcp-authoritative",
        "dhcp-ignore-names",
        "dhcp-lease-max=65536",
        "quiet-dhcp",
        "quiet-dhcp6",
        "quiet-ra",
        f"domain={DOMAIN}",
        f"local=/{DOMAIN}/",
        *ranges,
    ]
    if any(subnet.cidr.version == 6 for _, subnet in served):
        fixed += ["enable-ra", "ra-param=dhcp,60,0"]
    hosts, names, reserved = [], [], []
    for port in ports:
        cidrs = [subnet.cidr for _, subnet in served]
        own = [one for one in port.addresses if any(one in cidr for cidr in cidrs)]
        reserved += [(str(address), port.mac) for address in own]
        for address in port.addresses:
            name = host_name(port.hostname, address)
            names.append(f"{address} {name}.{DOMAIN} {name}\n")
        for together in _group_addresses(own):
            words = [
                port.mac,
                "id:*",
                *map(_format_address, together),
                _name(port.hostname, together[0]),
            ]
            hosts.append(f"{','.join(words)}\n")
    options = [f"option:mtu,{network.mtu}\n"] if network.mtu >= 576 else []
    for tag, subnet in served:
        options += _options(tag, subnet, network, dns)
    return DnsmasqConfig(
        network.id,
        "".join(f"{line}\n" for line in fixed),
        "".join(hosts),
        "".join(names),
        "".join(options),
        tuple(reserved),
    )


def _group_addresses(own: list[Address]) -> list[list[Address]]:
    """A line for each address of IPv4, those of IPv6 with the first: dnsmasq may take any line with
    the MAC."""
    four, six = ([one for one in own if one.version == version] for version in (4, 6))
    return [[*four[:1], *six], *([one] for one in four[1:])] if own else []


def _name(hostname: str, address: Address) -> str:
    """The guest's, unless dnsmasq would read it as a keyword or a time. Of a name with a domain the
    first label: it hands out no domain but its own."""
    label = hostname.partition(".")[0]
    return host_name("" if KEYWORDS.fullmatch(label.lower()) else label, address)


def _range(tag: str, subnet: Subnet) -> str:
    net = subnet.cidr
    if net.version == 4:
        return f"dhcp-range=set:{tag},{net.network_address},static,{net.netmask},{LEASE_SECONDS}"
    mode = MODES.get(subnet.ipv6_mode, "static")
    return f"dhcp-range=set:{tag},{net.network_address},{mode},{net.prefixlen},{LEASE_SECONDS}"


def _options(tag: str, subnet: Subnet, network: Network, dns: tuple[Address, ...]) -> list[str]:
    ours = [one.ip for one in (network.dhcp.addresses if network.dhcp else ())]
    here = next((one for one in ours if one in subnet.cidr), None)
    servers = list(subnet.dns) or [one for one in (here, *dns) if one is not None]
    listed = [one for one in servers if one.version == subnet.cidr.version]
    dns_servers = ",".join(map(_format_address, listed))
    if subnet.cidr.version == 6:
        return [f"tag:{tag},option6:dns-server,{dns_servers}\n"] if listed else []
    routes = [(str(prefix), str(hop)) for prefix, hop in subnet.routes]
    if here is not None:
        routes.append((f"{METADATA}/32", str(here)))
    if subnet.gateway is not None and all(prefix != "0.0.0.0/0" for prefix, _ in routes):
        # Who understands 121 ignores option router.
        routes.append(("0.0.0.0/0", str(subnet.gateway)))
    words = ",".join(f"{prefix},{hop}" for prefix, hop in routes)
    found = [f"option:router{f',{subnet.gateway}' if subnet.gateway else ''}"]
    found += [f"option:dns-server,{dns_servers}"] if listed else []
    found += [f"option:classless-static-route,{words}", f"249,{words}"] if words else []
    return [f"tag:{tag},{option}\n" for option in found]


def _format_address(address: Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)
