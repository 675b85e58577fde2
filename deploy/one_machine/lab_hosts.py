# SPDX-License-Identifier: Apache-2.0
"""A lab: a cloud whose hosts all have namespaces of their own, so that each can fail alone.

deploy/one_machine/lab.py and tests/e2e use this module. HOME/lab.json has the facts of the lab from
the start, so that later commands only need the home, and an interrupted one can be repeated. A host
is up (the namespace exists), cut (the cable is disconnected, and the guests run on) or off (no
process, no guest). Invariant: ``fence`` succeeds only when no process of the host lives. Only one
command at a time changes hosts.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from common.security import private_files
from deploy.one_machine.cloud import lifecycle, power
from deploy.one_machine.cloud.cloud import MOST_HOSTS, Cloud, Ports
from deploy.one_machine.cloud.process_control import find_supervisor
from deploy.one_machine.machine import libvirtd
from deploy.packages import ROOT
from deploy.progress import Failure

HOME, PORT_BASE = Path("/var/lib/kilonova-lab"), 15000
HOOK = """#!/bin/sh
# Made by deploy/lab: the fencing hook of this lab. Exits with 0 only when no process of the host remains.
KILONOVA_HOME={home} exec {lab} fence "$1"
"""
UP = "Make one with: ./deploy/lab up 3"
#: A domain in the output of virsh: the server's id, which is part of the domain's name, and the
#: number of its state.
DOMAIN = re.compile(r"^Domain: '(?:instance-)?(.+)'\n  state\.state=(\d+)$", re.MULTILINE)
STATES = {1: "running", 3: "paused", 5: "shutoff"}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a lab.

    Attributes:
        hosts: The number of hosts.
        shared: True if the disks of all guests are in one folder.
        port_base: The first port.
        volumes: True with a volume service.
    """

    hosts: int
    shared: bool
    port_base: int
    volumes: bool = False


@dataclass(frozen=True, slots=True)
class Guest:
    """A domain of a host.

    Attributes:
        server: The id of the server.
        state: running, paused, shutoff or other.
    """

    server: str
    state: str


