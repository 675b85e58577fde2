# SPDX-License-Identifier: Apache-2.0
"""The facts of one cloud on this machine: the folders, ports, addresses, hosts and passwords.

Several clouds can run side by side. Each has a separate home (KILONOVA_HOME) and separate ports
(KILONOVA_PORT_BASE). A cloud writes files only into the home, except dnsmasq's below /run.
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
    """The ports of the services. The broker also uses the next two ports, on 127.0.0.1."""

    identity: int = 5000
    image: int = 9292
    api: int = 8774
    # A RabbitMQ with the usual ports may run on this machine.
    broker: int = 5682
    # The same number over UDP is for the hosts' tunnels.
    network: int = 9696
    metadata: int = 8775
    console: int = 6080
    placement: int = 8778
    image_gateway: int = 9293
    volume: int = 8776
    COUNT: ClassVar[int] = 12

    @classmethod
    def from_base(cls, base: int) -> Ports:
        """Return the ports for a range of ``COUNT`` ports that begins at ``base``."""
        return cls(*(base + number for number in (0, 1, 2, 3, 6, 7, 8, 9, 10, 11)))

    def taken(self) -> dict[str, int]:
        """Return purpose -> port for all ports, including those of the broker's node."""
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
    """The facts from which the files and processes of a cloud follow.

    Attributes:
        home: The folder of the cloud.
        ports: The ports of the services.
        hosts: Names of the hosts. Each has an agent ("agent", "agent-2" …) and, with the driver
            libvirt, a separate libvirtd.
        driver: The driver of the agents, libvirt or memory.
        broker_url: An external broker, or None for a RabbitMQ of the cloud.
        database_url: An external database, or None for SQLite.
        networks: True with a network service. None means True if the cloud has guests.
        apart: True if no host is the machine itself, which is then the hosts' gateway, as in a lab.
        shared: True if the disks of all guests are in one folder.
        volumes: True with a volume service.
        fencing_hook: The path of the fencing hook, or "" without one.
        options: (section, option, value) of kilonova.conf that replace or complete the generated
            options.
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
        """Read the cloud's facts from environment variables.

        The variables are KILONOVA_HOME, KILONOVA_PORT_BASE, KILONOVA_HOSTS, KILONOVA_NETWORKS,
        KILONOVA_VOLUMES, KILONOVA_TRANSPORT_URL, KILONOVA_DATABASE_URL and KILONOVA_DRIVER.

        Raises:
            Failure: A variable has an invalid value.
        """
        cloud = cls(
            home=Path(os.environ.get("KILONOVA_HOME", HOME)).resolve(),
            hosts=_read_host_names(),
            networks={None: None, "yes": True, "no": False}[
                _read_choice("KILONOVA_NETWORKS", "yes", "no")
            ],
            volumes=_read_choice("KILONOVA_VOLUMES", "yes", "no") != "no",
            driver=_read_choice("KILONOVA_DRIVER", "libvirt", "memory") or "libvirt",
            broker_url=os.environ.get("KILONOVA_TRANSPORT_URL"),
            database_url=os.environ.get("KILONOVA_DATABASE_URL"),
        )
        base = os.environ.get("KILONOVA_PORT_BASE")
        if base is None:
            return cloud
        if not base.isdecimal() or not 1024 <= int(base) <= 65000:
            raise Failure(
                f"KILONOVA_PORT_BASE is {base!r}, which is not a valid port.",
                "Give a number from 1024 to 65000.",
            )
        return replace(cloud, ports=Ports.from_base(int(base)))

    # --- URLs, folders and files ---
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
    def store_url(self) -> str:
        """The URL of the database: the external one, or SQLite in the cloud's folder."""
        return self.database_url or f"sqlite:///{self.home}/data/kilonova.db"

    @property
    def has_guests(self) -> bool:
        """True if servers have real guests. With the driver memory they have none."""
        return self.driver == "libvirt"

    @property
    def has_networks(self) -> bool:
        return self.has_guests if self.networks is None else self.networks

    @property
    def underlay(self) -> Underlay:
        return Underlay(self.home, self.ports.identity, self.apart)

    @property
    def is_joined(self) -> bool:
        """True if a host has a network namespace of its own. A bridge joins these namespaces."""
        return self.has_guests and self.has_networks and (self.apart or len(self.hosts) > 1)

    @property
    def address(self) -> str:
        """Address of the services: the machine's address in the hosts' network, or 127.0.0.1."""
        return str(self.underlay.machine) if self.is_joined else "127.0.0.1"

    def host_address(self, number: int) -> str:
        """Return the address of a host, counted from 1. It is 127.0.0.1 unless ``is_joined``."""
        return str(self.underlay.address(number)) if self.is_joined else "127.0.0.1"

    def namespace(self, number: int) -> Path | None:
        """Return the file of a host's network namespace.

        For a host in the machine's own namespace, and for number 0 (the gateway of a lab, which is
        the machine itself), return None.
        """
        name = self.underlay.namespace(number) if self.is_joined else None
        return NAMESPACES / name if name else None

    def config(self, host: str | None = None, role: str = "") -> Path:
        """Return the path of the configuration file of a host's agent or of the control plane.

        Args:
            host: The name of the host, or None for the control plane.
            role: A role of ``configuration.ROLES``, or "" for the file of all other processes.
        """
        return (
            self.home
            / "etc"
            / (f"kilonova{role and '-'}{role}.conf" if host is None else f"host-{host}.conf")
        )

    def network_key(self, host: str) -> Path:
        """Return the path of the file with the key of a host's network agent."""
        return self.home / "etc" / f"network-{host}.key"

    def log(self, name: str) -> Path:
        return self.home / "log" / f"{name}.log"

    def secret(self, name: str) -> Path:
        """Return the path of the file with a password from ``PASSWORDS``."""
        return self.home / "secrets" / name

    def password(self, name: str) -> str:
        """Return a password from ``PASSWORDS``, read from its file.

        ``lifecycle.prepare`` makes the files.
        """
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
        """Return the folder with the state of a host's network agent.

        Number 0 is the gateway of a lab.
        """
        return self.home / numbered("network-host", number)

    def state_folder(self, number: int) -> Path:
        """Return the folder of a host's agent with journal, image cache and guests' disks."""
        return self.home / numbered("state", number)


def numbered(name: str, number: int) -> str:
    """Return the name of a host's process or folder.

    For example, "agent" on the first host and "agent-2" on the second. Number 0 is the gateway of a
    lab.
    """
    return name if number == 1 else f"{name}-{number or GATEWAY}"


def _read_choice(name: str, *words: str) -> str | None:
    """Return the value of an environment variable, or None if the variable is not set.

    Raises:
        Failure: The value is not in ``words``.
    """
    value = os.environ.get(name)
    if value not in (None, *words):
        raise Failure(f"{name} is {value!r}.", f"Set {name} to {' or '.join(words)}, or unset it.")
    return value


def _read_host_names() -> tuple[str, ...]:
    """Return the names of KILONOVA_HOSTS hosts (default 1), for example "box" and "box-2".

    The first is this machine's name.

    Raises:
        Failure: KILONOVA_HOSTS is not a number from 1 to ``MOST_HOSTS``.
    """
    number, name = os.environ.get("KILONOVA_HOSTS", "1"), socket.gethostname()
    if number not in map(str, range(1, MOST_HOSTS + 1)):
        raise Failure(
            f"KILONOVA_HOSTS is {number!r}, which is not a valid number.",
            f"Give a number from 1 to {MOST_HOSTS}.",
        )
    return tuple(numbered(name, index) for index in range(1, int(number) + 1))
