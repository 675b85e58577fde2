# SPDX-License-Identifier: Apache-2.0
"""Routes: one row per operation, with microversions, policy rule and schemas.

A service lists the rows (``compute.routes``, ``placement.routes``). An ``Endpoint`` serves the rows
of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import falcon

from compute_api.http.microversions import Range
from compute_api.http.validation import VersionedSchema

#: Largest body of a route without ``large_keys``.
SMALL_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """An operation in a range of microversions.

    Attributes:
        method: The HTTP method.
        path: Template of the path.
        handler: Answers the request.
        policy: The rule that is checked before the handler runs. "" means that the handler checks.
        since: First microversion.
        until: Last microversion, included. None means no limit.
        success: Status of a successful response.
        body: Schema of the body. None means that the operation has no body.
        query: Schema of the query.
        large_keys: Top-level keys of the body that may have more than SMALL_BODY_BYTES.
    """

    method: str
    path: str
    handler: Callable[..., object]
    policy: str
    since: str = "0.0"
    until: str | None = None
    success: int = 200
    body: VersionedSchema | None = None
    query: VersionedSchema | None = None
    large_keys: frozenset[str] = frozenset()

    @property
    def versions(self) -> Range:
        """The microversions of the operation, from ``since`` to ``until``."""
        return Range(self.since, self.until)


RouteT = TypeVar("RouteT", bound=ApiRoute)
RequestT = TypeVar("RequestT", bound=falcon.Request)


def by_path(routes: Iterable[RouteT]) -> dict[str, list[RouteT]]:
    """Return the routes of each path, in the given order."""
    routes_by_path: dict[str, list[RouteT]] = {}
    for route in routes:
        routes_by_path.setdefault(route.path, []).append(route)
    return routes_by_path


class Endpoint(Generic[RouteT, RequestT]):
    """All operations of one path. Method and microversion select the row."""

    def __init__(self, rows: Sequence[RouteT], methods: Iterable[str]) -> None:
        self.rows = rows
        for method in methods:
            setattr(self, f"on_{method.lower()}", self.serve)

    def serve(self, req: RequestT, resp: falcon.Response, **params: str) -> None:
        """Answer a request, in subclasses. Falcon calls this for each of ``methods``."""
        raise NotImplementedError

    def row(self, method: str, version: int) -> RouteT | None:
        """Return the row for this method and microversion, or None if no row matches."""
        return next(
            (row for row in self.rows if row.method == method and version in row.versions), None
        )
