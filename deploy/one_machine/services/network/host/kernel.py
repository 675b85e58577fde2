# SPDX-License-Identifier: Apache-2.0
"""The only module that runs commands, opens netlink sockets and enters network namespaces.

``Kernel`` belongs to one host, with the namespace of the process or of ``--netns``. Work in
another namespace happens in a thread that enters the namespace and ends, so the process itself
never moves. A failure is a KernelError with request and answer, or an OSError.
"""

import os
import socket
import struct
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyroute2 import IPRoute, netns
from pyroute2.ethtool.ioctl import EthtoolError, IoctlEthtool
from pyroute2.netlink.exceptions import NetlinkError

Result = TypeVar("Result")
NAMESPACES = Path("/run/netns")
COMMAND_TIMEOUT_SECONDS = 30
ENVIRONMENT = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin", "LC_ALL": "C"}
#: The forwarding entry for frames to receivers that no other entry names.
ALL_RECEIVERS = "00:00:00:00:00:00"
# The origin of routes (rtnetlink's RTPROT_STATIC).
STATIC = 4
# The flag IFA_F_NODAD of addresses.
NO_DUPLICATE_DETECTION = 2
NO_LINK_LOCAL = {
    "IFLA_AF_SPEC": {"attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})]}
}
Route = tuple[str, str]
"""(destination, next hop)"""


class KernelError(Exception):
    """The kernel or a tool refused. The text contains the request and the answer."""


@dataclass(frozen=True, slots=True)
class Link:
    """A network device.

    Attributes:
        name: The name.
        kind: For example bridge, veth or vxlan.
        master: The bridge of the device, or "".
        mtu: The MTU.
        mac: The MAC address.
        is_up: True if the device is up.
        vxlan: Segment, local address and port of a tunnel.
        addresses: The addresses with the length of their prefix.
    """

    name: str
    kind: str
    master: str
    mtu: int
    mac: str
    is_up: bool
    vxlan: tuple[int, str, int] | None
    addresses: frozenset[str]


class Kernel:
    """The kernel as one host sees it.

    The argument ``namespace`` of the methods is the name of a network namespace. Without it they
    work in the host's namespace.

    Args:
        netns: The path of the host's namespace, or None for the process's own.
    """

    def __init__(self, netns: Path | None = None) -> None:
        self.netns = netns

    def run(self, *command: str, text: str | None = None, namespace: str | None = None) -> str:
        """Run a command in a namespace and return the standard output.

        Args:
            command: The program and the arguments.
            text: The input of the program, or None for the input of this process.
            namespace: The name of the namespace, or None for the host's.

        Raises:
            KernelError: The program or namespace is missing, or the program returns an error or
                runs longer than ``COMMAND_TIMEOUT_SECONDS``.
        """
        path = self._path(namespace)
        words = [*(["nsenter", f"--net={path}"] if path else []), *command]
        try:
            result = subprocess.run(
                words,
                input=text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_TIMEOUT_SECONDS,
                check=False,
                env=ENVIRONMENT,
            )
        except FileNotFoundError as error:
            raise KernelError(
                f"{words[0]} is not installed: install iproute2 nftables dnsmasq-base dnsmasq-utils "
                "conntrack"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise KernelError(
                f"{' '.join(command)} did not end within {COMMAND_TIMEOUT_SECONDS} s"
            ) from error
        if result.returncode != 0:
            why = result.stderr.strip()[:600] or result.returncode
            raise KernelError(f"{' '.join(command)} failed: {why}")
        return result.stdout

    def nft(self, document: str, namespace: str | None = None) -> None:
        """Apply an nft document in one transaction.

        Raises:
            KernelError: nft refuses the document, is missing, or takes too long.
        """
        self.run("nft", "-f", "-", text=document, namespace=namespace)

    def nft_listing(self, *what: str) -> str:
        """Return nft's listing of a table or chain, without the elements of sets.

        The result is "" if nft fails, for example because there is no such table or chain.

        Args:
            what: The words after ``nft list``, for example "table", "inet" and the table's name.
        """
        try:
            return self.run("nft", "-t", "list", *what)
        except KernelError:
            return ""

    def links(self, namespace: str | None = None) -> dict[str, Link]:
        """Return all devices with their addresses, by name.

        Raises:
            KernelError, OSError: The devices cannot be read.
        """

        def read(ip: IPRoute) -> dict[str, Link]:
            addresses: dict[int, set[str]] = defaultdict(set)
            for item in ip.get_addr():
                address = item.get("local") or item.get("address")
                addresses[item["index"]].add(f"{address}/{item['prefixlen']}")
            items = list(ip.get_links())
            names = {item["index"]: item.get("ifname") for item in items}
            links = [_link(item, names, addresses[item["index"]]) for item in items]
            return {link.name: link for link in links}

        return self._netlink(read, namespace)

    def add_link(self, name: str, kind: str, **attributes: object) -> None:
        """Make a device in the host's namespace. The device is still down.

        Args:
            name: The name of the device, which must not exist.
            kind: For example bridge, veth or vxlan.
            attributes: More arguments of pyroute2's ``link("add")``.

        Raises:
            KernelError, OSError: The kernel refuses, or the host's namespace cannot be entered.
        """
        self._netlink(lambda ip: ip.link("add", ifname=name, kind=kind, **attributes))

    def add_pair(self, outer: str, inner: str, mac: str, mtu: int, namespace: str | None) -> None:
        """Make a veth pair: ``outer`` in the host's namespace, ``inner`` in ``namespace``.

        With ``namespace`` None both are in the host's. ``mac`` is the MAC address of ``inner``.
        Both ends get ``mtu`` and are still down.

        Raises:
            KernelError, OSError: The pair cannot be made.
        """
        with (self._path(namespace) or Path("/proc/self/ns/net")).open("rb") as file:
            peer = {"ifname": inner, "address": mac, "mtu": mtu, "net_ns_fd": file.fileno()}
            self.add_link(outer, "veth", mtu=mtu, peer=peer)

    def bring_up(
        self, name: str, namespace: str | None = None, *, master: str = "", **attributes: object
    ) -> None:
        """Set attributes of a device, add it to the bridge ``master``, and bring it up.

        Without ``master`` the bridge of the device stays. Devices of the host's namespace get no
        IPv6 link-local address. ``attributes`` are arguments of pyroute2, for example the MTU.

        Raises:
            KernelError, OSError: The device or bridge does not exist, the kernel refuses, or the
                namespace cannot be entered.
        """

        def change(ip: IPRoute) -> None:
            index = _index(ip, name)
            if namespace is None:
                ip.link("set", index=index, **NO_LINK_LOCAL)
            if master:
                attributes["master"] = _index(ip, master)
            ip.link("set", index=index, state="up", **attributes)

        self._netlink(change, namespace)

    def delete_link(self, name: str, namespace: str | None = None) -> None:
        """Remove a device.

        Raises:
            KernelError, OSError: The device does not exist, the kernel refuses, or the namespace
                cannot be entered.
        """
        self._netlink(lambda ip: ip.link("del", index=_index(ip, name)), namespace)

    def set_addresses(
        self, name: str, wanted: Iterable[str], known: Set[str], namespace: str | None = None
    ) -> None:
        """Add the missing addresses of a device, and remove all others.

        IPv6 link-local and all loopback addresses stay.

        Args:
            name: The device.
            wanted: The desired addresses with their prefix length.
            known: The present addresses with their prefix length.
            namespace: The namespace of the device, or None for the host's.

        Raises:
            KernelError, OSError: The device does not exist, the kernel refuses, or the namespace
                cannot be entered.
        """
        kept_prefixes = ("fe80:", "127.", "::1/")
        steps = [
            ("del", one) for one in sorted(known - set(wanted)) if not one.startswith(kept_prefixes)
        ]
        steps += [("add", one) for one in wanted if one not in known]

        def change(ip: IPRoute) -> None:
            index = _index(ip, name)
            for command, one in steps:
                address, _, length = one.partition("/")
                is_new = ":" in address and command == "add"
                flags = {"flags": NO_DUPLICATE_DETECTION} if is_new else {}
                ip.addr(command, index=index, address=address, prefixlen=int(length), **flags)

        if steps:
            self._netlink(change, namespace)

    def set_routes(self, namespace: str, wanted: Set[Route]) -> None:
        """Give a namespace exactly these static routes. Routes of another origin stay.

        Of several routes to one destination, only that whose next hop sorts last as text is set.

        Raises:
            KernelError, OSError: The routes cannot be changed.
        """
        desired = set(dict(sorted(wanted)).items())

        def change(ip: IPRoute) -> None:
            present = set()
            for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - a route, no address to listen on
                present |= {
                    (f"{item.get('dst') or anywhere}/{item['dst_len']}", item.get("gateway") or "")
                    for item in ip.get_routes(family=family, proto=STATIC)
                }
            replaced = {destination for destination, _ in desired - present}
            # The kernel replaces a route by its destination, so the former next hop is gone then.
            obsolete = {route for route in present - desired if route[0] not in replaced}
            for command, routes in (("replace", desired - present), ("del", obsolete)):
                for destination, hop in sorted(routes):
                    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
                    ip.route(command, dst=destination, gateway=hop, proto=STATIC, family=family)

        self._netlink(change, namespace)

    def set_peers(self, device: str, wanted: Set[str]) -> bool:
        """Let a vxlan device send frames with an unknown receiver to exactly these IP addresses.

        The device is in the host's namespace.

        Returns:
            True if the peers changed.

        Raises:
            KernelError, OSError: The device does not exist, the kernel refuses, or the namespace
                cannot be entered.
        """

        def change(ip: IPRoute) -> bool:
            index = _index(ip, device)
            entries = [item for item in ip.fdb("dump", ifindex=index) if item["ifindex"] == index]
            present = {item.get("dst") for item in entries if item.get("lladdr") == ALL_RECEIVERS}
            present.discard(None)
            for command, peers in (("append", wanted - present), ("del", present - wanted)):
                for peer in sorted(peers):
                    ip.fdb(command, ifindex=index, lladdr=ALL_RECEIVERS, dst=peer)
            return bool(wanted ^ present)

        return self._netlink(change)

    def namespaces(self, start: str) -> set[str]:
        """Return the names of the namespaces in ``NAMESPACES`` that begin with ``start``."""
        return {path.name for path in NAMESPACES.glob(f"{start}*")}

    def namespace_id(self, namespace: str) -> int:
        """Return a number that changes when a namespace is deleted and made again.

        Raises:
            OSError: There is no such namespace.
        """
        return (NAMESPACES / namespace).stat().st_ino

    def sysctl(self, name: str, value: str | None = None, namespace: str | None = None) -> str:
        """Write a setting of a namespace unless ``value`` is None, and return the present value.

        Args:
            name: The path below /proc/sys, for example "net/ipv4/ip_forward".
            value: The new value, or None to read only.
            namespace: The name of the namespace, or None for the host's.

        Raises:
            OSError: The setting does not exist or cannot be changed, or the namespace cannot be
                entered.
        """

        def access() -> str:
            path = Path("/proc/sys") / name
            if value is not None:
                path.write_text(value)
            return path.read_text().strip()

        return self._run_inside(namespace, access)

    def listen(self, namespace: str, address: str, port: int) -> socket.socket:
        """Return a TCP socket that listens at an IPv4 address in a namespace.

        Raises:
            OSError: The address cannot be bound, or the namespace cannot be entered.
        """

        def make() -> socket.socket:
            listener = socket.socket(socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(64)
            return listener

        return self._run_inside(namespace, make)

    def announce(self, namespace: str, device: str, mac: str, addresses: Iterable[str]) -> None:
        """Announce to the segment that a device has these IPv4 addresses, with gratuitous ARP.

        Raises:
            OSError: A packet cannot be sent, or the namespace cannot be entered.
        """

        def send() -> None:
            sender = bytes.fromhex(mac.replace(":", ""))
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
                raw.bind((device, 0))
                head = struct.pack("!HHHBBH", 0x0806, 1, 0x0800, 6, 4, 1)
                for address in map(socket.inet_aton, addresses):
                    raw.send(b"\xff" * 6 + sender + head + sender + address + b"\0" * 6 + address)

        self._run_inside(namespace, send)

    def disable_checksum_offload(self, namespace: str, device: str) -> None:
        """Let packets of this device carry full checksums.

        Why: DHCP clients read packets from raw sockets, and check the checksums.

        Raises:
            KernelError, OSError: The device refuses, or the namespace cannot be entered.
        """

        def disable() -> None:
            with closing(IoctlEthtool(device)) as ethtool:
                ethtool.set_offload_flag("tx-checksumming", 0)

        try:
            self._run_inside(namespace, disable)
        except EthtoolError as error:
            raise KernelError(
                f"the checksum offload of device {device} in namespace {namespace} cannot be disabled: "
                f"{type(error).__name__}"
            ) from error

    def _path(self, namespace: str | None) -> Path | None:
        return NAMESPACES / namespace if namespace else self.netns

    def _netlink(self, act: Callable[[IPRoute], Result], namespace: str | None = None) -> Result:
        def talk() -> Result:
            with IPRoute(ext_ack=True, strict_check=True) as ip:
                return act(ip)

        try:
            return self._run_inside(namespace, talk)
        except NetlinkError as error:
            raise KernelError(
                f"a netlink request in the namespace {namespace or 'of the host'} failed: {error.args[-1]}"
            ) from error

    def _run_inside(self, namespace: str | None, act: Callable[[], Result]) -> Result:
        """Run a function in a namespace and return the result.

        A new thread enters the namespace, runs the function and ends. In the namespace of the
        process itself, the function runs without such a thread.

        Raises:
            Exception: The function's own exception.
            OSError: The namespace cannot be entered.
        """
        path = self._path(namespace)
        if path is None:
            return act()
        outcome: list[Any] = []

        def enter() -> None:
            try:
                with path.open("rb") as file:
                    netns.setns(file.fileno())
                outcome.append(act())
            except BaseException as error:  # noqa: BLE001 - raised again below, in the calling thread
                outcome.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        result: Result = outcome[0]
        return result


def _index(ip: IPRoute, name: str) -> int:
    indexes = list(ip.link_lookup(ifname=name))
    if not indexes:
        raise KernelError(f"there is no device {name}")
    return int(indexes[0])


def _link(item: Any, names: dict[int, str], addresses: set[str]) -> Link:  # noqa: ANN401 - pyroute2 declares no types
    def detail(name: str) -> Any:  # noqa: ANN401 - pyroute2 declares no types
        return item.get(("linkinfo", "data", f"vxlan_{name}"))

    kind = item.get(("linkinfo", "kind")) or ""
    vxlan = (
        (detail("id"), detail("local") or detail("local6") or "", detail("port"))
        if kind == "vxlan"
        else None
    )
    return Link(
        item.get("ifname"),
        kind,
        names.get(item.get("master"), ""),
        item.get("mtu"),
        item.get("address") or "",
        item["state"] == "up",
        vxlan,
        frozenset(addresses),
    )
