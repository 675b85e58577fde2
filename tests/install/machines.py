# SPDX-License-Identifier: Apache-2.0
"""Machines of this machine's release as booted containers (systemd-nspawn) on a bridge.

All machines share one small system below and write to a layer each, so that a machine costs a
second and what it changes. They reach package mirrors through this machine's address. A program in
a machine runs in all namespaces of its systemd; nothing of this machine's environment goes along.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.packages import ROOT, release
from deploy.progress import run
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
MULTICAST = (
    "224.0.0.0/4"  #: of Neutron's tunnels; the kernel shows bridged packets to the rules too
)
#: Every machine's address; each finds the others by name, as DNS would tell it.
ADDRESSES = {
    name: f"{NETWORK}.{number}"
    for number, name in enumerate(("cloud", "controller", "second", "node1", "node2", "debian"), 10)
}
BOOT_SECONDS, INSTALL_SECONDS = 120, 1800
ADVICE = "Check the network and /etc/apt/sources.list, then run this again."
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


@contextmanager
def network() -> Iterator[None]:
    """The machines' bridge; what leaves it has this machine's address."""
    _remove_network()
    run(["ip", "link", "add", BRIDGE, "type", "bridge"], ADVICE)
    try:
        run(["ip", "address", "add", f"{NETWORK}.1/24", "dev", BRIDGE], ADVICE)
        run(["ip", "link", "set", BRIDGE, "up"], ADVICE)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        rules = (
            f"table ip {BRIDGE} {{ chain post {{ type nat hook postrouting priority 100; "
            f"ip saddr {NETWORK}.0/24 ip daddr != {{ {NETWORK}.0/24, {MULTICAST} }} masquerade; }}; }}"
        )
        run(["nft", rules], ADVICE)
        yield
    finally:
        _remove_network()


def _remove_network() -> None:
    subprocess.run(["nft", "delete", "table", "ip", BRIDGE], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


@contextmanager
def machine(folder: Path, name: str) -> Iterator[Machine]:
    """Boot one with a layer in this folder, and end it as a power cut would."""
    make_tree()
    root = folder / "root"
    for part in ("upper", "work", "root"):
        (folder / part).mkdir(parents=True)
    layers = f"lowerdir={TREE},upperdir={folder}/upper,workdir={folder}/work"
    run(["mount", "-t", "overlay", "overlay", "-o", layers, root], ADVICE)
    _configure(root, name)
    console = folder / "console.log"
    with console.open("wb") as log:
        process = subprocess.Popen(
            _nspawn(root, name), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )

    def story() -> str:
        return console.read_text(errors="replace")[-2000:]

    try:
        leader = await_true(lambda: _leader(process), BOOT_SECONDS, story)
        booted = Machine(name, ADDRESSES[name], root, leader)
        await_true(lambda: _is_up(booted), BOOT_SECONDS, story)
        yield booted
    finally:
        if leader := _leader(process):
            os.kill(leader, signal.SIGKILL)
        process.wait(BOOT_SECONDS)
        subprocess.run(["umount", root], check=False, capture_output=True)


def make_tree() -> None:
    """The small system below all machines, where it is not made yet."""
    if TREE.exists():
        return
    made = TREE.with_suffix(".new")
    shutil.rmtree(made, ignore_errors=True)
    TREE.parent.mkdir(parents=True, exist_ok=True)
    command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    run([*command, RELEASE, made, *_mirrors()], ADVICE, log=TREE.with_suffix(".log"))
    made.rename(TREE)


def _mirrors() -> list[str]:
    """This machine's sources of the release; none: mmdebstrap's default."""
    targets = run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"], ADVICE
    )
    lines = [line.split() for line in targets.splitlines()]
    return list(
        dict.fromkeys(
            f"deb {uri} {release} main"
            for uri, release, component in lines
            if component == "main" and re.fullmatch(f"{RELEASE}(-updates|-security)?", release)
        )
    )


def _nspawn(root: Path, name: str) -> list[str]:
    """Everything that a hypervisor needs is let in: the machine is no border."""
    devices = [path for path in ("/dev/net/tun", "/dev/kvm") if Path(path).exists()]
    return [
        *("systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit"),
        *("--resolv-conf=off", f"--network-bridge={BRIDGE}", "--capability=all"),
        *("--system-call-filter=@known", f"--directory={root}", f"--machine={name}"),
        *(f"--bind={path}" for path in devices),
    ]


def _configure(root: Path, name: str) -> None:
    (root / "etc/hostname").write_text(f"{name}\n")
    known = {"localhost": "127.0.0.1", **ADDRESSES}
    (root / "etc/hosts").write_text("".join(f"{known[one]}\t{one}\n" for one in known))
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    link = root / "etc/systemd/network/10-host0.network"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.write_text(
        f"[Match]\nName=host0\n[Network]\nAddress={ADDRESSES[name]}/24\nGateway={NETWORK}.1\n"
        "LinkLocalAddressing=no\n"
    )
    run(["systemctl", f"--root={root}", "enable", "-q", "systemd-networkd"], ADVICE)


def _leader(process: subprocess.Popen[bytes]) -> int:
    """The child of systemd-nspawn that is the machine's first process; 0: there is none."""
    with suppress(FileNotFoundError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            status = Path(f"/proc/{child}/status").read_text()
            if re.search(r"^NSpid:\s+\d+\s+1$", status, re.MULTILINE):
                return int(child)
    assert process.poll() is None, f"systemd-nspawn ended with status {process.returncode}"
    return 0


def _is_up(booted: Machine) -> bool:
    """Has it booted, and is its address there?"""
    state = booted.run("systemctl", "is-system-running", check=False).strip()
    if state not in ("running", "degraded"):
        return False
    return booted.address in booted.run("ip", "-4", "-br", "address", check=False)
