# SPDX-License-Identifier: Apache-2.0
"""The groups of Tempest's compute tests, by the required services and guests of a cloud.

``groups.txt`` in this folder lists the tests of each group. The list X has the tests without a
group, which do not run.
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
    """A group of Tempest's tests.

    Attributes:
        name: Name of the group.
        needs: Title of the requirements.
        boots: True if the tests log in to guests.
        volumes: True if the tests need a volume service.
        without_different_host: True if the tests use the hint different_host with servers of other
            projects. Kilonova ignores such servers, so Tempest must skip these tests.
    """

    name: str
    needs: str
    boots: bool = False
    volumes: bool = False
    without_different_host: bool = False


GROUPS = (
    Group("A1", "no server"),
    Group("A2", "servers"),
    Group("B", "a volume service", volumes=True),
    Group("C", "networks"),
    Group("D", "volumes of guests with logins", boots=True, volumes=True),
    Group("E", "guests with logins", boots=True),
    Group("F", "two hosts or more"),
    Group("S", "the scenarios: guests, networks and ssh", boots=True, without_different_host=True),
)
#: The groups that ``./deploy/test tempest`` runs by default, in this order.
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


def sort_into_groups(ids: Iterable[str], lists: dict[str, str]) -> dict[str, list[str]]:
    """Return the ids of the compute tests in each group.

    Args:
        ids: Output lines of ``stestr list``: names of tests, with their tags in brackets.
        lists: The group of each test by the test's name.

    Raises:
        Failure: A compute test is in no list.
    """
    by_name = {test.split("[")[0]: test for test in ids if re.search(_COMPUTE, test)}
    if unlisted := sorted(by_name.keys() - lists.keys()):
        raise Failure(
            f"tests/tempest/groups.txt does not list {', '.join(unlisted)}.",
            f"Add each to a group of this file, or to {NOT_RUN} if no group can run the test.",
        )
    sorted_ids: dict[str, list[str]] = {group.name: [] for group in GROUPS}
    for name, test in by_name.items():
        if lists[name] != NOT_RUN:
            sorted_ids[lists[name]].append(test)
    return sorted_ids