class Lab:
    """The lab in one home, with the commands on its hosts."""

    def __init__(self, home: Path, facts: Facts) -> None:
        self.facts = facts
        self.cloud = Cloud(
            home=home,
            ports=Ports.from_base(facts.port_base),
            apart=True,
            shared=facts.shared,
            volumes=facts.volumes,
            networks=True,
            hosts=tuple(f"lab{number}" for number in range(1, facts.hosts + 1)),
            fencing_hook=str(home / "fence"),
        )

    @classmethod
    def open(cls, home: Path) -> Lab:
        """Return the existing lab of this home, which may be running or stopped.

        Raises:
            Failure: There is no lab, or this user may not read lab.json.
        """
        try:
            return cls(home, Facts(**json.loads((home / "lab.json").read_text())))
        except FileNotFoundError as problem:
            raise Failure(
                f"There is no lab in {home}.", f"{UP}; or set KILONOVA_HOME to the home of a lab."
            ) from problem
        except PermissionError as problem:
            raise Failure(
                f"The lab in {home} cannot be read: {problem.strerror}.", "Run this as root."
            ) from problem

    @classmethod
    def make(cls, home: Path, facts: Facts) -> Lab:
        """Return the existing lab, or a new lab without processes if the home is empty or missing.

        Raises:
            Failure: The home contains a lab with other facts, a lab that this user may not read, or
                other files.
        """
        if (home / "lab.json").exists():
            lab = cls.open(home)
            if lab.facts != facts:
                raise Failure(
                    f"The lab in {home} has other settings: {describe(lab.facts)}.",
                    "Remove that lab with ./deploy/lab down, or set KILONOVA_HOME to another folder.",
                )
            return lab
        if home.exists() and any(home.iterdir()):
            raise Failure(
                f"{home} is not empty, and not the home of a lab.",
                "Set KILONOVA_HOME to another folder.",
            )
        home.mkdir(parents=True, exist_ok=True)
        private_files.replace(home / "lab.json", json.dumps(asdict(facts)) + "\n")
        return cls(home, facts)

    def write_hook(self) -> None:
        """Write the program that the conductor calls to fence a host."""
        path = Path(self.cloud.fencing_hook)
        path.write_text(
            HOOK.format(
                home=shlex.quote(str(self.cloud.home)), lab=shlex.quote(str(ROOT / "deploy/lab"))
            )
        )
        path.chmod(0o700)

    def down(self) -> None:
        """Remove the lab: processes, namespaces, devices, rules and files.

        Raises:
            Failure: A process does not stop, or a command that cleans up fails.
        """
        lifecycle.shut_down(self.cloud)
        shutil.rmtree(self.cloud.home)

    # --- hosts ---
    def number(self, host: str) -> int:
        """Return the number of a host, counted from 1.

        Raises:
            Failure: The lab has no such host. The message lists the hosts.
        """
        if host not in self.cloud.hosts:
            raise Failure(
                f"There is no host {host!r} in this lab.",
                f"Name one of: {', '.join(self.cloud.hosts)}",
            )
        return self.cloud.hosts.index(host) + 1

    def state(self, host: str) -> str:
        """Return the present state of the host: "up", "cut" (cable disconnected) or "off".

        Raises:
            Failure: The lab has no such host.
        """
        number = self.number(host)
        if not power.is_on(self.cloud, number):
            return "off"
        return "up" if self.cloud.underlay.is_plugged(number) else "cut"

    def kill(self, host: str) -> None:
        """Cut the host's power: agent, libvirtd and guests die, and stay dead until ``start``.

        A host that is off stays off.

        Raises:
            Failure: A process still runs after 30 s, a command that cleans up fails, the lab does
                not run, the host is unknown, or this user is not root.
        """
        number = self.number(host)
        with self._lock_hosts():
            power.off(self.cloud, number)

    def start(self, host: str) -> None:
        """Boot a host that is off, with a new boot id and a connected cable.

        A host that is on stays on, and its cable is connected.

        Raises:
            Failure: A process does not start within 30 s, the namespace or cable cannot be made,
                the lab does not run, the host is unknown, or this user is not root.
        """
        number = self.number(host)
        with self._lock_hosts():
            power.on(self.cloud, number)

    def cut(self, host: str) -> None:
        """Disconnect the host's cable. The guests continue to run.

        Raises:
            Failure: The host is off or unknown, the lab does not run, or this user is not root.
        """
        self._plug(host, False)

    def heal(self, host: str) -> None:
        """Connect the host's cable again.

        Raises:
            Failure: The host is off or unknown, the lab does not run, or this user is not root.
        """
        self._plug(host, True)

    def fence(self, host: str) -> None:
        """Kill a host that is up, cut or off, and make sure that no process remains.

        Raises:
            Failure: A process of the host may live. ``kill`` failed, or a process remains.
        """
        self.kill(host)
        if self.state(host) != "off" or libvirtd.is_running(
            self.cloud.libvirt_folder(self.number(host))
        ):
            raise Failure(
                f"Processes of host {host} remain after the kill.",
                "Run this again; see ./deploy/lab status.",
            )

    def guests(self, host: str) -> list[Guest] | None:
        """Return the domains of the host, sorted by server id, or None if libvirtd does not answer.

        Raises:
            Failure: The lab has no such host.
            TimeoutExpired: virsh did not end within 20 s.
        """
        uri = libvirtd.uri(self.cloud.libvirt_folder(self.number(host)))
        # One call, because a guest that changes its state between two calls would be in neither
        # result.
        done = subprocess.run(
            ["virsh", "-c", uri, "domstats", "--state"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            return None
        return sorted(
            (
                Guest(server, STATES.get(int(state), "other"))
                for server, state in DOMAIN.findall(done.stdout)
            ),
            key=lambda guest: guest.server,
        )

    def require_running(self) -> None:
        """Check that the lab runs.

        Raises:
            Failure: The lab does not run.
        """
        if find_supervisor(self.cloud) is None:
            raise Failure(
                f"The lab in {self.cloud.home} does not run.",
                f"Start it with: ./deploy/lab up {arguments(self.facts)}",
            )

    def _plug(self, host: str, is_in: bool) -> None:
        number = self.number(host)
        with self._lock_hosts():
            if self.state(host) == "off":
                raise Failure(
                    f"Host {host} is off, so its cable cannot be connected or disconnected.",
                    f"Boot it with: ./deploy/lab start {host}",
                )
            self.cloud.underlay.plug(number, is_in)

    @contextmanager
    def _lock_hosts(self) -> Iterator[None]:
        """Hold the lock of the lab, so that one command at a time changes hosts.

        Why: the fencing hook and a person may change the same host.

        Raises:
            Failure: The process is not root, or the lab does not run.
        """
        if os.geteuid() != 0:
            raise Failure(
                "Changes of hosts need root for the processes and namespaces.", "Run this as root."
            )
        self.require_running()
        with (self.cloud.run / "lab.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def facts(hosts: str, shared: bool, volumes: bool = False) -> Facts:
    """Return the facts from the command line and KILONOVA_PORT_BASE.

    Args:
        hosts: The number of hosts, as text.
        shared: True with ``--shared``.
        volumes: True with ``--volumes``.

    Raises:
        Failure: A value is invalid.
    """
    if hosts not in map(str, range(1, MOST_HOSTS + 1)):
        raise Failure(
            f"The number of hosts is {hosts!r}, which is not a valid number.",
            f"Give a number from 1 to {MOST_HOSTS}.",
        )
    base = os.environ.get("KILONOVA_PORT_BASE", str(PORT_BASE))
    if not base.isdecimal() or not 1024 <= int(base) <= 65000:
        raise Failure(f"KILONOVA_PORT_BASE is {base!r}.", "Give a number from 1024 to 65000.")
    return Facts(int(hosts), shared, int(base), volumes)


def describe(facts: Facts) -> str:
    """Return a lab's facts as text, for example "3 hosts with shared storage, ports from 15000"."""
    storage = "shared storage" if facts.shared else "storage of their own"
    volumes = ", a volume service" if facts.volumes else ""
    return f"{facts.hosts} hosts with {storage}{volumes}, ports from {facts.port_base}"


def arguments(facts: Facts) -> str:
    """Return the arguments of ``./deploy/lab up`` for this lab.

    The first port is no argument. The command reads it from KILONOVA_PORT_BASE.
    """
    words = [str(facts.hosts), *(["--shared"] if facts.shared else [])]
    return " ".join([*words, *(["--volumes"] if facts.volumes else [])])


def home() -> Path:
    """Return the lab's home: the folder KILONOVA_HOME as an absolute path, by default ``HOME``."""
    return Path(os.environ.get("KILONOVA_HOME", HOME)).resolve()
