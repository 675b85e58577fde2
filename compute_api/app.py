# SPDX-License-Identifier: Apache-2.0
"""The WSGI application: what every request passes through, in the order it does.

``create`` is called once a process by ``service.application``, and by tests. Authentication of tokens is a wrapper
around it that says in the environment who asks; an unknown caller gets no further than the version documents.
The order: request id · size · root and project in the URL · caller · microversion · route of that version · body
and query against their schemas · the server, if the route is about one · policy · handler.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import falcon
import orjson

from common import errors
from common.store import servers
from compute_api import faults, microversions, middleware, reading, routes
from compute_api.dependencies import Services
from compute_api.links import Links
from compute_api.policy import Policy
from compute_api.request import Answer, Request
from compute_api.resources import versions
from compute_api.routes import Route
from compute_api.schemas.common import NOTHING

JSON = "application/json"


def create(services: Services, policy: Policy | None = None) -> Any:
    """The application over these services; ``policy``: in place of the defaults."""
    in_order: list[Any] = [
        middleware.RequestIds(),
        middleware.Sizes(services.settings.max_body),
        middleware.Roots(services.settings.public_url),
        middleware.Callers(),
        middleware.Microversions(),
    ]
    app: Any = falcon.App(media_type=JSON, request_type=middleware.HttpRequest, middleware=in_order)
    app.add_error_handler(Exception, faults.handle)
    app.add_error_handler(falcon.HTTPError, faults.handle)      # falcon has one of its own for these
    policy = policy or Policy()

    app.add_route("/", versions.Versions())
    app.add_route("/v2", versions.Document())
    app.add_route("/v2.1", versions.Document())
    app.add_route("/v2.1/versions/{version_id}", versions.Document())
    known = routes.by_path()
    for path in [*known, *(path for path in routes.GONE if path not in known)]:
        app.add_route("/v2.1" + path, Endpoint(known.get(path, []), routes.GONE.get(path, ""), services, policy))
    app.add_sink(versions.choices, r"/(?!v2)")
    return app


class Endpoint:
    """One path: among its rows the method and the microversion choose, and the row says the rest.

    gone: the methods that were removed from the API: 410, whatever is asked.
    """

    def __init__(self, rows: list[Route], gone: str, services: Services, policy: Policy) -> None:
        self._rows, self._services, self._policy = rows, services, policy
        for method in {row.method for row in rows}:
            setattr(self, f"on_{method.lower()}", self._serve)
        for method in gone.split():
            setattr(self, f"on_{method.lower()}", self._refuse)

    def _refuse(self, req: falcon.Request, resp: falcon.Response, **params: str) -> None:
        raise falcon.HTTPGone()

    def _serve(self, req: middleware.HttpRequest, resp: falcon.Response, **params: str) -> None:
        state = req.context
        route = self._row(req.method, state.version)
        if _has_nul(params.values()):
            raise errors.NotFound("The resource could not be found.")
        query = reading.query_of(req.query_string)
        (route.query or NOTHING).at(state.version).check(query)
        caller = replace(state.caller, admin=self._policy.allows("context_is_admin", state.caller))
        request = Request(caller, state.version, self._services, self._policy, route,
                          Links(state.base, state.shown_version, state.url_project), query, req.headers)
        if route.body is not None:
            request.body = self._body(req, state, route)
        arguments: list[Any] = []
        if route.about_server:
            arguments.append(self._server(request, params.pop("server_id")))
        elif route.policy:
            request.require(route.policy)
        _send(resp, route, route.handler(request, *arguments, **params))

    def _row(self, method: str, version: int) -> Route:
        for row in self._rows:
            if row.method == method and version in row.versions:
                return row
        raise errors.NotFound(f"API version '{microversions.text(version)}' is not supported on this method.")

    def _body(self, req: middleware.HttpRequest, state: middleware.State, route: Route) -> Any:
        body = middleware.body_of(req, self._services.settings.max_body)
        assert route.body is not None
        schema = route.body.at(state.version)
        if state.legacy:
            body = schema.pruned(body)
        schema.check(body)
        return body

    def _server(self, request: Request, server_id: str) -> Any:
        """The server that the route is about, if the caller may do to it what the route does."""
        route = request.route
        row = request.read(servers.show, server_id, request.scope, deleted=route.deleted)
        if route.policy:
            request.require(route.policy, {"project_id": row.project_id, "user_id": row.user_id})
        return row


def _has_nul(values: Any) -> bool:
    return any("\x00" in value for value in values)


def _send(resp: falcon.Response, route: Route, outcome: Any) -> None:
    answer = outcome if isinstance(outcome, Answer) else Answer(outcome)
    resp.status = answer.status or route.success
    resp.set_headers(dict(answer.headers))
    if answer.body is not None:
        resp.data = orjson.dumps(answer.body)

