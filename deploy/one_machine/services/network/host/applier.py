# SPDX-License-Identifier: Apache-2.0
"""Brings the kernel into the desired state. A stop between any two steps is safe.

Rules come first, so that no frame passes a bridge without them. Objects that are not desired any
more are removed last, while the rules still match their bridges. `apply` only applies differences
from the last success. With ``full`` the whole state is read again (at the start, every 30 s, after
a failure). A failure only affects a network or router: `apply` continues and returns the reasons.
The memory of earlier steps only saves work. A restart leads to the same state.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.service.log import get_logger
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

LOG = get_logger("network.host")
#: Bridged packets pass the rules of the family inet, only in the host's namespace.
BRIDGE_SYSCTLS = ("net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables")
FORWARDING = "net/ipv4/ip_forward"
ROUTER_SYSCTLS = (FORWARDING, "net/ipv6/conf/all/forwarding")


@dataclass(frozen=True, slots=True)
class TunnelEndpoint:
    """This host's end of all tunnels."""

    address: str
    port: int


class Applier:
    """The applier of one host, for use by one thread."""

    def __init__(
        self, kernel: Kernel, names: Names, state: StateFolder, endpoint: TunnelEndpoint
    ) -> None:
        self.kernel, self._names, self._state, self._endpoint = kernel, names, state, endpoint
        self._dnsmasq = DnsmasqProcesses(kernel, names)
        self._done: dict[str, object] = {}
        # The rules that were applied last, and the kernel's list of them at that time.
        self._rules = ""
        self._listing: tuple[str, ...] | None = None
        self._settings: tuple[str, ...] = ()

    def apply(self, desired: DesiredState, full: bool = False) -> dict[str, str]:
        """Bring the kernel into the desired state.

        Args:
            desired: The desired state.
            full: Read and check the whole state of the kernel. Otherwise only differences from the
                last success are applied.

        Returns:
            The failures: name of a bridge, namespace, device or network, or "rules" -> reason.
            After a failure of the rules no device is made or removed.

        Raises:
            KernelError, OSError: The state of the kernel cannot be read.
        """
        if full:
            self._done.clear()
        failed: dict[str, str] = {}
        if not self._attempt("rules", failed, self._apply_rules, desired.rules, full):
            # Without rules no frame may pass, so no devices are made.
            return failed
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
        """Set the sysctls of the host's namespace. Every full `apply` sets them again.

        Log a warning if the policy of iptables' chain FORWARD is to drop packets.

        Args:
            forwards: True if the host is a gateway and needs IP forwarding.

        Raises:
            KernelError, OSError: A setting cannot be read or changed.
        """
        self._settings = (*BRIDGE_SYSCTLS, *([FORWARDING] if forwards else []))
        self._set_sysctls()
        for family in ("ip", "ip6"):
            if "policy drop" in self.kernel.nft_listing("chain", family, "filter", "FORWARD"):
                LOG.warning(
                    "this machine's own firewall drops forwarded packets in its chain FORWARD: "
                    "guests have no connections until this chain accepts packets of the bridges "
                    "brq*",
                    family=family,
                )

    def clean(self) -> list[str]:
        """Remove all objects of this agent from the kernel, also those of earlier runs.

        The sysctls are restored too, unless another network agent of this namespace needs them.

        Returns:
            The failures as texts. Without failures the files of ``StateFolder`` are deleted.

        Raises:
            KernelError, OSError: A dnsmasq does not end, or the devices cannot be read.
        """
        failed: dict[str, str] = {}
        self._dnsmasq.clear()
        self._remove_others(DesiredState((), (), (), (), "", {}), failed)
        document = "".join(delete_table(family, self._names.table) for family in FAMILIES)
        self._attempt("rules", failed, self.kernel.nft, document)
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
                LOG.info("a kernel setting is set to 1", setting=name, before=before)

    def _restore_sysctls(self) -> None:
        """Restore the sysctls, unless another network agent of this namespace needs them."""
        tables = [line.split()[2] for line in self.kernel.run("nft", "list", "tables").splitlines()]
        others = ", ".join({table for table in tables if table.startswith(TABLES)})
        for name, value in self._state.sysctls.items():
            if others:
                LOG.warning(
                    "a kernel setting stays 1, because other network agents use it",
                    setting=name,
                    before=value,
                    tables=others,
                )
            else:
                self.kernel.sysctl(name, value)

    def _attempt(
        self, name: str, failed: dict[str, str], step: Callable[..., object], *arguments: object
    ) -> bool:
        try:
            step(*arguments)
        except (KernelError, OSError) as error:
            failed[name] = str(error)
            # The state of the kernel is unknown now.
            self._done.clear()
            LOG.error("an object of the network cannot be applied", object=name, problem=error)
            return False
        return True

    def _apply_rules(self, rules: str, full: bool) -> None:
        if full:
            self._set_sysctls()
        if self._rules == rules and not (full and self._listing != self._list_rules()):
            return
        LOG.info("the rules are replaced", lines=rules.count("\n"))
        self._rules = ""
        self.kernel.nft(rules)
        # The next full check compares, because a replacement of equal rules resets rate limits.
        self._rules, self._listing = rules, self._list_rules()

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

    def _apply_bridge(self, bridge: Bridge, link: Link | None) -> None:
        if link is None:
            self.kernel.add_link(
                bridge.name, "bridge", br_stp_state=0, br_forward_delay=0, br_mcast_snooping=0
            )
            LOG.info("a bridge is made", bridge=bridge.name)
        if link is None or (link.mtu, link.is_up) != (bridge.mtu, True):
            self.kernel.bring_up(bridge.name, mtu=bridge.mtu)

    def _apply_tunnel(self, tunnel: Tunnel, link: Link | None) -> None:
        address, port = self._endpoint.address, self._endpoint.port
        if link is not None and link.vxlan != (tunnel.vni, address, port):
            self.kernel.delete_link(tunnel.name)
            link = None
        if link is None:
            local = {"vxlan_local6" if ":" in address else "vxlan_local": address}
            attributes = {"vxlan_id": tunnel.vni, "vxlan_port": port, **local}
            self.kernel.add_link(tunnel.name, "vxlan", **attributes)
            LOG.info("a tunnel is made", tunnel=tunnel.name, bridge=tunnel.bridge)
        if link is None or (link.master, link.mtu, link.is_up) != (tunnel.bridge, tunnel.mtu, True):
            self.kernel.bring_up(tunnel.name, master=tunnel.bridge, mtu=tunnel.mtu)
        if self.kernel.set_peers(tunnel.name, set(tunnel.peers)):
            LOG.info(
                "the peers of a tunnel are set", tunnel=tunnel.name, peers=", ".join(tunnel.peers)
            )

    def _apply_pair(
        self,
        pair: VethPair,
        namespace: str | None,
        links: dict[str, Link],
        inside: dict[str, Link],
    ) -> bool:
        """Make or change a veth pair, and return True if the pair was made anew.

        Args:
            pair: The desired pair.
            namespace: The namespace of the inner end, or None for the host's.
            links: The devices of the host's namespace.
            inside: The devices of the inner end's namespace.
        """
        outer, inner = links.get(pair.outer), inside.get(pair.inner)
        is_right = (
            outer is not None
            and inner is not None
            and (outer.master, outer.mtu, outer.is_up) == (pair.bridge, pair.mtu, True)
            and (inner.mac, inner.mtu, inner.is_up) == (pair.mac, pair.mtu, True)
        )
        if not is_right:
            if inner is not None:
                self.kernel.delete_link(pair.inner, namespace)
            elif outer is not None:
                self.kernel.delete_link(pair.outer)
            self.kernel.add_pair(pair.outer, pair.inner, pair.mac, pair.mtu, namespace)
            self.kernel.bring_up(pair.outer, master=pair.bridge)
            self.kernel.bring_up(pair.inner, namespace)
        present = inner.addresses if is_right and inner is not None else frozenset()
        self.kernel.set_addresses(pair.inner, pair.addresses, present, namespace)
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
            new_addresses = [one for one in pair.addresses if is_new or one not in before]
            new_ipv4 = [one.split("/")[0] for one in new_addresses if ":" not in one]
            if new_ipv4 and namespace.forwards:
                self.kernel.announce(name, pair.inner, pair.mac, new_ipv4)
        if namespace.forwards:
            self.kernel.set_routes(name, set(namespace.routes))
        self._done[name] = _devices_and_rules(namespace)

    def _enter(self, name: str) -> dict[str, Link]:
        """Return the devices in a namespace. A missing or broken namespace is made anew."""
        if name in self.kernel.namespaces(name):
            try:
                return self.kernel.links(name)
            except (KernelError, OSError):
                self.kernel.run("ip", "netns", "del", name)
        self.kernel.run("ip", "netns", "add", name)
        LOG.info("a network namespace is made", namespace=name)
        return self.kernel.links(name)

    def _apply_nat(self, namespace: Namespace, before: set[str]) -> None:
        """Apply a router's forwarding and NAT, and end connections to removed floating IPs.

        Args:
            namespace: The router's namespace.
            before: The present addresses of the devices there, with the length of their prefix.
        """
        for name in ROUTER_SYSCTLS:
            self.kernel.sysctl(name, "1", namespace.name)
        self.kernel.nft(namespace.rules, namespace.name)
        LOG.info("a router is set up", namespace=namespace.name, floating=len(namespace.floating))
        present = {address for pair in namespace.pairs for address in pair.addresses}
        removed = [one.removesuffix("/32") for one in before - present if one.endswith("/32")]
        for address in sorted(removed):
            for option in ("--orig-dst", "--reply-dst"):
                try:
                    self.kernel.run("conntrack", "-D", option, address, namespace=namespace.name)
                except KernelError as error:
                    if "0 flow entries" not in str(error):
                        raise

    def _remove_others(self, desired: DesiredState, failed: dict[str, str]) -> None:
        """Remove the agent's dnsmasq, namespaces, devices and bridges that are not desired.

        Args:
            desired: The desired state.
            failed: The failures so far, to which this method adds its own. With a failure, removed
                bridges stay in the state folder until the next success.

        Raises:
            KernelError, OSError: The present devices or dnsmasq's state cannot be read.
        """
        namespace_names = {namespace.name for namespace in desired.namespaces}
        served_networks = {
            namespace.dnsmasq.network
            for namespace in desired.namespaces
            if namespace.dnsmasq is not None
        }
        for network in self._dnsmasq.networks() - served_networks:
            self._attempt(network, failed, self._dnsmasq.remove, network)
        bridges = {bridge.name for bridge in desired.bridges}
        devices = {tunnel.name for tunnel in desired.tunnels}
        devices |= {pair.outer for namespace in desired.namespaces for pair in namespace.pairs}
        devices |= {end for pair in desired.gateways for end in (pair.outer, pair.inner)}
        unwanted = self.kernel.namespaces(self._names.namespaces) - namespace_names
        removed_bridges = set(self._state.zones) - bridges
        if self._done.get("removed") == (bridges, devices) and not removed_bridges and not unwanted:
            return
        links = self.kernel.links()
        own_devices = [name for name in links if self._names.is_ours(name) and name[:2] != "kg"]
        remaining = [name for name in own_devices if name not in devices]
        for name in [*remaining, *(removed_bridges & links.keys())]:
            self._attempt(name, failed, self.kernel.delete_link, name)
            LOG.info("a device is removed", device=name)
        for name in unwanted:
            self._done.pop(name, None)
            self._attempt(name, failed, self.kernel.run, "ip", "netns", "del", name)
            LOG.info("a network namespace is removed", namespace=name)
        if not failed:
            self._state.forget(removed_bridges)
            self._done["removed"] = (bridges, devices)


def _devices_and_rules(namespace: Namespace) -> object:
    return (namespace.name, namespace.pairs, namespace.local, namespace.routes, namespace.rules)
