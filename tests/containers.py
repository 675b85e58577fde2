# SPDX-License-Identifier: Apache-2.0
"""Debian roots made with mmdebstrap, run as containers (systemd-nspawn) on a bridge of their own.

Used by the rings install (booted machines) and newcomer (plain containers). Containers of one ring
share one root below and write to a layer each. They reach package mirrors through this machine's
address. A container is no security border: it gets all capabilities and the devices of a
hypervisor.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.progress import run

ADVICE = "Check the network and /etc/apt/sources.list, then run this again."
RELEASES = ("bookworm", "trixie")
#: Neutron's tunnels use multicast. The kernel applies NAT rules to bridged packets, too.
MULTICAST = "224.0.0.0/4"
DEVICES = ("/dev/net/tun", "/dev/kvm", "/dev/fuse", "/dev/loop-control")


def make_tree(tree: Path, release: str, *options: str) -> None:
    """Create the minimal Debian root of a release in the folder ``tree``, unless it exists.

    Args:
        tree: Folder of the root.
        release: Name of the Debian release.
        options: Further options of mmdebstrap.
    """
    if tree.exists():
        return
    part = tree.with_suffix(".new")
    shutil.rmtree(part, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    # Mounts in a namespace of their own vanish even if this process is killed.
    command = ["unshare", "--mount", "mmdebstrap", "--variant=minbase", *options, release]
    run([*command, part, *mirrors(release)], ADVICE, log=tree.with_suffix(".log"))
    part.chmod(0o755)
    part.rename(tree)


def mirrors(release: str) -> list[str]:
    """Return this machine's package sources as lines for ``release``.

    Sources of another release of Debian on this machine are translated. The list is empty if this
    machine has no source of Debian, which makes mmdebstrap use its default.
    """
    targets = run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"], ADVICE
    )
    lines = []
    for uri, suite, component in (line.split() for line in targets.splitlines()):
        suite_match = re.fullmatch(f"(?:{'|'.join(RELEASES)})(|-updates|-security)", suite)
        if component == "main" and suite_match:
            lines.append(f"deb {uri} {release}{suite_match[1]} main")
    return list(dict.fromkeys(lines))


@contextmanager
def network(bridge: str, prefix: str) -> Iterator[None]:
    """Create a bridge with the network ``prefix``.0/24 and NAT to other networks."""
    _remove_network(bridge)
    run(["ip", "link", "add", bridge, "type", "bridge"], ADVICE)
    try:
        run(["ip", "address", "add", f"{prefix}.1/24", "dev", bridge], ADVICE)
        run(["ip", "link", "set", bridge, "up"], ADVICE)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        rules = (
            f"table ip {bridge} {{ chain post {{ type nat hook postrouting priority 100; "
            f"ip saddr {prefix}.0/24 ip daddr != {{ {prefix}.0/24, {MULTICAST} }} masquerade; }}; }}"
        )
        run(["nft", rules], ADVICE)
        yield
    finally:
        _remove_network(bridge)


def _remove_network(bridge: str) -> None:
    subprocess.run(["nft", "delete", "table", "ip", bridge], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


@contextmanager
def layer(tree: Path, folder: Path) -> Iterator[Path]:
    """Mount a root that shows ``tree`` and keeps every change below ``folder``."""
    root = folder / "root"
    for part in ("upper", "work", "root"):
        (folder / part).mkdir(parents=True)
        (folder / part).chmod(0o755)
    layers = f"lowerdir={tree},upperdir={folder}/upper,workdir={folder}/work"
    run(["mount", "-t", "overlay", "overlay", "-o", layers, root], ADVICE)
    try:
        yield root
    finally:
        subprocess.run(["umount", root], check=False, capture_output=True)


def nspawn(root: Path, name: str, bridge: str, *options: str) -> list[str]:
    """Return the command that runs a container with everything that a hypervisor needs."""
    loops = sorted(str(path) for path in Path("/dev").glob("loop[0-9]*"))
    devices = [path for path in (*DEVICES, *loops) if Path(path).exists()]
    return [
        *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--resolv-conf=off"),
        *(f"--network-bridge={bridge}", "--capability=all", "--system-call-filter=@known"),
        *(f"--directory={root}", f"--machine={name}"),
        *(f"--bind={path}" for path in devices),
        *options,
    ]


def leader(process: subprocess.Popen[bytes]) -> int:
    """Return the container's first process, a child of systemd-nspawn, or 0 before it starts."""
    with suppress(FileNotFoundError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            status = Path(f"/proc/{child}/status").read_text()
            if re.search(r"^NSpid:\s+\d+\s+1$", status, re.MULTILINE):
                return int(child)
    assert process.poll() is None, f"systemd-nspawn ended with status {process.returncode}"
    return 0


def write_names(root: Path, name: str, addresses: dict[str, str]) -> None:
    """Write the container's host name, the hosts in ``addresses``, and a copy of resolv.conf."""
    (root / "etc/hostname").write_text(f"{name}\n")
    all_addresses = {"localhost": "127.0.0.1", **addresses}
    (root / "etc/hosts").write_text(
        "".join(f"{all_addresses[host]}\t{host}\n" for host in all_addresses)
    )
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    for file in ("hostname", "hosts", "resolv.conf"):
        (root / "etc" / file).chmod(0o644)
