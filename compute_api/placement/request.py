# SPDX-License-Identifier: Apache-2.0
"""The request object that handlers of the placement service receive."""

from __future__ import annotations

from dataclasses import dataclass

from common.domain import errors
from compute_api.http.request import ApiRequest


class BadQuery(errors.BadRequest):
    """An invalid query. The error's ``code`` identifies the reason for programs."""

    def __init__(self, text: str, code: str = "placement.query.bad_value") -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True, kw_only=True)
class PlacementRequest(ApiRequest):
    """A request with the URLs for its response.

    Attributes:
        base: Prefix of absolute URLs: scheme, host and ``prefix``.
        prefix: Prefix of paths in bodies: the path below which the service is reached, or "".
    """

    base: str
    prefix: str
