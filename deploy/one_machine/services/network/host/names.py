# SPDX-License-Identifier: Apache-2.0
"""The names of the network agent's objects in the kernel.

All names except those of bridges and taps contain a tag, a short hash of the state folder. Several
hosts and clouds can therefore share one machine, and `clean` finds the right objects. Bridges and
taps have Nova's names, which the compute side computes from the same ids. The state folder has the
list of our bridges (state.py). Invariant: no name of a device is longer than 15 characters, and the
same ids always give the same names.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

# The prefix of the tables of all network agents of all clouds.
TABLES = "kn_"


def bridge(network: str) -> str:
    """Return the name of the bridge of a network."""
    return f"brq{network[:11]}"


def tap(port: str) -> str:
    """Return the name of the device of a guest's port. libvirt makes the device."""
    return f"tap{port[:11]}"


def digest(text: str, letters: int) -> str:
    """Return the first ``letters`` hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:letters]


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one network agent. ``tag`` is the hash of the state folder."""

    tag: str

    @classmethod
    def of(cls, state: Path) -> "Names":
        """Return the names for the network agent with this state folder."""
        return cls(digest(str(state.resolve()), 6))

    @property
    def table(self) -> str:
        """The name of both nft tables, one in the family bridge and one in inet."""
        return f"{TABLES}{self.tag}"

    @property
    def namespaces(self) -> str:
        """The prefix of the names of all namespaces of this agent."""
        return f"kn-{self.tag}-"

    @property
    def runtime(self) -> Path:
        """The folder for dnsmasq's files.

        The folder is directly below /run, because dnsmasq reads the files again without root's
        rights, and might not reach other folders.
        """
        return Path(f"/run/kn-{self.tag}")

    def network_namespace(self, network: str) -> str:
        """Return the name of the namespace of a network's dnsmasq."""
        return f"{self.namespaces}net-{network}"

    def router_namespace(self, router: str) -> str:
        """Return the name of the namespace of a router."""
        return f"{self.namespaces}router-{router}"

    def vxlan(self, vni: int) -> str:
        """Return the name of the tunnel device of a network with this vxlan identifier."""
        return f"vx{self.tag}{vni:x}"

    def dhcp(self, network: str) -> str:
        """Return the name of the bridge's end of the veth pair into the network's namespace."""
        return f"kd{self.tag}{digest(network, 7)}"

    def plug(self, router: str, port: str) -> str:
        """Return the name of the bridge's end of a veth pair into a router's namespace.

        Args:
            router: The id of the router.
            port: The network's id and the MAC address of the router's interface, joined.
        """
        return f"kr{self.tag}{digest(router + port, 7)}"

    def gateway(self, network: str) -> tuple[str, str]:
        """Return the names of both ends of an external network's gateway pair.

        Both ends are in the host's namespace. The first end is on the bridge, and the second end
        has the gateway addresses of the network's subnets.
        """
        return f"kp{self.tag}{digest(network, 7)}", f"kg{self.tag}{digest(network, 7)}"

    def is_ours(self, device: str) -> bool:
        """Return True if the name shows that this agent made the device in the host's namespace.

        False for bridges and taps. The state folder contains the agent's bridges.
        """
        return device[:2] in ("vx", "kd", "kr", "kp", "kg") and device[2:8] == self.tag
