# SPDX-License-Identifier: Apache-2.0
"""Make the kernel have what is desired, in an order that is safe to stop at any line.

Rules come first, so a frame never meets a bridge without them; what is no longer wanted goes last, while the rules
still know its bridge. Each `apply` does only what differs from the last one that worked; ``full`` trusts nothing and
reads everything (at the start, every 30 s, after a failure). A failure costs the network or router it belongs to:
`apply` goes on and returns the reasons. What it remembers only saves work: a restart without it ends in the same state.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from deploy.standalone.network.host.desired import Bridge, Desired, Plug, Space, Tunnel
from deploy.standalone.network.host.kernel import EVERYONE, Failed, Kernel, Link
from deploy.standalone.network.host.ledger import Ledger
from deploy.standalone.network.host.names import TABLES, Names
from deploy.standalone.network.host.nft import Table, changes, gone, whole
from deploy.standalone.network.host.servers import Servers

LOG = logging.getLogger("network.host")
#: Bridged packets go through the rules of the family inet; in the host's namespace and nowhere else.
BRIDGE_SYSCTLS = ("net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables")
FORWARDING = "net/ipv4/ip_forward"


@dataclass(frozen=True, slots=True)
class Tunnels:
    """Our end of all of them."""

    address: str
    port: int


class Applier:
    """Of one host; used by one thread."""

    def __init__(self, kernel: Kernel, names: Names, ledger: Ledger, tunnels: Tunnels) -> None:
        self.kernel, self._names, self._ledger, self._tunnels = kernel, names, ledger, tunnels
        self.servers = Servers(kernel, names)
        self._done: dict[str, object] = {}
        self._tables: tuple[Table, ...] = ()
        self._listed: tuple[str, ...] | None = None
        self._settings: tuple[str, ...] = ()

    def apply(self, desired: Desired, full: bool = False) -> dict[str, str]:
        """Make it so. Returns what failed: name of a bridge or namespace, or "rules" -> reason."""
        if full:
            self._done.clear()
        wrong: dict[str, str] = {}
        if not self._try("rules", wrong, self._rules, desired, full):
            return wrong           # without rules no frame may pass: nothing new is made
        links = (desired.bridges, desired.tunnels, desired.gateways)
        if self._done.get("links") != links or any(self._differs(space) for space in desired.spaces):
            self._converge(desired, wrong)
            if not wrong:
                self._done["links"] = links
        for space in desired.spaces:
            if space.dnsmasq is not None and space.name not in wrong:
                self._try(space.name, wrong, self._serve, space)
        self._remove(desired, wrong)
        return wrong

    def prepare(self, forwards: bool) -> None:
        """Settings of the host's namespace, which every full look renews. Raises Failed, OSError."""
        self._settings = (*BRIDGE_SYSCTLS, *([FORWARDING] if forwards else []))
        self._set()
        for family in ("ip", "ip6"):
            if "policy drop" in self.kernel.listed(f"chain {family} filter FORWARD"):
                LOG.warning("this machine's own firewall drops what is forwarded (chain FORWARD of %s filter): guests "
                            "reach nobody until it accepts packets of the bridges brq*", family)

    def clean(self) -> list[str]:
        """Remove everything that was ever made here; what could not be is in the answer."""
        wrong: dict[str, str] = {}
        nothing = Desired((), (), (), (), (), {})
        self.servers.clear()
        self._remove(nothing, wrong)
        for family in ("bridge", "inet"):
            self._try("rules", wrong, self.kernel.nft, gone(family, self._names.table))
        self._try("settings", wrong, self._restore)
        if not wrong:
            self._ledger.clear()
        return [f"{name}: {reason}" for name, reason in wrong.items()]

    def _set(self) -> None:
        for name in self._settings:
            try:
                before = self.kernel.sysctl(name)
            except OSError:
                self.kernel.run("modprobe", "br_netfilter")
                before = self.kernel.sysctl(name)
            if before != "1":
                self._ledger.sysctls.setdefault(name, before)
                self._ledger.keep()
                self.kernel.sysctl(name, "1")
                LOG.info("%s is 1 now, was %s", name, before)

    def _restore(self) -> None:
        """Settings as they were; not while another host part, of this or another cloud, needs them here too."""
        others = {words[2] for words in map(str.split, self.kernel.run("nft", "list", "tables").splitlines())
                  if words[2].startswith(TABLES)}
        for name, value in self._ledger.sysctls.items():
            if others:
                LOG.warning("%s stays 1, it was %s: there are still rules of %s", name, value, ", ".join(others))
            else:
                self.kernel.sysctl(name, value)

    def _try(self, name: str, wrong: dict[str, str], act: Callable[..., object], *what: object) -> bool:
        try:
            act(*what)
        except (Failed, OSError) as problem:
            wrong[name] = str(problem)
            self._done.clear()     # what is there is not known any more
            LOG.error("%s: %s", name, problem)
            return False
        return True

    def _rules(self, desired: Desired, full: bool) -> None:
        """The rules, as little as differs from what is known to be there."""
        wanted, there = desired.rules, self._tables
        if full:
            self._set()
        if there == wanted and (not full or (self._listed is not None and self._list() == self._listed)):
            return
        less = changes(there, wanted) if there and not full else None
        self._tables = ()
        if less is None or not self._tried(less):
            less = whole(wanted)
            self.kernel.nft(less)
        if there != wanted or self._listed is not None:
            LOG.info("rules changed by %d lines", less.count("\n"))
        self._tables, self._listed = wanted, self._list() if full else None

    def _tried(self, text: str) -> bool:
        """Whether it worked; somebody else may have changed what it starts from."""
        try:
            self.kernel.nft(text)
        except Failed as problem:
            LOG.warning("rules are replaced as a whole: %s", problem)
            return False
        return True

    def _list(self) -> tuple[str, ...]:
        return tuple(self.kernel.listed(f"table {family} {self._names.table}") for family in ("bridge", "inet"))

    def _differs(self, space: Space) -> bool:
        return self._done.get(space.name) != _without_ports(space)

    def _converge(self, desired: Desired, wrong: dict[str, str]) -> None:
        links = self.kernel.links()
        self._done.pop("links", None)
        for bridge in desired.bridges:
            self._try(bridge.name, wrong, self._bridge, bridge, links.get(bridge.name))
        floods = self.kernel.floods() if desired.tunnels else {}
        for tunnel in desired.tunnels:
            self._try(tunnel.bridge, wrong, self._tunnel, tunnel, links.get(tunnel.name),
                      floods.get(tunnel.name, set()))
        for plug in desired.gateways:
            self._try(plug.bridge, wrong, self._plug, plug, None, links, links)
        for space in desired.spaces:
            if self._differs(space):
                self._try(space.name, wrong, self._space, space, links)

    def _bridge(self, wanted: Bridge, there: Link | None) -> None:
        commands = []
        if there is None:
            commands = [f"link add name {wanted.name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"]
            LOG.info("bridge %s made", wanted.name)
        if there is None or there.mtu != wanted.mtu or not there.up:
            commands += [f"link set dev {wanted.name} addrgenmode none",
                         f"link set dev {wanted.name} mtu {wanted.mtu} up"]
        self.kernel.ip(commands)

    def _tunnel(self, wanted: Tunnel, there: Link | None, floods: set[str]) -> None:
        ours = {"id": str(wanted.vni), "local": self._tunnels.address, "port": str(self._tunnels.port)}
        commands = []
        if there is not None and (there.kind != "vxlan" or dict(there.detail) != ours):
            commands.append(f"link del dev {wanted.name}")
            there, floods = None, set()
        if there is None:
            commands.append(f"link add name {wanted.name} type vxlan id {wanted.vni} local {self._tunnels.address} "
                            f"dstport {self._tunnels.port}")
            LOG.info("tunnel %s of %s made", wanted.name, wanted.bridge)
        if there is None or (there.master, there.mtu, there.up) != (wanted.bridge, wanted.mtu, True):
            commands += [f"link set dev {wanted.name} addrgenmode none",
                         f"link set dev {wanted.name} master {wanted.bridge} mtu {wanted.mtu} up"]
        self.kernel.ip(commands)
        changes = [f"fdb append {EVERYONE} dev {wanted.name} dst {peer}" for peer in sorted(set(wanted.peers) - floods)]
        changes += [f"fdb del {EVERYONE} dev {wanted.name} dst {peer}" for peer in sorted(floods - set(wanted.peers))]
        if changes:
            self.kernel.run("bridge", "-batch", "-", text="\n".join(changes) + "\n")
            LOG.info("tunnel %s: peers %s", wanted.name, ", ".join(wanted.peers))

    def _plug(self, wanted: Plug, space: str | None, links: dict[str, Link], inside: dict[str, Link]) -> bool:
        """Whether it was made anew."""
        outer, inner = links.get(wanted.outer), inside.get(wanted.inner)
        good = (outer is not None and inner is not None and (outer.master, outer.mtu, outer.up) == (
            wanted.bridge, wanted.mtu, True) and (inner.mac, inner.mtu, inner.up) == (wanted.mac, wanted.mtu, True))
        if not good:
            if inner is not None:
                self.kernel.ip([f"link del dev {wanted.inner}"], space)
            elif outer is not None:
                self.kernel.ip([f"link del dev {wanted.outer}"])
            where = f" netns {space}" if space else ""
            self.kernel.ip([f"link add name {wanted.outer} mtu {wanted.mtu} type veth peer name {wanted.inner} "
                            f"address {wanted.mac} mtu {wanted.mtu}{where}",
                            f"link set dev {wanted.outer} addrgenmode none",
                            f"link set dev {wanted.outer} master {wanted.bridge} up"])
            self.kernel.ip([f"link set dev {wanted.inner} up"], space)
        there = inner.addresses if good and inner is not None else frozenset()
        self.kernel.ip(_addresses(wanted.inner, wanted.addresses, there), space)
        return not good

    def _space(self, space: Space, links: dict[str, Link]) -> None:
        inside = self._enter(space.name)
        for name in set(inside) - {"lo"} - {plug.inner for plug in space.plugs}:
            self.kernel.ip([f"link del dev {name}"], space.name)
        before = {address for link in inside.values() for address in link.addresses}
        self.kernel.ip(["link set dev lo up", *_addresses("lo", space.local, inside["lo"].addresses)], space.name)
        if space.rules:
            self._translate(space, before)
        for plug in space.plugs:
            new = self._plug(plug, space.name, links, inside)
            if new and not space.forwards:
                self.kernel.sum_in_software(space.name, plug.inner)
            fresh = [one.split("/")[0] for one in plug.addresses if ":" not in one and (new or one not in before)]
            if fresh and space.forwards:
                self.kernel.announce(space.name, plug.inner, plug.mac, fresh)
        if space.forwards:
            there, wanted = self.kernel.routes(space.name), set(space.routes)
            words = [*(("replace", *route) for route in sorted(wanted - there)),
                     *(("del", *route) for route in sorted(there - wanted))]
            self.kernel.ip((f"route {word} {to} via {hop} proto static" for word, to, hop in words), space.name)
        self._done[space.name] = _without_ports(space)

    def _enter(self, name: str) -> dict[str, Link]:
        """The devices inside; the namespace is made when it is not there, or not whole."""
        if name in self.kernel.spaces(name):
            try:
                return self.kernel.links(name)
            except Failed:
                self.kernel.run("ip", "netns", "del", name)
        self.kernel.run("ip", "netns", "add", name)
        LOG.info("namespace %s made", name)
        return self.kernel.links(name)

    def _translate(self, space: Space, before: set[str]) -> None:
        """A router's forwarding and NAT; what was translated to an address that is gone is cut."""
        def forward() -> None:
            for name in ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"):
                with open(f"/proc/sys/{name}", "w") as file:
                    file.write("1")
        self.kernel.inside(space.name, forward)
        self.kernel.nft(space.rules, space.name)
        LOG.info("router %s: %d floating", space.name, len(space.floating))
        wanted = {address for plug in space.plugs for address in plug.addresses}
        for address in sorted(one.removesuffix("/32") for one in before - wanted if one.endswith("/32")):
            for option in ("--orig-dst", "--reply-dst"):
                try:
                    self.kernel.run("conntrack", "-D", option, address, space=space.name)
                except Failed as problem:
                    if "0 flow entries" not in str(problem):
                        raise

    def _serve(self, space: Space) -> None:
        assert space.dnsmasq is not None
        for what in self.servers.ensure(space.name, space.dnsmasq):
            LOG.info("%s", what)

    def _remove(self, desired: Desired, wrong: dict[str, str]) -> None:
        """What is ours and not wanted: dnsmasq, namespaces, devices, bridges."""
        kept = {space.name for space in desired.spaces}
        served = {space.dnsmasq.network for space in desired.spaces if space.dnsmasq is not None}
        for network in self.servers.networks() - served:
            self._try(network, wrong, self.servers.remove, network)
        bridges = {bridge.name for bridge in desired.bridges}
        devices = {tunnel.name for tunnel in desired.tunnels}
        devices |= {plug.outer for space in desired.spaces for plug in space.plugs}
        devices |= {end for plug in desired.gateways for end in (plug.outer, plug.inner)}
        old = self.kernel.spaces(self._names.spaces) - kept
        if self._done.get("removed") == (bridges, devices) and not set(self._ledger.zones) - bridges and not old:
            return
        links = self.kernel.links()
        left = [name for name in links if self._names.is_ours(name) and name not in devices and name[:2] != "kg"]
        left += [name for name in self._ledger.zones if name in links and name not in bridges]
        for name in left:
            self._try(name, wrong, self.kernel.ip, [f"link del dev {name}"])
            LOG.info("device %s removed", name)
        for name in old:
            self._done.pop(name, None)
            self._try(name, wrong, self.kernel.run, "ip", "netns", "del", name)
            LOG.info("namespace %s removed", name)
        if not wrong:
            self._ledger.forget(set(self._ledger.zones) - bridges)
            self._done["removed"] = (bridges, devices)


def _addresses(device: str, wanted: tuple[str, ...], there: frozenset[str]) -> list[str]:
    """What brings a device's addresses to what is wanted; those of the link itself stay."""
    extra = [one for one in sorted(there - set(wanted)) if not one.startswith(("fe80:", "127.", "::1/"))]
    return [*(f"addr del {one} dev {device}" for one in extra),
            *(f"addr add {one} dev {device}{' nodad' if ':' in one else ''}" for one in wanted if one not in there)]


def _without_ports(space: Space) -> object:
    """What of a namespace is devices and rules."""
    return (space.name, space.plugs, space.local, space.routes, space.rules)
