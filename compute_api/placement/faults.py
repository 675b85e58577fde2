# SPDX-License-Identifier: Apache-2.0
"""Errors of the placement service: ``{"errors": [{status, title, detail, code, …}]}``.

Since 1.23, ``code`` lets programs distinguish conflicts.
"""

from __future__ import annotations

import html
import http

import falcon
import orjson

from common.domain import errors
from common.domain.json_types import JsonObject
from common.service.log import get_logger
from compute_api.http import faults
from compute_api.http.microversions import Range
from compute_api.http.middleware import HttpRequest
from compute_api.http.response import JSON_TYPE
from compute_api.placement import microversions

log = get_logger(__name__)
UNDEFINED, WITH_CODE = "placement.undefined_code", Range("1.23")
_TEXTS = {**faults.TEXTS, 406: "Only application/json is provided"}


def body(status: int, detail: str) -> JsonObject:
    """Return an error's body with status, title and detail. ``handle`` adds further keys."""
    return {
        "errors": [{"status": status, "title": http.HTTPStatus(status).phrase, "detail": detail}]
    }


def _build_page(error: JsonObject) -> bytes:
    title = f"{error['status']} {error['title']}"
    return f"<html><title>{title}</title><h1>{title}</h1>{html.escape(error['detail'])}</html>\n".encode()


def handle(req: HttpRequest, resp: falcon.Response, problem: BaseException, params: object) -> None:
    """Write the response for an exception. This is falcon's handler for all exceptions.

    An error with status 5xx is logged. A client that accepts HTML and no JSON gets a page.
    """
    fault = faults.fault_of(problem, _TEXTS)
    if fault.status >= 500:
        faults.log_failure(log, req, problem)
    document = body(fault.status, fault.text)
    [error] = document["errors"]
    error["request_id"] = req.context.request_id
    if req.context.version in WITH_CODE:
        error["code"] = getattr(problem, "code", None) or UNDEFINED
    if isinstance(problem, errors.NotAcceptable):
        error |= {
            "min_version": microversions.text(microversions.MIN),
            "max_version": microversions.text(microversions.MAX),
        }
    resp.status = fault.status
    resp.data, resp.content_type = orjson.dumps(document), JSON_TYPE
    # A browser does not accept JSON.
    if not req.client_accepts(JSON_TYPE) and req.client_accepts("text/html"):
        resp.data, resp.content_type = _build_page(error), "text/html; charset=UTF-8"
    resp.set_headers(dict(fault.headers))
