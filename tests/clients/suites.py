# SPDX-License-Identifier: Apache-2.0
"""The functional suites of the clients, and the tests that are left out, each with its reason.

docs/clients.md also lists the tests that are left out. If an expression in ``left_out`` matches
no test, the suite fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """A client's suite of functional tests.

    Attributes:
        name: Name of the client.
        folders: Folders of tests below the installed packages.
        only: Regular expression for the ids of tests of Kilonova's services.
        workers: Number of concurrent tests.
        needs_server: True if the admin's project must have a server.
        left_out: Regular expression for ids of tests to leave out -> reason.
    """

    name: str
    folders: tuple[str, ...]
    only: str = "."
    workers: int = 1
    needs_server: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    def select(self, ids: Iterable[str]) -> tuple[list[str], dict[str, str]]:
        """Return the tests to run, and the reason for each test that is left out.

        Tests of other services are in neither.
        """
        ours = [test for test in ids if re.search(self.only, test)]
        left_out: dict[str, str] = {}
        for expression, reason in self.left_out.items():
            left_out = {test: reason for test in ours if re.search(expression, test)} | left_out
        return [test for test in ours if test not in left_out], left_out

    def find_unused(self, ids: Iterable[str]) -> list[str]:
        """Return the expressions in ``left_out`` that match no test, because the suite changed."""
        tests = [*ids]
        return [
            expression
            for expression in self.left_out
            if not any(re.search(expression, test) for test in tests)
        ]


NOVACLIENT = Suite(
    "novaclient",
    ("novaclient/tests/functional",),
    left_out={
        r"test_resize_down_revert": "until the confirm of a resize, usage counts the larger flavor",
    },
)
OPENSTACKCLIENT = Suite(
    "openstackclient",
    ("openstackclient/tests/functional/compute",),
    workers=2,
)
OPENSTACKSDK = Suite(
    "openstacksdk",
    tuple(f"openstack/tests/functional/{part}" for part in ("compute", "cloud", "placement")),
    only=r"functional\.(compute|placement|cloud\.test_(compute|inventory))\.",
    needs_server=True,
    left_out={
        r"placement\.v1\.test_(resource_provider_)?allocation\.": "only claims write allocations",
    },
)
SUITES = (NOVACLIENT, OPENSTACKCLIENT, OPENSTACKSDK)
