# SPDX-License-Identifier: Apache-2.0
"""The result of a handler, and its conversion to an HTTP response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import falcon
import orjson

JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """A body with status or headers.

    Attributes:
        body: The body, or None.
        status: The status. None means the status of the route.
        headers: Additional headers.
        modified: Time of the last change in microseconds. None means now.
    """

    body: object = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    modified: int | None = None


def send(resp: falcon.Response, outcome: object, success: int) -> ApiResponse:
    """Write the result of a handler to the HTTP response, and return it as an ``ApiResponse``.

    Args:
        resp: The HTTP response.
        outcome: A body or an ``ApiResponse``. The body None means an empty response.
        success: The status if ``outcome`` has none.
    """
    response = outcome if isinstance(outcome, ApiResponse) else ApiResponse(outcome)
    resp.status = response.status or success
    resp.set_headers(dict(response.headers))
    if response.body is not None:
        resp.data = orjson.dumps(response.body)
        resp.content_type = JSON_TYPE
    return response
