# SPDX-License-Identifier: Apache-2.0
"""What the kernel should have: bridges, tunnels, namespaces with what is in them, made from the description.

`desire` is pure; applier.py makes it true. A network on this host is a bridge. When it has DHCP there is a
namespace with our dnsmasq and the metadata listener in it, the same address on every host. A router is a
namespace with a leg in each of its networks.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from deploy.standalone.network.host.description import Address, Description, Interface, Leg, Network, Port, Router
from deploy.standalone.network.host.dnsmasq import METADATA, Dnsmasq, configure
from deploy.standalone.network.host.filters import Member, Traffic, ruleset
from deploy.standalone.network.host.names import Names, bridge, digest
from deploy.standalone.network.host.nat import router_rules
from deploy.standalone.network.host.nft import Table


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
class Plug:
    """A pair of devices: ``outer`` on the bridge, ``inner`` in a namespace ("" for the host's own)."""

    outer: str
    bridge: str
    inner: str
    mac: str
    mtu: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace. ``routes``: (destination, next hop); ``rules``: nft's text inside, "" for none."""

    name: str
    plugs: tuple[Plug, ...]
    local: tuple[str, ...] = ()
    routes: tuple[tuple[str, str], ...] = ()
    forwards: bool = False
    rules: str = ""
    floating: tuple[str, ...] = ()
    dnsmasq: Dnsmasq | None = None


@dataclass(frozen=True, slots=True)
class Desired:
    """All of it; ``listeners``: namespace -> network of the metadata listener."""

    bridges: tuple[Bridge, ...]
    tunnels: tuple[Tunnel, ...]
    gateways: tuple[Plug, ...]
    spaces: tuple[Space, ...]
    rules: tuple[Table, ...]
    listeners: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where this host part is: what does not come from the service."""

    names: Names
    tunnel: Address
    tunnel_port: int = 4789
    external_gateway: bool = False


def desire(place: Place, told: Description, ports: Mapping[str, int], zones: Mapping[str, int]) -> Desired:
    """From the description to what should be; ``ports`` and ``zones`` are the ledger's numbers."""
    names, networks = place.names, told.networks
    mine = {id_: [port for port in told.ports.values() if port.network == id_] for id_ in networks}
    tunnels = tuple(Tunnel(names.vxlan(network.vni), network.vni, bridge(id_), network.mtu,
                           tuple(str(peer) for peer in network.peers))
                    for id_, network in networks.items() if network.peers)
    spaces = (*(_network_space(names, network, mine[id_], told.dns)
                for id_, network in networks.items() if network.dhcp),
              *(_router_space(names, router, networks) for router in told.routers.values()))
    gateways = tuple(_gateway(names, network) for network in networks.values()
                     if network.external and place.external_gateway and _gateway_addresses(network))
    served = {names.vxlan(network.vni) for network in networks.values() if network.dhcp}
    dhcp = {names.dhcp(id_) for id_ in networks}
    members = (*(Member(tunnel.name, "tunnel" if tunnel.name in served else "other") for tunnel in tunnels),
               *(Member(plug.outer, "dhcp" if plug.outer in dhcp else "other")
                 for plug in chain(gateways, *(space.plugs for space in spaces))))
    traffic = Traffic(zones=zones, numbers=ports, ports=tuple(told.ports.values()), members=members,
                      groups=told.groups, tunnel=place.tunnel, tunnel_port=place.tunnel_port,
                      peers=tuple(sorted({peer for network in networks.values() for peer in network.peers}, key=str)),
                      outside=tuple(subnet.cidr for network in networks.values() if network.external
                                    and place.external_gateway for subnet in network.subnets),
                      gateways=tuple(plug.inner for plug in gateways))
    return Desired(tuple(Bridge(bridge(id_), network.mtu) for id_, network in networks.items()), tunnels, gateways,
                   spaces, ruleset(names.table, traffic),
                   {names.network_space(id_): id_ for id_, network in networks.items() if network.dhcp})


def _network_space(names: Names, network: Network, ports: list[Port], dns: tuple[Address, ...]) -> Space:
    assert network.dhcp is not None
    plug = Plug(names.dhcp(network.id), bridge(network.id), "dhcp", network.dhcp.mac, network.mtu,
                _texts(network.dhcp.addresses))
    return Space(names.network_space(network.id), (plug,), (f"{METADATA}/32",), dnsmasq=configure(network, ports, dns))


def _router_space(names: Names, router: Router, networks: Mapping[str, Network]) -> Space:
    def plug(leg: Leg, inner: str, more: tuple[str, ...] = ()) -> Plug:
        return Plug(names.plug(router.id, f"{leg.network}{leg.mac}"), bridge(leg.network), inner, leg.mac,
                    networks[leg.network].mtu, (*_texts(leg.addresses), *more))

    plugs = [plug(leg, f"in{digest(leg.mac, 9)}") for leg in router.legs]
    routes = [(str(prefix), str(hop)) for prefix, hop in router.routes]
    floating: tuple[str, ...] = ()
    if router.external is not None:
        floating = tuple(str(one) for one, _ in router.floating)
        plugs.append(plug(router.external, "out", tuple(f"{one}/32" for one in floating)))
        if router.gateway is not None:
            routes.append(("default" if router.gateway.version == 4 else "::/0", str(router.gateway)))
    return Space(names.router_space(router.id), tuple(plugs), routes=tuple(dict(routes).items()), forwards=True,
                 rules=router_rules(router), floating=floating)


def _gateway(names: Names, network: Network) -> Plug:
    outer, inner = names.gateway(network.id)
    octets = digest(inner, 10)
    mac = ":".join(["0e", *(octets[at:at + 2] for at in range(0, 10, 2))])
    return Plug(outer, bridge(network.id), inner, mac, network.mtu, _gateway_addresses(network))


def _gateway_addresses(network: Network) -> tuple[str, ...]:
    return tuple(f"{subnet.gateway}/{subnet.cidr.prefixlen}" for subnet in network.subnets if subnet.gateway)


def _texts(addresses: tuple[Interface, ...]) -> tuple[str, ...]:
    return tuple(str(address) for address in addresses)
