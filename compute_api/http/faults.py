# SPDX-License-Identifier: Apache-2.0
"""Faults: the status and the text of anything that a handler raises; each service has its own shape
for it.

A Problem has its own text. Anything else is logged with its request id and becomes a 500 that does
not tell the cause."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import falcon

from common.domain import errors
from compute_api.http import access_log
from compute_api.http.explanations import cut

#: More characters no text of a fault has: it may repeat a name that somebody made very long.
MAX_TEXT_CHARACTERS = 2000
TEXT_TYPE = "text/plain; charset=UTF-8"
#: What is said of an error of the framework, by status.
TEXTS = {
    404: "The resource could not be found.",
    400: "The server could not comply with the request since it is either malformed or otherwise incorrect.",
}


@dataclass(frozen=True, slots=True)
class ApiFault:
    """An error as clients get it."""

    status: int
    text: str
    headers: Mapping[str, str]


def fault_of(problem: BaseException, texts: Mapping[int, str] = TEXTS) -> ApiFault:
    """What is said of a problem; ``texts``: of errors of the framework."""
    if isinstance(problem, errors.Problem):
        text = cut(problem.text, MAX_TEXT_CHARACTERS)
        return ApiFault(problem.status, text, {"Retry-After": "1"} if problem.status == 503 else {})
    if isinstance(problem, falcon.HTTPError):
        status = falcon.http_status_to_code(problem.status)
        text = texts.get(status) or problem.description or problem.title or str(problem.status)
        return ApiFault(status, text, dict(problem.headers or {}))
    return ApiFault(500, errors.Problem().text, {})


def log_failure(log: logging.Logger, req: falcon.Request, problem: BaseException) -> None:
    """A failure of ours, with its traceback; what a client did wrong is not worth a line."""
    log.error(
        "%s %r failed [%s]",
        req.method,
        access_log.shown(req.path),
        getattr(req.context, "request_id", "-"),
        exc_info=(type(problem), problem, problem.__traceback__),
    )


class FaultyApp(Protocol):
    """What of falcon's application answers what is raised in it."""

    def add_error_handler(
        self, exception: type[Exception], handler: Callable[..., None], /
    ) -> None: ...

    def set_error_serializer(self, serializer: Callable[..., None], /) -> None: ...


def answered_with(app: FaultyApp, handle: Callable[..., None]) -> None:
    """Let a function answer everything that is raised in an application."""
    app.add_error_handler(Exception, handle)
    app.add_error_handler(falcon.HTTPError, handle)  # falcon has one of its own for these


class TextFaults:
    """Errors of a service that answers in plain text: refusals are logged, failures of ours with
    their traceback.

    Args:
        refusal: the line of the log for a refusal.
        with_title: the answer begins with the status' title.
        hides_missing: a 404 says nothing, so that who guesses does not learn which of the guesses
        was right.
    """

    def __init__(
        self,
        log: logging.Logger,
        refusal: Callable[[falcon.Request, errors.Problem], str],
        *,
        with_title: bool = False,
        hides_missing: bool = False,
    ) -> None:
        self._log, self._refusal = log, refusal
        self._with_title, self._hides_missing = with_title, hides_missing

    def install(self, app: FaultyApp) -> None:
        """Answer everything that is raised in this application."""
        app.set_error_serializer(self._serialize)
        app.add_error_handler(Exception, self._failed)
        app.add_error_handler(errors.Problem, self._refused)

    def _refused(
        self, req: falcon.Request, resp: falcon.Response, problem: errors.Problem, params: object
    ) -> None:
        self._log.warning("refused %s", self._refusal(req, problem))
        if problem.status == 404 and self._hides_missing:
            raise falcon.HTTPNotFound
        raise falcon.HTTPError(
            problem.status,
            description=problem.text,
            headers={"Retry-After": "1"} if problem.retryable else None,
        )

    def _failed(
        self, req: falcon.Request, resp: falcon.Response, problem: Exception, params: object
    ) -> None:
        self._log.error(
            "%s %.200r failed", req.method, access_log.shown(req.path), exc_info=problem
        )
        raise falcon.HTTPInternalServerError(
            description="Unexpected error; the operator's log says more."
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
