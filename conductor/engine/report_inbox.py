# SPDX-License-Identifier: Apache-2.0
"""Reports of hosts that wait for the next round, and the choice of each round.

After a failure of the broker or of all conductors, all hosts register or report all domains at
once. An agent waits a few seconds for the answer and then sends a newer report, which contains
what the older one contained. So a round that processed the oldest reports first would answer
reports that agents have given up, and no host would ever be up. Hence:

* A round takes few registrations and reports of all domains, because these cost much. Other
  reports, for example with the result of a command, do not wait for many of them.
* A round takes the newest reports first.
* An older report of the same host, and a report that waited too long, fail without any work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from common.domain import errors
from common.domain.models import Sync, SyncAnswer

#: Limits of one round: all reports, and registrations and reports of all domains.
MAX_REPORTS, MAX_FULL_REPORTS = 256, 16
#: An agent waits at most so long for an answer (``compute_agent.service``).
PATIENCE_SECONDS = 4.0
STOPPING = "This conductor is stopping. Send the request again."
LATE = "The report of host {} waited too long, or a newer one replaced it. Send it again."


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
            self._reports.append(waiting)
        self._arrival.set()
        return waiting.answer

    def wait(self, seconds: float) -> None:
        """Wait until a report waits, the inbox is closed, or the time is over."""
        self._arrival.wait(seconds)

    def take(self) -> list[WaitingReport]:
        """Remove and return the reports of one round. Late reports fail with Unavailable."""
        with self._lock:
            self._arrival.clear()
            newest, late = _select_newest(self._reports, self._monotonic() - PATIENCE_SECONDS)
            taken, self._reports = _split(newest)
            if self._reports:
                self._arrival.set()
        for waiting in late:
            waiting.answer.set_exception(errors.Unavailable(LATE.format(waiting.sync.host)))
        return taken

    def close(self) -> None:
        """Refuse further reports. Waiting reports fail with Unavailable."""
        with self._lock:
            self._is_closed = True
            reports, self._reports = self._reports, []
        for waiting in reports:
            waiting.answer.set_exception(errors.Unavailable(STOPPING))
        self._arrival.set()


def _select_newest(
    reports: Sequence[WaitingReport], since: float
) -> tuple[list[WaitingReport], list[WaitingReport]]:
    """Return the newest report of each host that came after ``since``, and all others.

    The first list is in the order of arrival.
    """
    by_host: dict[str, WaitingReport] = {}
    late = []
    for waiting in reports:
        older = by_host.pop(waiting.sync.host, None)
        late += [older] if older else []
        by_host[waiting.sync.host] = waiting
    newest = [waiting for waiting in by_host.values() if waiting.came_at >= since]
    return newest, late + [waiting for waiting in by_host.values() if waiting.came_at < since]


def _split(reports: Sequence[WaitingReport]) -> tuple[list[WaitingReport], list[WaitingReport]]:
    """Return the reports of one round, newest first, and the remaining ones in their order."""
    taken: list[WaitingReport] = []
    remaining, full_reports = [], 0
    for waiting in reversed(reports):
        is_full = waiting.sync.session == 0 or waiting.sync.domains is not None
        if len(taken) == MAX_REPORTS or (is_full and full_reports == MAX_FULL_REPORTS):
            remaining.append(waiting)
            continue
        full_reports += is_full
        taken.append(waiting)
    return taken, remaining[::-1]
