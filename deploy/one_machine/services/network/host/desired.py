# SPDX-License-Identifier: Apache-2.0
"""The desired state of the kernel, computed from the description: bridges, tunnels and namespaces.

`desire` is pure, and applier.py applies the result. A network on this host is a bridge. With DHCP
the network has a namespace with a dnsmasq and the metadata listener, with the same address on every
host. A router is a namespace with an interface in each of its networks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from deploy.one_machine.services.network.host.description import (
    Address,
    Description,
    GuestPort,
    Interface,
    Network,
    Router,
    RouterInterface,
)
from deploy.one_machine.services.network.host.dnsmasq_config import (
    METADATA,
    DnsmasqConfig,
    configure,
)
from deploy.one_machine.services.network.host.filters import BridgeDevice, FilterInput, ruleset
from deploy.one_machine.services.network.host.names import Names, bridge, digest
from deploy.one_machine.services.network.host.nat import router_rules


@dataclass(frozen=True, slots=True)
class Bridge:
    """The bridge of a network."""

    name: str
    mtu: int


@dataclass(frozen=True, slots=True)
class Tunnel:
    """The vxlan device of a network to the other hosts."""

    name: str
    vni: int
    bridge: str
    mtu: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VethPair:
    """A veth pair: ``outer`` is on the bridge, ``inner`` in a namespace or in the host's own."""

    outer: str
    bridge: str
    inner: str
    mac: str
    mtu: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Namespace:
    """The network namespace of a network's dnsmasq, or of a router.

    Attributes:
        name: The name.
        pairs: The veth pairs into the namespace.
        local: Addresses of lo.
        routes: Pairs of destination and next hop.
        forwards: True for a router.
        rules: The nft document for the namespace, or "".
        floating: Floating addresses of the router.
        dnsmasq: The configuration of the dnsmasq, or None for a router.
    """

    name: str
    pairs: tuple[VethPair, ...]
    local: tuple[str, ...] = ()
    routes: tuple[tuple[str, str], ...] = ()
    forwards: bool = False
    rules: str = ""
    floating: tuple[str, ...] = ()
    dnsmasq: DnsmasqConfig | None = None


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The desired objects of one host.

    Attributes:
        bridges: The bridges of networks.
        tunnels: The tunnels to other hosts.
        gateways: The pairs with which this machine is the gateway of external networks.
        namespaces: The namespaces of networks and routers.
        rules: The nft document for the host's namespace.
        listeners: Namespace of a metadata listener -> network.
    """

    bridges: tuple[Bridge, ...]
    tunnels: tuple[Tunnel, ...]
    gateways: tuple[VethPair, ...]
    namespaces: tuple[Namespace, ...]
    rules: str
    listeners: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HostPlace:
    """The facts of a host that do not come from the network service."""

    names: Names
    tunnel: Address
    tunnel_port: int = 4789
    external_gateway: bool = False


# fmt: off
def desire(place: HostPlace, description: Description, ports: Mapping[str, int],
           zones: Mapping[str, int]) -> DesiredState:
    """Return the devices, namespaces and rules with which a host fulfils a description.

    Args:
        place: The facts of the host.
        description: The description.
        ports: Port -> mark, for all ports of the description.
        zones: Bridge -> conntrack zone, for all bridges that the rules must cover. Bridges that
            are still to be removed are included.
    """
    names, networks = place.names, description.networks
    ports_by_network = {id_: [port for port in description.ports.values() if port.network == id_] for id_ in networks}
    tunnels = tuple(Tunnel(names.vxlan(network.vni), network.vni, bridge(id_), network.mtu,
                           tuple(str(peer) for peer in network.peers))
                    for id_, network in networks.items() if network.peers)
    namespaces = (*(_network_namespace(names, network, ports_by_network[id_], description.dns)
                    for id_, network in networks.items() if network.dhcp),
                  *(_router_namespace(names, router, networks) for router in description.routers.values()))
    gateways = tuple(_gateway(names, network) for network in networks.values()
                     if network.external and place.external_gateway and _gateway_addresses(network))
    dhcp_tunnels = {names.vxlan(network.vni) for network in networks.values() if network.dhcp}
    dhcp = {names.dhcp(id_) for id_ in networks}
    devices = (*(BridgeDevice(tunnel.name, "tunnel" if tunnel.name in dhcp_tunnels else "other") for tunnel in tunnels),
               *(BridgeDevice(pair.outer, "dhcp" if pair.outer in dhcp else "other")
                 for pair in chain(gateways, *(namespace.pairs for namespace in namespaces))))
    filters = FilterInput(zones=zones, marks=ports, ports=tuple(description.ports.values()), devices=devices,
                          groups=description.groups, tunnel=place.tunnel, tunnel_port=place.tunnel_port,
                          peers=tuple(sorted({ip for network in networks.values() for ip in network.peers}, key=str)),
                          external=tuple(subnet.cidr for network in networks.values() if network.external
                                         and place.external_gateway for subnet in network.subnets),
                          gateways=tuple(pair.inner for pair in gateways))
    return DesiredState(tuple(Bridge(bridge(id_), network.mtu) for id_, network in networks.items()), tunnels, gateways,
                        namespaces, ruleset(names.table, filters),
                        {names.network_namespace(id_): id_ for id_, network in networks.items() if network.dhcp})
# fmt: on


def _network_namespace(
    names: Names, network: Network, ports: list[GuestPort], dns: tuple[Address, ...]
) -> Namespace:
    assert network.dhcp is not None
    pair = VethPair(
        names.dhcp(network.id),
        bridge(network.id),
        "dhcp",
        network.dhcp.mac,
        network.mtu,
        _texts(network.dhcp.addresses),
    )
    return Namespace(
        names.network_namespace(network.id),
        (pair,),
        (f"{METADATA}/32",),
        dnsmasq=configure(network, ports, dns),
    )


def _router_namespace(names: Names, router: Router, networks: Mapping[str, Network]) -> Namespace:
    def pair(
        interface: RouterInterface, inner: str, more_addresses: tuple[str, ...] = ()
    ) -> VethPair:
        return VethPair(
            names.plug(router.id, f"{interface.network}{interface.mac}"),
            bridge(interface.network),
            inner,
            interface.mac,
            networks[interface.network].mtu,
            (*_texts(interface.addresses), *more_addresses),
        )

    pairs = [pair(interface, f"in{digest(interface.mac, 9)}") for interface in router.interfaces]
    routes = [(str(prefix), str(hop)) for prefix, hop in router.routes]
    floating: tuple[str, ...] = ()
    if router.external is not None:
        floating = tuple(str(address) for address, _ in router.floating)
        pairs.append(pair(router.external, "out", tuple(f"{address}/32" for address in floating)))
        if router.gateway is not None:
            routes.append(
                ("0.0.0.0/0" if router.gateway.version == 4 else "::/0", str(router.gateway))
            )
    return Namespace(
        names.router_namespace(router.id),
        tuple(pairs),
        routes=tuple(dict(routes).items()),
        forwards=True,
        rules=router_rules(router),
        floating=floating,
    )


def _gateway(names: Names, network: Network) -> VethPair:
    outer, inner = names.gateway(network.id)
    octets = digest(inner, 10)
    mac = ":".join(["0e", *(octets[index : index + 2] for index in range(0, 10, 2))])
    return VethPair(outer, bridge(network.id), inner, mac, network.mtu, _gateway_addresses(network))


def _gateway_addresses(network: Network) -> tuple[str, ...]:
    return tuple(
        f"{subnet.gateway}/{subnet.cidr.prefixlen}" for subnet in network.subnets if subnet.gateway
    )


def _texts(addresses: tuple[Interface, ...]) -> tuple[str, ...]:
    return tuple(str(address) for address in addresses)
