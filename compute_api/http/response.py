# SPDX-License-Identifier: Apache-2.0
"""What a handler returns beside a body, and how it becomes an HTTP response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import falcon
import orjson

JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """A body with another status than the route's, or with headers."""

    body: object = None
    status: int | None = None  #: None: the route's
    headers: Mapping[str, str] = field(default_factory=dict)
    modified: int | None = None  #: microseconds; when what is shown last changed, None: now


def send(resp: falcon.Response, outcome: object, success: int) -> ApiResponse:
    """Write what a handler returned, a body or an ``ApiResponse``, into the HTTP response."""
    answer = outcome if isinstance(outcome, ApiResponse) else ApiResponse(outcome)
    resp.status = answer.status or success
    resp.set_headers(dict(answer.headers))
    if answer.body is not None:
        resp.data = orjson.dumps(answer.body)
        resp.content_type = JSON_TYPE
    return answer
