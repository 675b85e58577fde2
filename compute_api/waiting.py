# SPDX-License-Identifier: Apache-2.0
"""Answers that wait: for a step of an action that is committed as ever, or for the turn of one that may queue.

``for_step`` is called for rows of ``states.ACTIONS`` with ``answer_after``. A definite failure becomes the request's
error; when the time is over nothing is known, and the caller answers 202 as for any other action. Polls get rarer,
20 to 200 ms. A bounded share of the threads may wait.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from common import errors
from common.clock import Clock
from common.store import actions
from common.store.engine import Store

T = TypeVar("T")

PATIENCE = 30.0
_ENDED = "The action was ended before it was done."
#: What a neighbour refuses with when a quota of its is used up, or it forbids it: the user is told so.
_FORBIDDEN = (403, 413)
FIRST, LONGEST, SLOWER = 0.02, 0.2, 1.5


def for_step(store: Store, action_id: str, step: str, *, failure: type[errors.Problem] = errors.Conflict,
             patience: float = PATIENCE, clock: Clock | None = None, pause: Callable[[float], None] = time.sleep
             ) -> Any | None:
    """The event of the step when it has succeeded; None when the time (in seconds) was over first.

    Raises:
        Problem: of class ``failure``, with the journal's text: the step failed, or the action ended before it.
        Forbidden: a neighbour forbids it, or its quota is used up.
    """
    clock = clock or Clock()
    end, delay = clock.monotonic() + patience, FIRST
    while True:
        # The action before its events: of one that has ended, all events are there.
        action, event = store.read(lambda tx: (actions.show_by_id(tx, action_id),
                                               actions.step_outcome(tx, action_id, step)))
        if event is not None and event.event == "succeeded":
            return event
        if event is not None and action is not None and action.state == "failed":
            refused = ((action.data or {}).get("problem") or {}).get("status") in _FORBIDDEN
            raise (errors.Forbidden if refused else failure)(
                event.message or action.message or f"The step {step} failed.")
        if action is None or action.state in actions.ENDED:
            raise failure(action.message if action is not None and action.message else _ENDED)
        if clock.monotonic() + delay > end:
            return None
        pause(delay)
        delay = min(delay * SLOWER, LONGEST)


def for_turn(begin: Callable[[], T], *, patience: float = PATIENCE, clock: Clock | None = None,
             pause: Callable[[float], None] = time.sleep) -> T:
    """Begin an action as soon as the one before it has let go of the server; what ``begin`` returns.

    Raises:
        Busy: it has not when the time (in seconds) was over.
    """
    clock = clock or Clock()
    end, delay = clock.monotonic() + patience, FIRST
    while True:
        try:
            return begin()
        except errors.Busy:
            if clock.monotonic() + delay > end:
                raise
        pause(delay)
        delay = min(delay * SLOWER, LONGEST)
