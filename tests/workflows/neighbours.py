# SPDX-License-Identifier: Apache-2.0
"""What the neighbours in memory have in common: how they can answer any of their calls otherwise
than they should."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar

from common.domain import errors
from tests.answers import REFUSALS, Answer, calls_of, half

T = TypeVar("T")
Call = tuple[str, str]  # a method, and what it is about


def nobody() -> None:
    """Nobody else goes on."""


@dataclass
class Neighbour:
    """Made with the interface that it implements, or with the names of its calls: each of these
    begins with ``_speak`` and ends with ``_answer``.

    ``silent`` and ``answers_lost`` count calls that go wrong from now on; ``script`` says it by
    the call's number, beginning with 1."""

    calls_known: ClassVar[list[str]] = []
    name: str
    silent: int = 0  # calls that are not answered, and do nothing
    answers_lost: int = 0  # calls that are not answered, and are done all the same
    lost_at: int = 0  # the answer to the call of this number is lost
    script: dict[int, Answer] = field(default_factory=dict)
    refusing: dict[Call, errors.Problem] = field(default_factory=dict)
    next_of: tuple[Collection[str], Answer] | None = None  # what becomes of the next of these
    asked: list[Call] = field(default_factory=list)
    refused: list[Call] = field(default_factory=list)
    given_up: list[Callable[[], object]] = field(default_factory=list)  # and still to be done
    meanwhile: Callable[[], object] = nobody  # what others do while it is slow
    before_answer: Callable[[], object] = nobody  # what happens when it has done what was asked

    def __init_subclass__(cls, interface: type | None = None, calls: tuple[str, ...] = ()) -> None:
        cls.calls_known = [*(calls_of(interface) if interface else ()), *calls]
        for name in cls.calls_known:
            setattr(cls, name, _listening(name, getattr(cls, name)))

    @property
    def calls(self) -> int:
        return len(self.asked)

    def well(self) -> None:
        """It refuses nothing any more."""
        self.refusing.clear()
        self.script.clear()
        self.silent = self.answers_lost = 0
        self.next_of, self.before_answer = None, nobody

    def catches_up(self) -> None:
        """Do what was given up; nobody hears what comes of it."""
        late, self.given_up = self.given_up, []
        for call in late:
            try:
                call()
            except errors.Problem:
                continue

    def _speak(self, method: str, about: str = "") -> None:
        """Each call begins so."""
        self.asked.append((method, about))
        what = self.script.get(self.calls)
        if what in REFUSALS:
            self.refusing[method, about] = REFUSALS[what]
        if refusal := self.refusing.get((method, about)):
            if not isinstance(refusal, errors.Unavailable):
                self.refused.append((method, about))
            raise type(refusal)(refusal.text)
        if self.silent or what is Answer.SILENT:
            self.silent = max(0, self.silent - 1)
            raise errors.NoAnswer(f"the {self.name} is silent")
        if what is Answer.SLOW:
            self.meanwhile()

    def _answer(self, answer: T) -> T:
        """Each call ends so."""
        self.before_answer()
        what = self.script.get(self.calls)
        if what is Answer.HALF:
            half(self.name)
        if self.answers_lost or self.calls == self.lost_at or what is Answer.LOST:
            self.answers_lost = max(0, self.answers_lost - 1)
            raise errors.NoAnswer(f"the {self.name}'s answer is lost")
        return answer


def _listening(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Neighbour, *arguments: Any, **more: Any) -> Any:
        if self.next_of is not None and name in self.next_of[0]:
            self.script[self.calls + 1], self.next_of = self.next_of[1], None
        if self.script.get(self.calls + 1) is not Answer.LATE:
            return method(self, *arguments, **more)
        self.asked.append((name, "given up"))
        self.given_up.append(partial(method, self, *arguments, **more))
        raise errors.NoAnswer(f"the {self.name} is slow")

    return call


def one(values: Any) -> str:
    """What a call with a list is about."""
    return ",".join(sorted(map(str, values)))
