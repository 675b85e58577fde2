# SPDX-License-Identifier: Apache-2.0
"""Share the time of a process between projects.

Under Python's global lock, expensive requests of one project would slow down every other request.
Therefore only a limited number of requests of a project run at the same time. Further requests of
the project wait in a queue without a thread, and projects take turns.

``limit_projects`` is placed between authentication and the application, because the project is only
known after the token is validated. When a request must wait, the worker keeps the request and calls
the whole application again later. Until then only the token has been validated.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import orjson

#: Key of the request's ``Admission`` in the WSGI environment.
ADMISSION = "kilonova.admission"
#: Waiting requests are refused after this time.
MAX_WAIT_SECONDS = 30.0
#: Largest number of waiting requests of a project in a lane.
MAX_WAITING = 256
_REFUSED = "Too many requests of this project are being served; try again later."


class Admission:
    """The permission of a request to run in a lane.

    Attributes:
        lane: The lane.
        resume: Gives the request to a thread again. This is called in any thread.
        began: Time at which the request arrived, for the log.
        project: Id of the project, once the token is validated.
        deadline: Time at which a waiting request is refused.
        holds_place: The request runs.
        must_wait: The response that was just built must be discarded, because the request waits.
        is_refused: The request has waited too long, or too many requests of the project wait.
    """

    def __init__(self, lane: Lane, resume: Callable[[], object]) -> None:
        self.lane, self.resume = lane, resume
        self.began = time.perf_counter()
        self.project = ""
        self.deadline = 0.0
        self.holds_place = self.must_wait = self.is_refused = False


class Lane:
    """Running and waiting requests of one kind. Thread-safe.

    Args:
        places: Largest number of running requests. A number below 2 counts as 2.
        places_of_project: The same for a single project. 0 counts as 1.
        monotonic: The clock.
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
        """Take a place for a request if the lane and the project have a free one.

        Returns:
            True if the request has a place and may run. False if no place is free, or if earlier
            requests of the project are waiting. Then the caller calls ``wait``.
        """
        with self._lock:
            if admission.project not in self._waiting and self._has_place(admission.project):
                self._take_place(admission)
            return admission.holds_place

    def wait(self, admission: Admission) -> None:
        """Put a request into the queue of its project.

        The request is resumed when a place becomes free, which may be at once. The request is
        refused after ``MAX_WAIT_SECONDS``, or at once if ``MAX_WAITING`` requests of the project
        are waiting.
        """
        with self._lock:
            line = self._waiting.setdefault(admission.project, deque())
            admission.deadline = self._monotonic() + MAX_WAIT_SECONDS
            line.append(admission)
            refused = [line.pop()] if len(line) > MAX_WAITING else []
            resumed = self._advance()
        self._resume(resumed, refused)

    def leave(self, admission: Admission) -> None:
        """Release the place of a request, if it has one, and resume waiting requests."""
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
        """Refuse the requests that have waited for ``MAX_WAIT_SECONDS``.

        ``Lanes.refuse_late`` calls this regularly.
        """
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
        """Give free places to waiting requests, one project after the other.

        Returns:
            The requests that have got a place. The caller resumes them.
        """
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
    """The lanes of a process.

    Reads and changes have separate lanes, both for the normal threads and for the waiting threads.
    A change often waits for an external service or an action. A read mostly needs CPU time, so
    fewer reads run at the same time. Some reads of one server wait for its host. They use the
    waiting threads, so that a silent host does not block all reads of a project.
    """

    reads: Lane
    changes: Lane
    waiting_reads: Lane
    waiting_changes: Lane

    @classmethod
    def create(cls, threads: int, waiting_threads: int) -> Lanes:
        """Return lanes with a place for a change in each of these threads.

        The lanes of reads have half as many places, in the threads of ``threads_beside``. A project
        can use half of the places for changes and a quarter of those for reads, at least one each.

        Args:
            threads: Number of the normal threads.
            waiting_threads: Number of the threads for requests that may wait for a host.
        """
        return cls(
            Lane(threads // 2, threads // 8),
            Lane(threads, threads // 2),
            Lane(waiting_threads // 2, waiting_threads // 8),
            Lane(waiting_threads, waiting_threads // 2),
        )

    @staticmethod
    def threads_beside(threads: int) -> int:
        """Return the number of additional threads, for reads and for validating tokens."""
        return threads // 2 + 6

    def of(self, method: str, may_wait: bool) -> Lane:
        """Return the lane of a request.

        Args:
            method: The HTTP method.
            may_wait: True if the request uses the waiting threads.
        """
        if method in ("GET", "HEAD"):
            return self.waiting_reads if may_wait else self.reads
        return self.waiting_changes if may_wait else self.changes

    def refuse_late(self) -> None:
        """Refuse the requests of all lanes that have waited for ``MAX_WAIT_SECONDS``."""
        for lane in (self.reads, self.changes, self.waiting_reads, self.waiting_changes):
            lane.refuse_late()


def limit_projects(
    application: WSGIApplication, fault: Callable[[int, str], object]
) -> WSGIApplication:
    """Wrap the application so that a request only runs with a place in its lane.

    Without a free place the response is 503. Unless the lane has refused the request, this also
    sets ``Admission.must_wait``. Then the worker discards the response and calls the application
    again later. A request without an ``Admission`` or without a project is not limited.

    Args:
        application: Called with the headers that authentication sets.
        fault: Builds the body of an error from status and text.
    """

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        admission: Admission | None = environ.get(ADMISSION)
        project = environ.get("HTTP_X_PROJECT_ID", "")
        if admission is None or not project or admission.holds_place:
            return application(environ, start_response)
        admission.project = project
        if not admission.is_refused and admission.lane.enter(admission):
            return application(environ, start_response)
        # If the request must wait, the worker discards this response.
        admission.must_wait = not admission.is_refused
        start_response(
            "503 Service Unavailable", [("Content-Type", "application/json"), ("Retry-After", "1")]
        )
        return [orjson.dumps(fault(503, _REFUSED))]

    return entry
