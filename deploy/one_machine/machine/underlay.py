# SPDX-License-Identifier: Apache-2.0
"""The network below the networks of one cloud: private addresses, and a bridge between the hosts.

deploy/one_machine/cloud/cloud.py and deploy/one_machine/lab_hosts.py use this module. In a lab
(``apart``) every host has a network namespace. In other clouds the first host uses the
machine's namespace. A namespace is made at the boot of the host, with a new boot id. A bridge joins
the namespaces and the machine.

Device names contain a hash of the cloud's home, and addresses follow from the first port, so
several clouds do not conflict. ``make`` adds the missing objects and ``remove`` removes all, also
after a crash. Invariant: only the cloud's own hosts and the machine reach these addresses.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from deploy.progress import run

NAMESPACES, DEVICES = Path("/run/netns"), Path("/sys/class/net")
#: The blocks for tunnels and for external networks. Each has 8192 parts, one for each cloud.
TUNNELS, EXTERNAL = IPv4Network("198.18.0.0/15"), IPv4Network("172.24.0.0/13")
#: One part belongs to this many ports in a row. Clouds with different ports never share a part.
PORTS, PARTS = 8, 8192
#: Number of VXLAN identifiers that belong to one cloud: all identifiers, in as many parts.
IDENTIFIERS = (1 << 24) // PARTS
#: Both devices belong to the cloud. Packets to these addresses from other devices come from a guest
#: or from another machine.
GUARD = """
table inet {table}
delete table inet {table}
table inet {table} {{
  chain prerouting {{
    type filter hook prerouting priority -310; policy accept;
    iifname != {{ "lo", "{device}" }} ip daddr {part} drop
  }}
}}
"""
UP, IFF_UP = "tunnel", 1
ADVICE = (
    "Run this as root, with the right to make network namespaces (in a container: --privileged)."
)


@dataclass(frozen=True, slots=True)
class Underlay:
    """The network below a cloud's networks.

    Attributes:
        home: The cloud's home.
        port: The cloud's first port.
        apart: True if no host uses the machine's own namespace.
    """

    home: Path
    port: int
    apart: bool = False

    @property
    def tag(self) -> str:
        """The hash that is part of the names of this cloud's devices and namespaces."""
        return hashlib.sha256(str(self.home).encode()).hexdigest()[:8]

    @property
    def bridge(self) -> str:
        """The name of the bridge in the machine's namespace, and of the nftables tables."""
        return f"klab{self.tag}"

    @property
    def external(self) -> IPv4Network:
        """The IPv4 block of the external network. The address at index 1 is the gateway."""
        return _part(EXTERNAL, self.port)

    @property
    def first_identifier(self) -> int:
        """The first identifier of this cloud's VXLAN networks."""
        return max(1, self.port // PORTS % PARTS * IDENTIFIERS)

    @property
    def machine(self) -> IPv4Address:
        """The machine's address in the hosts' network."""
        return self._network[1]

    def address(self, number: int) -> IPv4Address:
        """Return the address of a host, which is the end of its tunnels.

        Args:
            number: The number of the host, counted from 1. In a lab, 0 is the gateway.
        """
        return self._network[number + self.apart]

    def namespace(self, number: int) -> str | None:
        """Return the name of a host's network namespace, or None if the host uses the machine's."""
        return f"{self.bridge}-{number}" if number + self.apart > 1 else None

    def cable(self, number: int) -> str:
        """Return the name of the machine's end of the veth pair that leads to a host."""
        return f"klv{self.tag}-{number}"

    def boot_id(self, number: int) -> Path:
        """Return the file with the host's boot id, which changes with each new namespace."""
        return self.home / "run" / f"boot-{number}"

    def make(self, hosts: int) -> None:
        """Make the bridge, boot the hosts with namespaces of their own, and connect their cables.

        Existing objects stay. Without such a host do nothing.

        Args:
            hosts: The number of hosts, of which the first may use the machine's namespace.

        Raises:
            Failure: The kernel lacks a feature, or the process lacks the rights.
        """
        numbers = [number for number in range(1, hosts + 1) if self.namespace(number)]
        if not numbers:
            return
        if not (DEVICES / self.bridge).exists():
            _ip("link", "add", self.bridge, "type", "bridge")
        self._guard(self.bridge)
        _ip("address", "replace", f"{self.machine}/{self._network.prefixlen}", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for number in numbers:
            self.join(number)

    def join(self, number: int) -> None:
        """Boot a stopped host: make its namespace, boot id and cable, and connect the cable.

        For a host that is on, only missing objects are made, and the cable is connected.

        Raises:
            Failure: The kernel lacks a feature, or the process lacks the rights.
        """
        name, outside = f"{self.bridge}-{number}", self.cable(number)
        if not self.exists(number):
            if (NAMESPACES / name).exists():
                _ip("netns", "delete", name)
            # The end in the namespace goes with the namespace, but later.
            _succeeds("ip", "link", "delete", outside)
            self.boot_id(number).parent.mkdir(parents=True, exist_ok=True)
            self.boot_id(number).write_text(f"{uuid.uuid4()}\n")
            _ip("netns", "add", name)
        self._guard(UP, name)
        if not (DEVICES / outside).exists():
            _ip(
                "link",
                "add",
                outside,
                "type",
                "veth",
                "peer",
                "name",
                UP,
                "address",
                f"02:00:{self.address(number).packed.hex(':')}",
                "netns",
                name,
            )
        _ip("link", "set", outside, "master", self.bridge, "up")
        _ip(
            "-netns",
            name,
            "address",
            "replace",
            f"{self.address(number)}/{self._network.prefixlen}",
            "dev",
            UP,
        )
        for device in ("lo", UP):
            _ip("-netns", name, "link", "set", device, "up")

    def exists(self, number: int) -> bool:
        """Return True if the host's namespace exists. A leftover file does not count."""
        return _succeeds("ip", "-netns", f"{self.bridge}-{number}", "link", "show", "lo")

    def plug(self, number: int, is_in: bool) -> None:
        """Connect the host's cable if ``is_in`` is True, otherwise disconnect the cable.

        Raises:
            Failure: The host has no cable, or the process lacks the rights.
        """
        _ip("link", "set", self.cable(number), "up" if is_in else "down")

    def is_plugged(self, number: int) -> bool:
        """Return True if the host's cable exists and is connected."""
        flags = DEVICES / self.cable(number) / "flags"
        return flags.exists() and bool(int(flags.read_text(), 16) & IFF_UP)

    def remove_host(self, number: int) -> None:
        """Remove a host's namespace, with all devices in it, and its cable, if they exist."""
        if (NAMESPACES / f"{self.bridge}-{number}").exists():
            _ip("netns", "delete", f"{self.bridge}-{number}")
        # The pair may disappear with the namespace at this moment.
        _succeeds("ip", "link", "delete", self.cable(number))

    def remove(self) -> None:
        """Remove the cloud's namespaces, cables, bridge and rules, if there are any."""
        for namespace in self.namespaces():
            self.remove_host(int(namespace.rpartition("-")[2]))
        for device in (*DEVICES.glob(f"klv{self.tag}-*"), *DEVICES.glob(self.bridge)):
            _succeeds("ip", "link", "delete", device.name)
        _succeeds("nft", "delete", "table", "inet", self.bridge)

    def namespaces(self) -> list[str]:
        """Return the names of the cloud's files in /run/netns, including leftover files."""
        return sorted(path.name for path in NAMESPACES.glob(f"{self.bridge}-*"))

    @property
    def _network(self) -> IPv4Network:
        return _part(TUNNELS, self.port)

    def _guard(self, device: str, namespace: str | None = None) -> None:
        """Load rules that drop packets to the hosts' addresses, unless they arrive at ``device``.

        Packets of the device lo also pass. The rules are for ``namespace``, or for the machine's.
        Invariant: the rules are loaded before a program can listen at these addresses.
        """
        rules = GUARD.format(table=self.bridge, device=device, part=self._network)
        run([*(["ip", "netns", "exec", namespace] if namespace else []), "nft", rules], ADVICE)


def _part(block: IPv4Network, port: int) -> IPv4Network:
    length = block.prefixlen + PARTS.bit_length() - 1
    size = 1 << (32 - length)
    return IPv4Network((int(block.network_address) + port // PORTS % PARTS * size, length))


def _ip(*arguments: str) -> None:
    run(["ip", *arguments], ADVICE)


def _succeeds(*command: str) -> bool:
    return not find_error(command)


def find_error(command: Sequence[str]) -> str:
    """Run a command and return the error, or "" after success or without the program."""
    path = shutil.which(command[0], path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        return ""
    done = subprocess.run(
        [path, *command[1:]], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return "" if done.returncode == 0 else done.stderr.strip() or f"it ended with {done.returncode}"
