# SPDX-License-Identifier: Apache-2.0
"""Scripted behaviour of calls to a host in memory, for tests, and the waiting of verbs.

A verb that waits checks for a cancellation every ``LOOK_SECONDS``.
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
    """The scripted call takes ``seconds`` longer.

    The call waits before the effect, or with ``after`` between the effect and the return.
    """

    seconds: float
    after: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The scripted call raises VerbFailed with these values, before any effect."""

    text: str = "The hypervisor refused."
    retryable: bool = False
    details: str = "scripted"
    reason: FailureReason = FailureReason.UNSPECIFIED


def wait(seconds: float, context: VerbContext) -> None:
    """Wait ``seconds``, or raise Cancelled when the verb is cancelled, even with 0 seconds."""
    deadline = time.monotonic() + seconds
    while not context.cancelled():
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, LOOK_SECONDS))
    raise Cancelled
