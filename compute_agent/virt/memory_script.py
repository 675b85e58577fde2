# SPDX-License-Identifier: Apache-2.0
"""What a test tells a host in memory to do at a call, and how its verbs wait.

Used by ``virt.memory_host`` and the verbs on top of it. A verb that waits asks all the time whether it is cancelled.
"""
from __future__ import annotations

import time
from dataclasses import dataclass

from compute_agent.virt.driver import Cancelled, Run

#: Seconds between two questions whether to go on.
MOMENT = 0.02
QUIET = Run(phase=lambda name: None, cancelled=lambda: False)


@dataclass(frozen=True, slots=True)
class Slow:
    """The call takes ``seconds`` more: before its effect, or between the effect and the answer."""

    seconds: float
    after: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The call raises VerbFailed before it has any effect."""

    text: str = "The hypervisor refused."
    retryable: bool = False
    details: str = "scripted"


def nap(run: Run) -> None:
    """A moment; raises Cancelled."""
    wait(MOMENT, run)


def wait(seconds: float, run: Run) -> None:
    deadline = time.monotonic() + seconds
    while not run.cancelled():
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, MOMENT))
    raise Cancelled
