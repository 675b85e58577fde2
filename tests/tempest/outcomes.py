# SPDX-License-Identifier: Apache-2.0
"""What ``tempest run`` prints, read: each test's outcome, and why it was skipped or what it failed
by."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.tempest.known import Known, reason, stale

#: ``{1} tempest.api…test_x [1.2s] ... ok``; of a class: ``{1} setUpClass (tempest.…Class) [0s] ...
#: FAILED``
_LINE = re.compile(
    r"^\{\d+\} (?P<test>(?:setUpClass|tearDownClass) \([\w.]+\)|[\w.]+)\S* (?:\[[\d.]+s\] )?\.\.\. "
    r"(?P<word>ok|FAILED|SKIPPED)(?:: (?P<why>.*))?$"
)
_CLASS = re.compile(r"(?P<part>setUpClass|tearDownClass) \((?P<name>[\w.]+)\)")


@dataclass
class Outcomes:
    """The tests of a group by outcome; ``skipped``: with the reason. ``not_run``: asked for, and
    nothing was said.

    ``said``: what was printed below a failure; ``known``: failures that were foreseen, with the
    reason; ``stale``: what passed though a failure was foreseen.
    """

    asked: list[str]
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)

    def foresee(self, rows: Sequence[Known]) -> None:
        """Failures that these rows foresee count as known."""
        self.known = {
            test: why for test in self.failed if (why := reason(rows, test, self.said[test]))
        }
        self.failed = [test for test in self.failed if test not in self.known]
        self.stale = stale(rows, self.passed)

    @property
    def not_run(self) -> list[str]:
        """Tests of which nothing was said."""
        said = {*self.passed, *self.failed, *self.skipped, *self.known}
        return [one for one in self.asked if one not in said]

    @property
    def is_well(self) -> bool:
        """Did every test pass that was not skipped?"""
        return not self.failed and not self.not_run and not self.stale

    def reasons(self) -> dict[str, int]:
        """How many were skipped, or failed as foreseen, for each reason, the most frequent one
        first."""
        return dict(Counter([*self.skipped.values(), *self.known.values()]).most_common())

    def line(self) -> str:
        """Counts, those of negative tests apart: a server that answers 404 to everything passes
        many of these."""
        negative = sum("egative" in one for one in self.passed)
        known = f", {len(self.known)} failed as foreseen" if self.known else ""
        not_run = f", {len(self.not_run)} not run" if self.not_run else ""
        return (
            f"{len(self.passed)}/{len(self.asked)} passed ({negative} of them negative), "
            f"{len(self.failed)} failed, {len(self.skipped)} skipped{known}{not_run}"
        )


def read(asked: Iterable[str], printed: Iterable[str]) -> Outcomes:
    """``asked``: ids, with or without brackets. What a class's set-up says holds for all its
    tests."""
    found = Outcomes([one.split("[")[0] for one in asked])
    tests: list[str] = []
    for line in printed:
        match = _LINE.match(line.rstrip())
        if match is None:
            for test in tests:
                found.said[test] += line
            continue
        of_class = _CLASS.fullmatch(match["test"])
        tests = [match["test"]]
        if of_class is not None:
            tests = [one for one in found.asked if one.rsplit(".", 1)[0] == of_class["name"]]
        for test in tests:
            _put(found, test, match["word"], match["why"] or "")
            found.said.setdefault(test, "")
    return found


def _put(found: Outcomes, test: str, word: str, why: str) -> None:
    if test in found.failed:
        return
    if word == "FAILED":
        found.failed.append(test)
        found.passed = [one for one in found.passed if one != test]
    elif word == "SKIPPED":
        found.skipped[test] = why
    elif test not in found.passed:
        found.passed.append(test)
