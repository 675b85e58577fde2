# SPDX-License-Identifier: Apache-2.0
"""One cloud on this machine: its folders, ports, secrets and processes; its configuration is
deploy/configuration.py's.

Used by deploy/commands/{up,down,lab}.py and by tests/e2e. Several clouds can run side by side: each
has its home (KILONOVA_HOME) and its ports (KILONOVA_PORT_BASE); nothing outside the home is
written, and in the kernel only what ``shut_down`` removes again. ``kill("conductor")`` is kill -9,
after which the supervisor starts it again; ``stop`` keeps it down until ``start``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from compute_api.metadata.proxy_headers import host_key
from deploy import certificates, configuration, power, processes, settings, supervise
from deploy.broker import Broker
from deploy.configuration import write_secret
from deploy.environment import VENV
from deploy.packages import ROOT
from deploy.progress import Failure, private, run, wait
from deploy.servers import answers, http_answers
from deploy.underlay import NAMESPACES, Underlay

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

    @property
    def broker(self) -> Broker:
        """The own node; its password is made by ``prepare``."""
        return Broker(
            self.home / "broker",
            self.ports.broker,
            self.password("broker"),
            self.address,
            self.hosts,
            certificates.of(self, certificates.BROKER),
        )

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

    def libvirt_folder(self, number: int) -> Path:
        return self.home / processes.numbered("libvirt", number)

    def network_folder(self, number: int) -> Path:
        """What a host's part of the network service remembers; number 0 is the gateway of a lab."""
        return self.home / processes.numbered("network-host", number)

    def state_folder(self, number: int) -> Path:
        """What a host's agent keeps: journal, image cache, guests' disks."""
        return self.home / processes.numbered("state", number)

    # --- made once ---
    def prepare(self) -> None:
        """Folders, secrets and configuration; what exists stays, but for the configuration, which
        follows from the facts above."""
        for name in ("etc", "secrets", "data", "log", "run", "image"):
            (self.home / name).mkdir(parents=True, exist_ok=True)
            (self.home / name).chmod(0o700)
        self.home.chmod(0o711)  # guests' processes and the broker go through it to their own files
        for name in PASSWORDS:
            path = self.secret(name)
            if not path.exists():
                # a "-" in front would be read as an option
                write_secret(path, secrets.token_hex(24))
        for _, host in processes.network_parts(self):
            write_secret(self.network_key(host), host_key(self.password("metadata"), host))
        certificates.make(self)
        for number, host in enumerate(self.hosts, 1):
            self.state_folder(number).mkdir(mode=0o700, exist_ok=True)
            self.libvirt_folder(number).mkdir(mode=0o700, exist_ok=True)
            if self.shared:
                self._share(self.state_folder(number) / "instances")
            write_secret(self.config(host), configuration.of_host(self, host, number))
        for role in ("", *configuration.ROLES):
            write_secret(self.config(role=role), configuration.of_control_plane(self, role))
        write_secret(self.clouds_yaml, configuration.clouds(self))
        if self.broker_url is None and self.broker.prepare() and self.supervisor() is not None:
            self.broker.learn_users()

    def _share(self, instances: Path) -> None:
        (self.home / "instances").mkdir(mode=0o711, exist_ok=True)
        if not instances.is_symlink():
            instances.symlink_to(self.home / "instances")

    # --- processes ---
    def programs(self) -> list[supervise.Program]:
        """All processes in the order of their start."""
        return processes.programs(self)

    def environment(self, host: str | None = None, role: str = "") -> dict[str, str]:
        """Only what the processes need: no proxy, for everything that they call is on this machine.
        It changes with their configuration, so that the supervisor starts again what has another
        one now."""
        config = self.config(host, role)
        digest = hashlib.sha256(config.read_bytes() if config.exists() else b"").hexdigest()[:8]
        return {
            "PATH": f"{VENV}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.home),
            "LC_ALL": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "KILONOVA_CONF": str(config),
            "KILONOVA_CONF_DIGEST": digest,
        }

    def launch(self) -> None:
        """Start the supervisor with the broker and libvirt first, or bring a running one up to
        date."""
        programs = self.programs()
        if self.is_joined:
            self.underlay.make(len(self.hosts))
        for marker in self.run.glob("*.down"):
            marker.unlink()
        if self.supervisor() is None:
            supervise.write(
                self.run, [one for one in programs if one.name.startswith(processes.NEIGHBOURS)]
            )
            settings.remember(self)
            self._start_supervisor()
            self._await_broker()
        known = supervise.read(self.run)
        if known != programs:
            supervise.write(self.run, programs)
            pid = self.supervisor()
            if pid is None:
                raise Failure("The supervisor has ended.", self.advice("supervise"))
            before = {one.name: self.pid(one.name) for one in programs if one not in known}
            os.kill(pid, signal.SIGHUP)
            wait(
                lambda: all(self.pid(name) not in (None, old) for name, old in before.items()),
                120,
                f"Not all of these start: {', '.join(before)}",
                lambda: self.advice("supervise"),
            )

    def _start_supervisor(self) -> None:
        with open(self.log("supervise"), "ab", opener=private) as log:
            subprocess.Popen(
                [sys.executable, "-m", "deploy.supervise", str(self.run)],
                cwd=ROOT,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
            )
        wait(
            lambda: self.supervisor() is not None,
            10,
            "The supervisor does not start",
            lambda: self.advice("supervise"),
        )

    def supervisor(self) -> int | None:
        """The process id of the supervisor when it runs: it holds its lock as long as it lives."""
        try:
            with (self.run / "supervise.lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            text = (self.run / "supervise.lock").read_text().strip()
            return int(text) if text else None
        return None

    def pid(self, name: str) -> int | None:
        """Of the running process, or None."""
        try:
            return int((self.run / f"{name}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the process and return its id; after a death the supervisor starts
        another."""
        pid = self.pid(name)
        if pid is None:
            raise Failure(f"{name} does not run.", f"See {self.log('supervise')}.")
        os.kill(pid, number)
        return pid

    def stop(self, name: str, seconds: float = 30) -> None:
        """End the process and keep it down."""
        (self.run / f"{name}.down").touch()
        wait(
            lambda: self.pid(name) is None,
            seconds,
            f"{name} does not stop",
            f"See {self.log(name)}.",
        )

    def start(self, name: str, seconds: float = 30) -> int:
        """Let the process run again; returns its id."""
        (self.run / f"{name}.down").unlink(missing_ok=True)
        wait(
            lambda: self.pid(name) is not None,
            seconds,
            f"{name} does not start",
            f"See {self.log(name)}.",
        )
        return self.pid(name) or 0

    def restart(self, name: str) -> int:
        """Stop and start."""
        self.stop(name)
        return self.start(name)

    def shut_down(self, seconds: float = 120) -> bool:
        """Stop everything, and remove what it made in the kernel, also when it was killed before;
        False when nothing ran."""
        pid = self.supervisor()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            wait(
                lambda: self.supervisor() is None,
                seconds,
                "The processes do not stop",
                f"See {self.log('supervise')}; kill process {pid} by hand.",
            )
        if processes.volume_folder(self).exists():
            # They go on when their service ends, as guests do.
            run(processes.ending_exports(self), "Run ./deploy/down again.", log=self.log("volume"))
        for number in range(MOST_HOSTS + 1):
            if self.network_folder(number).exists():
                power.sweep(self, number)
        self.underlay.remove()
        return pid is not None

    def purge(self) -> None:
        """Remove the home with all data.

        Raises:
            Failure: the folder is not the home of a cloud, or the cloud runs.
        """
        if self.supervisor() is not None or not (self.home / "secrets/broker").exists():
            raise Failure(
                f"{self.home} is not the home of a stopped cloud; nothing is removed.",
                "See whether KILONOVA_HOME is right.",
            )
        shutil.rmtree(self.home)

    # --- readiness ---
    def _await_broker(self, seconds: float = 90) -> None:
        """Processes that find no broker would wait seconds before they look again."""
        if self.broker_url is None:
            wait(
                lambda: answers(self.ports.broker, self.address),
                seconds,
                "RabbitMQ does not answer",
                lambda: self.advice("rabbitmq"),
            )

    def await_http(self, name: str, url: str, seconds: float = 60) -> None:
        """Until this URL answers anything but a server error."""
        authority = certificates.of(self, certificates.CONTROL)
        wait(
            lambda: http_answers(url, authority and authority.ca),
            seconds,
            f"The {name} service does not answer at {url}",
            lambda: self.advice(name),
        )

    def advice(self, name: str) -> str:
        """What a process that does not do what it should has said last, and where the rest is."""
        log = self.log(name)
        said = (
            log.read_text(errors="replace").strip().splitlines()[-5:]
            if log.exists()
            else ["nothing"]
        )
        return "\n".join(
            [
                f"The {name} said last:",
                *("  | " + line[:300] for line in said),
                f"More in {log} and {self.log('supervise')}; then run this again.",
            ]
        )


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
    return tuple(processes.numbered(name, one) for one in range(1, int(number) + 1))
