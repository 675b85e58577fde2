# SPDX-License-Identifier: Apache-2.0
"""Mutations: each removes one protection from the code, and a test must fail.

They are data in the files ``*.toml`` of this folder. Each mutation has these fields:

id: Name of the mutation.
file: File to change.
find: Exact text in the file, which must occur once.
replace: Text that replaces ``find``.
protects: The protection that the mutation removes.
decision: Number of the decision record that requires the protection.
tests: Tests to run.
k: Expression for pytest's option -k, optional.

``./deploy/test mutations [-- ID ...]`` applies each mutation to a copy of the tree. A unit test
fails if ``find`` does not occur exactly once in the current code.
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
    """A change of one file that removes one protection. The package describes the fields."""

    id: str
    file: str
    find: str
    replace: str
    protects: str
    decision: str
    tests: tuple[str, ...]
    k: str = ""

    def apply_to(self, text: str) -> str:
        """Return the text of the file without the protection.

        Raises:
            OutOfDate: ``find`` does not occur exactly once, or ``replace`` is the same text.
        """
        count = text.count(self.find)
        if count != 1:
            raise OutOfDate(
                f"{self.id}: {self.file} contains the text to replace {count} times, not once. "
                "Update tests/mutations."
            )
        changed = text.replace(self.find, self.replace)
        if changed == text:
            raise OutOfDate(f"{self.id}: the mutation does not change {self.file}")
        return changed


class OutOfDate(Exception):
    """A mutation no longer applies to the code."""


def read_mutations() -> Iterator[Mutation]:
    """Yield all mutations, sorted by file and in the order of each file."""
    for path in sorted(HERE.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutation"]:
            yield Mutation(**{**entry, "tests": tuple(entry["tests"])})
