# SPDX-License-Identifier: Apache-2.0
"""The one loop of tests that wait for something which cannot call them: another process, a thread,
a guest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
RAREST = 0.5  # seconds between two questions, at most


def await_true(
    question: Callable[[], T],
    seconds: float = 10,
    story: Callable[[], object] | str = "what was asked",
    pause: float = 0.02,
    late: float = 0.0,
) -> T:
    """Ask until the answer is true and return it; fail with the story.

    ``late``: a part of the time so far that may pass before it is asked again, where asking is dear
    and what is awaited stays as it is.
    """
    began = time.monotonic()
    while not (answer := question()):
        waited = time.monotonic() - began
        assert waited < seconds, (
            f"not within {seconds:g} s: {story if isinstance(story, str) else story()}"
        )
        time.sleep(max(pause, min(late * waited, RAREST)))  # who is asked about cannot tell
    return answer


def is_true_within(question: Callable[[], object], seconds: float, pause: float = 0.02) -> bool:
    """Whether the answer becomes true in this time."""
    deadline = time.monotonic() + seconds
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(pause)  # who is asked about cannot tell
    return bool(answer)


def slowdown() -> float:
    """How many times as long as on an idle machine a computation takes just now, at least once."""
    began, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.1:
        pass
    return max(1.0, (time.monotonic() - began) / 0.1)
