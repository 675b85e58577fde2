# SPDX-License-Identifier: Apache-2.0
"""The only place that runs commands and enters namespaces: what the kernel has, and a way to change it.

``Kernel`` is of one host: its namespace is the process's own or that of ``--netns``, which commands reach by nsenter.
Other namespaces are reached by name (``ip -n``) or, for sockets and sysctls, by a thread that enters, does one thing
and ends: the process itself never moves. Every failure is a Failed that says which command and what it said.
"""
from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
SPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
PATIENCE = 30      # seconds for a command
ENVIRONMENT = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin", "LC_ALL": "C"}
EVERYONE = "00:00:00:00:00:00"


class Failed(Exception):
    """The kernel or a tool refused; the text says what was asked and what it answered."""


@dataclass(frozen=True, slots=True)
class Link:
    """A device as it is. ``detail``: what its kind has (vxlan: id, local, port)."""

    name: str
    kind: str
    master: str
    mtu: int
    mac: str
    up: bool
    detail: tuple[tuple[str, str], ...] = ()
    addresses: frozenset[str] = frozenset()


class Kernel:
    """Of one host. ``netns``: the path of its namespace, None for the process's own."""

    def __init__(self, netns: Path | None = None) -> None:
        self.netns = netns

    def run(self, *command: str, text: str | None = None, space: str | None = None) -> str:
        """What a command prints, in the host's namespace or in ``space``. Raises Failed."""
        where = SPACES / space if space else self.netns
        words = [*(["nsenter", f"--net={where}"] if where else []), *command]
        try:
            done = subprocess.run(words, input=text, capture_output=True, text=True, errors="replace",
                                  timeout=PATIENCE, check=False, env=ENVIRONMENT)
        except FileNotFoundError as problem:
            raise Failed(f"{words[0]} is not installed: install iproute2 nftables dnsmasq-base conntrack") from problem
        except subprocess.TimeoutExpired as problem:
            raise Failed(f"{' '.join(command)} did not end within {PATIENCE} s") from problem
        if done.returncode != 0:
            raise Failed(f"{' '.join(command)}: {done.stderr.strip()[:600] or done.returncode}")
        return done.stdout

    def ip(self, commands: Iterable[str], space: str | None = None) -> None:
        """Commands of `ip`, until one fails. Raises Failed."""
        if lines := list(commands):
            self.run("ip", "-batch", "-", text="\n".join(lines) + "\n", space=space)

    def links(self, space: str | None = None) -> dict[str, Link]:
        """Every device with its addresses. Raises Failed."""
        found = json.loads(self.run("ip", "-j", "-d", "addr", "show", space=space) or "[]")
        return {item["ifname"]: _link(item) for item in found if "ifname" in item}

    def routes(self, space: str) -> set[tuple[str, str]]:
        """Our routes there: (destination, next hop)."""
        found = [item for family in ("-4", "-6")
                 for item in json.loads(self.run("ip", "-j", family, "route", "show", "proto", "static",
                                                 space=space) or "[]")]
        return {("::/0" if item["dst"] == "default" and ":" in item.get("gateway", "") else item["dst"],
                 item.get("gateway", "")) for item in found}

    def floods(self) -> dict[str, set[str]]:
        """Of each vxlan the peers that get what nobody is known for."""
        found: dict[str, set[str]] = {}
        for item in json.loads(self.run("bridge", "-j", "fdb", "show") or "[]"):
            if item.get("mac") == EVERYONE and "dst" in item:
                found.setdefault(item["ifname"], set()).add(item["dst"])
        return found

    def nft(self, rules: str, space: str | None = None) -> None:
        """Apply a text in one transaction. Raises Failed."""
        self.run("nft", "-f", "-", text=rules, space=space)

    def listed(self, what: str) -> str:
        """A table's or chain's rules as the kernel lists them, without what is in sets; "" when it is not there."""
        try:
            return self.run("nft", "-t", "list", *what.split())
        except Failed:
            return ""

    def spaces(self, start: str) -> set[str]:
        """Namespaces whose names begin so."""
        return {path.name for path in SPACES.glob(f"{start}*")}

    def sysctl(self, name: str, value: str | None = None) -> str:
        """Read a setting of the host's namespace, or write it. Raises OSError."""
        def act() -> str:
            path = Path("/proc/sys") / name
            if value is not None:
                path.write_text(value)
            return path.read_text().strip()
        return self.inside(None, act)

    def inside(self, space: str | None, act: Callable[[], Result]) -> Result:
        """Do one thing in a namespace (None: the host's), in a thread that enters it and ends. Raises what it does."""
        where = SPACES / space if space else self.netns
        if where is None:
            return act()
        outcome: list[Any] = []

        def enter() -> None:
            try:
                with where.open("rb") as file:
                    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), f"cannot enter {where}: {os.strerror(ctypes.get_errno())}")
                outcome.append(act())
            except BaseException as problem:      # noqa: BLE001 - raised again below, in the thread that asked
                outcome.append(problem)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        result: Result = outcome[0]
        return result

    def listen(self, space: str, address: str, port: int) -> socket.socket:
        """A listening socket inside a namespace. Raises OSError."""
        def make() -> socket.socket:
            made = socket.socket(socket.AF_INET)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.listen(64)
            return made
        return self.inside(space, make)

    def send(self, space: str, device: str, what: Iterable[tuple[bytes, tuple[str, int]]]) -> None:
        """Send datagrams of IPv4, each with address and port, by a device in a namespace. Raises OSError."""
        def act() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
                for data, to in what:
                    sender.sendto(data, to)
        self.inside(space, act)

    def announce(self, space: str, device: str, mac: str, addresses: Iterable[str]) -> None:
        """Tell the segment where these IPv4 addresses are now (gratuitous ARP). Raises OSError."""
        def send() -> None:
            own = bytes.fromhex(mac.replace(":", ""))
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
                raw.bind((device, 0))
                for address in addresses:
                    what = socket.inet_aton(address)
                    raw.send(b"\xff" * 6 + own + struct.pack("!HHHBBH", 0x0806, 1, 0x0800, 6, 4, 1)
                             + own + what + b"\0" * 6 + what)
        self.inside(space, send)

    def sum_in_software(self, space: str, device: str) -> None:
        """Packets of this device carry whole checksums: DHCP clients read them from raw sockets. Raises OSError."""
        def turn() -> None:
            wanted = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(wanted)) + b"\0" * 16
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, SIOCETHTOOL, request)
        self.inside(space, turn)


def _link(item: dict[str, Any]) -> Link:
    info = item.get("linkinfo") or {}
    detail = info.get("info_data") or {}
    return Link(item["ifname"], info.get("info_kind", ""), item.get("master", ""), int(item.get("mtu", 0)),
                item.get("address", ""), "UP" in item.get("flags", ()),
                tuple((key, str(detail.get(key, detail.get(f"{key}6", "")))) for key in ("id", "local", "port")),
                frozenset(f"{one['local']}/{one['prefixlen']}" for one in item.get("addr_info", ()) if "local" in one))
