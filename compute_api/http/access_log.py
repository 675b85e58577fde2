# SPDX-License-Identifier: Apache-2.0
"""The log of requests: one line each, around the whole application, so that what authentication or
the framework answers is logged too.

Queries are never logged, and of a path no token. What a client says of itself is not believed: the
user stands in the line only after ``Authentication``."""

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

logger = logging.getLogger(__name__)
REQUEST, STATE, NOTES = "kilonova.request", "kilonova.state", "kilonova.notes"
ROUTE = "kilonova.route"  #: the path's template, once it is found
GIVEN = "HTTP_X_OPENSTACK_REQUEST_ID"  #: of the service that asks us, for its own request
_SECRET = re.compile(r"(os-console-auth-tokens/+|token=)[^/&]+", re.IGNORECASE)
_LONG = re.compile(r"[^/]{65,}")  # a part as long as a token; no id is
_MAX_PATH_CHARS = 400
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


def logged(application: WSGIApplication) -> WSGIApplication:
    """The application, with a line in the log for each request, which is counted too. The time that
    is told begins when the request has come. It ends when the answer is made, or, of one that is
    streamed, when all of it is sent."""

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        admission: Admission | None = environ.get(ADMISSION)
        began = time.perf_counter() if admission is None else admission.began
        environ[REQUEST] = request = ids.new_request()
        outer = log.request_id.set(request)
        said = ["500"]

        def start(
            status: str,
            headers: list[tuple[str, str]],
            *more: Any,  # noqa: ANN401 - passed on unchanged
        ) -> Callable[[bytes], object]:
            said[0] = status
            return start_response(status, headers, *more)

        def tell() -> None:
            if admission is not None and admission.must_wait:
                return  # The request is not answered yet.
            _tell(environ, said[0], time.perf_counter() - began)

        try:
            items = application(environ, start)
            if isinstance(items, list):
                tell()
                return items
        except BaseException:
            tell()
            raise
        finally:
            log.request_id.reset(outer)
        return _logged_at_end(items, tell)

    return entry


def begun(environ: WSGIEnvironment, state: object) -> str:
    """The id of this request; ``state`` will know its caller."""
    environ[STATE] = state
    return environ.get(REQUEST) or ids.new_request()


def note(environ: WSGIEnvironment, **parts: str) -> None:
    """What the line of this request tells beside."""
    environ.setdefault(NOTES, {}).update(parts)


def shown(path: str) -> str:
    """A path as a log may have it."""
    return _LONG.sub("***", _SECRET.sub(r"\1***", path))[:_MAX_PATH_CHARS]


def _tell(environ: WSGIEnvironment, status: str, seconds: float) -> None:
    path = environ.get("PATH_INFO", "")
    caller = getattr(environ.get(STATE), "caller", None)
    given = environ.get(GIVEN)
    method = environ["REQUEST_METHOD"]
    if metrics.is_counting():
        kind, route = method if method in _METHODS else "other", environ.get(ROUTE) or "other"
        metrics.REQUESTS.add(kind, route, status[:3])
        metrics.REQUEST_SECONDS.observe(seconds, kind, route)
    is_dull = path.startswith("/healthcheck") and status.startswith("200")
    if tracing.spans and not is_dull:
        tracing.request(
            environ[REQUEST],
            method if method in _METHODS else "other",
            environ.get(ROUTE) or "other",
            int(status[:3]),
            seconds,
            project=getattr(caller, "project_id", None),
            client=environ.get("HTTP_TRACEPARENT"),
        )
    log.event(
        logger,
        "request",
        logging.DEBUG if is_dull else logging.INFO,
        method=method,
        path=shown(environ.get("SCRIPT_NAME", "") + path),
        status=int(status[:3]),
        ms=round(seconds * 1000, 1),
        user=getattr(caller, "user_id", None),
        project=getattr(caller, "project_id", None),
        request=environ[REQUEST],
        given=given if ids.is_request(given) else None,
        client=environ.get("REMOTE_ADDR"),
        **environ.get(NOTES, {}),
    )


def _logged_at_end(items: Iterable[bytes], tell: Callable[[], None]) -> Iterable[bytes]:
    """The same items; ``tell`` is called when they are closed. gunicorn knows files by their
    class, so they keep it."""
    close = getattr(items, "close", lambda: None)

    def ended() -> None:
        try:
            close()
        finally:
            tell()

    try:
        items.close = ended  # type: ignore[attr-defined]
    except AttributeError:  # a generator's attributes cannot be set
        return _Items(items, ended)
    return items


class _Items:
    def __init__(self, items: Iterable[bytes], close: Callable[[], None]) -> None:
        self._items, self.close = items, close

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._items)
