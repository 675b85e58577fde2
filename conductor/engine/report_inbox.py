# SPDX-License-Identifier: Apache-2.0
"""Reports of hosts that wait for the next round, and the choice of each round.

After a failure of the broker or of all conductors, all hosts register at once. An agent waits a few
seconds for the answer and then sends a newer request. So a round that processed the oldest requests
first would answer requests that agents have given up, and no host would ever be up. Hence:

* Reports within a session come first, because their hosts are up.
* Of registrations a round takes a few, the newest first. Then a round is short.
* An older registration of the same host, and one that waited too long, fails without any work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from common.domain import errors
from common.domain.models import Sync, SyncAnswer

#: Reports within a session, and registrations, of one round.
MAX_REPORTS, MAX_REGISTRATIONS = 256, 16
#: An agent waits at most so long for an answer (``compute_agent.service``).
PATIENCE_SECONDS = 4.0
STOPPING = "This conductor is stopping. Send the request again."
LATE = "The registration of host {} waited too long, or a newer one replaced it. Send it again."


@dataclass(frozen=True)
class WaitingReport:
    """A report without an answer yet. ``came_at`` is the monotonic time of the arrival."""

    sync: Sync
    answer: Future[SyncAnswer]
    came_at: float


class ReportInbox:
    """The waiting reports of one conductor. Thread-safe.

    ``monotonic`` is the clock, in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._lock, self._arrival = monotonic, threading.Lock(), threading.Event()
        self._reports: list[WaitingReport] = []
        self._registrations: list[WaitingReport] = []
        self._is_closed = False

    def put(self, sync: Sync) -> Future[SyncAnswer]:
        """Add a report, and return the future of its answer.

        Raises:
            Unavailable: The inbox is closed.
        """
        waiting = WaitingReport(sync, Future(), self._monotonic())
        with self._lock:
            if self._is_closed:
                raise errors.Unavailable(STOPPING)
            (self._reports if sync.session else self._registrations).append(waiting)
        self._arrival.set()
        return waiting.answer

    def wait(self, seconds: float) -> None:
        """Wait until a report waits, the inbox is closed, or the time is over."""
        self._arrival.wait(seconds)

    def take(self) -> list[WaitingReport]:
        """Remove and return the reports of one round. Late registrations fail with Unavailable."""
        with self._lock:
            self._arrival.clear()
            reports, self._reports = self._reports[:MAX_REPORTS], self._reports[MAX_REPORTS:]
            newest, late = _select_newest(self._registrations, self._monotonic() - PATIENCE_SECONDS)
            taken, self._registrations = newest[-MAX_REGISTRATIONS:], newest[:-MAX_REGISTRATIONS]
            if self._reports or self._registrations:
                self._arrival.set()
        for waiting in late:
            waiting.answer.set_exception(errors.Unavailable(LATE.format(waiting.sync.host)))
        return reports + taken

    def close(self) -> None:
        """Refuse further reports. Waiting reports fail with Unavailable."""
        with self._lock:
            self._is_closed = True
            reports = self._reports + self._registrations
            self._reports, self._registrations = [], []
        for waiting in reports:
            waiting.answer.set_exception(errors.Unavailable(STOPPING))
        self._arrival.set()


def _select_newest(
    registrations: Sequence[WaitingReport], since: float
) -> tuple[list[WaitingReport], list[WaitingReport]]:
    """Return the newest registration of each host that came after ``since``, and all others.

    The first list is in the order of arrival.
    """
    by_host: dict[str, WaitingReport] = {}
    late = []
    for waiting in registrations:
        older = by_host.pop(waiting.sync.host, None)
        late += [older] if older else []
        by_host[waiting.sync.host] = waiting
    newest = [waiting for waiting in by_host.values() if waiting.came_at >= since]
    return newest, late + [waiting for waiting in by_host.values() if waiting.came_at < since]
