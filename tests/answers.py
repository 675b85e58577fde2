# SPDX-License-Identifier: Apache-2.0
"""What can become of a call of a neighbour: one table for the doubles of all of them, of the
conductor and of the API. The calls are those of the interface that a double stands for, so that a
new one cannot be forgotten."""

from __future__ import annotations

import inspect
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn

from common.clients.http import document
from common.domain import errors


class Answer(Enum):
    """What becomes of a call."""

    FORBIDDEN = (
        "it is refused with 403, and so is the same one again until the neighbour is ``well``"
    )
    CONFLICT = "the same with 409"
    SILENT = "it is not answered, and has done nothing"
    LOST = "it is not answered, and is done all the same"
    HALF = "it is done, and half of an answer comes, which nobody can read"
    SLOW = "it is answered when others have gone on ``meanwhile``"
    LATE = "it is given up, and done later: when the neighbour ``catches_up``"


REFUSALS = {
    Answer.FORBIDDEN: errors.Forbidden("Forbidden."),
    Answer.CONFLICT: errors.Conflict("It is in use."),
}
#: After these a caller does not know what has become of it.
UNKNOWN = (Answer.SILENT, Answer.LOST, Answer.HALF, Answer.LATE)
#: With these it is done, sooner or later.
DONE = (Answer.LOST, Answer.HALF, Answer.SLOW, Answer.LATE)


def calls_of(interface: type) -> list[str]:
    """The names of an interface's methods, in their order."""
    return [name for name, _ in inspect.getmembers(interface, inspect.isfunction) if name[0] != "_"]


def half(name: str) -> NoReturn:
    """What a client of this neighbour makes of the first half of a document."""

    def broken() -> Any:
        raise ValueError("Unterminated string")

    document(SimpleNamespace(content=b'{"id": "7', json=broken), name)  # type: ignore[arg-type]
    raise AssertionError("half a document was read")
