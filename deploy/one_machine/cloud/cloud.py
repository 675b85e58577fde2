# SPDX-License-Identifier: Apache-2.0
"""The facts of one cloud on this machine: its folders, ports, addresses, hosts and passwords.

Several clouds can run side by side. Each has its own home (KILONOVA_HOME) and its own ports
(KILONOVA_PORT_BASE). A cloud writes nothing outside its home.
deploy/one_machine/cloud/lifecycle.py prepares, starts and stops a cloud, and
deploy/one_machine/cloud/process_control.py signals single processes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from deploy.one_machine.machine.underlay import NAMESPACES, Underlay
from deploy.progress import Failure

HOME = Path("/var/lib/kilonova-up")
PASSWORDS = (
    "admin",
    "kilonova",
    "demo",
    "broker",
    "sealing",
    "metadata",
    "commands",
    "queries",
    "tickets",
)
MOST_HOSTS = 9
#: The name of the machine itself in the network service of a lab.
GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where things listen; the broker also takes the two after its own, on 127.0.0.1."""

    identity: int = 5000
    image: int = 9292
    api: int = 8774
    broker: int = 5682  # beside a RabbitMQ that may run on its usual ports
    network: int = 9696  # over UDP, the hosts' tunnels
    metadata: int = 8775
    console: int = 6080
    placement: int = 8778
    image_gateway: int = 9293
    volume: int = 8776
    COUNT: ClassVar[int] = 12

    @classmethod
    def from_base(cls, base: int) -> Ports:
        """``COUNT`` ports in a row."""
        return cls(*(base + number for number in (0, 1, 2, 3, 6, 7, 8, 9, 10, 11)))

    def taken(self) -> dict[str, int]:
        """Every port with what it is for."""
        return {
            "identity": self.identity,
            "image": self.image,
            "api": self.api,
            "broker": self.broker,
            "broker's node": self.broker + 1,
            "broker's port mapper": self.broker + 2,
            "network": self.network,
            "metadata": self.metadata,
            "console": self.console,
            "placement": self.placement,
            "image-gateway": self.image_gateway,
            "volume": self.volume,
        }


