# SPDX-License-Identifier: Apache-2.0
"""The Debian packages that the commands need, and how the missing ones are installed.

Used by deploy/one_machine/up.py and deploy/testing/test.py. Nothing is installed when nothing is
missing. Services of packages that are installed here are neither started nor enabled: the commands
run nodes of their own, and what an operator runs already stays as it is.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.progress import Failure, run, say

ROOT = Path(__file__).resolve().parent.parent
POLICY = Path("/usr/sbin/policy-rc.d")
APT_FAILED = "Check the network, the proxy and /etc/apt/sources.list, then run this again."


@dataclass(frozen=True)
class Release:
    """What the packages are called that have different names in the releases.

    Attributes:
        postgresql: The version of PostgreSQL.
        promtool: The package that contains promtool.
    """

    postgresql: str
    promtool: str


RELEASES = {
    "bookworm": Release("15", "prometheus"),
    "trixie": Release("17", "promtool"),
    "noble": Release("16", "prometheus"),
}

PYTHON = (
    "python3",
    "python3-venv",
    "python3-dev",
    "gcc",
    "libc6-dev",
    "pkg-config",
    "libvirt-dev",
    "ca-certificates",
)
HYPERVISOR = (
    "libvirt-daemon",
    "libvirt-daemon-driver-qemu",
    "libvirt-daemon-system",
    "libvirt-clients",
    "qemu-system-x86",
    "qemu-utils",
    "e2fsprogs",
    "dosfstools",
    "mtools",
)
NETWORK = ("iproute2", "dnsmasq-base", "dnsmasq-utils", "nftables", "conntrack", "kmod")
CONSOLE = ("novnc", "spice-html5")
BROKER = ("rabbitmq-server",)
#: What judges units and man pages.
LINT = ("systemd", "groff-base")
#: With what Debian packages are built and judged.
DEBIAN = ("build-essential", "debhelper", "lintian")
#: With what machines are made that the packages are installed on.
MACHINES = ("mmdebstrap", "systemd-container", "buildah")
#: With what the tests look at guests, networks and the console's page.
EYES = ("genisoimage", "openssh-client", "tcpdump", "iputils-ping", "arping", "chromium")
#: File systems of ephemeral disks that a host need not be able to make.
FILE_SYSTEMS = ("xfsprogs", "ntfs-3g")
#: An iSCSI target that needs no module of the kernel, and with what QEMU reaches it.
ISCSI = ("tgt", "qemu-block-extra")
KERNEL, KERNEL_FOLDER = "linux-image-cloud-amd64", ROOT / "build/kernel"
#: What judges alert rules.
PROMTOOL = ROOT / "build/promtool"


def image_packages(image: str = "tiny") -> tuple[str, ...]:
    """What the build of an image says that it needs."""
    name = f"deploy/images/{image}/build"
    found = re.search(r"^# debian-packages: (.+)$", (ROOT / name).read_text(), re.MULTILINE)
    if found is None:
        raise Failure(
            f"{name} does not name its packages.", "Restore the file from the repository."
        )
    return tuple(found[1].split())


_KERNEL_NAMED = r"Depends: (linux-image-\S+-cloud-amd64)"


def unpack_kernel(log: Path) -> None:
    """Unpack the guests' kernel beside the image's build. It is never installed: this machine would
    boot it.

    Raises:
        Failure: it cannot be downloaded.
    """
    if any(KERNEL_FOLDER.glob("boot/vmlinuz-*")):
        return
    found = re.search(_KERNEL_NAMED, run(["apt-cache", "depends", KERNEL], APT_FAILED, log=log))
    if found is None:
        run(["apt-get", "update", "-q"], APT_FAILED, log=log)
        found = re.search(_KERNEL_NAMED, run(["apt-cache", "depends", KERNEL], APT_FAILED))
    if found is None:
        raise Failure(f"apt knows no package {KERNEL}.", "Use Debian 12 or 13 for amd64.")
    say(f"        unpacking {found[1]} for the guests")
    part = _unpacked(found[1], KERNEL_FOLDER.with_name("kernel.new"), log)
    if not (part / "lib").exists():  # Debian 13's package has them below /usr
        (part / "lib").symlink_to("usr/lib")
    run(
        ["depmod", "-b", part, next(part.glob("lib/modules/*")).name],
        "Install the Debian package kmod.",
        log=log,
    )
    part.rename(KERNEL_FOLDER)


def unpack_promtool(log: Path) -> None:
    """Unpack promtool alone: in most releases its package would start a server.

    Raises:
        Failure: it cannot be downloaded.
    """
    if PROMTOOL.exists():
        return
    package = RELEASES[release()["VERSION_CODENAME"]].promtool
    say(f"        unpacking the package {package}")
    part = _unpacked(package, PROMTOOL.with_name("promtool.new"), log)
    (part / "usr/bin/promtool").rename(PROMTOOL)
    shutil.rmtree(part)


def _unpacked(package: str, folder: Path, log: Path) -> Path:
    """The folder, with the files of this Debian package and nothing else. Raises Failure."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    download = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package]
    run(download, APT_FAILED, log=log, cwd=folder)
    archive = next(folder.glob("*.deb"))
    run(["dpkg-deb", "-x", archive, folder], "Make room on the disk.", log=log)
    archive.unlink()
    return folder


