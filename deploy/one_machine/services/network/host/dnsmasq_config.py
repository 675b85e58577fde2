# SPDX-License-Identifier: Apache-2.0
"""dnsmasq's files for the DHCP and DNS of a network, made from the description.

dnsmasq gives out the addresses of this host's ports only, and accepts no names from guests. dnsmasq
cannot send packets out of the namespace, so names outside of the network are refused. Guests get
the operator's DNS servers as the next servers. A change of ports is a new hosts file and SIGHUP.
The functions are pure, and dnsmasq_processes.py runs dnsmasq.
"""

import re
from dataclasses import dataclass

from deploy.one_machine.services.network.host.description import Address, GuestPort, Network, Subnet
from deploy.one_machine.services.network.host.names import digest
from deploy.one_machine.services.network.host_names import DOMAIN, host_name

METADATA = "169.254.169.254"
LEASE_SECONDS = 86400
KEYWORDS = re.compile(r"ignore|infinite|deprecated|[0-9]+[smhdw]?")
#: dnsmasq's modes for IPv6, by the subnet's mode.
MODES = {
    "slaac": "ra-only",
    "dhcpv6-stateless": "ra-stateless",
    "dhcpv6-stateful": "static",
    None: "static",
}


@dataclass(frozen=True, slots=True)
class DnsmasqConfig:
    """The files of one network's dnsmasq.

    Attributes:
        network: The id of the network.
        fixed: The configuration. A change needs a restart. The other files need SIGHUP.
        hosts: The reservations.
        names: The host names for DNS.
        options: The DHCP options.
        reserved: Pairs of address and MAC address.
    """

    network: str
    fixed: str
    hosts: str
    names: str
    options: str
    reserved: tuple[tuple[str, str], ...]

    @property
    def version(self) -> str:
        """The hash of ``fixed``. If it changes, dnsmasq must be restarted."""
        return digest(self.fixed, 12)


def configure(network: Network, ports: list[GuestPort], dns: tuple[Address, ...]) -> DnsmasqConfig:
    """Return the texts of the files for the dnsmasq of a network.

    Args:
        network: The network.
        ports: The ports of the network on this host.
        dns: The operator's DNS servers, for guests of subnets without own DNS servers.
    """
    tagged_subnets = [
        (f"s{digest(subnet.id, 8)}", subnet) for subnet in network.subnets if subnet.dhcp
    ]
    ranges = [_range(tag, subnet) for tag, subnet in tagged_subnets]
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
    if any(subnet.cidr.version == 6 for _, subnet in tagged_subnets):
        fixed += ["enable-ra", "ra-param=dhcp,60,0"]
    hosts, names, reserved = [], [], []
    for port in ports:
        cidrs = [subnet.cidr for _, subnet in tagged_subnets]
        dhcp_addresses = [one for one in port.addresses if any(one in cidr for cidr in cidrs)]
        reserved += [(str(address), port.mac) for address in dhcp_addresses]
        for address in port.addresses:
            name = host_name(port.hostname, address)
            names.append(f"{address} {name}.{DOMAIN} {name}\n")
        for group in _group_addresses(dhcp_addresses):
            words = [
                port.mac,
                "id:*",
                *map(_format_address, group),
                _name(port.hostname, group[0]),
            ]
            hosts.append(f"{','.join(words)}\n")
    options = [f"option:mtu,{network.mtu}\n"] if network.mtu >= 576 else []
    for tag, subnet in tagged_subnets:
        options += _options(tag, subnet, network, dns)
    return DnsmasqConfig(
        network.id,
        "".join(f"{line}\n" for line in fixed),
        "".join(hosts),
        "".join(names),
        "".join(options),
        tuple(reserved),
    )


def _group_addresses(addresses: list[Address]) -> list[list[Address]]:
    """Return a port's addresses, as one list for each line of the hosts file.

    Each IPv4 address has a line of its own. All IPv6 addresses are in the first line, because
    dnsmasq may use any line with the MAC address.
    """
    ipv4, ipv6 = (
        [address for address in addresses if address.version == version] for version in (4, 6)
    )
    return [[*ipv4[:1], *ipv6], *([address] for address in ipv4[1:])] if addresses else []


def _name(hostname: str, address: Address) -> str:
    """Return the host name for DHCP: the first label of ``hostname``.

    The other labels are dropped, because dnsmasq only gives out the domain of the network. A name
    made from the address replaces an empty label, and a label that dnsmasq would parse as a keyword
    or a time.
    """
    label = hostname.partition(".")[0]
    return host_name("" if KEYWORDS.fullmatch(label.lower()) else label, address)


def _range(tag: str, subnet: Subnet) -> str:
    net = subnet.cidr
    if net.version == 4:
        return f"dhcp-range=set:{tag},{net.network_address},static,{net.netmask},{LEASE_SECONDS}"
    mode = MODES.get(subnet.ipv6_mode, "static")
    return f"dhcp-range=set:{tag},{net.network_address},{mode},{net.prefixlen},{LEASE_SECONDS}"


def _options(tag: str, subnet: Subnet, network: Network, dns: tuple[Address, ...]) -> list[str]:
    dhcp_addresses = [address.ip for address in (network.dhcp.addresses if network.dhcp else ())]
    dhcp_address = next((address for address in dhcp_addresses if address in subnet.cidr), None)
    servers = list(subnet.dns) or [
        address for address in (dhcp_address, *dns) if address is not None
    ]
    version_servers = [address for address in servers if address.version == subnet.cidr.version]
    dns_servers = ",".join(map(_format_address, version_servers))
    if subnet.cidr.version == 6:
        return [f"tag:{tag},option6:dns-server,{dns_servers}\n"] if version_servers else []
    routes = [(str(prefix), str(hop)) for prefix, hop in subnet.routes]
    if dhcp_address is not None:
        routes.append((f"{METADATA}/32", str(dhcp_address)))
    if subnet.gateway is not None and all(prefix != "0.0.0.0/0" for prefix, _ in routes):
        # A client that understands option 121 ignores the option router.
        routes.append(("0.0.0.0/0", str(subnet.gateway)))
    words = ",".join(f"{prefix},{hop}" for prefix, hop in routes)
    options = [f"option:router{f',{subnet.gateway}' if subnet.gateway else ''}"]
    options += [f"option:dns-server,{dns_servers}"] if version_servers else []
    options += [f"option:classless-static-route,{words}", f"249,{words}"] if words else []
    return [f"tag:{tag},{option}\n" for option in options]


def _format_address(address: Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)
