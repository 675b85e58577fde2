# SPDX-License-Identifier: Apache-2.0
"""The behaviour that a test scripts for a call of a host in memory, and how its verbs wait.

A verb that waits asks every ``LOOK_SECONDS`` whether it is cancelled.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from common.domain.models import FailureReason
from compute_agent.verb_context import Cancelled, VerbContext

LOOK_SECONDS = 0.02
QUIET = VerbContext(report_progress=lambda progress: None, cancelled=lambda: False)


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
    reason: FailureReason = FailureReason.UNSPECIFIED


def wait(seconds: float, context: VerbContext) -> None:
    """Raises Cancelled, also with 0 seconds."""
    deadline = time.monotonic() + seconds
    while not context.cancelled():
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, LOOK_SECONDS))
    raise Cancelled
