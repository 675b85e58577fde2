# SPDX-License-Identifier: Apache-2.0
"""Requests that wait: for a step of the action that they began, or for another action of the server
to end.

``for_step`` serves rows of ``states.ACTIONS`` with ``answer_after``. A definite failure becomes the
request's error. When the time is over, the outcome is unknown and the caller answers 202, as for
any other action. The interval of the polls grows from 20 to 200 ms. Requests to a server have
threads of their own (``edge.worker``), most of which may wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from common.domain import errors
from common.domain.clock import Clock
from common.domain.statuses import ActionState, StepEvent
from common.store.engine import Store
from common.store.rows import EventRow
from common.store.servers import actions

if TYPE_CHECKING:
    from compute_api.compute.request.dependencies import Services

T = TypeVar("T")

STEP_TIMEOUT_SECONDS = 30.0
SLOT_SECONDS = 10.0  #: that a request waits for a thread which may wait
TURN_TIMEOUTS = 2  #: timeouts of an answer for which a request waits for its turn
_ENDED_EARLY = "The action was ended before it was done."
#: Statuses with which another service refuses what its quota or policy forbids; the user gets the
#: same.
_FORBIDDEN = (403, 413)
FIRST_POLL_SECONDS, MAX_POLL_SECONDS, POLL_BACKOFF = 0.02, 0.2, 1.5


@contextmanager
def slot(services: Services) -> Iterator[bool]:
    """Wait for one of the threads that may wait. Yields False if none is free in time."""
    seconds = min(SLOT_SECONDS, services.settings.answer_timeout_seconds)
    is_free = services.wait_slots.acquire(timeout=seconds)
    try:
        yield is_free
    finally:
        if is_free:
            services.wait_slots.release()


def in_turn(services: Services, server_id: str, begin: Callable[[], T], *, waits: bool = True) -> T:
    """Begin an action of a server when those before it have ended.

    Args:
        begin: Begins it, or raises Busy.
        waits: Whether the request has a slot; without one it tries once.

    Raises:
        Busy: The actions before it have not ended within the time.
    """
    seconds = TURN_TIMEOUTS * services.settings.answer_timeout_seconds if waits else 0
    end = time.monotonic() + seconds
    with services.turns.first(server_id, seconds):
        return for_turn(begin, timeout_seconds=max(0, end - time.monotonic()))


def begin_in_turn(services: Services, server_id: str, begin: Callable[[], T]) -> T:
    """Begin an action at once, or in its turn if another action has the server.

    Raises:
        Busy: As ``in_turn``.
    """
    try:
        return begin()
    except errors.Busy:
        with slot(services) as is_free:
            return in_turn(services, server_id, begin, waits=is_free)


def for_step(
    store: Store,
    action_id: str,
    step: str,
    *,
    failure: type[errors.Problem] = errors.Conflict,
    timeout_seconds: float = STEP_TIMEOUT_SECONDS,
    clock: Clock | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> EventRow | None:
    """The event of the step when it has succeeded; None when the time was over first.

    Raises:
        Problem: of class ``failure``, with the journal's text: the step failed, or the action ended
        before it.
        Forbidden: another service forbids it, or its quota is used up.
    """
    clock = clock or Clock()
    end, delay = clock.monotonic() + timeout_seconds, FIRST_POLL_SECONDS
    while True:
        # The action before its events: of one that has ended, all events are there.
        action, event = store.read(
            lambda tx: (
                actions.show_by_id(tx, action_id),
                actions.step_outcome(tx, action_id, step),
            )
        )
        if event is not None and event.event == StepEvent.SUCCEEDED:
            return event
        if event is not None and action is not None and action.state == ActionState.FAILED:
            refused = ((action.data or {}).get("problem") or {}).get("status") in _FORBIDDEN
            raise (errors.Forbidden if refused else failure)(
                event.message or action.message or f"The step {step} failed."
            )
        if action is None or action.state in actions.ENDED:
            raise failure(action.message if action is not None and action.message else _ENDED_EARLY)
        if clock.monotonic() + delay > end:
            return None
        pause(delay)
        delay = min(delay * POLL_BACKOFF, MAX_POLL_SECONDS)


def for_turn(
    begin: Callable[[], T],
    *,
    timeout_seconds: float = STEP_TIMEOUT_SECONDS,
    clock: Clock | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """Begin an action as soon as the one before it has ended; what ``begin`` returns.

    Raises:
        Busy: it has not when the time was over.
    """
    clock = clock or Clock()
    end, delay = clock.monotonic() + timeout_seconds, FIRST_POLL_SECONDS
    while True:
        try:
            return begin()
        except errors.Busy:
            if clock.monotonic() + delay > end:
                raise
        pause(delay)
        delay = min(delay * POLL_BACKOFF, MAX_POLL_SECONDS)
