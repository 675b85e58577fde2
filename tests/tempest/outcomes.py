# SPDX-License-Identifier: Apache-2.0
"""Parser of the output of ``tempest run`` and ``stestr run``: the outcome of each test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.tempest.known import KnownFailure, find_reason, list_stale

#: For example, ``{1} tempest.api…test_x [1.2s] ... ok``, or for a class ``{1} setUpClass
#: (tempest.…Class) [0s] ... FAILED``.
_LINE = re.compile(
    r"^\{\d+\} (?P<test>(?:setUpClass|tearDownClass) \([\w.]+\)|[\w.]+)\S* (?:\[[\d.]+s\] )?\.\.\. "
    r"(?P<word>ok|FAILED|SKIPPED)(?:: (?P<reason>.*))?$"
)
_CLASS = re.compile(r"(?P<part>setUpClass|tearDownClass) \((?P<name>[\w.]+)\)")


@dataclass
class Outcomes:
    """The outcomes of the tests of a run.

    Attributes:
        requested: Names of all tests of the run.
        passed: Names of passed tests.
        failed: Names of failed tests, without known failures.
        skipped: Name of a skipped test -> reason.
        errors: Name of a test -> output below the outcome.
        known: Name of a test with a known failure -> reason.
        stale: Names of tests that passed despite a known failure.
    """

    requested: list[str]
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)

    def accept_known(self, entries: Sequence[KnownFailure]) -> None:
        """Move failures from ``failed`` to ``known`` by these entries, and set ``stale``."""
        self.known = {
            test: reason
            for test in self.failed
            if (reason := find_reason(entries, test, self.errors[test]))
        }
        self.failed = [test for test in self.failed if test not in self.known]
        self.stale = list_stale(entries, self.passed)

    @property
    def not_run(self) -> list[str]:
        """The requested tests without an outcome."""
        complete = {*self.passed, *self.failed, *self.skipped, *self.known}
        return [test for test in self.requested if test not in complete]

    @property
    def is_ok(self) -> bool:
        """True if each test passed, was skipped, or failed as known, and no entry is stale."""
        return not self.failed and not self.not_run and not self.stale

    def reasons(self) -> dict[str, int]:
        """Return the number of skips and known failures by reason, the most frequent first."""
        return dict(Counter([*self.skipped.values(), *self.known.values()]).most_common())

    def line(self) -> str:
        """Return the counts as a text.

        Negative tests are counted separately, because a service that answers 404 to every request
        passes many of them.
        """
        negative = sum("egative" in test for test in self.passed)
        known = f", {len(self.known)} failed as foreseen" if self.known else ""
        not_run = f", {len(self.not_run)} not run" if self.not_run else ""
        return (
            f"{len(self.passed)}/{len(self.requested)} passed ({negative} of them negative), "
            f"{len(self.failed)} failed, {len(self.skipped)} skipped{known}{not_run}"
        )


def read(ids: Iterable[str], output: Iterable[str]) -> Outcomes:
    """Read the outcomes of tests. The outcome of a class's setup applies to all tests of the class.

    Args:
        ids: Ids of the requested tests, with or without tags in brackets.
        output: Lines of the output.
    """
    outcomes = Outcomes([test.split("[")[0] for test in ids])
    tests: list[str] = []
    for line in output:
        match = _LINE.match(line.rstrip())
        if match is None:
            for test in tests:
                outcomes.errors[test] += line
            continue
        of_class = _CLASS.fullmatch(match["test"])
        tests = [match["test"]]
        if of_class is not None:
            tests = [
                test for test in outcomes.requested if test.rsplit(".", 1)[0] == of_class["name"]
            ]
        for test in tests:
            _add(outcomes, test, match["word"], match["reason"] or "")
            outcomes.errors.setdefault(test, "")
    return outcomes


def _add(outcomes: Outcomes, test: str, word: str, reason: str) -> None:
    """Add the outcome of a test. A failure replaces a pass and is final."""
    if test in outcomes.failed:
        return
    if word == "FAILED":
        outcomes.failed.append(test)
        outcomes.passed = [other for other in outcomes.passed if other != test]
    elif word == "SKIPPED":
        outcomes.skipped[test] = reason
    elif test not in outcomes.passed:
        outcomes.passed.append(test)
