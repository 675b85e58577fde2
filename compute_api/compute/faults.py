# SPDX-License-Identifier: Apache-2.0
"""Error responses of the Compute API: ``{"itemNotFound": {"code": 404, "message": "…"}}``."""

from __future__ import annotations

import falcon
import orjson

from common.domain.json_types import JsonObject
from common.service.log import get_logger
from compute_api.http import faults
from compute_api.http.response import JSON_TYPE

log = get_logger(__name__)

KINDS = {
    400: "badRequest",
    401: "unauthorized",
    403: "forbidden",
    404: "itemNotFound",
    405: "badMethod",
    409: "conflictingRequest",
    413: "overLimit",
    415: "badMediaType",
    429: "overLimit",
    501: "notImplemented",
    503: "serviceUnavailable",
}
_TEXTS = {
    **faults.TEXTS,
    410: "This resource is no longer available. No forwarding address is given.",
    405: "The method is not allowed for this resource.",
}


def body(status: int, message: str) -> JsonObject:
    """Return the JSON body of an error response with this status and message.

    The key is from ``KINDS``, or "computeFault" for another status.
    """
    return {KINDS.get(status, "computeFault"): {"code": status, "message": message}}


def handle(
    req: falcon.Request, resp: falcon.Response, problem: BaseException, params: object
) -> None:
    """Write the error response for any exception during a request. Falcon calls this.

    Statuses from 500 on, except 501, are logged with the traceback.
    """
    fault = faults.fault_of(problem, _TEXTS)
    if fault.status >= 500 and fault.status != 501:
        faults.log_failure(log, req, problem)
    resp.status = fault.status
    resp.data = orjson.dumps(body(fault.status, fault.text))
    resp.content_type = JSON_TYPE
    resp.set_headers(dict(fault.headers))
    if fault.status == 413:
        resp.set_header("Retry-After", "0")
