# SPDX-License-Identifier: Apache-2.0
"""Requests that wait, for a step of their own action or for the end of another action.

``for_step`` serves rows of ``states.ACTIONS`` with ``answer_after``. A definite failure of the step
becomes the request's error. After the timeout the result is unknown, and the caller answers as if
the action had only begun.

The interval of the polls grows from 20 to 200 ms. Requests to a server have separate threads
(``http.worker``), and only a limited number of these may wait.
"""

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
#: Seconds that a request waits for a slot, which permits the thread to wait for longer.
SLOT_SECONDS = 10.0
#: A request waits for its turn for this many times ``answer_timeout_seconds``.
TURN_TIMEOUTS = 2
_ENDED_EARLY = "The action ended before the requested change was complete."
#: Statuses of an external service for requests that its quota or policy forbids. The user gets 403.
_FORBIDDEN = (403, 413)
FIRST_POLL_SECONDS, MAX_POLL_SECONDS, POLL_BACKOFF = 0.02, 0.2, 1.5


@contextmanager
def slot(services: Services) -> Iterator[bool]:
    """Wait for a slot, which permits this thread to wait, and hold the slot during the with block.

    Yields True with a slot. Yields False if no slot becomes free within ``SLOT_SECONDS``, or within
    ``answer_timeout_seconds`` if that is shorter.
    """
    seconds = min(SLOT_SECONDS, services.settings.answer_timeout_seconds)
    is_free = services.wait_slots.acquire(timeout=seconds)
    try:
        yield is_free
    finally:
        if is_free:
            services.wait_slots.release()


def in_turn(services: Services, server_id: str, begin: Callable[[], T], *, waits: bool = True) -> T:
    """Begin an action as soon as earlier actions of the server have ended.

    Requests of this process to the same server begin their actions one after the other. The wait
    takes at most ``TURN_TIMEOUTS`` times ``answer_timeout_seconds``. If another request
    still has the turn after this time, ``begin`` is called once without the turn.

    Args:
        services: The services, with the queues of requests and the timeout.
        server_id: Id of the server.
        begin: Begins the action, or raises Busy while another action is running.
        waits: Whether the request has a slot. Without a slot ``begin`` is called once, without a
            wait.

    Returns:
        The result of ``begin``.

    Raises:
        Busy: The earlier actions have not ended in time.
    """
    seconds = TURN_TIMEOUTS * services.settings.answer_timeout_seconds if waits else 0
    end = time.monotonic() + seconds
    with services.turns.first(server_id, seconds):
        return for_turn(begin, timeout_seconds=max(0, end - time.monotonic()))


def begin_in_turn(services: Services, server_id: str, begin: Callable[[], T]) -> T:
    """Call ``begin``, and if that raises Busy, repeat the call until the other action has ended.

    Before the repeated calls this waits for a slot (``slot``) and for the request's turn
    (``in_turn``). If no slot becomes free, ``begin`` is called only once more.

    Args:
        services: The services, with the slots and the queues of requests.
        server_id: Id of the server.
        begin: Begins the action, or raises Busy while another action is running.

    Returns:
        The result of ``begin``.

    Raises:
        Busy: The earlier actions have not ended in time.
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
    """Wait for the success of a step, and return the event of the success, or None after a timeout.

    The failure of a step is raised only after the undo, when the whole action has failed.

    Args:
        store: The database, which is polled.
        action_id: Id of the action.
        step: Name of the step.
        failure: The error to raise for a failure.
        timeout_seconds: Limit for the wait.
        clock: Measures the timeout. None means the real clock.
        pause: Sleeps for a number of seconds.

    Raises:
        failure: The action failed at this step, ended before the step succeeded, or does not
            exist. The text is the message of the step's event or of the action, if any.
        Forbidden: The action failed at this step, because the policy or the quota of an external
            service does not allow the step.
    """
    clock = clock or Clock()
    end, delay = clock.monotonic() + timeout_seconds, FIRST_POLL_SECONDS
    while True:
        # Read the action before its events, because an ended action has all its events.
        action, event = store.read(
            lambda tx: (
                actions.show_by_id(tx, action_id),
                actions.step_outcome(tx, action_id, step),
            )
        )
        if event is not None and event.event == StepEvent.SUCCEEDED:
            return event
        if event is not None and action is not None and action.state == ActionState.FAILED:
            is_forbidden = ((action.data or {}).get("problem") or {}).get("status") in _FORBIDDEN
            raise (errors.Forbidden if is_forbidden else failure)(
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
    """Call ``begin`` until it no longer raises Busy, and return its result.

    With a timeout of 0, ``begin`` is called once. For the other arguments see ``for_step``.

    Raises:
        Busy: Another action was still running after the timeout.
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
