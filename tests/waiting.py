# SPDX-License-Identifier: Apache-2.0
"""Polling of conditions in other processes, threads and guests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
#: Maximum seconds between two calls of a question.
RAREST = 0.5


def await_true(
    question: Callable[[], T],
    seconds: float = 10,
    story: Callable[[], object] | str = "what was asked",
    pause: float = 0.02,
    late: float = 0.0,
) -> T:
    """Call the question until its answer is true, and return the answer.

    Args:
        question: The condition.
        seconds: Timeout.
        story: Text of the failure, or a function that returns the text.
        pause: Seconds between two calls.
        late: Fraction of the time so far that may pass before the next call. Use this if a call is
            expensive and the answer stays true.

    Raises:
        AssertionError: The answer is not true within the timeout.
    """
    start = time.monotonic()
    while not (answer := question()):
        waited = time.monotonic() - start
        assert waited < seconds, (
            f"not within {seconds:g} s: {story if isinstance(story, str) else story()}"
        )
        # Poll, because the other process cannot send a notification.
        time.sleep(max(pause, min(late * waited, RAREST)))
    return answer


def is_true_within(question: Callable[[], object], seconds: float, pause: float = 0.02) -> bool:
    """Return True if the answer becomes true within this time."""
    deadline = time.monotonic() + seconds
    while not (answer := question()) and time.monotonic() < deadline:
        # Poll, because the other process cannot send a notification.
        time.sleep(pause)
    return bool(answer)


def slowdown() -> float:
    """Return the current slowdown of a computation compared with an idle machine, at least 1."""
    start, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.1:
        pass
    return max(1.0, (time.monotonic() - start) / 0.1)
