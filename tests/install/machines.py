# SPDX-License-Identifier: Apache-2.0
"""Machines of this machine's release as booted containers (systemd-nspawn) on a bridge.

All machines share one small system below and write to a layer each, so that a machine costs a
second and what it changes. They reach package mirrors through this machine's address. A program in
a machine runs in all namespaces of its systemd; nothing of this machine's environment goes along.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.packages import ROOT, release
from deploy.progress import run
from tests import containers
from tests.waiting import await_true

RELEASE = release()["VERSION_CODENAME"]  #: the packages are built for it
TREE = ROOT / "build/install" / RELEASE  #: a minimal Debian, made once
#: What a minimal installation has beside the essential packages.
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "udev",
    "procps",
    "netbase",
    "iproute2",
    "iputils-ping",
    "init-system-helpers",
    "ca-certificates",
)
BRIDGE, NETWORK = "kn-install", "172.31.77"
#: Every machine's address; each finds the others by name, as DNS would tell it.
ADDRESSES = {
    name: f"{NETWORK}.{number}"
    for number, name in enumerate(("cloud", "controller", "second", "node1", "node2", "debian"), 10)
}
BOOT_SECONDS, INSTALL_SECONDS = 120, 1800
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}


@dataclass
class Machine:
    """One booted container. ``leader``: its systemd, as this machine counts processes."""

    name: str
    address: str
    root: Path
    leader: int

    def run(self, *command: str, check: bool = True) -> str:
        """What a program prints in the machine.

        Raises:
            AssertionError: it failed, and was not allowed to; with the end of what it said.
        """
        done = subprocess.run(
            ["nsenter", f"--target={self.leader}", "--all", "env", "--chdir=/root", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_SECONDS,
            check=False,
            env=ENVIRONMENT,
        )
        said = done.stdout.decode(errors="replace")
        assert not check or done.returncode == 0, f"{self.name}: {command}: {said[-5000:]}"
        return said

    def shell(self, script: str) -> str:
        """What a script of bash prints; it ends with its first failure."""
        return self.run("bash", "-euo", "pipefail", "-c", script)

    def apt(self, *arguments: str) -> str:
        """apt-get, which asks nothing and keeps what an operator has written."""
        return self.run(
            *("apt-get", "--quiet", "--yes", "--no-install-recommends"),
            *("-o", "Dpkg::Options::=--force-confold", *arguments),
        )

    def install_idle(self, *packages: str) -> None:
        """Install these, and start nothing yet: what has no configuration fails again and again."""
        policy = "/usr/sbin/policy-rc.d"
        self.write(policy, "#!/bin/sh\nexit 101\n", 0o755)
        self.apt("update")
        self.apt("install", *packages)
        self.run("rm", policy)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file of root's."""
        self.run("install", "-D", f"-m{mode:o}", "/dev/null", path)
        Path(f"/proc/{self.leader}/root{path}").write_text(text)


def network() -> AbstractContextManager[None]:
    """Make the machines' bridge."""
    return containers.network(BRIDGE, NETWORK)


def make_tree() -> None:
    """Make the root that all machines share, unless it exists."""
    containers.make_tree(TREE, RELEASE, f"--include={','.join(PACKAGES)}")


@contextmanager
def machine(folder: Path, name: str) -> Iterator[Machine]:
    """Boot one with a layer in this folder, and end it as a power cut would."""
    make_tree()
    with containers.layer(TREE, folder) as root:
        _configure(root, name)
        console = folder / "console.log"
        command = containers.nspawn(root, name, BRIDGE, "--boot")
        with console.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

        def story() -> str:
            return console.read_text(errors="replace")[-2000:]

        try:
            leader = await_true(lambda: containers.leader(process), BOOT_SECONDS, story)
            booted = Machine(name, ADDRESSES[name], root, leader)
            await_true(lambda: _is_up(booted), BOOT_SECONDS, story)
            yield booted
        finally:
            if leader := containers.leader(process):
                os.kill(leader, signal.SIGKILL)
            process.wait(BOOT_SECONDS)


def _configure(root: Path, name: str) -> None:
    containers.write_names(root, name, ADDRESSES)
    link = root / "etc/systemd/network/10-host0.network"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.write_text(
        f"[Match]\nName=host0\n[Network]\nAddress={ADDRESSES[name]}/24\nGateway={NETWORK}.1\n"
        "LinkLocalAddressing=no\n"
    )
    run(["systemctl", f"--root={root}", "enable", "-q", "systemd-networkd"], containers.ADVICE)


def _is_up(booted: Machine) -> bool:
    """Has it booted, and is its address there?"""
    state = booted.run("systemctl", "is-system-running", check=False).strip()
    if state not in ("running", "degraded"):
        return False
    return booted.address in booted.run("ip", "-4", "-br", "address", check=False)
