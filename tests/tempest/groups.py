# SPDX-License-Identifier: Apache-2.0
"""Tempest's compute tests in groups, by what a cloud must have for them; and which test is in
which.

The groups and their letters are those of the id lists that KILONOVA_TEMPEST_LISTS names (a folder
of ``A1.txt`` and so on, one id a line). Without lists a test belongs to the first group below whose
expression finds its id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPUTE = r"^tempest\.(serial_tests\.)?(api\.compute|scenario)\."
#: Consoles.
_GUESTS = r"test_novnc|test_get_vnc_console"
#: The scenario that logs in to nothing.
_LIMITS = r"test_compute_unified_limits"
#: Logs in, whatever Tempest is told of its cloud.
_LOGS_IN = r"ServerActionsV293TestJSON"


@dataclass(frozen=True)
class Group:
    """``needs``: in words. ``boots``: its tests log in to guests. ``volumes``: it needs a volume
    service.
    ``strangers``: it wants a server on another host than those of other projects, which no hint
    knows here."""

    name: str
    needs: str
    found_by: str
    boots: bool = False
    volumes: bool = False
    strangers: bool = False


#: In the order in which an id is looked for.
GROUPS = (
    Group(
        "D",
        "volumes of guests that one can log in to",
        r"scenario\.(.*[Vv]olume|test_stamp_pattern|test_snapshots_with_add_location|test_minimum_basic)|"
        r"test_attach_volume|admin\.test_(assisted_)?volume|StableRescueTest\.\w+volume|"
        + _LOGS_IN,
        boots=True,
        volumes=True,
    ),
    Group("B", "a volume service", r"[Vv]olume", volumes=True),
    Group(
        "E",
        "guests that one can log in to",
        _GUESTS + r"|test_attach_interfaces|test_device_tagging|ServersTestFqdn|FqdnHostnames|"
        r"test_verify_created_server|test_host_name_is_same|test_change_server_password",
        boots=True,
    ),
    Group(
        "S",
        "guests, networks and ssh: the scenarios",
        rf"tempest\.scenario\.(?!{_LIMITS})",
        boots=True,
        strangers=True,
    ),
    Group(
        "F",
        "two hosts and more",
        r"test_live_migration|test_servers_on_multinodes|test_server_affinity|"
        r"test_cold_migration",
    ),
    Group(
        "C",
        "networks",
        r"compute\.(floating_ips|security_groups)\.|test_disk_config|test_auto_allocate|"
        r"test_server_(addresses|group|metadata|tags|password)|test_instance_actions|"
        r"test_list_servers_negative|test_create_server_multi_nic|test_multiple_create\.|"
        r"servers\.test_servers_negative|test_delete_server\.Delete|test_images(_oneserver)?\.",
    ),
    Group(
        "A2",
        "servers",
        _LIMITS + r"|compute\.servers\.|test_list_image_filters|test_server_|test_delete_server|"
        r"test_simple_tenant_usage\.|admin\.test_servers",
    ),
    Group("A1", "no server", r"."),
)
#: What ``./deploy/test tempest`` runs when no group is named, in this order.
USUAL = ("A1", "A2", "C", "E", "F", "S")


def sorted_into(ids: Iterable[str], lists: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The ids of ``stestr list`` by group. ``lists``: names without brackets by group; an empty
    one: by expression.

    What only guests have is in S (scenarios), E, or D (with volumes), whatever its list.
    """
    known = {one.split("[")[0]: one for one in ids if re.search(_COMPUTE, one)}
    found: dict[str, list[str]] = {group.name: [] for group in GROUPS}
    if lists:
        for name, names in lists.items():
            for one in names:
                group = _listed(one, name)
                if one in known and group in found:
                    found[group].append(known[one])
        return found
    for name, one in known.items():
        group = next(group for group in GROUPS if re.search(group.found_by, name))
        found[group.name].append(one)
    return found


def _listed(test: str, name: str) -> str:
    """The group of a test that is in this list."""
    for expression, group in ((_GUESTS, "E"), (_LIMITS, "A2"), (_LOGS_IN, "D")):
        if re.search(expression, test):
            return group
    if ".scenario." in test:
        return {"B": "D", "D": "D", "A1": "A1"}.get(name, "S")
    return name


def read_lists(folder: Path | None) -> dict[str, list[str]]:
    """The lists in a folder by their names; none when there is no such folder."""
    if folder is None or not folder.is_dir():
        return {}
    return {
        path.stem: [line.strip() for line in path.read_text().splitlines() if line.strip()]
        for path in sorted(folder.glob("*.txt"))
    }
