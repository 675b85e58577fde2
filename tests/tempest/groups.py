# SPDX-License-Identifier: Apache-2.0
"""The groups of Tempest's compute tests, by the services and guests that a cloud must have for
them.

``groups.txt`` beside this file lists the tests of each group, and in X those that no group runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deploy.progress import Failure

_COMPUTE = r"^tempest\.(serial_tests\.)?(api\.compute|scenario)\."
LISTS = Path(__file__).with_name("groups.txt")
#: The list of tests that no group runs.
NOT_RUN = "X"


@dataclass(frozen=True)
class Group:
    """``needs``: in words. ``boots``: its tests log in to guests. ``volumes``: it needs a volume
    service.
    ``strangers``: it wants a server on another host than those of other projects, which no hint
    knows here."""

    name: str
    needs: str
    boots: bool = False
    volumes: bool = False
    strangers: bool = False


GROUPS = (
    Group("A1", "no server"),
    Group("A2", "servers"),
    Group("B", "a volume service", volumes=True),
    Group("C", "networks"),
    Group("D", "volumes of guests that one can log in to", boots=True, volumes=True),
    Group("E", "guests that one can log in to", boots=True),
    Group("F", "two hosts and more"),
    Group("S", "guests, networks and ssh: the scenarios", boots=True, strangers=True),
)
#: The groups that ``./deploy/test tempest`` runs when none is named, in this order.
USUAL = ("A1", "A2", "C", "E", "F", "S")


def read_lists(path: Path = LISTS) -> dict[str, str]:
    """Return the group of each test that the file lists, by the test's name."""
    groups: dict[str, str] = {}
    group = class_name = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            group = line.strip("[]")
        elif line.startswith(" "):
            groups[f"{class_name}.{line.strip()}"] = group
        elif line and not line.startswith("#"):
            class_name = line
    return groups


def sorted_into(ids: Iterable[str], lists: dict[str, str]) -> dict[str, list[str]]:
    """Sort the compute tests among the ids of ``stestr list`` into the groups.

    Args:
        ids: A test's name each, with its tags in brackets.
        lists: The group of each test.

    Raises:
        Failure: A compute test is in no list.
    """
    by_name = {one.split("[")[0]: one for one in ids if re.search(_COMPUTE, one)}
    if unlisted := sorted(by_name.keys() - lists.keys()):
        raise Failure(
            f"tests/tempest/groups.txt does not list {', '.join(unlisted)}.",
            f"Add each to a group there, or to {NOT_RUN} if no group can run it.",
        )
    sorted_ids: dict[str, list[str]] = {group.name: [] for group in GROUPS}
    for name, one in by_name.items():
        if lists[name] != NOT_RUN:
            sorted_ids[lists[name]].append(one)
    return sorted_ids
