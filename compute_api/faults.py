# SPDX-License-Identifier: Apache-2.0
"""Faults: how every error leaves, in the Compute API's shape.

``{"itemNotFound": {"code": 404, "message": "…"}}``. Problems carry their own text; whatever else was raised is
logged with its request id and leaves as a 500 without a word about its cause.
"""
from __future__ import annotations

import logging
from typing import Any

import falcon
import orjson

from common import errors

log = logging.getLogger(__name__)

KINDS = {400: "badRequest", 401: "unauthorized", 403: "forbidden", 404: "itemNotFound", 405: "badMethod",
         409: "conflictingRequest", 413: "overLimit", 415: "badMediaType", 429: "overLimit",
         501: "notImplemented", 503: "serviceUnavailable"}
_TEXTS = {410: "This resource is no longer available. No forwarding address is given.",
          404: "The resource could not be found.", 405: "The method is not allowed for this resource.",
          400: "The server could not comply with the request since it is either malformed or otherwise incorrect."}
_WAIT = {413: "0", 503: "1"}                     # Retry-After, in seconds


def body(status: int, message: str) -> dict[str, Any]:
    """The fault body of a status."""
    return {KINDS.get(status, "computeFault"): {"code": status, "message": message}}


def handle(req: falcon.Request, resp: falcon.Response, problem: BaseException, params: Any) -> None:
    """Falcon's error handler for everything that is raised."""
    headers: dict[str, str] = {}
    if isinstance(problem, errors.Problem):
        status, message = problem.status, problem.text
    elif isinstance(problem, falcon.HTTPError):
        status = falcon.http_status_to_code(problem.status)
        message = _TEXTS.get(status, problem.title or str(problem.status))
        headers = dict(problem.headers or {})
    else:
        status, message = 500, errors.Problem().text
    if status >= 500 and status != 501:
        log.error("%s %r failed [%s]", req.method, req.path, getattr(req.context, "request_id", "-"),
                  exc_info=(type(problem), problem, problem.__traceback__))
    if status in _WAIT:
        headers["Retry-After"] = _WAIT[status]
    resp.status = status
    resp.data = orjson.dumps(body(status, message))
    resp.content_type = "application/json"
    resp.set_headers(headers)
