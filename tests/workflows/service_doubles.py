# SPDX-License-Identifier: Apache-2.0
"""The base class of external services in memory, with the errors that a test can cause."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar

from common.domain import errors
from tests.answers import REFUSALS, Answer, calls_of, half

T = TypeVar("T")
#: The name of a method, and the id of the object of the call.
Call = tuple[str, str]


def do_nothing() -> None:
    """Do nothing: the default of the hooks of a service."""


@dataclass
class ServiceDouble:
    """An external service in memory.

    A subclass names the interface, or the calls, that are implemented. Invariant: each call begins
    with ``_speak`` and ends with ``_answer``, which raise the errors.
    """

    call_names: ClassVar[list[str]] = []
    #: The name of the service in error texts.
    name: str
    #: Number of next calls without answer and without effect.
    silent: int = 0
    #: Number of next calls with an effect whose answer is lost.
    answers_lost: int = 0
    #: Number of the call whose answer is lost. Calls count from 1.
    lost_at: int = 0
    #: Number of a call -> its outcome.
    script: dict[int, Answer] = field(default_factory=dict)
    #: Call -> the error of each repetition.
    refusing: dict[Call, errors.Problem] = field(default_factory=dict)
    #: Names of methods, and the outcome of the next call of one of them.
    next_of: tuple[Collection[str], Answer] | None = None
    #: All calls so far.
    asked: list[Call] = field(default_factory=list)
    #: The calls that were refused definitely.
    refused: list[Call] = field(default_factory=list)
    #: Calls that timed out, and take effect in ``catches_up``.
    late_calls: list[Callable[[], object]] = field(default_factory=list)
    #: Called during a slow call: the events that happen before its effect.
    meanwhile: Callable[[], object] = do_nothing
    #: Called after the effect of each call, before its answer.
    before_answer: Callable[[], object] = do_nothing

    def __init_subclass__(cls, interface: type | None = None, calls: tuple[str, ...] = ()) -> None:
        cls.call_names = [*(calls_of(interface) if interface else ()), *calls]
        for name in cls.call_names:
            setattr(cls, name, _wrap_call(name, getattr(cls, name)))

    @property
    def calls(self) -> int:
        return len(self.asked)

    def well(self) -> None:
        """End all errors, and forget the script and the hook before answers."""
        self.refusing.clear()
        self.script.clear()
        self.silent = self.answers_lost = 0
        self.next_of, self.before_answer = None, do_nothing

    def catches_up(self) -> None:
        """Carry out the calls that timed out. Their errors are lost."""
        late_calls, self.late_calls = self.late_calls, []
        for call in late_calls:
            try:
                call()
            except errors.Problem:
                continue

    def _speak(self, method: str, about: str = "") -> None:
        """Record a call, and raise the error that the test has scheduled for its start.

        Args:
            method: The name of the method.
            about: Id of the object of the call, or "".
        """
        self.asked.append((method, about))
        outcome = self.script.get(self.calls)
        if outcome in REFUSALS:
            self.refusing[method, about] = REFUSALS[outcome]
        if refusal := self.refusing.get((method, about)):
            if not isinstance(refusal, errors.Unavailable):
                self.refused.append((method, about))
            raise type(refusal)(refusal.text)
        if self.silent or outcome is Answer.SILENT:
            self.silent = max(0, self.silent - 1)
            raise errors.NoAnswer(f"the {self.name} is silent")
        if outcome is Answer.SLOW:
            self.meanwhile()

    def _answer(self, answer: T) -> T:
        """Return a call's answer, or raise the error that the test has scheduled for its end."""
        self.before_answer()
        outcome = self.script.get(self.calls)
        if outcome is Answer.HALF:
            half(self.name)
        if self.answers_lost or self.calls == self.lost_at or outcome is Answer.LOST:
            self.answers_lost = max(0, self.answers_lost - 1)
            raise errors.NoAnswer(f"the {self.name}'s answer is lost")
        return answer


def _wrap_call(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with the outcomes ``next_of`` and ``Answer.LATE``."""

    @wraps(method)
    def call(self: ServiceDouble, *arguments: Any, **more: Any) -> Any:
        if self.next_of is not None and name in self.next_of[0]:
            self.script[self.calls + 1], self.next_of = self.next_of[1], None
        if self.script.get(self.calls + 1) is not Answer.LATE:
            return method(self, *arguments, **more)
        self.asked.append((name, "given up"))
        self.late_calls.append(partial(method, self, *arguments, **more))
        raise errors.NoAnswer(f"the {self.name} is slow")

    return call


def join_ids(values: Any) -> str:
    """Return the id that represents a list of objects in ``Call``."""
    return ",".join(sorted(map(str, values)))
