# SPDX-License-Identifier: Apache-2.0
"""A neighbour of the API, each call of which can go wrong as tests/answers.py says."""

from __future__ import annotations

from functools import partial
from typing import Any

from common.domain import errors
from tests.answers import REFUSALS, Answer, calls_of, half

#: Not a request to the neighbour: it tells where something is.
LOCAL = ("url",)


class Faulty:
    """Another double's calls; those of the interface are counted. ``script``: what becomes of the
    call of this number, beginning with 1."""

    def __init__(self, name: str, inner: Any, interface: type) -> None:
        self.name, self.inner = name, inner
        self.calls_known = [call for call in calls_of(interface) if call not in LOCAL]
        self.asked: list[str] = []
        self.script: dict[int, Answer] = {}
        self.late: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return partial(self._call, name, found) if name in self.calls_known else found

    def begin(self, **script: Answer) -> None:
        """Forget what was asked."""
        self.asked.clear()
        self.script = {int(number[1:]): how for number, how in script.items()}

    def _call(self, name: str, method: Any, *arguments: Any, **more: Any) -> Any:
        self.asked.append(name)
        how = self.script.get(len(self.asked))
        if how in REFUSALS:
            raise type(REFUSALS[how])(REFUSALS[how].text)
        if how in (Answer.SILENT, Answer.LATE):
            raise errors.NoAnswer(f"The {self.name} does not answer; try again later.")
        made = method(*arguments, **more)
        if how is Answer.HALF:
            half(self.name)
        if how is Answer.LOST:
            raise errors.NoAnswer(f"The {self.name} does not answer; try again later.")
        return made
