# SPDX-License-Identifier: Apache-2.0
"""A failing test prints what a person needs: what each cloud that it used tells of itself.

A cloud registers itself where it is made (``register``), and from then on belongs to the fixture
that makes it, or to the test. When a test fails in setup, call or teardown, each living one that
its fixtures or it made is asked for its ``diagnosis``, and the answers are printed below the
failure, once for each test. Who removes a cloud that does not come up, or that fails when it ends,
asks it first: ``asked_first``. A question that fails, or is not answered in time, is a line of its
own, never the end of the report. A test that passes costs a bookmark of each living cloud.
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

#: Of one failing test, in all; and of one line.
LINES, WIDTH = 200, 300
#: How long an answer may take, seconds: longer than ``kilonova doctor`` may.
PATIENCE = 45.0
#: A test that makes one cloud after the other failed with one of the last.
NEWEST = 3
Section = tuple[str, list[str]]


class Diagnosable(Protocol):
    """Something that can tell what it was doing."""

    def bookmark(self) -> Any:
        """Where it stands when a test begins; cheap."""

    def diagnosis(self, since: Any) -> Mapping[str, Callable[[], Iterable[str]]]:
        """Titles, each with a question that is answered in lines: what it was doing since the
        bookmark."""


#: What made a cloud; None is the test itself.
Owner = pytest.FixtureDef[Any] | None


@dataclass
class Known:
    """One that registered, and its bookmark of the test that runs."""

    thing: weakref.ref[Diagnosable]
    since: Any


@dataclass
class Registry:
    """Who is there, and what the test that runs has to do with it."""

    known: dict[Owner, deque[Known]] = field(default_factory=dict)
    making: list[Owner] = field(default_factory=lambda: [None])  # the innermost is the last
    used: set[str] = field(default_factory=set)  # fixtures that the test asked for by itself
    torn: list[Known] = field(default_factory=list)  # what it used, before its fixtures end
    # by those that were asked before they were removed
    told: list[Section] = field(default_factory=list)

    def add(self, thing: Diagnosable) -> None:
        mine = self.known.setdefault(self.making[-1], deque(maxlen=NEWEST))
        mine.append(Known(weakref.ref(thing), thing.bookmark()))

    def begin(self) -> None:
        """A test begins; what an earlier one made by itself is not its own."""
        self.known.pop(None, None)
        self.used.clear()
        self.torn.clear()
        for one in chain(*self.known.values()):
            thing = one.thing()
            if thing is not None:
                one.since = thing.bookmark()

    def of(self, item: pytest.Item) -> list[Known]:
        """Those that the test uses, of each maker the newest first."""
        names, above = {*getattr(item, "fixturenames", ()), *self.used}, item.listchain()
        return [
            one
            for owner, made in self.known.items()
            if owner is None
            or (owner.argname in names and (owner.node is None or owner.node in above))
            for one in reversed(made)
        ]

    def ask(self, known: Iterable[Known]) -> None:
        for one in known:
            thing = one.thing()
            if thing is not None:
                self.told += asked(thing, one.since)


_here = Registry()


def register(thing: Diagnosable) -> None:
    """Called where it is made, once it can be asked."""
    _here.add(thing)


@contextmanager
def asked_first(thing: Diagnosable) -> Iterator[None]:
    """What fails within asks the thing before its maker removes it."""
    try:
        yield
    except (Exception, pytest.fail.Exception):
        _here.ask([one for one in chain(*_here.known.values()) if one.thing() is thing])
        raise


def asked(thing: Diagnosable, since: Any, patience: float = PATIENCE) -> list[Section]:
    """Every title with its answer."""
    found: list[Section] = []
    questions: list[tuple[str, Callable[[], Iterable[str]]]] = []

    def ask() -> Iterable[str]:
        questions.extend(thing.diagnosis(since).items())
        return ()

    trouble = _answer(ask, patience)
    if trouble:
        found.append((type(thing).__name__, trouble))
    for title, question in questions:
        found.append((title, _answer(question, patience)))
    return found


def _answer(question: Callable[[], Iterable[str]], patience: float) -> list[str]:
    """In a thread of its own, because nothing else ends a question that hangs."""
    answer: list[str] = []
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            answer.extend(question())
        except BaseException as problem:  # noqa: BLE001  # told instead of the answer, beside the test's own failure
            problems.append(problem)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        thread.join(patience)
    except pytest.fail.Exception as problem:  # the test's own time is over, too
        problems.append(problem)
    if problems:
        return [f"could not be asked: {problems[0]!r}"]
    return [f"did not answer within {patience:g} s"] if thread.is_alive() else answer


def printed(sections: Iterable[Section]) -> Iterator[tuple[str, str]]:
    """The titles with their texts; all of them, cut to ``LINES``."""
    left = LINES
    for title, lines in sections:
        short = [
            line if len(line) <= WIDTH else f"{line[:WIDTH]}…"
            for text in lines
            for line in text.splitlines()
        ]
        shown = short[: max(left, 0)]
        left -= len(shown)
        yield (
            title,
            "\n".join(
                [*shown, *([f"… {len(short) - len(shown)} more lines"] if short != shown else [])]
            ),
        )


# --- pytest's hooks ---
@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """What is made meanwhile belongs to this fixture."""
    _here.used.update((fixturedef.argname, *fixturedef.argnames))
    _here.making.append(fixturedef)
    try:
        return (yield)
    finally:
        _here.making.pop()


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    """What the fixture made is gone."""
    _here.known.pop(fixturedef, None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test begins."""
    _here.begin()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Its fixtures are about to end."""
    _here.torn = _here.of(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Ask, and print below the failure: there JUnit's XML has it, too."""
    report: pytest.TestReport = yield
    if report.failed and not item.stash.get(_TOLD, False):
        item.stash[_TOLD] = True
        if not _here.told and not _is_repeated(call):
            _here.ask(_here.torn if call.when == "teardown" else _here.of(item))
        add = getattr(
            report.longrepr, "addsection", lambda *section: report.sections.append(section)
        )
        for section in printed(_here.told):
            add(*section)
    _here.told.clear()
    return report


def _is_repeated(call: pytest.CallInfo[None]) -> bool:
    """True if another test of this run has failed with the same exception object.

    pytest raises the exception of a shared fixture again for each test that uses the fixture. The
    clouds were asked at the first failure. Asking a cloud that is gone takes minutes.
    """
    problem = call.excinfo.value if call.excinfo else None
    if any(problem is other for other in _setup_problems):
        return True
    if problem is not None and call.when == "setup":
        _setup_problems.append(problem)
    return False


_TOLD = pytest.StashKey[bool]()
_setup_problems: list[BaseException] = []
