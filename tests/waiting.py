# SPDX-License-Identifier: Apache-2.0
"""The one loop of tests that wait for something which cannot call them: another process, a thread, a guest."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def await_true(question: Callable[[], T], seconds: float = 10, story: Callable[[], object] | str = "what was asked",
               pause: float = 0.02) -> T:
    """Ask until the answer is true and return it; fail with the story."""
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {story if isinstance(story, str) else story()}"
        time.sleep(pause)       # who is asked about cannot tell
    return answer


def is_true_within(question: Callable[[], object], seconds: float, pause: float = 0.02) -> bool:
    """Whether the answer becomes true in this time."""
    deadline = time.monotonic() + seconds
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(pause)       # who is asked about cannot tell
    return bool(answer)
