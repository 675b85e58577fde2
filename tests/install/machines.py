# SPDX-License-Identifier: Apache-2.0
"""Booted containers (systemd-nspawn) with the Debian release of this machine, on a bridge.

All machines share a minimal system, and each writes to a layer of its own, so a machine boots
fast and needs little space. They reach package mirrors through this machine's address. A program in
a machine runs in all namespaces of its systemd, without the environment of this machine.
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

#: The release for which the packages are built.
RELEASE = release()["VERSION_CODENAME"]
#: A minimal Debian, made once.
TREE = ROOT / "build/install" / RELEASE
#: Packages of a minimal installation, beside the essential packages.
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
#: The address of each machine. /etc/hosts of every machine has all names.
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
    """A booted container. ``leader`` is the process id of its systemd on this machine."""

    name: str
    address: str
    root: Path
    leader: int

    def run(self, *command: str, check: bool = True) -> str:
        """Run a program in the machine, and return its output.

        Raises:
            AssertionError: The program fails, and ``check`` is true. The message has the end of the
                output.
        """
        process = subprocess.run(
            ["nsenter", f"--target={self.leader}", "--all", "env", "--chdir=/root", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_SECONDS,
            check=False,
            env=ENVIRONMENT,
        )
        output = process.stdout.decode(errors="replace")
        assert not check or process.returncode == 0, f"{self.name}: {command}: {output[-5000:]}"
        return output

    def shell(self, script: str) -> str:
        """Run a bash script up to its first failing command, and return the output."""
        return self.run("bash", "-euo", "pipefail", "-c", script)

    def apt(self, *arguments: str) -> str:
        """Run apt-get without questions. Configuration files that an operator changed stay."""
        return self.run(
            *("apt-get", "--quiet", "--yes", "--no-install-recommends"),
            *("-o", "Dpkg::Options::=--force-confold", *arguments),
        )

    def install_idle(self, *packages: str) -> None:
        """Install packages without starting their services, which have no configuration yet."""
        policy = "/usr/sbin/policy-rc.d"
        self.write(policy, "#!/bin/sh\nexit 101\n", 0o755)
        self.apt("update")
        self.apt("install", *packages)
        self.run("rm", policy)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file that root owns."""
        self.run("install", "-D", f"-m{mode:o}", "/dev/null", path)
        Path(f"/proc/{self.leader}/root{path}").write_text(text)


def network() -> AbstractContextManager[None]:
    """Create the bridge of the machines for a with block."""
    return containers.network(BRIDGE, NETWORK)


def make_tree() -> None:
    """Create the system that all machines share, unless it exists."""
    containers.make_tree(TREE, RELEASE, f"--include={','.join(PACKAGES)}")


@contextmanager
def machine(folder: Path, name: str) -> Iterator[Machine]:
    """Boot a machine with a layer in ``folder``, and kill it at the end of the with block."""
    make_tree()
    with containers.layer(TREE, folder) as root:
        _configure(root, name)
        console = folder / "console.log"
        command = containers.nspawn(root, name, BRIDGE, "--boot")
        with console.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

        def read_console() -> str:
            return console.read_text(errors="replace")[-2000:]

        try:
            leader = await_true(lambda: containers.leader(process), BOOT_SECONDS, read_console)
            new_machine = Machine(name, ADDRESSES[name], root, leader)
            await_true(lambda: _is_up(new_machine), BOOT_SECONDS, read_console)
            yield new_machine
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


def _is_up(new_machine: Machine) -> bool:
    """Return whether the machine has booted and has an address."""
    state = new_machine.run("systemctl", "is-system-running", check=False).strip()
    if state not in ("running", "degraded"):
        return False
    return new_machine.address in new_machine.run("ip", "-4", "-br", "address", check=False)
