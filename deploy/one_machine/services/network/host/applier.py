# SPDX-License-Identifier: Apache-2.0
"""Makes the kernel have the desired state, in an order that is safe to stop at any line.

Rules come first, so that no frame meets a bridge without them; what is no longer wanted is removed
last, while the rules still know its bridge. `apply` does only what differs from the last one that
worked; ``full`` trusts nothing and reads everything (at the start, every 30 s, after a failure). A
failure costs the network or router it belongs to: `apply` goes on and returns the reasons. What is
remembered only saves work: a restart ends in the same state.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from deploy.one_machine.services.network.host.desired import (
    Bridge,
    DesiredState,
    Namespace,
    Tunnel,
    VethPair,
)
from deploy.one_machine.services.network.host.dnsmasq_processes import DnsmasqProcesses
from deploy.one_machine.services.network.host.kernel import Kernel, KernelError, Link
from deploy.one_machine.services.network.host.names import TABLES, Names
from deploy.one_machine.services.network.host.nft import FAMILIES, delete_table
from deploy.one_machine.services.network.host.state import StateFolder

LOG = logging.getLogger("network.host")
#: Bridged packets go through the rules of the family inet; in the host's namespace and nowhere
#: else.
BRIDGE_SYSCTLS = ("net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables")
FORWARDING = "net/ipv4/ip_forward"
ROUTER_SYSCTLS = (FORWARDING, "net/ipv6/conf/all/forwarding")


@dataclass(frozen=True, slots=True)
class TunnelEndpoint:
    """This host's end of all tunnels."""

    address: str
    port: int


