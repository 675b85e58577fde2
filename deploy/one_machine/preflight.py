# SPDX-License-Identifier: Apache-2.0
"""The checks of the machine before the changes of ./deploy/up.

They concern root, system, kernel, disk, memory, ports, other services and proxies. ``check`` raises
a Failure at the first problem. Otherwise ``check`` returns notes, which the operator need not act
on.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
from ipaddress import IPv4Network
from pathlib import Path

from deploy.one_machine.cloud import settings
from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.cloud.probes import answers, is_taken
from deploy.one_machine.cloud.process_control import find_supervisor
from deploy.one_machine.machine import abilities as machine
from deploy.progress import Failure

DISK_GB, MEMORY_MB, LONGEST_HOME = 4, 1800, 48
MEMORY = "KILONOVA_DRIVER=memory works here, with servers that exist only in the database"
#: The abilities for a cloud with guests, and for a cloud with guests and networks. Beside each,
#: the settings for a machine without them.
WITHOUT = (
    (machine.FOR_GUESTS, MEMORY),
    (
        machine.FOR_NETWORKS,
        f"KILONOVA_NETWORKS=no works here, with servers without networks; {MEMORY}",
    ),
)
FOREIGN = ((5672, "RabbitMQ"), (16509, "libvirtd"))


def check(cloud: Cloud) -> str:
    """Check the machine and return notes for the operator, joined in one text.

    The ports of a running cloud are not checked.

    Raises:
        Failure: A check fails. The later checks do not run.
    """
    check_machine(os.geteuid())
    check_settings(cloud)
    check_broker(cloud)
    check_home(cloud)
    check_space(cloud)
    running = find_supervisor(cloud) is not None
    if not running:
        check_ports(cloud)
    check_abilities(cloud)
    external = cloud.underlay.external
    notes = [
        f"packets to {external} go to this cloud from now on, and no longer over the route: {route}"
        for route in (find_routes(external) if cloud.has_networks and cloud.has_guests else [])
    ]
    if running:
        notes.append("this cloud runs already")
    notes += find_neighbours(cloud)
    if not Path("/run/systemd/system").is_dir():
        notes.append("this machine has no systemd, and this cloud needs none")
    if any(
        name.lower() in ("http_proxy", "https_proxy", "all_proxy") and value
        for name, value in os.environ.items()
    ):
        notes.append("the proxy of the environment is used for downloads, not for this cloud")
    return "\n        ".join(notes)


def check_machine(user: int) -> None:
    """Check the user, the architecture and the package manager.

    Raises:
        Failure: The user is not root, the machine is not x86_64, or apt-get is missing.
    """
    if user != 0:
        raise Failure(
            "./deploy/up must run as root, because it installs packages and starts libvirtd.",
            "Run it with sudo.",
        )
    if platform.machine() != "x86_64":
        raise Failure(
            f"This machine's architecture is {platform.machine()} instead of x86_64.",
            "Use an x86_64 machine (amd64).",
        )
    if shutil.which("apt-get") is None:
        raise Failure("This machine has no apt-get.", "Use Debian 12 or 13.")


def check_broker(cloud: Cloud) -> None:
    """Check that a cloud whose hosts have namespaces does not use the operator's own broker.

    Raises:
        Failure: KILONOVA_TRANSPORT_URL is set, and ``Cloud.is_joined`` is True.
    """
    if cloud.is_joined and cloud.broker_url is not None:
        raise Failure(
            "Several hosts on this machine cannot reach the broker of KILONOVA_TRANSPORT_URL from their networks.",
            "Unset KILONOVA_TRANSPORT_URL, or unset KILONOVA_HOSTS.",
        )


def check_home(cloud: Cloud) -> None:
    """Check the length of the path of the cloud's home, and the rights of the folders above.

    Raises:
        Failure: The path is too long for sockets, or only the owner may enter a folder above.
    """
    if len(str(cloud.home)) > LONGEST_HOME:
        raise Failure(
            f"The path {cloud.home} has {len(str(cloud.home))} letters; paths of sockets in this folder allow "
            f"{LONGEST_HOME}.",
            "Set KILONOVA_HOME to a shorter path.",
        )
    if not cloud.has_guests and cloud.broker_url is not None:
        return
    for folder in cloud.home.parents:
        if folder.exists() and not folder.stat().st_mode & stat.S_IXOTH:
            raise Failure(
                f"RabbitMQ and guests run as users of their own, which cannot enter {folder} on the way to "
                f"{cloud.home}.",
                "Set KILONOVA_HOME to another folder, for example below /var/lib.",
            )


def check_space(cloud: Cloud) -> None:
    """Check the free disk space and the available memory.

    The memory is not checked while the cloud runs.

    Raises:
        Failure: Disk space or memory is short.
    """
    existing_folder = next(
        folder for folder in (cloud.home, *cloud.home.parents) if folder.exists()
    )
    free = shutil.disk_usage(existing_folder).free / 2**30
    if free < DISK_GB:
        raise Failure(
            f"{existing_folder} has {free:.1f} GiB free; {DISK_GB} are needed.",
            "Free space there, or set KILONOVA_HOME to a folder on another disk.",
        )
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = (
        next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) // 1024
    )
    if memory < MEMORY_MB and find_supervisor(cloud) is None:
        raise Failure(
            f"{memory} MiB of memory are available; {MEMORY_MB} are needed.",
            "Stop other programs, or use a machine with more memory.",
        )


def check_settings(cloud: Cloud) -> None:
    """Check that a running cloud was started with the present environment variables.

    Raises:
        Failure: A variable has changed. The message has the former values, except of variables that
            may contain passwords and of KILONOVA_PORT_BASE.
    """
    changes = settings.find_changes(cloud)
    if changes:
        raise Failure(
            f"This cloud runs with other settings: {', '.join(changes)}.",
            "Set these variables to their former values; or stop the cloud with ./deploy/down, which keeps the "
            "data, and run this again.",
        )


def check_abilities(cloud: Cloud) -> None:
    """Check that this machine has the abilities that the cloud needs.

    A cloud without guests needs no ability. The message proposes settings that need fewer
    abilities, except for a lab.

    Raises:
        Failure: An ability is missing.
    """
    for abilities, instead in WITHOUT[: 1 + cloud.has_networks] if cloud.has_guests else ():
        lack = machine.lack_of(*abilities)
        if lack is not None:
            raise Failure(
                lack.what,
                lack.todo if cloud.apart else f"{lack.todo} Or change a setting: {instead}.",
            )


def find_routes(external: IPv4Network) -> list[str]:
    """Return the lines of ``ip route`` whose networks overlap ``external``.

    The default route, a route to ``external`` itself and routes with a type, for example blackhole,
    are left out. Without the program ip the list is empty.
    """
    if shutil.which("ip") is None:
        return []
    result = subprocess.run(
        ["ip", "-4", "route"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    routes = [line.strip() for line in result.stdout.splitlines() if line[:1].isdigit()]
    networks = [(IPv4Network(route.split()[0], strict=False), route) for route in routes]
    return [
        route for network, route in networks if network != external and network.overlaps(external)
    ]


def check_ports(cloud: Cloud) -> None:
    """Check that the ports of the cloud are free.

    With an external broker the ports of the cloud's own broker are not checked.

    Raises:
        Failure: Another program listens on a port.
    """
    taken = {
        name: port
        for name, port in cloud.ports.taken().items()
        if any(is_taken(port, address) for address in {"127.0.0.1", cloud.address})
        and not (cloud.broker_url and name.startswith("broker"))
    }
    if taken:
        listed = ", ".join(f"{port} ({name})" for name, port in taken.items())
        raise Failure(
            f"Other programs listen on ports that this cloud needs: {listed}.",
            "Find the programs with 'ss -ltnp' and stop them, or set KILONOVA_PORT_BASE to the first of "
            f"{cloud.ports.COUNT} free ports.",
        )


def find_neighbours(cloud: Cloud) -> list[str]:
    """Return notes about RabbitMQ and libvirtd services that do not belong to this cloud."""
    names = [name for port, name in FOREIGN if answers(port)]
    # os.path, because Path.exists raises PermissionError for a user who may not read the folder.
    if os.path.exists("/run/libvirt/libvirt-sock") and _runs("libvirtd"):
        names.append("libvirtd")
    return [
        f"another {name} runs on this machine and is not changed" for name in dict.fromkeys(names)
    ]


def _runs(program: str) -> bool:
    """Return True if a process with this program name runs in the mount namespace of this process.

    The libvirtds of clouds have mount namespaces of their own.
    """
    done = subprocess.run(
        ["pidof", program], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    own = os.readlink("/proc/self/ns/mnt")
    return any(_mounts_of(pid) == own for pid in done.stdout.split())


def _mounts_of(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""
