# SPDX-License-Identifier: Apache-2.0
"""Checks of this machine's abilities: root, namespaces, mounts, network devices and rules.

deploy/one_machine/preflight.py uses this module, and so do the tests, which skip without them. Each
ability is tried once per process, in namespaces that end with the command. A program that is not
installed yet is not tried. The later use then fails.
"""

from __future__ import annotations

import functools
import os
import shutil
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from deploy.one_machine.machine.underlay import find_error

FILTER, TUN = Path("/proc/sys/net/bridge/bridge-nf-call-iptables"), Path("/dev/net/tun")
PRIVILEGED = "Run this on a machine where root may do this (a container needs --privileged)"


class Ability(Enum):
    """An ability of a machine."""

    ROOT = auto()
    NAMESPACES = auto()
    MOUNTS = auto()
    #: Bridges, and the veth pairs, tunnels and rules that go with them.
    BRIDGES = auto()
    #: Guests' interfaces, and the rules for packets that cross a bridge.
    TAPS = auto()


#: Abilities for a libvirtd of our own, for hosts with networks of their own, and for guests with
#: networks.
FOR_GUESTS = (Ability.ROOT, Ability.NAMESPACES, Ability.MOUNTS)
FOR_HOSTS = (*FOR_GUESTS, Ability.BRIDGES)
FOR_NETWORKS = (*FOR_HOSTS, Ability.TAPS)
#: The commands that try an ability. Those after "unshare --net" run in a network namespace.
TRIED: dict[Ability, tuple[str, ...]] = {
    Ability.NAMESPACES: ("unshare --net true", "unshare --mount --pid --fork true"),
    Ability.MOUNTS: ("unshare --mount --pid --fork --mount-proc mount --bind /run /run",),
    Ability.BRIDGES: tuple(
        "unshare --net " + command
        for command in (
            "ip link add probe type bridge",
            "ip link add probe type veth peer name other",
            "ip link add probe type vxlan id 1 dstport 4789 local 127.0.0.1",
            "nft add table inet probe",
            "nft add table bridge probe",
        )
    ),
    Ability.TAPS: ("unshare --net ip tuntap add probe mode tap",),
}
WORDS = {
    Ability.NAMESPACES: "Namespaces cannot be made here",
    Ability.MOUNTS: "Mounts cannot be made here",
    Ability.BRIDGES: "Networks cannot be made here",
    Ability.TAPS: "Guests' interfaces cannot be made here",
}


class Lack(NamedTuple):
    """A missing ability.

    Attributes:
        what: The missing ability.
        todo: Advice for the operator.
    """

    what: str
    todo: str


def lack_of(*abilities: Ability) -> Lack | None:
    """Return the first of these abilities that the machine lacks, or None if it has all.

    An ability whose program is not installed yet does not count as missing.
    """
    return next(filter(None, map(_find_lack, abilities)), None)


@functools.cache
def _find_lack(ability: Ability) -> Lack | None:
    if ability is Ability.ROOT:
        return (
            None
            if os.geteuid() == 0
            else Lack("This process does not run as root.", "Run it with sudo.")
        )
    if ability is Ability.TAPS and (lack := _find_lack_of_devices()):
        return lack
    for command in TRIED[ability]:
        words = command.split()
        program = words[2] if words[1] == "--net" else words[0]
        if _is_there(program) and (error := find_error(words)):
            return Lack(f"{WORDS[ability]}: '{command}' failed: {error}", f"{PRIVILEGED}.")
    return None


def _find_lack_of_devices() -> Lack | None:
    if not FILTER.exists() and (error := find_error(["modprobe", "--dry-run", "br_netfilter"])):
        return Lack(
            f"The kernel has no br_netfilter, which security groups need: {error}",
            "Load the module with 'modprobe br_netfilter'. For a container, load it on the container's host.",
        )
    if not TUN.exists():
        return Lack(
            f"There is no {TUN}, which guests' interfaces need.",
            f"Load the module with 'modprobe tun'. Pass {TUN} to a container.",
        )
    return None


def _is_there(program: str) -> bool:
    return shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is not None
