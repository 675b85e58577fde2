# SPDX-License-Identifier: Apache-2.0
"""What ``tempest run`` prints, read: each test's outcome, and why it was skipped or what it failed by."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

#: ``{1} tempest.api…test_x [1.2s] ... ok``; of a class: ``{1} setUpClass (tempest.…Class) [0s] ... FAILED``
_LINE = re.compile(r"^\{\d+\} (?P<test>(?:setUpClass|tearDownClass) \([\w.]+\)|[\w.]+)\S* (?:\[[\d.]+s\] )?\.\.\. "
                   r"(?P<word>ok|FAILED|SKIPPED)(?:: (?P<why>.*))?$")
_CLASS = re.compile(r"(?P<part>setUpClass|tearDownClass) \((?P<name>[\w.]+)\)")


@dataclass
class Outcomes:
    """The tests of a group by outcome; ``skipped``: with the reason. ``not_run``: asked for, and nothing was said."""

    asked: list[str]
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def not_run(self) -> list[str]:
        """Tests of which nothing was said."""
        said = {*self.passed, *self.failed, *self.skipped}
        return [one for one in self.asked if one not in said]

    @property
    def is_well(self) -> bool:
        """Did every test pass that was not skipped?"""
        return not self.failed and not self.not_run

    def reasons(self) -> dict[str, int]:
        """How many were skipped for each reason, the most frequent one first."""
        return dict(Counter(self.skipped.values()).most_common())

    def line(self) -> str:
        """Counts, those of negative tests apart: a server that answers 404 to everything passes many of these."""
        negative = sum("egative" in one for one in self.passed)
        not_run = f", {len(self.not_run)} not run" if self.not_run else ""
        return (f"{len(self.passed)}/{len(self.asked)} passed ({negative} of them negative), "
                f"{len(self.failed)} failed, {len(self.skipped)} skipped{not_run}")


def read(asked: Iterable[str], printed: Iterable[str]) -> Outcomes:
    """``asked``: ids, with or without brackets. What a class's set-up says holds for all its tests."""
    found = Outcomes([one.split("[")[0] for one in asked])
    for line in printed:
        match = _LINE.match(line.rstrip())
        if match is None:
            continue
        of_class = _CLASS.fullmatch(match["test"])
        tests = [match["test"]]
        if of_class is not None:
            tests = [one for one in found.asked if one.rsplit(".", 1)[0] == of_class["name"]]
        for test in tests:
            _put(found, test, match["word"], match["why"] or "")
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