@dataclass(frozen=True, slots=True)
class Cloud:
    """Everything follows from these few facts.

    ``hosts`` are the names of its hosts, each with an agent ("agent", "agent-2" …) and, with the
    driver libvirt, a libvirtd of its own. ``broker_url`` and ``database_url`` replace the own
    broker and SQLite.
    ``networks``: None is yes where there are guests to use them. ``apart``: no host is the machine
    itself, which is then their network's gateway. ``shared``: the disks of all hosts' guests are in
    one folder. ``volumes``: with a volume service.
    ``options``: (section, option, value) of kilonova.conf beside what follows from the others.
    """

    home: Path = HOME
    ports: Ports = field(default_factory=Ports)
    hosts: tuple[str, ...] = field(default_factory=lambda: (socket.gethostname(),))
    driver: str = "libvirt"
    broker_url: str | None = None
    database_url: str | None = None
    networks: bool | None = None
    apart: bool = False
    shared: bool = False
    volumes: bool = False
    fencing_hook: str = ""
    options: tuple[tuple[str, str, object], ...] = ()

    @classmethod
    def from_environment(cls) -> Cloud:
        """KILONOVA_HOME, KILONOVA_PORT_BASE, KILONOVA_HOSTS, KILONOVA_NETWORKS, KILONOVA_VOLUMES,
        KILONOVA_TRANSPORT_URL, KILONOVA_DATABASE_URL, KILONOVA_DRIVER."""
        cloud = cls(
            home=Path(os.environ.get("KILONOVA_HOME", HOME)).resolve(),
            hosts=_hosts(),
            networks={None: None, "yes": True, "no": False}[
                _said("KILONOVA_NETWORKS", "yes", "no")
            ],
            volumes=_said("KILONOVA_VOLUMES", "yes", "no") != "no",
            driver=_said("KILONOVA_DRIVER", "libvirt", "memory") or "libvirt",
            broker_url=os.environ.get("KILONOVA_TRANSPORT_URL"),
            database_url=os.environ.get("KILONOVA_DATABASE_URL"),
        )
        base = os.environ.get("KILONOVA_PORT_BASE")
        if base is None:
            return cloud
        if not base.isdecimal() or not 1024 <= int(base) <= 65000:
            raise Failure(f"KILONOVA_PORT_BASE is {base!r}.", "Give a number from 1024 to 65000.")
        return replace(cloud, ports=Ports.from_base(int(base)))

    # --- where things are ---
    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def clouds_yaml(self) -> Path:
        return self.home / "clouds.yaml"

    @property
    def identity_url(self) -> str:
        return f"http://{self.address}:{self.ports.identity}/v3"

    @property
    def image_url(self) -> str:
        return f"http://{self.address}:{self.ports.image}"

    @property
    def image_gateway_url(self) -> str:
        return f"http{'s' * self.is_joined}://{self.address}:{self.ports.image_gateway}"

    @property
    def api_url(self) -> str:
        return f"http://{self.address}:{self.ports.api}/v2.1"

    @property
    def network_url(self) -> str:
        return f"http://{self.address}:{self.ports.network}"

    @property
    def volume_url(self) -> str:
        return f"http://{self.address}:{self.ports.volume}/v3"

    @property
    def metadata_url(self) -> str:
        return f"http{'s' * self.is_joined}://{self.address}:{self.ports.metadata}"

    @property
    def console_url(self) -> str:
        return f"http://{self.address}:{self.ports.console}"

    @property
    def placement_url(self) -> str:
        return f"http://{self.address}:{self.ports.placement}"

    @property
    def has_guests(self) -> bool:
        """Do its servers run, or are they on paper only?"""
        return self.driver == "libvirt"

    @property
    def has_networks(self) -> bool:
        return self.has_guests if self.networks is None else self.networks

    @property
    def underlay(self) -> Underlay:
        return Underlay(self.home, self.ports.identity, self.apart)

    @property
    def is_joined(self) -> bool:
        """Are there several hosts, of which further ones are in namespaces of their own?"""
        return self.has_guests and self.has_networks and (self.apart or len(self.hosts) > 1)

    @property
    def address(self) -> str:
        """Where everything listens: where the hosts reach the machine, or nobody but the machine
        itself."""
        return str(self.underlay.machine) if self.is_joined else "127.0.0.1"

    def host_address(self, number: int) -> str:
        """Where a host is reached."""
        return str(self.underlay.address(number)) if self.is_joined else "127.0.0.1"

    def namespace(self, number: int) -> Path | None:
        """Of a host's own network namespace; None for a host in the machine's."""
        name = self.underlay.namespace(number) if self.is_joined else None
        return NAMESPACES / name if name else None

    def config(self, host: str | None = None, role: str = "") -> Path:
        """The configuration file of the control plane, or of a host's agent; a ``role`` has one
        with its own name at the broker."""
        return (
            self.home
            / "etc"
            / (f"kilonova{role and '-'}{role}.conf" if host is None else f"host-{host}.conf")
        )

    def network_key(self, host: str) -> Path:
        """The key file of a host's part of the network service."""
        return self.home / "etc" / f"network-{host}.key"

    def log(self, name: str) -> Path:
        return self.home / "log" / f"{name}.log"

    def secret(self, name: str) -> Path:
        """The file with one of ``PASSWORDS``."""
        return self.home / "secrets" / name

    def password(self, name: str) -> str:
        """One of ``PASSWORDS``."""
        return self.secret(name).read_text().strip()

    @property
    def identity_db(self) -> Path:
        return self.home / "data/identity.db"

    @property
    def volume_folder(self) -> Path:
        """The folder with the volumes and the state of the volume service."""
        return self.home / "volume"

    def libvirt_folder(self, number: int) -> Path:
        return self.home / numbered("libvirt", number)

    def network_folder(self, number: int) -> Path:
        """What a host's part of the network service remembers; number 0 is the gateway of a lab."""
        return self.home / numbered("network-host", number)

    def state_folder(self, number: int) -> Path:
        """What a host's agent keeps: journal, image cache, guests' disks."""
        return self.home / numbered("state", number)


def numbered(name: str, number: int) -> str:
    """Return the name of a host's process or folder.

    For example, "agent" on the first host and "agent-2" on the second. Number 0 is the gateway of a
    lab.
    """
    return name if number == 1 else f"{name}-{number or GATEWAY}"


def _said(name: str, *words: str) -> str | None:
    """What a variable says that takes one of these words; None when it is not set."""
    said = os.environ.get(name)
    if said not in (None, *words):
        raise Failure(f"{name} is {said!r}.", f"Say {' or '.join(words)}, or leave it away.")
    return said


def _hosts() -> tuple[str, ...]:
    """This machine, and with KILONOVA_HOSTS=2 one more host on it, and so on."""
    number, name = os.environ.get("KILONOVA_HOSTS", "1"), socket.gethostname()
    if number not in map(str, range(1, MOST_HOSTS + 1)):
        raise Failure(f"KILONOVA_HOSTS is {number!r}.", f"Give a number from 1 to {MOST_HOSTS}.")
    return tuple(numbered(name, one) for one in range(1, int(number) + 1))
