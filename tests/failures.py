# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that adds the evidence of the clouds of a failed test to its report.

A cloud registers itself when it is created (``register``). It belongs to the fixture that creates
it, or to the test. When a test fails in setup, call or teardown, the plugin requests a
``diagnosis`` from each existing cloud of the test and its fixtures, and adds the answers to the
report once. Code that removes a cloud after a failure requests its diagnosis first, with
``diagnose_first``. A source of evidence that fails or does not answer in time adds a line and does
not stop the report. For a test that passes, the plugin only takes bookmarks of existing clouds.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import pytest

#: Maximum lines for one failing test, and maximum characters of a line.
LINES, WIDTH = 200, 300
#: Seconds that an answer may take, more than ``kilonova doctor`` may take.
PATIENCE = 45.0
#: Number of clouds of one owner to diagnose, the newest first.
NEWEST = 3
Section = tuple[str, list[str]]


class Diagnosable(Protocol):
    """An object with evidence for failed tests, for example a cloud."""

    def bookmark(self) -> Any:
        """Return the position in the evidence at the start of a test. This must be cheap."""

    def diagnosis(self, since: Any) -> Mapping[str, Callable[[], Iterable[str]]]:
        """Return titles with functions that return the lines of evidence since the bookmark."""


#: The fixture that created a cloud, or None for the test itself.
Owner = pytest.FixtureDef[Any] | None


@dataclass
class Entry:
    """A registered object and its bookmark of the running test."""

    thing: weakref.ref[Diagnosable]
    since: Any


@dataclass
class Registry:
    """The registered objects and their relation to the running test."""

    entries: dict[Owner, deque[Entry]] = field(default_factory=dict)
    # The fixtures in setup, the innermost last.
    owners: list[Owner] = field(default_factory=lambda: [None])
    # Names of fixtures that the test requested at run time.
    used: set[str] = field(default_factory=set)
    # The objects that the test used, before the teardown of its fixtures.
    used_entries: list[Entry] = field(default_factory=list)
    # The evidence of objects that were removed after a failure.
    evidence: list[Section] = field(default_factory=list)

    def add(self, thing: Diagnosable) -> None:
        entries = self.entries.setdefault(self.owners[-1], deque(maxlen=NEWEST))
        entries.append(Entry(weakref.ref(thing), thing.bookmark()))

    def begin(self) -> None:
        """Begin a test: forget the objects of the previous test and take bookmarks."""
        self.entries.pop(None, None)
        self.used.clear()
        self.used_entries.clear()
        for entry in chain(*self.entries.values()):
            thing = entry.thing()
            if thing is not None:
                entry.since = thing.bookmark()

    def of(self, item: pytest.Item) -> list[Entry]:
        """Return the objects that the test uses, the newest of each owner first."""
        names, above = {*getattr(item, "fixturenames", ()), *self.used}, item.listchain()
        return [
            entry
            for owner, entries in self.entries.items()
            if owner is None
            or (owner.argname in names and (owner.node is None or owner.node in above))
            for entry in reversed(entries)
        ]

    def diagnose(self, entries: Iterable[Entry]) -> None:
        """Add the diagnosis of the objects to the evidence."""
        for entry in entries:
            thing = entry.thing()
            if thing is not None:
                self.evidence += diagnose(thing, entry.since)


_registry = Registry()


def register(thing: Diagnosable) -> None:
    """Register an object for the diagnosis of failed tests."""
    _registry.add(thing)


@contextmanager
def diagnose_first(thing: Diagnosable) -> Iterator[None]:
    """Request the diagnosis of an object if the block fails, before the object is removed."""
    try:
        yield
    except (Exception, pytest.fail.Exception):
        _registry.diagnose(
            [entry for entry in chain(*_registry.entries.values()) if entry.thing() is thing]
        )
        raise


def diagnose(thing: Diagnosable, since: Any, patience: float = PATIENCE) -> list[Section]:
    """Return each title of the diagnosis with its lines."""
    sections: list[Section] = []
    questions: list[tuple[str, Callable[[], Iterable[str]]]] = []

    def collect_questions() -> Iterable[str]:
        questions.extend(thing.diagnosis(since).items())
        return ()

    problem_lines = _answer(collect_questions, patience)
    if problem_lines:
        sections.append((type(thing).__name__, problem_lines))
    for title, question in questions:
        sections.append((title, _answer(question, patience)))
    return sections


def _answer(question: Callable[[], Iterable[str]], patience: float) -> list[str]:
    """Call the function in a thread, because a call that hangs cannot be stopped otherwise."""
    answer: list[str] = []
    problems: list[BaseException] = []

    def call_question() -> None:
        try:
            answer.extend(question())
        # The problem replaces the answer in the report.
        except BaseException as problem:  # noqa: BLE001
            problems.append(problem)

    thread = threading.Thread(target=call_question, daemon=True)
    thread.start()
    try:
        thread.join(patience)
    # The timeout of the test has expired, too.
    except pytest.fail.Exception as problem:
        problems.append(problem)
    if problems:
        return [f"could not be asked: {problems[0]!r}"]
    return [f"did not answer within {patience:g} s"] if thread.is_alive() else answer


def cut_sections(sections: Iterable[Section]) -> Iterator[tuple[str, str]]:
    """Yield the titles with their texts, cut to ``LINES`` in all."""
    remaining = LINES
    for title, lines in sections:
        short = [
            line if len(line) <= WIDTH else f"{line[:WIDTH]}…"
            for text in lines
            for line in text.splitlines()
        ]
        shown = short[: max(remaining, 0)]
        remaining -= len(shown)
        yield (
            title,
            "\n".join(
                [*shown, *([f"… {len(short) - len(shown)} more lines"] if short != shown else [])]
            ),
        )


# --- pytest's hooks ---
@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """Assign the objects that are registered during the setup to this fixture."""
    _registry.used.update((fixturedef.argname, *fixturedef.argnames))
    _registry.owners.append(fixturedef)
    try:
        return (yield)
    finally:
        _registry.owners.pop()


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Forget the objects of the fixture."""
    _registry.entries.pop(fixturedef, None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin a test before its fixtures are set up."""
    _registry.begin()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Remember the objects of the test before its fixtures end."""
    _registry.used_entries = _registry.of(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the evidence below the failure, where JUnit's XML contains it, too."""
    report: pytest.TestReport = yield
    if report.failed and not item.stash.get(_REPORTED, False):
        item.stash[_REPORTED] = True
        if not _registry.evidence and not _is_repeated(call):
            _registry.diagnose(
                _registry.used_entries if call.when == "teardown" else _registry.of(item)
            )
        add = getattr(
            report.longrepr, "addsection", lambda *section: report.sections.append(section)
        )
        for section in cut_sections(_registry.evidence):
            add(*section)
    _registry.evidence.clear()
    return report


def _is_repeated(call: pytest.CallInfo[None]) -> bool:
    """Return True if another test of this run has failed with the same exception object.

    pytest raises the exception of a shared fixture again for each test that uses the fixture. The
    first failure has the evidence already. A request to a removed cloud takes minutes.
    """
    problem = call.excinfo.value if call.excinfo else None
    if any(problem is other for other in _setup_problems):
        return True
    if problem is not None and call.when == "setup":
        _setup_problems.append(problem)
    return False


_REPORTED = pytest.StashKey[bool]()
_setup_problems: list[BaseException] = []
