# SPDX-License-Identifier: Apache-2.0
"""One request as the handlers of the placement service see it."""

from __future__ import annotations

from dataclasses import dataclass

from common.domain import errors
from compute_api.http.request import ApiRequest


class BadQuery(errors.BadRequest):
    """A wrong query, which programs can tell from others by its code."""

    def __init__(self, text: str, code: str = "placement.query.bad_value") -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True, kw_only=True)
class PlacementRequest(ApiRequest):
    """What a handler is given."""

    base: str  #: what absolute URLs begin with
    prefix: str  #: what paths in bodies begin with

    def first(self, name: str) -> str | None:
        """A parameter's value; of several the first."""
        values = self.query.get(name)
        return values[0] if values else None
