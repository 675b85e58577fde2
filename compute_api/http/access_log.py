# SPDX-License-Identifier: Apache-2.0
"""The access log: one line per request.

``log_requests`` wraps the whole application. Therefore the log includes responses of authentication
and of the framework. Queries are left out, and tokens in paths are masked. The line contains the
user only after ``Authentication`` has validated the token.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from common.domain import ids
from common.service import log, metrics, tracing
from compute_api.http.fair_share import ADMISSION, Admission

logger = log.get_logger(__name__)
REQUEST, STATE, NOTES = "kilonova.request", "kilonova.state", "kilonova.notes"
#: Template of the path, set after routing.
ROUTE = "kilonova.route"
#: Request id of the calling service.
GIVEN = "HTTP_X_OPENSTACK_REQUEST_ID"
_SECRET = re.compile(r"(os-console-auth-tokens/+|token=)[^/&]+", re.IGNORECASE)
# A part of a path that is as long as a token. Ids are shorter.
_LONG = re.compile(r"[^/]{65,}")
_MAX_PATH_CHARS = 400
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


def log_requests(application: WSGIApplication) -> WSGIApplication:
    """Wrap the application so that each request gets a log line, and configured metrics and spans.

    A successful health check gets no span, and a line of the level DEBUG.

    The time of a request begins when the request has arrived. It ends when the application has
    returned a list, or when any other response is closed. A request that must wait for its project
    is recorded only after the wait.
    """

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        admission: Admission | None = environ.get(ADMISSION)
        began = time.perf_counter() if admission is None else admission.began
        environ[REQUEST] = request = ids.new_request()
        outer_request = log.request_id.set(request)
        response_status = ["500"]

        def start(
            status: str,
            headers: list[tuple[str, str]],
            *more: Any,  # noqa: ANN401 - passed on unchanged
        ) -> Callable[[bytes], object]:
            response_status[0] = status
            return start_response(status, headers, *more)

        def record() -> None:
            if admission is not None and admission.must_wait:
                # The worker repeats the request when its project has a free place.
                return
            _record(environ, response_status[0], time.perf_counter() - began)

        try:
            items = application(environ, start)
            if isinstance(items, list):
                record()
                return items
        except BaseException:
            record()
            raise
        finally:
            log.request_id.reset(outer_request)
        return _record_at_end(items, record)

    return entry


def begin_request(environ: WSGIEnvironment, state: object) -> str:
    """Store the request state in the environment, and return the id of the request.

    The log line reads the caller from the state at the end of the request. The id is that of
    ``log_requests``, or a new one without this wrapper.
    """
    environ[STATE] = state
    return environ.get(REQUEST) or ids.new_request()


def note(environ: WSGIEnvironment, **parts: str) -> None:
    """Add fields to the log line of this request."""
    environ.setdefault(NOTES, {}).update(parts)


def redact_path(path: str) -> str:
    """Return the path for the log, cut to ``_MAX_PATH_CHARS`` characters.

    A token after ``os-console-auth-tokens/`` or ``token=``, and each part between slashes of more
    than 64 characters, is replaced by '***'.
    """
    return _LONG.sub("***", _SECRET.sub(r"\1***", path))[:_MAX_PATH_CHARS]


def _record(environ: WSGIEnvironment, status: str, seconds: float) -> None:
    path = environ.get("PATH_INFO", "")
    caller = getattr(environ.get(STATE), "caller", None)
    calling_request = environ.get(GIVEN)
    method = environ["REQUEST_METHOD"]
    if metrics.is_counting():
        counted_method, route = (
            method if method in _METHODS else "other",
            environ.get(ROUTE) or "other",
        )
        metrics.REQUESTS.add(counted_method, route, status[:3])
        metrics.REQUEST_SECONDS.observe(seconds, counted_method, route)
    is_health_check = path.startswith("/healthcheck") and status.startswith("200")
    if tracing.spans and not is_health_check:
        tracing.request(
            environ[REQUEST],
            method if method in _METHODS else "other",
            environ.get(ROUTE) or "other",
            int(status[:3]),
            seconds,
            project=getattr(caller, "project_id", None),
            client=environ.get("HTTP_TRACEPARENT"),
        )
    logger.log(
        logging.DEBUG if is_health_check else logging.INFO,
        "request",
        method=method,
        path=redact_path(environ.get("SCRIPT_NAME", "") + path),
        status=int(status[:3]),
        ms=round(seconds * 1000, 1),
        user=getattr(caller, "user_id", None),
        project=getattr(caller, "project_id", None),
        request=environ[REQUEST],
        given=calling_request if ids.is_request(calling_request) else None,
        client=environ.get("REMOTE_ADDR"),
        **environ.get(NOTES, {}),
    )


def _record_at_end(items: Iterable[bytes], record: Callable[[], None]) -> Iterable[bytes]:
    """Return the items of a response, whose ``close`` then also calls ``record``.

    The result is the same object with another ``close``, because gunicorn recognizes files by their
    class. Only an object that accepts no other ``close``, such as a generator, is wrapped.
    """
    close = getattr(items, "close", lambda: None)

    def close_and_record() -> None:
        try:
            close()
        finally:
            record()

    try:
        items.close = close_and_record  # type: ignore[attr-defined]
    except AttributeError:
        # A generator accepts no further attributes.
        return _Items(items, close_and_record)
    return items


class _Items:
    def __init__(self, items: Iterable[bytes], close: Callable[[], None]) -> None:
        self._items, self.close = items, close

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._items)
