# SPDX-License-Identifier: Apache-2.0
"""Mutations: each takes one protection away, and a test must fail for it.

They are data (``*.toml`` beside this file): ``id``; ``file`` and the exact text to ``find`` there,
which occurs once; what to ``replace`` it with; what that ``protects`` and the decision that says
so; the ``tests`` to run, with ``k`` to choose among them. ``./deploy/test mutations [-- ID ...]``
applies each to a copy of the tree, never to the tree. A mutation whose text is not there any more
is out of date; a unit test says so at once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Mutation:
    """One protection, and how it is taken away."""

    id: str
    file: str
    find: str
    replace: str
    protects: str
    decision: str
    tests: tuple[str, ...]
    k: str = ""

    def applied(self, text: str) -> str:
        """The file without the protection. Raises OutOfDate."""
        found = text.count(self.find)
        if found != 1:
            raise OutOfDate(
                f"{self.id}: {self.file} has {found} times what it replaces, not once: mend tests/mutations"
            )
        changed = text.replace(self.find, self.replace)
        if changed == text:
            raise OutOfDate(f"{self.id}: it changes nothing")
        return changed


class OutOfDate(Exception):
    """The code has changed under a mutation."""


def every() -> Iterator[Mutation]:
    """All mutations, in the order of their files."""
    for path in sorted(HERE.glob("*.toml")):
        for one in tomllib.loads(path.read_text())["mutation"]:
            yield Mutation(**{**one, "tests": tuple(one["tests"])})
