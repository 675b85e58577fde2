# SPDX-License-Identifier: Apache-2.0
"""Share a process's time between projects.

Under Python's global lock, many expensive requests of one project would slow down every other
request. A project therefore has a bounded number of requests that run at a time. The others of this
project wait in a line without a thread, and projects take turns.

The project is known only after its token was checked. ``admitted`` therefore stands between
authentication and the application. When a request has to wait, the worker keeps it and calls the
whole application again when its turn has come. Until then only its token was looked at.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import orjson

ADMISSION = "kilonova.admission"  #: in the WSGI environment: the request's ``Admission``
MAX_WAIT_SECONDS = 30.0  #: after which a request that waits is refused
MAX_WAITING = 256  #: requests of one project that wait in a lane
_REFUSED = "Too many requests of this project are being served; try again later."


class Admission:
    """One request's permission to run in a lane.

    Args:
        lane: The lane that the request runs in.
        resume: Gives the request to a thread again. Called in any thread.
    """

    def __init__(self, lane: Lane, resume: Callable[[], object]) -> None:
        self.lane, self.resume = lane, resume
        self.began = time.perf_counter()
        self.project = ""
        self.deadline = 0.0
        self.holds_place = self.must_wait = self.is_refused = False


class Lane:
    """Requests of one kind that run or wait. Thread-safe.

    Args:
        places: Requests that run at a time; at least 2.
        places_of_project: The same of one project; at least 1.
    """

    def __init__(
        self,
        places: int,
        places_of_project: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free, self._each, self._monotonic = (
            max(2, places),
            max(1, places_of_project),
            monotonic,
        )
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        #: Requests that wait, by project. The first project has the next turn.
        self._waiting: OrderedDict[str, deque[Admission]] = OrderedDict()

    def enter(self, admission: Admission) -> bool:
        """Let a request run if its project has a free place. Others of its project that wait go
        first."""
        with self._lock:
            if admission.project not in self._waiting and self._has_place(admission.project):
                self._take_place(admission)
            return admission.holds_place

    def wait(self, admission: Admission) -> None:
        """Put a request into its project's line. It resumes when it has a place, or when it is
        refused."""
        with self._lock:
            line = self._waiting.setdefault(admission.project, deque())
            admission.deadline = self._monotonic() + MAX_WAIT_SECONDS
            line.append(admission)
            refused = [line.pop()] if len(line) > MAX_WAITING else []
            resumed = self._advance()
        self._resume(resumed, refused)

    def leave(self, admission: Admission) -> None:
        """Give up the place of a request, if it has one."""
        with self._lock:
            if not admission.holds_place:
                return
            admission.holds_place = False
            self._free += 1
            self._running[admission.project] -= 1
            if not self._running[admission.project]:
                del self._running[admission.project]
            resumed = self._advance()
        self._resume(resumed, [])

    def refuse_late(self) -> None:
        """Refuse the requests that have waited too long."""
        now, refused = self._monotonic(), []
        with self._lock:
            for project, line in list(self._waiting.items()):
                while line and line[0].deadline < now:
                    refused.append(line.popleft())
                if not line:
                    del self._waiting[project]
        self._resume([], refused)

    def _has_place(self, project: str) -> bool:
        return self._free > 0 and self._running[project] < self._each

    def _take_place(self, admission: Admission) -> None:
        self._free -= 1
        self._running[admission.project] += 1
        admission.holds_place = True

    def _advance(self) -> list[Admission]:
        """Give free places to requests that wait, to one project after the other."""
        resumed: list[Admission] = []
        while project := next(filter(self._has_place, self._waiting), None):
            line = self._waiting[project]
            resumed.append(line.popleft())
            self._take_place(resumed[-1])
            self._waiting.move_to_end(project)
            if not line:
                del self._waiting[project]
        return resumed

    @staticmethod
    def _resume(resumed: Iterable[Admission], refused: Iterable[Admission]) -> None:
        for admission in refused:
            admission.is_refused = True
        for admission in (*resumed, *refused):
            admission.must_wait = False
            admission.resume()


@dataclass(frozen=True)
class Lanes:
    """The lanes of a process: for requests of its usual threads and of its waiting threads, reads
    apart from changes.

    A change often waits for another service or for an action. A read mostly uses the processor, so
    that fewer of them may run. Some reads of one server wait for its host: they have the places of
    the waiting threads, so that a silent host does not hold up all reads of a project.
    """

    reads: Lane
    changes: Lane
    waiting_reads: Lane
    waiting_changes: Lane

    @classmethod
    def sized(cls, threads: int, waiting_threads: int) -> Lanes:
        """Return lanes with a place for a change in each of these threads. Reads need
        ``threads_beside``."""
        return cls(
            Lane(threads // 2, threads // 8),
            Lane(threads, threads // 2),
            Lane(waiting_threads // 2, waiting_threads // 8),
            Lane(waiting_threads, waiting_threads // 2),
        )

    @staticmethod
    def threads_beside(threads: int) -> int:
        """Return how many more threads a pool needs: for reads, and to look at tokens."""
        return threads // 2 + 6

    def of(self, method: str, may_wait: bool) -> Lane:
        """Return the lane of a request."""
        if method in ("GET", "HEAD"):
            return self.waiting_reads if may_wait else self.reads
        return self.waiting_changes if may_wait else self.changes

    def refuse_late(self) -> None:
        """Refuse the requests that have waited too long."""
        for lane in (self.reads, self.changes, self.waiting_reads, self.waiting_changes):
            lane.refuse_late()


def admitted(application: WSGIApplication, fault: Callable[[int, str], object]) -> WSGIApplication:
    """The application, called for a project only when the project has a free place.

    Args:
        application: Called with the headers that authentication sets.
        fault: Makes the body of an error.
    """

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        admission: Admission | None = environ.get(ADMISSION)
        project = environ.get("HTTP_X_PROJECT_ID", "")
        if admission is None or not project or admission.holds_place:
            return application(environ, start_response)
        admission.project = project
        if not admission.is_refused and admission.lane.enter(admission):
            return application(environ, start_response)
        # The worker drops this answer if the request is only to wait.
        admission.must_wait = not admission.is_refused
        start_response(
            "503 Service Unavailable", [("Content-Type", "application/json"), ("Retry-After", "1")]
        )
        return [orjson.dumps(fault(503, _REFUSED))]

    return entry
