# SPDX-License-Identifier: Apache-2.0
"""A lab: a cloud all of whose hosts have namespaces of their own, so that each can be struck alone.

Used by deploy/one_machine/lab.py and tests/e2e. What a lab is made of stands in HOME/lab.json from
its first moment on, so that every later command needs the home only and an interrupted one can be
repeated. A host is on (its namespace is there), cut (its cable is pulled: it reaches nobody and
nobody it, its guests run on) or off (no process, no guest). Must stay true: ``fence`` ends well
only when nothing of the host lives; one command at a time strikes.
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
# Made by deploy/lab: the fencing hook of this lab. Ends with 0 only when nothing of the host lives.
KILONOVA_HOME={home} exec {lab} fence "$1"
"""
UP = "Make one with: ./deploy/lab up 3"
#: A domain in virsh's words: the server's id, which the agent's name for it ends with, and the
#: number of its state.
DOMAIN = re.compile(r"^Domain: '(?:instance-)?(.+)'\n  state\.state=(\d+)$", re.MULTILINE)
STATES = {1: "running", 3: "paused", 5: "shutoff"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a lab is made of."""

    hosts: int
    shared: bool
    port_base: int
    volumes: bool = False


@dataclass(frozen=True, slots=True)
class Guest:
    """A domain of a host, by the id of its server: running, paused, shutoff or other."""

    server: str
    state: str


class Lab:
    """The lab in one home."""

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
        """The one that is there. Raises Failure when there is none."""
        try:
            return cls(home, Facts(**json.loads((home / "lab.json").read_text())))
        except FileNotFoundError as problem:
            raise Failure(
                f"There is no lab in {home}.", f"{UP}; or set KILONOVA_HOME to the home of one."
            ) from problem
        except PermissionError as problem:
            raise Failure(
                f"The lab in {home} cannot be read: {problem.strerror}.", "Run this as root."
            ) from problem

    @classmethod
    def make(cls, home: Path, facts: Facts) -> Lab:
        """The one that is there if it is like this, else a new one, of which nothing runs yet.

        Raises:
            Failure: another one is there, or something else.
        """
        if (home / "lab.json").exists():
            there = cls.open(home)
            if there.facts != facts:
                raise Failure(
                    f"The lab in {home} is another one: {describe(there.facts)}.",
                    "Take it down with ./deploy/lab down, or set KILONOVA_HOME to another folder.",
                )
            return there
        if home.exists() and any(home.iterdir()):
            raise Failure(
                f"{home} is no lab, and not empty.", "Set KILONOVA_HOME to another folder."
            )
        home.mkdir(parents=True, exist_ok=True)
        private_files.replace(home / "lab.json", json.dumps(asdict(facts)) + "\n")
        return cls(home, facts)

    def write_hook(self) -> None:
        """The program that the conductor calls to fence a host."""
        path = Path(self.cloud.fencing_hook)
        path.write_text(
            HOOK.format(
                home=shlex.quote(str(self.cloud.home)), lab=shlex.quote(str(ROOT / "deploy/lab"))
            )
        )
        path.chmod(0o700)

    def down(self) -> None:
        """Nothing of it stays: processes, namespaces, devices, rules, files."""
        lifecycle.shut_down(self.cloud)
        shutil.rmtree(self.cloud.home)

    # --- its hosts ---
    def number(self, host: str) -> int:
        """Of a host, by its name. Raises Failure naming those that there are."""
        if host not in self.cloud.hosts:
            raise Failure(
                f"There is no host {host!r} in this lab.",
                f"Name one of: {', '.join(self.cloud.hosts)}",
            )
        return self.cloud.hosts.index(host) + 1

    def state(self, host: str) -> str:
        """up, cut or off."""
        number = self.number(host)
        if not power.is_on(self.cloud, number):
            return "off"
        return "up" if self.cloud.underlay.is_plugged(number) else "cut"

    def kill(self, host: str) -> None:
        """A power cut: agent, libvirtd and every guest die at once, and stay dead until
        ``start``."""
        number = self.number(host)
        with self._lock_hosts():
            power.off(self.cloud, number)

    def start(self, host: str) -> None:
        """Boot a host that is off: it has another boot id, and its cable is in."""
        number = self.number(host)
        with self._lock_hosts():
            power.on(self.cloud, number)

    def cut(self, host: str) -> None:
        """Pull its cable."""
        self._plug(host, False)

    def heal(self, host: str) -> None:
        """Put its cable in again."""
        self._plug(host, True)

    def fence(self, host: str) -> None:
        """Make sure that nothing of the host lives; it needs no word from the host, which may be
        cut, or off.

        Raises:
            Failure: something of it may live.
        """
        self.kill(host)
        if self.state(host) != "off" or libvirtd.is_running(
            self.cloud.libvirt_folder(self.number(host))
        ):
            raise Failure(f"{host} is not dead.", "Run this again; see ./deploy/lab status.")

    def guests(self, host: str) -> list[Guest] | None:
        """What its libvirtd has; None when it does not answer."""
        uri = libvirtd.uri(self.cloud.libvirt_folder(self.number(host)))
        # One question: a guest that changes its state between two would be in neither answer.
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
        """Raises Failure when the lab does not run."""
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
                    f"{host} is off: it has no cable to pull or put in.",
                    f"Boot it with: ./deploy/lab start {host}",
                )
            self.cloud.underlay.plug(number, is_in)

    @contextmanager
    def _lock_hosts(self) -> Iterator[None]:
        """One at a time: the fencing hook and a person may want the same host."""
        if os.geteuid() != 0:
            raise Failure("This strikes processes and namespaces of root.", "Run this as root.")
        self.require_running()
        with (self.cloud.run / "lab.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def facts(hosts: str, shared: bool, volumes: bool = False) -> Facts:
    """From the command line and KILONOVA_PORT_BASE. Raises Failure."""
    if hosts not in map(str, range(1, MOST_HOSTS + 1)):
        raise Failure(
            f"A lab of {hosts!r} hosts cannot be made.", f"Give a number from 1 to {MOST_HOSTS}."
        )
    base = os.environ.get("KILONOVA_PORT_BASE", str(PORT_BASE))
    if not base.isdecimal() or not 1024 <= int(base) <= 65000:
        raise Failure(f"KILONOVA_PORT_BASE is {base!r}.", "Give a number from 1024 to 65000.")
    return Facts(int(hosts), shared, int(base), volumes)


def describe(facts: Facts) -> str:
    """In words."""
    storage = "shared storage" if facts.shared else "storage of their own"
    volumes = ", a volume service" if facts.volumes else ""
    return f"{facts.hosts} hosts with {storage}{volumes}, ports from {facts.port_base}"


def arguments(facts: Facts) -> str:
    """Of the command that makes it."""
    words = [str(facts.hosts), *(["--shared"] if facts.shared else [])]
    return " ".join([*words, *(["--volumes"] if facts.volumes else [])])


def home() -> Path:
    """Where the lab is: KILONOVA_HOME, or a place beside that of ./deploy/up."""
    return Path(os.environ.get("KILONOVA_HOME", HOME)).resolve()