class Applier:
    """Of one host; used by one thread."""

    def __init__(
        self, kernel: Kernel, names: Names, state: StateFolder, endpoint: TunnelEndpoint
    ) -> None:
        self.kernel, self._names, self._state, self._endpoint = kernel, names, state, endpoint
        self._dnsmasq = DnsmasqProcesses(kernel, names)
        self._done: dict[str, object] = {}
        self._rules = ""  # the document that was applied last
        self._listing: tuple[str, ...] | None = None  # what the kernel listed then
        self._settings: tuple[str, ...] = ()

    def apply(self, desired: DesiredState, full: bool = False) -> dict[str, str]:
        """Make it so. Returns what failed: name of a bridge or namespace, or "rules" -> reason."""
        if full:
            self._done.clear()
        failed: dict[str, str] = {}
        if not self._attempt("rules", failed, self._apply_rules, desired.rules, full):
            return failed  # without rules no frame may pass: nothing new is made
        links = (desired.bridges, desired.tunnels, desired.gateways)
        if self._done.get("links") != links or any(map(self._differs, desired.namespaces)):
            self._apply_links(desired, failed)
            if not failed:
                self._done["links"] = links
        for namespace in desired.namespaces:
            name, dnsmasq = namespace.name, namespace.dnsmasq
            if dnsmasq is not None and name not in failed:
                self._attempt(name, failed, self._dnsmasq.ensure, name, dnsmasq)
        self._remove_others(desired, failed)
        return failed

    def prepare(self, forwards: bool) -> None:
        """Settings of the host's namespace, which every full look renews. Raises KernelError,
        OSError."""
        self._settings = (*BRIDGE_SYSCTLS, *([FORWARDING] if forwards else []))
        self._set_sysctls()
        for family in ("ip", "ip6"):
            if "policy drop" in self.kernel.nft_listing("chain", family, "filter", "FORWARD"):
                LOG.warning(
                    "this machine's own firewall drops what is forwarded (chain FORWARD of %s filter): guests "
                    "reach nobody until it accepts packets of the bridges brq*",
                    family,
                )

    def clean(self) -> list[str]:
        """Remove everything that was ever made here; returns what could not be removed."""
        failed: dict[str, str] = {}
        self._dnsmasq.clear()
        self._remove_others(DesiredState((), (), (), (), "", {}), failed)
        gone = "".join(delete_table(one, self._names.table) for one in FAMILIES)
        self._attempt("rules", failed, self.kernel.nft, gone)
        self._attempt("settings", failed, self._restore_sysctls)
        if not failed:
            self._state.clear()
        return [f"{name}: {reason}" for name, reason in failed.items()]

    def _set_sysctls(self) -> None:
        for name in self._settings:
            try:
                before = self.kernel.sysctl(name)
            except OSError:
                self.kernel.run("modprobe", "br_netfilter")
                before = self.kernel.sysctl(name)
            if before != "1":
                self._state.sysctls.setdefault(name, before)
                self._state.save()
                self.kernel.sysctl(name, "1")
                LOG.info("%s is 1 now, was %s", name, before)

    def _restore_sysctls(self) -> None:
        """Settings as they were; not while another host part, of this or another cloud, needs them
        here too."""
        tables = [line.split()[2] for line in self.kernel.run("nft", "list", "tables").splitlines()]
        others = ", ".join({table for table in tables if table.startswith(TABLES)})
        for name, value in self._state.sysctls.items():
            if others:
                LOG.warning(
                    "%s stays 1, it was %s: there are still rules of %s", name, value, others
                )
            else:
                self.kernel.sysctl(name, value)

    def _attempt(
        self, name: str, failed: dict[str, str], act: Callable[..., object], *arguments: object
    ) -> bool:
        try:
            act(*arguments)
        except (KernelError, OSError) as error:
            failed[name] = str(error)
            self._done.clear()  # what is there is not known any more
            LOG.error("%s: %s", name, error)
            return False
        return True

    def _apply_rules(self, wanted: str, full: bool) -> None:
        if full:
            self._set_sysctls()
        if self._rules == wanted and not (
            full and (self._listing is None or self._listing != self._list_rules())
        ):
            return
        if self._rules != wanted or self._listing is not None:
            LOG.info("rules replaced, %d lines", wanted.count("\n"))
        self._rules = ""
        self.kernel.nft(wanted)
        self._rules, self._listing = wanted, self._list_rules() if full else None

    def _list_rules(self) -> tuple[str, ...]:
        table = self._names.table
        return tuple(self.kernel.nft_listing("table", family, table) for family in FAMILIES)

    def _differs(self, namespace: Namespace) -> bool:
        return self._done.get(namespace.name) != _devices_and_rules(namespace)

    def _apply_links(self, desired: DesiredState, failed: dict[str, str]) -> None:
        links = self.kernel.links()
        self._done.pop("links", None)
        for bridge in desired.bridges:
            self._attempt(bridge.name, failed, self._apply_bridge, bridge, links.get(bridge.name))
        for tunnel in desired.tunnels:
            self._attempt(tunnel.bridge, failed, self._apply_tunnel, tunnel, links.get(tunnel.name))
        for pair in desired.gateways:
            self._attempt(pair.bridge, failed, self._apply_pair, pair, None, links, links)
        for namespace in desired.namespaces:
            if self._differs(namespace):
                self._attempt(namespace.name, failed, self._apply_namespace, namespace, links)

    def _apply_bridge(self, wanted: Bridge, link: Link | None) -> None:
        if link is None:
            self.kernel.add_link(
                wanted.name, "bridge", br_stp_state=0, br_forward_delay=0, br_mcast_snooping=0
            )
            LOG.info("bridge %s made", wanted.name)
        if link is None or (link.mtu, link.is_up) != (wanted.mtu, True):
            self.kernel.bring_up(wanted.name, mtu=wanted.mtu)

    def _apply_tunnel(self, wanted: Tunnel, link: Link | None) -> None:
        address, port = self._endpoint.address, self._endpoint.port
        if link is not None and link.vxlan != (wanted.vni, address, port):
            self.kernel.delete_link(wanted.name)
            link = None
        if link is None:
            local = {"vxlan_local6" if ":" in address else "vxlan_local": address}
            own = {"vxlan_id": wanted.vni, "vxlan_port": port, **local}
            self.kernel.add_link(wanted.name, "vxlan", **own)
            LOG.info("tunnel %s of %s made", wanted.name, wanted.bridge)
        if link is None or (link.master, link.mtu, link.is_up) != (wanted.bridge, wanted.mtu, True):
            self.kernel.bring_up(wanted.name, master=wanted.bridge, mtu=wanted.mtu)
        if self.kernel.set_peers(wanted.name, set(wanted.peers)):
            LOG.info("tunnel %s: peers %s", wanted.name, ", ".join(wanted.peers))

    def _apply_pair(
        self,
        wanted: VethPair,
        namespace: str | None,
        links: dict[str, Link],
        inside: dict[str, Link],
    ) -> bool:
        """Whether it was made anew."""
        outer, inner = links.get(wanted.outer), inside.get(wanted.inner)
        is_right = (
            outer is not None
            and inner is not None
            and (outer.master, outer.mtu, outer.is_up) == (wanted.bridge, wanted.mtu, True)
            and (inner.mac, inner.mtu, inner.is_up) == (wanted.mac, wanted.mtu, True)
        )
        if not is_right:
            if inner is not None:
                self.kernel.delete_link(wanted.inner, namespace)
            elif outer is not None:
                self.kernel.delete_link(wanted.outer)
            self.kernel.add_pair(wanted.outer, wanted.inner, wanted.mac, wanted.mtu, namespace)
            self.kernel.bring_up(wanted.outer, master=wanted.bridge)
            self.kernel.bring_up(wanted.inner, namespace)
        known = inner.addresses if is_right and inner is not None else frozenset()
        self.kernel.set_addresses(wanted.inner, wanted.addresses, known, namespace)
        return not is_right

    def _apply_namespace(self, namespace: Namespace, links: dict[str, Link]) -> None:
        name, inside = namespace.name, self._enter(namespace.name)
        for other in set(inside) - {"lo"} - {pair.inner for pair in namespace.pairs}:
            self.kernel.delete_link(other, name)
        before = {address for link in inside.values() for address in link.addresses}
        self.kernel.bring_up("lo", name)
        self.kernel.set_addresses("lo", namespace.local, inside["lo"].addresses, name)
        if namespace.rules:
            self._apply_nat(namespace, before)
        for pair in namespace.pairs:
            is_new = self._apply_pair(pair, name, links, inside)
            if is_new and not namespace.forwards:
                self.kernel.disable_checksum_offload(name, pair.inner)
            fresh = [one for one in pair.addresses if is_new or one not in before]
            four = [one.split("/")[0] for one in fresh if ":" not in one]
            if four and namespace.forwards:
                self.kernel.announce(name, pair.inner, pair.mac, four)
        if namespace.forwards:
            self.kernel.set_routes(name, set(namespace.routes))
        self._done[name] = _devices_and_rules(namespace)

    def _enter(self, name: str) -> dict[str, Link]:
        """The devices inside; the namespace is made when it is missing or not whole."""
        if name in self.kernel.namespaces(name):
            try:
                return self.kernel.links(name)
            except (KernelError, OSError):
                self.kernel.run("ip", "netns", "del", name)
        self.kernel.run("ip", "netns", "add", name)
        LOG.info("namespace %s made", name)
        return self.kernel.links(name)

    def _apply_nat(self, namespace: Namespace, before: set[str]) -> None:
        """A router's forwarding and NAT; connections that were translated to an address that is
        gone are cut."""
        for name in ROUTER_SYSCTLS:
            self.kernel.sysctl(name, "1", namespace.name)
        self.kernel.nft(namespace.rules, namespace.name)
        LOG.info("router %s: %d floating", namespace.name, len(namespace.floating))
        wanted = {address for pair in namespace.pairs for address in pair.addresses}
        gone = [one.removesuffix("/32") for one in before - wanted if one.endswith("/32")]
        for address in sorted(gone):
            for option in ("--orig-dst", "--reply-dst"):
                try:
                    self.kernel.run("conntrack", "-D", option, address, namespace=namespace.name)
                except KernelError as error:
                    if "0 flow entries" not in str(error):
                        raise

    def _remove_others(self, desired: DesiredState, failed: dict[str, str]) -> None:
        """Remove what is this host part's and not wanted: dnsmasq, namespaces, devices, bridges."""
        kept = {one.name for one in desired.namespaces}
        served = {one.dnsmasq.network for one in desired.namespaces if one.dnsmasq is not None}
        for network in self._dnsmasq.networks() - served:
            self._attempt(network, failed, self._dnsmasq.remove, network)
        bridges = {bridge.name for bridge in desired.bridges}
        devices = {tunnel.name for tunnel in desired.tunnels}
        devices |= {pair.outer for one in desired.namespaces for pair in one.pairs}
        devices |= {end for pair in desired.gateways for end in (pair.outer, pair.inner)}
        unwanted = self.kernel.namespaces(self._names.namespaces) - kept
        gone = set(self._state.zones) - bridges
        if self._done.get("removed") == (bridges, devices) and not gone and not unwanted:
            return
        links = self.kernel.links()
        ours = [name for name in links if self._names.is_ours(name) and name[:2] != "kg"]
        left = [name for name in ours if name not in devices]
        for name in [*left, *(gone & links.keys())]:
            self._attempt(name, failed, self.kernel.delete_link, name)
            LOG.info("device %s removed", name)
        for name in unwanted:
            self._done.pop(name, None)
            self._attempt(name, failed, self.kernel.run, "ip", "netns", "del", name)
            LOG.info("namespace %s removed", name)
        if not failed:
            self._state.forget(gone)
            self._done["removed"] = (bridges, devices)


def _devices_and_rules(namespace: Namespace) -> object:
    return (namespace.name, namespace.pairs, namespace.local, namespace.routes, namespace.rules)
