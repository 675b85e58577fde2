# SPDX-License-Identifier: Apache-2.0
"""The health of a process: /healthcheck and /healthcheck/ready.

/healthcheck shows that the process is alive. /healthcheck/ready shows whether it can serve
requests, with each dependency by name. Both need no token and are meant for load balancers and
operators. The dependencies are checked at most once in ``KEEP_SECONDS``, and other requests get the
previous result. A dependency that does not answer in ``TIMEOUT_SECONDS`` is reported as failed. The
response only contains error texts that users may see. Further details are logged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import orjson

from common.domain import errors
from common.domain.json_types import JsonObject
from common.service.log import get_logger

log = get_logger(__name__)
ALIVE, READY = "/healthcheck", "/healthcheck/ready"
KEEP_SECONDS, TIMEOUT_SECONDS = 3.0, 3.0
Check = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Dependency:
    """A dependency of the process.

    Attributes:
        name: Name in the response.
        check: Raises an exception if the dependency fails.
        required: True: the process is not ready without this dependency. False: the process stays
            ready, although some operations fail.
    """

    name: str
    check: Check
    required: bool = True


class Health:
    """The health of this process. Create this after the fork, because threads are started."""

    def __init__(
        self,
        dependencies: Iterable[Dependency],
        monotonic: Callable[[], float] = time.monotonic,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._dependencies, self._monotonic, self._timeout = tuple(dependencies), monotonic, timeout
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(
            max(1, len(self._dependencies)), thread_name_prefix="health"
        )
        self._pending: dict[str, Future[str]] = {}
        self._failures: dict[str, str] = {}
        self._fresh_until = float("-inf")

    def answer(self, path: str) -> tuple[int, JsonObject] | None:
        """Return status and body for the path ``ALIVE`` or ``READY``, or None for another path.

        ``ALIVE`` always has status 200. ``READY`` has 503 if a required dependency fails, else 200.
        """
        if path == ALIVE:
            return 200, {"status": "alive"}
        if path != READY:
            return None
        failures = self._read_failures()
        is_ready = not any(
            failures[dependency.name] for dependency in self._dependencies if dependency.required
        )
        dependencies = {
            dependency.name: {
                "status": "failed",
                "message": failures[dependency.name],
                "required": dependency.required,
            }
            if failures[dependency.name]
            else {"status": "ok", "required": dependency.required}
            for dependency in self._dependencies
        }
        status = "ready" if is_ready else "not ready"
        return 200 if is_ready else 503, {"status": status, "dependencies": dependencies}

    def _read_failures(self) -> Mapping[str, str]:
        """Return the error text of each dependency by name, "" if the dependency works.

        If the last result is older than ``KEEP_SECONDS``, one thread checks again. Meanwhile other
        threads return the previous result, or wait for the first result.
        """
        if not self._lock.acquire(blocking=not self._failures):
            return self._failures
        try:
            if self._monotonic() >= self._fresh_until:
                self._failures = self._check_dependencies()
                self._fresh_until = self._monotonic() + KEEP_SECONDS
            return self._failures
        finally:
            self._lock.release()

    def _check_dependencies(self) -> dict[str, str]:
        for dependency in self._dependencies:
            # A check that has not ended yet is not repeated.
            if dependency.name not in self._pending:
                self._pending[dependency.name] = self._pool.submit(_check, dependency)
        end, failures = time.monotonic() + self._timeout, {}
        for dependency in self._dependencies:
            try:
                failures[dependency.name] = self._pending[dependency.name].result(
                    max(0, end - time.monotonic())
                )
                del self._pending[dependency.name]
            except TimeoutError:
                failures[dependency.name] = f"no answer in {self._timeout:g} s"
                log.warning(
                    "a dependency is not ready",
                    dependency=dependency.name,
                    problem=failures[dependency.name],
                )
        return failures


def _check(dependency: Dependency) -> str:
    try:
        dependency.check()
    except errors.Problem as problem:
        log.warning("a dependency is not ready", dependency=dependency.name, problem=problem)
        return problem.text
    except Exception:
        log.exception("a dependency is not ready", dependency=dependency.name)
        return "failed; see the log of this process"
    return ""


def add_health_checks(
    application: WSGIApplication, health: Health, unless: str | None = None
) -> WSGIApplication:
    """Wrap the application so that GET and HEAD of ``ALIVE`` and ``READY`` return the health.

    Args:
        application: The application.
        health: The health of the process.
        unless: Key of a header in the WSGI environment. Requests with this header go to the
            application instead. None: no exception.
    """

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path not in (ALIVE, READY) or environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return application(environ, start_response)
        report = health.answer(path) if unless is None or unless not in environ else None
        if report is None:
            return application(environ, start_response)
        status, body = report
        content = orjson.dumps(body)
        start_response(
            "200 OK" if status == 200 else "503 Service Unavailable",
            [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(content))),
                ("Cache-Control", "no-store"),
            ],
        )
        return [content if environ["REQUEST_METHOD"] == "GET" else b""]

    return entry
