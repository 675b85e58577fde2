# SPDX-License-Identifier: Apache-2.0
"""What lies below the networks of one cloud: the addresses that are its own, and the wire between
its hosts.

Used by deploy/one_machine/cloud/cloud.py and deploy/one_machine/lab_hosts.py. A cloud's first host
lives in the machine's own network namespace, but in a lab (``apart``); every other has a namespace
of its own, which is made when the host boots, with a name for that boot. A bridge joins them all
and the machine. Names carry a hash of the cloud's home and addresses follow from its first port,
so that clouds side by side never meet. ``make`` adds what is missing, ``remove`` leaves nothing,
whatever was killed before. Must stay true: nothing but the cloud's own hosts and the machine
reaches these addresses.
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
#: The block for tunnels and the block for external networks, each cut into 8192 parts: one a cloud.
TUNNELS, EXTERNAL = IPv4Network("198.18.0.0/15"), IPv4Network("172.24.0.0/13")
#: Ports in a row that one part is for: clouds whose ports differ never have the same part.
PORTS, PARTS = 8, 8192
#: Identifiers of networks that one cloud has for itself: all of VXLAN's, in as many parts.
IDENTIFIERS = (1 << 24) // PARTS
#: Both devices are ours alone: what comes for our addresses by another is a guest's, or a
#: neighbour's.
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
ADVICE = "It takes root and the right to make network namespaces (in a container: --privileged)."


@dataclass(frozen=True, slots=True)
class Underlay:
    """Of the cloud with this home and this first port. ``apart``: no host is the machine itself."""

    home: Path
    port: int
    apart: bool = False

    @property
    def tag(self) -> str:
        """The prefix of this cloud's devices and namespaces."""
        return hashlib.sha256(str(self.home).encode()).hexdigest()[:8]

    @property
    def bridge(self) -> str:
        """The device that joins the hosts, in the machine's own namespace; the guard's tables are
        called like it."""
        return f"klab{self.tag}"

    @property
    def external(self) -> IPv4Network:
        """The addresses of the external network: its gateway is the first, floating addresses are
        the others."""
        return _part(EXTERNAL, self.port)

    @property
    def first_identifier(self) -> int:
        """Of this cloud's VXLAN networks."""
        return max(1, self.port // PORTS % PARTS * IDENTIFIERS)

    @property
    def machine(self) -> IPv4Address:
        """Where the hosts reach the machine."""
        return self._network[1]

    def address(self, number: int) -> IPv4Address:
        """Where the cloud's first, second … host is reached; tunnels end there."""
        return self._network[number + self.apart]

    def namespace(self, number: int) -> str | None:
        """The network namespace of a host; None of one that lives in the machine's."""
        return f"{self.bridge}-{number}" if number + self.apart > 1 else None

    def cable(self, number: int) -> str:
        """The machine's end of the pair that leads to a host."""
        return f"klv{self.tag}-{number}"

    def boot_id(self, number: int) -> Path:
        """The file that says which boot of the host this is; it changes whenever the namespace is
        made."""
        return self.home / "run" / f"boot-{number}"

    def make(self, hosts: int) -> None:
        """Join that many hosts; what is there already stays.

        Raises:
            Failure: the kernel or the rights do not allow it.
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
        """Boot one host, unless it runs: its namespace, and the pair that joins it."""
        name, outside = f"{self.bridge}-{number}", self.cable(number)
        if not self.exists(number):
            if (NAMESPACES / name).exists():
                _ip("netns", "delete", name)
            _succeeds("ip", "link", "delete", outside)  # a namespace takes its end along, but later
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
        """Is there a namespace of this host, and not only a name that outlived it?"""
        return _succeeds("ip", "-netns", f"{self.bridge}-{number}", "link", "show", "lo")

    def plug(self, number: int, is_in: bool) -> None:
        """Put the host's cable in, or pull it."""
        _ip("link", "set", self.cable(number), "up" if is_in else "down")

    def is_plugged(self, number: int) -> bool:
        """Is the host's cable in?"""
        flags = DEVICES / self.cable(number) / "flags"
        return flags.exists() and bool(int(flags.read_text(), 16) & IFF_UP)

    def remove_host(self, number: int) -> None:
        """A host's namespace goes with all that is in it; harmless when there is none."""
        if (NAMESPACES / f"{self.bridge}-{number}").exists():
            _ip("netns", "delete", f"{self.bridge}-{number}")
        # the pair may go with its namespace at this moment
        _succeeds("ip", "link", "delete", self.cable(number))

    def remove(self) -> None:
        """Namespaces, bridge and guard go; harmless when there are none."""
        for namespace in self.namespaces():
            self.remove_host(int(namespace.rpartition("-")[2]))
        for device in (*DEVICES.glob(f"klv{self.tag}-*"), *DEVICES.glob(self.bridge)):
            _succeeds("ip", "link", "delete", device.name)
        _succeeds("nft", "delete", "table", "inet", self.bridge)

    def namespaces(self) -> list[str]:
        """Those that exist now."""
        return sorted(path.name for path in NAMESPACES.glob(f"{self.bridge}-*"))

    @property
    def _network(self) -> IPv4Network:
        return _part(TUNNELS, self.port)

    def _guard(self, device: str, namespace: str | None = None) -> None:
        """Set up first, before anything can listen."""
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
    """What the command had to say against it; empty when it went well, or when there is no such
    program yet."""
    path = shutil.which(command[0], path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        return ""
    done = subprocess.run(
        [path, *command[1:]], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return "" if done.returncode == 0 else done.stderr.strip() or f"it ended with {done.returncode}"
