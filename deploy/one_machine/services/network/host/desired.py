# SPDX-License-Identifier: Apache-2.0
"""The desired state of the kernel: bridges, tunnels, namespaces with what is in them, made from the
description.

`desire` is pure; applier.py applies it. A network on this host is a bridge. When it has DHCP there
is a namespace with our dnsmasq and the metadata listener in it, the same address on every host. A
router is a namespace with an interface in each of its networks.
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
    """A network's bridge."""

    name: str
    mtu: int


@dataclass(frozen=True, slots=True)
class Tunnel:
    """The vxlan of a network to the other hosts."""

    name: str
    vni: int
    bridge: str
    mtu: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VethPair:
    """A pair of devices: ``outer`` on the bridge, ``inner`` in a namespace ("" for the host's
    own)."""

    outer: str
    bridge: str
    inner: str
    mac: str
    mtu: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace: of a network's dnsmasq, or of a router."""

    name: str
    pairs: tuple[VethPair, ...]
    local: tuple[str, ...] = ()  #: addresses of lo
    routes: tuple[tuple[str, str], ...] = ()  #: (destination, next hop)
    forwards: bool = False
    rules: str = ""  #: nft's document for the inside; "" for none
    floating: tuple[str, ...] = ()
    dnsmasq: DnsmasqConfig | None = None


@dataclass(frozen=True, slots=True)
class DesiredState:
    """All of it."""

    bridges: tuple[Bridge, ...]
    tunnels: tuple[Tunnel, ...]
    gateways: tuple[VethPair, ...]
    namespaces: tuple[Namespace, ...]
    rules: str  #: nft's document for the host's namespace
    listeners: Mapping[str, str]  #: namespace -> network of the metadata listener


@dataclass(frozen=True, slots=True)
class HostPlace:
    """What a host part knows of its host: what does not come from the service."""

    names: Names
    tunnel: Address
    tunnel_port: int = 4789
    external_gateway: bool = False


# fmt: off
def desire(place: HostPlace, description: Description, ports: Mapping[str, int],
           zones: Mapping[str, int]) -> DesiredState:
    """From the description to what should be; ``ports`` and ``zones`` are the numbers of the state
    folder."""
    names, networks = place.names, description.networks
    mine = {id_: [port for port in description.ports.values() if port.network == id_] for id_ in networks}
    tunnels = tuple(Tunnel(names.vxlan(network.vni), network.vni, bridge(id_), network.mtu,
                           tuple(str(peer) for peer in network.peers))
                    for id_, network in networks.items() if network.peers)
    namespaces = (*(_network_namespace(names, network, mine[id_], description.dns)
                    for id_, network in networks.items() if network.dhcp),
                  *(_router_namespace(names, router, networks) for router in description.routers.values()))
    gateways = tuple(_gateway(names, network) for network in networks.values()
                     if network.external and place.external_gateway and _gateway_addresses(network))
    served = {names.vxlan(network.vni) for network in networks.values() if network.dhcp}
    dhcp = {names.dhcp(id_) for id_ in networks}
    devices = (*(BridgeDevice(tunnel.name, "tunnel" if tunnel.name in served else "other") for tunnel in tunnels),
               *(BridgeDevice(pair.outer, "dhcp" if pair.outer in dhcp else "other")
                 for pair in chain(gateways, *(namespace.pairs for namespace in namespaces))))
    filters = FilterInput(zones=zones, marks=ports, ports=tuple(description.ports.values()), devices=devices,
                          groups=description.groups, tunnel=place.tunnel, tunnel_port=place.tunnel_port,
                          peers=tuple(sorted({one for network in networks.values() for one in network.peers}, key=str)),
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
    def pair(interface: RouterInterface, inner: str, more: tuple[str, ...] = ()) -> VethPair:
        return VethPair(
            names.plug(router.id, f"{interface.network}{interface.mac}"),
            bridge(interface.network),
            inner,
            interface.mac,
            networks[interface.network].mtu,
            (*_texts(interface.addresses), *more),
        )

    pairs = [pair(interface, f"in{digest(interface.mac, 9)}") for interface in router.interfaces]
    routes = [(str(prefix), str(hop)) for prefix, hop in router.routes]
    floating: tuple[str, ...] = ()
    if router.external is not None:
        floating = tuple(str(one) for one, _ in router.floating)
        pairs.append(pair(router.external, "out", tuple(f"{one}/32" for one in floating)))
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
    mac = ":".join(["0e", *(octets[at : at + 2] for at in range(0, 10, 2))])
    return VethPair(outer, bridge(network.id), inner, mac, network.mtu, _gateway_addresses(network))


def _gateway_addresses(network: Network) -> tuple[str, ...]:
    return tuple(
        f"{subnet.gateway}/{subnet.cidr.prefixlen}" for subnet in network.subnets if subnet.gateway
    )


def _texts(addresses: tuple[Interface, ...]) -> tuple[str, ...]:
    return tuple(str(address) for address in addresses)
