# SPDX-License-Identifier: Apache-2.0
"""Routes: one row for each operation, with its microversions, policy rule and schemas.

A service lists its rows (``compute.routes``, ``placement.routes``); an ``Endpoint`` serves those of
one path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import falcon

from compute_api.http.microversions import Range
from compute_api.http.validation import VersionedSchema

#: The largest body of a route that names no large key.
SMALL_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One operation between two microversions."""

    method: str
    path: str
    handler: Callable[..., object]
    policy: str  #: the rule asked for before the handler runs; empty: the handler asks
    since: str = "0.0"
    until: str | None = None  #: included; None: the last version
    success: int = 200  #: the status when all is well
    body: VersionedSchema | None = None  #: what it may hold; None: there is none
    query: VersionedSchema | None = None
    #: keys at the top of a body that may have more than SMALL_BODY_BYTES
    large_keys: frozenset[str] = frozenset()

    @property
    def versions(self) -> Range:
        """Those that have it."""
        return Range(self.since, self.until)


RouteT = TypeVar("RouteT", bound=ApiRoute)
RequestT = TypeVar("RequestT", bound=falcon.Request)


def by_path(routes: Iterable[RouteT]) -> dict[str, list[RouteT]]:
    """The rows of each path."""
    found: dict[str, list[RouteT]] = {}
    for route in routes:
        found.setdefault(route.path, []).append(route)
    return found


class Endpoint(Generic[RouteT, RequestT]):
    """One path: among its rows the method and the microversion choose, and the row says the
    rest."""

    def __init__(self, rows: Sequence[RouteT], methods: Iterable[str]) -> None:
        self.rows = rows
        for method in methods:
            setattr(self, f"on_{method.lower()}", self.serve)

    def serve(self, req: RequestT, resp: falcon.Response, **params: str) -> None:
        """Called by falcon for each of the methods."""
        raise NotImplementedError

    def row(self, method: str, version: int) -> RouteT | None:
        """The row of this method at this version."""
        return next(
            (row for row in self.rows if row.method == method and version in row.versions), None
        )
