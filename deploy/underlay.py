# SPDX-License-Identifier: Apache-2.0
"""What lies below the networks of one cloud: the addresses that are its own, and the wire between its hosts.

Used by deploy/cloud.py. The first host lives in the machine's own network namespace; every further one has a
namespace of its own, and a bridge joins them all: only tunnels run over it. Names carry a hash of the cloud's home
and addresses follow from its first port, so that clouds side by side never meet. ``make`` adds what is missing,
``remove`` leaves nothing, whatever was killed before.
"""
from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from deploy.progress import run

NAMESPACES, DEVICES = Path("/run/netns"), Path("/sys/class/net")
#: The block for tunnels and the block for external networks, each cut into 8192 parts: one a cloud.
TUNNELS, EXTERNAL = IPv4Network("198.18.0.0/15"), IPv4Network("172.24.0.0/13")
#: Ports in a row that one part is for: clouds whose ports differ never have the same part.
PORTS, PARTS = 8, 8192
#: Identifiers of networks that one cloud has for itself: all of VXLAN's, in as many parts.
IDENTIFIERS = (1 << 24) // PARTS
ADVICE = "It takes root and the right to make network namespaces (in a container: --privileged)."


@dataclass(frozen=True, slots=True)
class Underlay:
    """Of the cloud with this home and this first port."""

    home: Path
    port: int

    @property
    def tag(self) -> str:
        """What this cloud's devices and namespaces are told by."""
        return hashlib.sha256(str(self.home).encode()).hexdigest()[:8]

    @property
    def bridge(self) -> str:
        """The device that joins the hosts, in the machine's own namespace."""
        return f"klab{self.tag}"

    @property
    def external(self) -> IPv4Network:
        """The addresses of the external network: its gateway is the first, floating addresses are the others."""
        return _part(EXTERNAL, self.port)

    @property
    def first_identifier(self) -> int:
        """Of this cloud's VXLAN networks."""
        return max(1, self.port // PORTS % PARTS * IDENTIFIERS)

    def address(self, number: int) -> IPv4Address:
        """Where the tunnels of the cloud's first, second … host end."""
        return _part(TUNNELS, self.port)[number]

    def namespace(self, number: int) -> str | None:
        """The network namespace of a host; the first has none of its own."""
        return f"{self.bridge}-{number}" if number > 1 else None

    def make(self, hosts: int) -> None:
        """Join that many hosts; what is there already stays.

        Raises:
            Failure: the kernel or the rights do not allow it.
        """
        if hosts < 2:
            return
        if not (DEVICES / self.bridge).exists():
            _ip("link", "add", self.bridge, "type", "bridge")
        _ip("address", "replace", self._with_length(1), "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for number in range(2, hosts + 1):
            self._join(number)

    def _join(self, number: int) -> None:
        name, outside = f"{self.bridge}-{number}", f"klv{self.tag}-{number}"
        if not _fine("ip", "-netns", name, "link", "show", "lo"):       # none, or a name that outlived its namespace
            if (NAMESPACES / name).exists():
                _ip("netns", "delete", name)
            _fine("ip", "link", "delete", outside)                      # a namespace takes its end along, but later
            _ip("netns", "add", name)
        if not (DEVICES / outside).exists():
            _ip("link", "add", outside, "type", "veth", "peer", "name", "tunnel", "address",
                f"02:00:{self.address(number).packed.hex(':')}", "netns", name)
        _ip("link", "set", outside, "master", self.bridge, "up")
        _ip("-netns", name, "address", "replace", self._with_length(number), "dev", "tunnel")
        for device in ("lo", "tunnel"):
            _ip("-netns", name, "link", "set", device, "up")

    def remove(self) -> None:
        """Namespaces and bridge go; harmless when there are none."""
        for namespace in self.namespaces():
            _ip("netns", "delete", namespace)
        for device in (*DEVICES.glob(f"klv{self.tag}-*"), *DEVICES.glob(self.bridge)):
            _fine("ip", "link", "delete", device.name)          # a pair may go with its namespace at this moment

    def namespaces(self) -> list[str]:
        """Those that exist now."""
        return sorted(path.name for path in NAMESPACES.glob(f"{self.bridge}-*"))

    def _with_length(self, number: int) -> str:
        return f"{self.address(number)}/{_part(TUNNELS, self.port).prefixlen}"


def _part(block: IPv4Network, port: int) -> IPv4Network:
    length = block.prefixlen + PARTS.bit_length() - 1
    size = 1 << (32 - length)
    return IPv4Network((int(block.network_address) + port // PORTS % PARTS * size, length))


def _ip(*arguments: str) -> None:
    run(["ip", *arguments], ADVICE)


def _fine(*command: str) -> bool:
    return not complaint(command)


def complaint(command: Sequence[str]) -> str:
    """What the command had to say against it; empty when it went well, or when there is no such program yet."""
    path = shutil.which(command[0], path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        return ""
    done = subprocess.run([path, *command[1:]], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return "" if done.returncode == 0 else done.stderr.strip() or f"it ended with {done.returncode}"
