# SPDX-License-Identifier: Apache-2.0
"""A double of an external service whose calls can fail as tests/answers.py describes."""

from __future__ import annotations

from functools import partial
from typing import Any

from common.domain import errors
from tests.answers import REFUSALS, Answer, calls_of, half

#: Methods that send no request to the external service.
LOCAL = ("url",)


class Faulty:
    """A wrapper of another double that counts its calls and lets some of them fail.

    Only calls of the interface count. ``script`` maps the number of a call, beginning with 1, to
    its outcome.
    """

    def __init__(self, name: str, inner: Any, interface: type) -> None:
        self.name, self.inner = name, inner
        self.interface_calls = [call for call in calls_of(interface) if call not in LOCAL]
        self.queries: list[str] = []
        self.script: dict[int, Answer] = {}
        self.late: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        return partial(self._call, name, attribute) if name in self.interface_calls else attribute

    def begin(self, **outcomes: Answer) -> None:
        """Forget the recorded calls and set new outcomes. For example, ``n2`` is call 2."""
        self.queries.clear()
        self.script = {int(number[1:]): answer for number, answer in outcomes.items()}

    def _call(self, name: str, method: Any, *arguments: Any, **more: Any) -> Any:
        self.queries.append(name)
        answer = self.script.get(len(self.queries))
        if answer in REFUSALS:
            raise type(REFUSALS[answer])(REFUSALS[answer].text)
        if answer in (Answer.SILENT, Answer.LATE):
            raise errors.NoAnswer(f"The {self.name} does not answer; try again later.")
        result = method(*arguments, **more)
        if answer is Answer.HALF:
            half(self.name)
        if answer is Answer.LOST:
            raise errors.NoAnswer(f"The {self.name} does not answer; try again later.")
        return result
