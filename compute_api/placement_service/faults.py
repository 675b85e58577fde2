# SPDX-License-Identifier: Apache-2.0
"""Faults: how every error of the placement service leaves: ``{"errors": [{status, title, detail, code, …}]}``.

Problems carry their own text; whatever else was raised is logged with its request id and leaves as a 500 without a
word about its cause. Programs tell conflicts apart by ``code``, since 1.23.
"""
from __future__ import annotations

import html
import http
import logging
from typing import Any

import falcon
import orjson

from common import errors
from compute_api.placement_service import versions

log = logging.getLogger(__name__)
UNDEFINED, WITH_CODE = "placement.undefined_code", 23
_TEXTS = {404: "The resource could not be found.",
          406: "Only application/json is provided",
          400: "The server could not comply with the request since it is either malformed or otherwise incorrect."}


def body(status: int, detail: str) -> dict[str, Any]:
    """The body of an error, as far as it can be told without the request."""
    return {"errors": [{"status": status, "title": http.HTTPStatus(status).phrase, "detail": detail}]}


def _page(error: dict[str, Any]) -> bytes:
    title = f"{error['status']} {error['title']}"
    return f"<html><title>{title}</title><h1>{title}</h1>{html.escape(error['detail'])}</html>\n".encode()


def handle(req: falcon.Request, resp: falcon.Response, problem: BaseException, params: Any) -> None:
    """Falcon's error handler for everything that is raised."""
    headers: dict[str, str] = {}
    if isinstance(problem, errors.Problem):
        status, detail = problem.status, problem.text
    elif isinstance(problem, falcon.HTTPError):
        status = falcon.http_status_to_code(problem.status)
        detail = _TEXTS.get(status, problem.description or problem.title or str(problem.status))
        headers = dict(problem.headers or {})
    else:
        status, detail = 500, errors.Problem().text
    if status >= 500:
        log.error("%s %r failed [%s]", req.method, req.path, req.context.request_id,
                  exc_info=(type(problem), problem, problem.__traceback__))
    if status == 503:
        headers["Retry-After"] = "1"
    said = body(status, detail)
    said["errors"][0]["request_id"] = req.context.request_id
    if req.context.version >= WITH_CODE:
        said["errors"][0]["code"] = getattr(problem, "code", None) or UNDEFINED
    if status == 406 and isinstance(problem, errors.NotAcceptable):
        said["errors"][0] |= {"min_version": versions.text(versions.MIN), "max_version": versions.text(versions.MAX)}
    resp.status = status
    resp.data, resp.content_type = orjson.dumps(said), "application/json"
    if not req.client_accepts("application/json") and req.client_accepts("text/html"):      # a browser
        resp.data, resp.content_type = _page(said["errors"][0]), "text/html; charset=UTF-8"
    resp.set_headers(headers)
