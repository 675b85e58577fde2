# SPDX-License-Identifier: Apache-2.0
"""The names of the host part's objects in the kernel.

Every name but a bridge's carries a tag, a short hash of the state folder, so that several hosts and
clouds can live on one machine and `clean` knows what is its own. Bridges and taps have Nova's
names, which the compute side computes from the same ids; which bridges we made is remembered in the
state folder (state.py). Must stay
true: no name of a device is longer than 15 characters, and the same ids always give the same names.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

TABLES = "kn_"  # what the tables of every host part begin with, of all clouds


def bridge(network: str) -> str:
    """The bridge of a network."""
    return f"brq{network[:11]}"


def tap(port: str) -> str:
    """The device of a guest's port, which libvirt makes."""
    return f"tap{port[:11]}"


def digest(text: str, letters: int) -> str:
    """So many hexadecimal letters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:letters]


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one host part; ``tag`` is of its state folder."""

    tag: str

    @classmethod
    def of(cls, state: Path) -> "Names":
        """Those of the host part with this state folder."""
        return cls(digest(str(state.resolve()), 6))

    @property
    def table(self) -> str:
        """Of both nft tables, one in the family bridge and one in inet."""
        return f"{TABLES}{self.tag}"

    @property
    def namespaces(self) -> str:
        """What all our namespaces begin with."""
        return f"kn-{self.tag}-"

    @property
    def runtime(self) -> Path:
        """For dnsmasq's files: it reads them again when it has given up root, perhaps below no
        other folder."""
        return Path(f"/run/kn-{self.tag}")

    def network_namespace(self, network: str) -> str:
        """The namespace of a network's dnsmasq."""
        return f"{self.namespaces}net-{network}"

    def router_namespace(self, router: str) -> str:
        """The namespace of a router."""
        return f"{self.namespaces}router-{router}"

    def vxlan(self, vni: int) -> str:
        """The tunnel device of a network."""
        return f"vx{self.tag}{vni:x}"

    def dhcp(self, network: str) -> str:
        """The bridge's end of the pair into the network's namespace."""
        return f"kd{self.tag}{digest(network, 7)}"

    def plug(self, router: str, port: str) -> str:
        """The bridge's end of a pair into a router's namespace."""
        return f"kr{self.tag}{digest(router + port, 7)}"

    def gateway(self, network: str) -> tuple[str, str]:
        """Both ends of the pair by which this machine is the gateway of an external network:
        bridge's, ours."""
        return f"kp{self.tag}{digest(network, 7)}", f"kg{self.tag}{digest(network, 7)}"

    def is_ours(self, device: str) -> bool:
        """Whether a device of the host's namespace was made by us (bridges: see the state
        folder)."""
        return device[:2] in ("vx", "kd", "kr", "kp", "kg") and device[2:8] == self.tag