def release() -> dict[str, str]:
    """Return /etc/os-release, for example ID=debian, VERSION_ID=12, VERSION_CODENAME=bookworm.

    Raises:
        Failure: this release has other packages.
    """
    fields = platform.freedesktop_os_release()
    if fields.get("VERSION_CODENAME") not in RELEASES:
        raise Failure(
            f"Kilonova's commands do not know {fields['PRETTY_NAME']}.", "Use Debian 12 or 13."
        )
    return fields


def postgresql_version() -> str:
    """Return the version of PostgreSQL in this release's archive."""
    return RELEASES[release()["VERSION_CODENAME"]].postgresql


def databases() -> tuple[str, ...]:
    """Return the packages of the database servers."""
    return f"postgresql-{postgresql_version()}", "mariadb-server"


def for_up() -> tuple[str, ...]:
    """What ./deploy/up needs."""
    return PYTHON + BROKER + HYPERVISOR + NETWORK + CONSOLE + ("openssh-client",) + image_packages()


def for_test() -> tuple[str, ...]:
    """What ./deploy/test needs."""
    extras = LINT + EYES + FILE_SYSTEMS + ISCSI + image_packages("debian")
    return for_up() + databases() + extras


def for_deb() -> tuple[str, ...]:
    """What ./deploy/deb needs."""
    return PYTHON + DEBIAN


def missing(names: Sequence[str]) -> list[str]:
    """Those that are not installed now."""
    query = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${binary:Package} ${db:Status-Status}\n", *names],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    installed = {
        line.split()[0].split(":")[0]
        for line in query.stdout.splitlines()
        if line.endswith(" installed")
    }
    return [name for name in dict.fromkeys(names) if name not in installed]


def install(names: Sequence[str], log: Path, *, kernel: bool = True) -> str:
    """Install what is missing; returns a note. ``kernel``: guests will need one, too.

    Raises:
        Failure: not root, or apt failed.
    """
    wanted = missing(names)
    if not wanted:
        if kernel:
            unpack_kernel(log)
        return "all are there"
    if os.geteuid() != 0:
        raise Failure(
            f"These Debian packages are missing: {' '.join(wanted)}",
            "Install them, or run this as root.",
        )
    say(f"        installing {' '.join(wanted)}")
    environment = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    before = _enabled_units()
    with _services_stay_down():
        run(["apt-get", "update", "-q"], APT_FAILED, log=log, env=environment)
        run(
            ["apt-get", "install", "-q", "-y", "--no-install-recommends", *wanted],
            APT_FAILED,
            log=log,
            env=environment,
        )
    _disable(_enabled_units() - before, log)
    if kernel:
        unpack_kernel(log)
    return f"{len(wanted)} installed"


@contextmanager
def _services_stay_down() -> Iterator[None]:
    """Packages ask this policy before they start a service; one that is there already stays."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _systemd_runs() -> bool:
    return Path("/run/systemd/system").is_dir() and shutil.which("systemctl") is not None


def _enabled_units() -> set[str]:
    if not _systemd_runs():
        return set()
    listed = subprocess.run(
        ["systemctl", "list-unit-files", "--state=enabled", "--no-legend", "--plain"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}


def _disable(units: set[str], log: Path) -> None:
    """Units that came with the packages would start with the machine's next boot and take the
    ports."""
    ours = sorted(
        unit
        for unit in units
        if re.match(r"(rabbitmq|epmd|libvirt|virt|mariadb|postgresql|nftables|tgt)", unit)
    )
    if ours:
        run(["systemctl", "disable", *ours], "Disable these units by hand.", log=log)
