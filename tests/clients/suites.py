# SPDX-License-Identifier: Apache-2.0
"""The clients' functional suites: where their tests are, and which of them are left out, each with
its reason.

``left_out`` is for readers in docs/clients.md too. An expression that finds no test fails the
suite.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """``folders``: below where the packages are installed, what is looked through for tests.
    ``only``: expression for those of them that are of this project's services. ``workers``: tests
    side by side. ``resident``: it wants a project that has a server."""

    name: str
    folders: tuple[str, ...]
    only: str = "."
    workers: int = 1
    resident: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    def chosen(self, ids: Iterable[str]) -> tuple[list[str], dict[str, str]]:
        """Those to run, and those that are left out, with the reason."""
        ours = [one for one in ids if re.search(self.only, one)]
        out: dict[str, str] = {}
        for part, why in self.left_out.items():
            out = {one: why for one in ours if re.search(part, one)} | out
        return [one for one in ours if one not in out], out

    def unused(self, ids: Iterable[str]) -> list[str]:
        """Expressions by which no test is left out: the suite has changed."""
        known = [*ids]
        return [part for part in self.left_out if not any(re.search(part, one) for one in known)]


NOVACLIENT = Suite(
    "novaclient",
    ("novaclient/tests/functional",),
    left_out={
        r"test_resize_down_revert": "usage after a resize to less is the larger flavor's until it is confirmed",
    },
)
OPENSTACKCLIENT = Suite(
    "openstackclient",
    ("openstackclient/tests/functional/compute",),
    workers=2,
)
OPENSTACKSDK = Suite(
    "openstacksdk",
    tuple(f"openstack/tests/functional/{one}" for one in ("compute", "cloud", "placement")),
    only=r"functional\.(compute|placement|cloud\.test_(compute|inventory))\.",
    resident=True,
    left_out={
        r"placement\.v1\.test_(resource_provider_)?allocation\.": "allocations are written by claims alone",
    },
)
SUITES = (NOVACLIENT, OPENSTACKCLIENT, OPENSTACKSDK)
