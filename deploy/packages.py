# SPDX-License-Identifier: Apache-2.0
"""The Debian packages that the commands need, and their installation.

The commands in deploy/ use this module. Services of packages that are installed here are neither
started nor enabled, because the commands run nodes of their own. Services that the machine already
runs stay as they are.
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
    """Names of packages that differ between releases.

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
#: Checkers of units and man pages.
LINT = ("systemd", "groff-base")
#: Tools that build and check Debian packages.
DEBIAN = ("build-essential", "debhelper", "lintian")
#: Tools that make the machines on which tests install the packages.
MACHINES = ("mmdebstrap", "systemd-container", "buildah")
#: Tools with which the tests look at guests, networks and the console's page.
EYES = ("genisoimage", "openssh-client", "tcpdump", "iputils-ping", "arping", "chromium")
#: Tools for file systems of ephemeral disks. A host works without them.
FILE_SYSTEMS = ("xfsprogs", "ntfs-3g")
#: An iSCSI target that needs no kernel module, and QEMU's access to this target.
ISCSI = ("tgt", "qemu-block-extra")
KERNEL, KERNEL_FOLDER = "linux-image-cloud-amd64", ROOT / "build/kernel"
#: The checker of alert rules.
PROMTOOL = ROOT / "build/promtool"


def image_packages(image: str = "tiny") -> tuple[str, ...]:
    """Return the Debian packages in the line "# debian-packages:" of deploy/images/IMAGE/build.

    Raises:
        Failure: The script has no such line.
    """
    name = f"deploy/images/{image}/build"
    match = re.search(r"^# debian-packages: (.+)$", (ROOT / name).read_text(), re.MULTILINE)
    if match is None:
        raise Failure(
            f"{name} has no line '# debian-packages:'.", "Restore the file from the repository."
        )
    return tuple(match[1].split())


_KERNEL_NAMED = r"Depends: (linux-image-\S+-cloud-amd64)"


def unpack_kernel(log: Path) -> None:
    """Download the guests' kernel and unpack it into build/kernel, unless a kernel is there.

    The package is not installed, because this machine would then boot that kernel.

    Raises:
        Failure: apt does not know the package, the package cannot be downloaded or unpacked, or
            depmod fails.
    """
    if any(KERNEL_FOLDER.glob("boot/vmlinuz-*")):
        return
    match = re.search(_KERNEL_NAMED, run(["apt-cache", "depends", KERNEL], APT_FAILED, log=log))
    if match is None:
        run(["apt-get", "update", "-q"], APT_FAILED, log=log)
        match = re.search(_KERNEL_NAMED, run(["apt-cache", "depends", KERNEL], APT_FAILED))
    if match is None:
        raise Failure(f"apt knows no package {KERNEL}.", "Use Debian 12 or 13 for amd64.")
    say(f"        unpacking {match[1]} for the guests")
    part = _unpack(match[1], KERNEL_FOLDER.with_name("kernel.new"), log)
    # Debian 13's package has the modules below /usr.
    if not (part / "lib").exists():
        (part / "lib").symlink_to("usr/lib")
    run(
        ["depmod", "-b", part, next(part.glob("lib/modules/*")).name],
        "Install the Debian package kmod.",
        log=log,
    )
    part.rename(KERNEL_FOLDER)


def unpack_promtool(log: Path) -> None:
    """Download the package of promtool and extract ``PROMTOOL``, unless the file exists.

    The package is not installed, because in most releases that starts a Prometheus server.

    Raises:
        Failure: The package cannot be downloaded or unpacked, or the release is not in
            ``RELEASES``.
    """
    if PROMTOOL.exists():
        return
    package = RELEASES[release()["VERSION_CODENAME"]].promtool
    say(f"        unpacking the package {package}")
    part = _unpack(package, PROMTOOL.with_name("promtool.new"), log)
    (part / "usr/bin/promtool").rename(PROMTOOL)
    shutil.rmtree(part)


