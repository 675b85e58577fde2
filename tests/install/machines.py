# SPDX-License-Identifier: Apache-2.0
"""Debian 12 machines as booted containers (systemd-nspawn), on a bridge of their own.

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
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.progress import Failure, run
from tests.waiting import await_true

RELEASE = "bookworm"
#: What a minimal installation of Debian has beside the essential packages.
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "udev",
    "procps",
    "netbase",
    "iproute2",
    "iputils-ping",
    "ca-certificates",
)
BRIDGE, NETWORK = "kn-install", "172.31.77"
#: Every machine's address; each finds the others by name, as DNS would tell it.
ADDRESSES = {
    name: f"{NETWORK}.{number}"
    for number, name in enumerate(("cloud", "controller", "controller2", "node1", "node2"), 10)
}
BOOT_SECONDS = 60
ADVICE = "Check the network and /etc/apt/sources.list, then run this again."


def debian(folder: Path) -> Path:
    """A tree with a minimal Debian 12, made once."""
    tree = folder / RELEASE
    if not tree.exists():
        made = folder / f"{RELEASE}.new"
        shutil.rmtree(made, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
        run([*command, RELEASE, made, *_mirrors()], ADVICE, log=folder / "mmdebstrap.log")
        made.rename(tree)
    return tree


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


def make_network() -> None:
    """The machines' bridge; what leaves it has this machine's address.

    Raises:
        Failure: the kernel cannot.
    """
    remove_network()
    run(["ip", "link", "add", BRIDGE, "type", "bridge"], ADVICE)
    run(["ip", "address", "add", f"{NETWORK}.1/24", "dev", BRIDGE], ADVICE)
    run(["ip", "link", "set", BRIDGE, "up"], ADVICE)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    rules = (
        f"table ip {BRIDGE} {{ chain post {{ type nat hook postrouting priority 100; "
        f"ip saddr {NETWORK}.0/24 ip daddr != {NETWORK}.0/24 masquerade; }}; }}"
    )
    run(["nft", rules], ADVICE)


def remove_network() -> None:
    """Remove it; what is not there is fine."""
    subprocess.run(["nft", "delete", "table", "ip", BRIDGE], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


@dataclass
class Machine:
    """One booted container."""

    name: str
    address: str
    root: Path
    process: subprocess.Popen[bytes]
    leader: int  #: the process id of its systemd, as this machine counts

    def run(self, command: str | Sequence[str], seconds: float = 600) -> str:
        """What a program, or a shell's script, prints in the machine.

        Raises:
            Failure: its status is not 0; with the end of what it said.
        """
        words = ["bash", "-euo", "pipefail", "-c", command] if isinstance(command, str) else command
        done = subprocess.run(
            [*self._inside(), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
        said = done.stdout.decode(errors="replace")
        if done.returncode:
            raise Failure(
                f"{self.name}: status {done.returncode} of {command}\n{said[-4000:]}",
                f"Look into {self.root}, or run ./deploy/test install --keep.",
            )
        return said

    def _inside(self) -> list[str]:
        """The words that lead a program into the machine, with root's usual environment."""
        enter = ["nsenter", f"--target={self.leader}", "--all"]
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return [
            *enter,
            "env",
            "--chdir=/root",
            "-i",
            f"PATH={path}",
            "HOME=/root",
            "LANG=C.UTF-8",
            "DEBIAN_FRONTEND=noninteractive",
        ]

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file in the machine, root's."""
        self.run(["install", "-D", f"-m{mode:o}", "/dev/null", path])
        target = Path(f"/proc/{self.leader}/root{path}")
        target.write_text(text)

    def stop(self) -> None:
        """End it as a power cut would, if it runs."""
        if self.process.poll() is None:
            os.kill(self.leader, signal.SIGKILL)
            self.process.wait()
        subprocess.run(["umount", self.root], check=False, capture_output=True)


def boot(folder: Path, tree: Path, name: str) -> Machine:
    """A machine of this name; each machine knows the others by name.

    Raises:
        Failure: it does not come up.
    """
    address = ADDRESSES[name]
    home = folder / name
    root = home / "root"
    for part in ("upper", "work", "root"):
        (home / part).mkdir(parents=True)
    layers = f"lowerdir={tree},upperdir={home}/upper,workdir={home}/work"
    run(["mount", "-t", "overlay", "overlay", "-o", layers, root], ADVICE)
    _configure(root, name, address)
    with (home / "console.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "systemd-nspawn",
                "--boot",
                f"--directory={root}",
                f"--machine={name}",
                f"--network-bridge={BRIDGE}",
                "--register=no",
                "--keep-unit",
                "--resolv-conf=off",
                "--capability=all",
                "--system-call-filter=@known",
                "--bind=/dev/net/tun",
                *(["--bind=/dev/kvm"] if Path("/dev/kvm").exists() else []),
                "--property=DeviceAllow=/dev/net/tun rwm",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    leader = await_true(
        lambda: _leader(process), BOOT_SECONDS, lambda: (home / "console.log").read_text()[-2000:]
    )
    machine = Machine(name, address, root, process, leader)
    await_true(
        lambda: _is_up(machine), BOOT_SECONDS, lambda: (home / "console.log").read_text()[-2000:]
    )
    return machine


def _configure(root: Path, name: str, address: str) -> None:
    (root / "etc/hostname").write_text(f"{name}\n")
    known = {"localhost": "127.0.0.1", **ADDRESSES}
    hosts = "".join(f"{there}\t{other}\n" for other, there in known.items())
    (root / "etc/hosts").write_text(hosts)
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    network = root / "etc/systemd/network/10-host0.network"
    network.parent.mkdir(parents=True, exist_ok=True)
    network.write_text(
        f"[Match]\nName=host0\n[Network]\nAddress={address}/24\nGateway={NETWORK}.1\n"
        "LinkLocalAddressing=no\n"
    )
    run(["systemctl", f"--root={root}", "enable", "-q", "systemd-networkd"], ADVICE)


def _leader(process: subprocess.Popen[bytes]) -> int:
    """The child of systemd-nspawn that is the machine's first process; 0: there is none yet."""
    if process.poll() is not None:
        raise Failure(f"systemd-nspawn ended with status {process.returncode}.", ADVICE)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(FileNotFoundError):
            status = Path(f"/proc/{child}/status").read_text()
            if re.search(r"^NSpid:\s+\d+\s+1$", status, re.MULTILINE):
                return int(child)
    return 0


def _is_up(machine: Machine) -> bool:
    """Has it booted, and is its address there?"""
    try:
        state = machine.run("systemctl is-system-running || true", 10).strip()
        return state in ("running", "degraded") and machine.address in machine.run("ip -4 -br a")
    except Failure:
        time.sleep(0.1)
        return False
