# SPDX-License-Identifier: Apache-2.0
"""Convert exceptions to HTTP errors. Each service has its own format of the body.

A Problem has a text for clients. Any other exception is logged with the request id and becomes
status 500 without details.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import falcon

from common.domain import errors
from common.domain.json_types import JsonObject
from common.service.log import EventLogger
from compute_api.http import access_log
from compute_api.http.explanations import cut

#: Longest text of a fault. A text may contain a long name from the request.
MAX_TEXT_CHARACTERS = 2000
TEXT_TYPE = "text/plain; charset=UTF-8"
#: Texts of errors of the framework, by status.
TEXTS = {
    404: "The resource could not be found.",
    400: "The server could not comply with the request since it is either malformed or otherwise incorrect.",
}


@dataclass(frozen=True, slots=True)
class ApiFault:
    """Status, text and headers of an error response."""

    status: int
    text: str
    headers: Mapping[str, str]


def fault_of(problem: BaseException, texts: Mapping[int, str] = TEXTS) -> ApiFault:
    """Return status, text and headers of the response to an exception.

    Any exception that is neither a ``Problem`` nor an error of falcon becomes status 500 without
    details. The text of a ``Problem`` is cut to ``MAX_TEXT_CHARACTERS``.

    Args:
        problem: The exception.
        texts: Texts that replace those of falcon's errors, by status.
    """
    if isinstance(problem, errors.Problem):
        text = cut(problem.text, MAX_TEXT_CHARACTERS)
        return ApiFault(problem.status, text, {"Retry-After": "1"} if problem.status == 503 else {})
    if isinstance(problem, falcon.HTTPError):
        status = falcon.http_status_to_code(problem.status)
        text = texts.get(status) or problem.description or problem.title or str(problem.status)
        return ApiFault(status, text, dict(problem.headers or {}))
    return ApiFault(500, errors.Problem().text, {})


def log_failure(log: EventLogger, req: falcon.Request, problem: BaseException) -> None:
    """Log an error with the request's method, path and id, and the traceback of ``problem``."""
    log.error(
        "a request failed unexpectedly",
        method=req.method,
        path=access_log.redact_path(req.path),
        request=getattr(req.context, "request_id", None),
        exc_info=(type(problem), problem, problem.__traceback__),
    )


class FaultyApp(Protocol):
    """The methods of falcon's application that register error handlers."""

    def add_error_handler(
        self, exception: type[Exception], handler: Callable[..., None], /
    ) -> None: ...

    def set_error_serializer(self, serializer: Callable[..., None], /) -> None: ...


def answered_with(app: FaultyApp, handle: Callable[..., None]) -> None:
    """Register ``handle`` for every error in the application, including falcon's ``HTTPError``."""
    app.add_error_handler(Exception, handle)
    # This replaces falcon's own handler.
    app.add_error_handler(falcon.HTTPError, handle)


class TextFaults:
    """Error responses in plain text. Refusals and failures are logged, failures with traceback.

    A refusal is a ``Problem``. Errors of falcon, for example 405, are not logged.

    Args:
        log: The logger.
        refusal: Returns the fields of the log line of a refusal.
        with_title: The response begins with the title of the status.
        hides_missing: The 404 for a ``Problem`` has no detail, so that a client that guesses cannot
            learn which part of the guess is right.
    """

    def __init__(
        self,
        log: EventLogger,
        refusal: Callable[[falcon.Request, errors.Problem], JsonObject],
        *,
        with_title: bool = False,
        hides_missing: bool = False,
    ) -> None:
        self._log, self._refusal = log, refusal
        self._with_title, self._hides_missing = with_title, hides_missing

    def install(self, app: FaultyApp) -> None:
        """Register the error handlers and the plain-text serializer in the application."""
        app.set_error_serializer(self._serialize)
        app.add_error_handler(Exception, self._handle_failure)
        app.add_error_handler(errors.Problem, self._handle_refusal)

    def _handle_refusal(
        self, req: falcon.Request, resp: falcon.Response, problem: errors.Problem, params: object
    ) -> None:
        self._log.warning("a request is refused", **self._refusal(req, problem))
        if problem.status == 404 and self._hides_missing:
            raise falcon.HTTPNotFound
        raise falcon.HTTPError(
            problem.status,
            description=problem.text,
            headers={"Retry-After": "1"} if problem.retryable else None,
        )

    def _handle_failure(
        self, req: falcon.Request, resp: falcon.Response, problem: Exception, params: object
    ) -> None:
        self._log.error(
            "a request failed unexpectedly",
            method=req.method,
            path=access_log.redact_path(req.path)[:200],
            exc_info=problem,
        )
        raise falcon.HTTPInternalServerError(
            description="Unexpected error. The operator finds details in the service's log."
        )

    def _serialize(
        self, req: falcon.Request, resp: falcon.Response, problem: falcon.HTTPError
    ) -> None:
        lines = (
            [problem.title, problem.description]
            if self._with_title
            else [problem.description or problem.title]
        )
        lines = [line for line in lines if line]
        resp.content_type, resp.text = TEXT_TYPE, "\n".join(map(str, lines)) + "\n"