def _unpack(package: str, folder: Path, log: Path) -> Path:
    """Download a Debian package, unpack it into ``folder``, and return the folder.

    An existing folder is replaced.

    Raises:
        Failure: The package cannot be downloaded or unpacked.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    download = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package]
    run(download, APT_FAILED, log=log, cwd=folder)
    archive = next(folder.glob("*.deb"))
    run(["dpkg-deb", "-x", archive, folder], "Free space on the disk.", log=log)
    archive.unlink()
    return folder


def release() -> dict[str, str]:
    """Return the fields of /etc/os-release, for example ID, VERSION_ID and VERSION_CODENAME.

    Raises:
        Failure: The release is not in ``RELEASES``.
    """
    fields = platform.freedesktop_os_release()
    if fields.get("VERSION_CODENAME") not in RELEASES:
        raise Failure(
            f"Kilonova's commands do not support {fields['PRETTY_NAME']}.", "Use Debian 12 or 13."
        )
    return fields


def postgresql_version() -> str:
    """Return the major version of PostgreSQL in this machine's release, for example "15".

    Raises:
        Failure: The release is not in ``RELEASES``.
    """
    return RELEASES[release()["VERSION_CODENAME"]].postgresql


def databases() -> tuple[str, ...]:
    """Return the Debian packages of PostgreSQL and MariaDB for this machine's release.

    Raises:
        Failure: The release is not in ``RELEASES``.
    """
    return f"postgresql-{postgresql_version()}", "mariadb-server"


def for_up() -> tuple[str, ...]:
    """Return the Debian packages that ./deploy/up needs."""
    return PYTHON + BROKER + HYPERVISOR + NETWORK + CONSOLE + ("openssh-client",) + image_packages()


def for_test() -> tuple[str, ...]:
    """Return the Debian packages that ./deploy/test needs, including those of ./deploy/up.

    Raises:
        Failure: The release is not in ``RELEASES``.
    """
    extras = LINT + EYES + FILE_SYSTEMS + ISCSI + image_packages("debian")
    return for_up() + databases() + extras


def for_deb() -> tuple[str, ...]:
    """Return the Debian packages that ./deploy/deb needs."""
    return PYTHON + DEBIAN


def missing(names: Sequence[str]) -> list[str]:
    """Return the packages that are not installed, without duplicates."""
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
    """Install the missing packages among ``names``, and return a note for the progress output.

    Units of servers in new packages are disabled. These servers are not started, unless the machine
    has its own policy-rc.d.

    Args:
        names: The packages.
        log: The file that gets the output of apt and systemctl.
        kernel: Also unpack the kernel of the guests, even if no package is missing.

    Raises:
        Failure: Packages are missing and the process is not root, apt or systemctl fails, or the
            kernel cannot be unpacked.
    """
    missing_names = missing(names)
    if not missing_names:
        if kernel:
            unpack_kernel(log)
        return "all are installed"
    if os.geteuid() != 0:
        raise Failure(
            f"These Debian packages are missing: {' '.join(missing_names)}",
            "Install them, or run this as root.",
        )
    say(f"        installing {' '.join(missing_names)}")
    environment = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    before = _enabled_units()
    with _prevent_service_starts():
        run(["apt-get", "update", "-q"], APT_FAILED, log=log, env=environment)
        run(
            ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing_names],
            APT_FAILED,
            log=log,
            env=environment,
        )
    _disable(_enabled_units() - before, log)
    if kernel:
        unpack_kernel(log)
    return f"{len(missing_names)} installed"


@contextmanager
def _prevent_service_starts() -> Iterator[None]:
    """Keep packages that are installed within the context from starting services.

    If the machine has its own policy-rc.d, that file decides instead.
    """
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
    result = subprocess.run(
        ["systemctl", "list-unit-files", "--state=enabled", "--no-legend", "--plain"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return {line.split()[0] for line in result.stdout.splitlines() if line.strip()}


def _disable(units: set[str], log: Path) -> None:
    """Disable the units whose names begin with that of a known server, for example rabbitmq.

    These units would start at the machine's next boot and take the ports.

    Raises:
        Failure: systemctl fails.
    """
    ours = sorted(
        unit
        for unit in units
        if re.match(r"(rabbitmq|epmd|libvirt|virt|mariadb|postgresql|nftables|tgt)", unit)
    )
    if ours:
        run(["systemctl", "disable", *ours], "Disable these units by hand.", log=log)
