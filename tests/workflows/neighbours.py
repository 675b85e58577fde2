# SPDX-License-Identifier: Apache-2.0
"""What both neighbours in memory have in common: how they can answer any of their calls otherwise
than they should."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from common import errors

T = TypeVar("T")
Call = tuple[str, str]  # a method, and what it is about


class Answer(Enum):
    """What becomes of a call."""

    FORBIDDEN = (
        "it is refused with 403, and so is the same one again until the neighbour is ``well``"
    )
    CONFLICT = "the same with 409"
    SILENT = "it is not answered, and has done nothing"
    LOST = "it is not answered, and is done all the same"


REFUSALS = {
    Answer.FORBIDDEN: errors.Forbidden("Forbidden."),
    Answer.CONFLICT: errors.Conflict("It is in use."),
}


@dataclass
class Neighbour:
    """``silent`` and ``answers_lost`` count calls that go wrong from now on; ``script`` says it by
    the call's number, beginning with 1."""

    name: str
    silent: int = 0  # calls that are not answered, and do nothing
    answers_lost: int = 0  # calls that are not answered, and are done all the same
    lost_at: int = 0  # the answer to the call of this number is lost
    script: dict[int, Answer] = field(default_factory=dict)
    refusing: dict[Call, errors.Problem] = field(default_factory=dict)
    asked: list[Call] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return len(self.asked)

    def well(self) -> None:
        """It refuses nothing any more."""
        self.refusing.clear()
        self.script.clear()
        self.silent = self.answers_lost = 0

    def _speak(self, method: str, about: str = "") -> None:
        """Each call begins so."""
        self.asked.append((method, about))
        what = self.script.get(self.calls)
        if what in REFUSALS:
            self.refusing[method, about] = REFUSALS[what]
        if refusal := self.refusing.get((method, about)):
            raise type(refusal)(refusal.text)
        if self.silent or what is Answer.SILENT:
            self.silent = max(0, self.silent - 1)
            raise errors.NoAnswer(f"the {self.name} is silent")

    def _answer(self, answer: T) -> T:
        """Each call ends so."""
        if (
            self.answers_lost
            or self.calls == self.lost_at
            or self.script.get(self.calls) is Answer.LOST
        ):
            self.answers_lost = max(0, self.answers_lost - 1)
            raise errors.NoAnswer(f"the {self.name}'s answer is lost")
        return answer


def one(values: Any) -> str:
    """What a call with a list is about."""
    return ",".join(sorted(map(str, values)))
