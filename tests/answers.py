# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a call to an external service, for the test doubles of the conductor and the API.

The calls are the methods of the interface that a double implements, so that tests cover new calls.
"""

from __future__ import annotations

import inspect
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn

from common.clients.http import document
from common.domain import errors


class Answer(Enum):
    """The outcome of a call."""

    FORBIDDEN = "refused with 403, and again if repeated, until the external service is ``well``"
    CONFLICT = "refused with 409, and again if repeated"
    SILENT = "no answer, and no effect"
    LOST = "no answer, but the effect takes place"
    HALF = "the effect takes place, but half of the answer is missing"
    SLOW = "an answer after the events of ``meanwhile``"
    LATE = "a timeout, and the effect later, when the external service ``catches_up``"


REFUSALS = {
    Answer.FORBIDDEN: errors.Forbidden("Forbidden."),
    Answer.CONFLICT: errors.Conflict("It is in use."),
}
#: Outcomes after which the caller does not know the effect.
UNKNOWN = (Answer.SILENT, Answer.LOST, Answer.HALF, Answer.LATE)
#: Outcomes with an effect, at once or later.
DONE = (Answer.LOST, Answer.HALF, Answer.SLOW, Answer.LATE)


def calls_of(interface: type) -> list[str]:
    """Return the names of an interface's public methods, sorted."""
    return [name for name, _ in inspect.getmembers(interface, inspect.isfunction) if name[0] != "_"]


def half(name: str) -> NoReturn:
    """Raise the error of this service's client for an incomplete JSON document."""

    def broken() -> Any:
        raise ValueError("Unterminated string")

    document(SimpleNamespace(content=b'{"id": "7', json=broken), name)  # type: ignore[arg-type]
    raise AssertionError("half a document was read")
