# SPDX-License-Identifier: Apache-2.0
"""/healthcheck: is the process alive, and /healthcheck/ready: can it serve, with each dependency by
name.

Without a token, for load balancers and operators. All that anybody may cost us is one look at each
dependency in some seconds; those who ask meanwhile get what was found. A dependency that has not
answered in ``PATIENCE_SECONDS`` is told as failed. Said is what users are told of it anyway; the
rest goes to the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import orjson

from common.domain import errors
from common.domain.json_types import JsonObject

log = logging.getLogger(__name__)
ALIVE, READY = "/healthcheck", "/healthcheck/ready"
KEEP_SECONDS, TIMEOUT_SECONDS = 3.0, 3.0
Check = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Dependency:
    """What a process needs: ``check`` raises when it does not do. ``required``: without it the
    process is not ready; without another one it does less."""

    name: str
    check: Check
    required: bool = True


class Health:
    """Of one process; made after it has forked."""

    def __init__(
        self,
        dependencies: Iterable[Dependency],
        monotonic: Callable[[], float] = time.monotonic,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._all, self._monotonic, self._timeout = tuple(dependencies), monotonic, timeout
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, len(self._all)), thread_name_prefix="health")
        self._coming: dict[str, Future[str]] = {}
        self._found: dict[str, str] = {}
        self._fresh_until = float("-inf")

    def answer(self, path: str) -> tuple[int, JsonObject] | None:
        """Status and body for one of the two paths; None for another one."""
        if path == ALIVE:
            return 200, {"status": "alive"}
        if path != READY:
            return None
        found = self._look()
        is_ready = not any(found[one.name] for one in self._all if one.required)
        dependencies = {
            one.name: {"status": "failed", "message": found[one.name], "required": one.required}
            if found[one.name]
            else {"status": "ok", "required": one.required}
            for one in self._all
        }
        status = "ready" if is_ready else "not ready"
        return 200 if is_ready else 503, {"status": status, "dependencies": dependencies}

    def _look(self) -> Mapping[str, str]:
        """Of each dependency why it does not do; "": it does. One thread looks, the others get what
        it found before, or wait for it the first time."""
        if not self._lock.acquire(blocking=not self._found):
            return self._found
        try:
            if self._monotonic() >= self._fresh_until:
                self._found = self._looked()
                self._fresh_until = self._monotonic() + KEEP_SECONDS
            return self._found
        finally:
            self._lock.release()

    def _looked(self) -> dict[str, str]:
        for one in self._all:
            if one.name not in self._coming:  # else the last look has not ended yet
                self._coming[one.name] = self._pool.submit(_why_not, one)
        end, found = time.monotonic() + self._timeout, {}
        for one in self._all:
            try:
                found[one.name] = self._coming[one.name].result(max(0, end - time.monotonic()))
                del self._coming[one.name]
            except TimeoutError:
                found[one.name] = f"no answer in {self._timeout:g} s"
                log.warning("%s is not ready: %s", one.name, found[one.name])
        return found


def _why_not(one: Dependency) -> str:
    try:
        one.check()
    except errors.Problem as problem:
        log.warning("%s is not ready: %s", one.name, problem)
        return problem.text
    except Exception:
        log.exception("%s is not ready", one.name)
        return "failed; the log of this process says more"
    return ""


def answered(
    application: WSGIApplication, health: Health, unless: str | None = None
) -> WSGIApplication:
    """The application, with the two paths before it, GET and HEAD. ``unless``: a header, in WSGI's
    spelling, of those who are not told."""

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path not in (ALIVE, READY) or environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return application(environ, start_response)
        found = health.answer(path) if unless is None or unless not in environ else None
        if found is None:
            return application(environ, start_response)
        status, body = found
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
