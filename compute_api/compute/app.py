# SPDX-License-Identifier: Apache-2.0
"""The WSGI application of the Compute API, and the order in which it processes a request.

``service.application`` calls ``create`` once in each worker process. A wrapper checks tokens and
passes the caller in the WSGI environment. Without a token only the version documents are available.

The order is: request id, size, root and project in the URL, caller, microversion, route of that
version, query against the schema, server (only if the path contains a server id), policy, body
against the schema, handler. Handlers of routes without a policy rule check the policy themselves,
after the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from wsgiref.types import WSGIApplication

import falcon
from falcon.routing import CompiledRouter

from common.domain import errors
from common.domain.json_types import JsonValue
from common.store.rows import ServerRecord
from common.store.servers import servers
from compute_api.compute import faults, middleware, routes, versions
from compute_api.compute.middleware import ComputeHttpRequest, ComputeState
from compute_api.compute.policies import COMPUTE_RULES
from compute_api.compute.request import microversions
from compute_api.compute.request.dependencies import Services
from compute_api.compute.request.links import Links
from compute_api.compute.request.request import Request
from compute_api.compute.routes import Route
from compute_api.compute.schemas.common import NOTHING
from compute_api.http import request_data
from compute_api.http.faults import answered_with
from compute_api.http.middleware import Authentication, BodySizes, RequestIds, require_caller
from compute_api.http.policy import Policy
from compute_api.http.response import JSON_TYPE, send
from compute_api.http.routing import SMALL_BODY_BYTES, Endpoint, by_path

#: Accepted media types of JSON bodies, as in Nova.
BODY_TYPES = (JSON_TYPE, "application/vnd.openstack.compute+json", "text/plain")


def create(services: Services, policy: Policy | None = None) -> WSGIApplication:
    """Return the WSGI application of the Compute API with these services.

    Args:
        services: The store and the other services of the handlers.
        policy: Policy instead of the default rules. None means ``COMPUTE_RULES``.
    """
    middlewares: list[Any] = [
        RequestIds("X-Compute-Request-Id", "X-Openstack-Request-Id"),
        BodySizes(services.settings.max_body_bytes),
        middleware.Dependencies(services, policy or Policy(COMPUTE_RULES)),
        middleware.ApiRoots(services.settings.public_url),
        Authentication(_is_public),
        middleware.UrlProjects(),
        middleware.ComputeVersions(),
    ]
    app: Any = falcon.App(
        media_type=JSON_TYPE,
        request_type=ComputeHttpRequest,
        middleware=middlewares,
        router=_make_router(),
    )
    answered_with(app, faults.handle)
    app.add_sink(versions.choices, r"/(?!v2)")
    application: WSGIApplication = app
    return application


@cache
def _make_router() -> CompiledRouter:
    """Return the router, which all applications of this process share.

    Why: endpoints have no state, and falcon needs 0.2 s to compile the routes.
    """
    router = CompiledRouter()
    router.add_route("/", versions.VersionList())
    router.add_route("/v2", versions.VersionDocument())
    router.add_route("/v2.1", versions.VersionDocument())
    router.add_route("/v2.1/versions/{version_id}", versions.VersionDocument())
    rows_by_path = by_path(routes.ROUTES)
    for path in [*rows_by_path, *(path for path in routes.GONE if path not in rows_by_path)]:
        endpoint = ComputeEndpoint(rows_by_path.get(path, []), routes.GONE.get(path, ""))
        router.add_route("/v2.1" + path, endpoint)
    return router


def _is_public(req: ComputeHttpRequest) -> bool:
    return req.context.is_public


class ComputeEndpoint(Endpoint[Route, ComputeHttpRequest]):
    """A path of the Compute API with its routes.

    Args:
        rows: Routes with this path.
        gone: HTTP methods that were removed from the API, separated by spaces. The response is 410.
    """

    def __init__(self, rows: list[Route], gone: str) -> None:
        super().__init__(rows, {row.method for row in rows})
        for method in gone.split():
            setattr(self, f"on_{method.lower()}", self._refuse)

    def _refuse(self, req: falcon.Request, resp: falcon.Response, **params: str) -> None:
        raise falcon.HTTPGone()

    def serve(self, req: ComputeHttpRequest, resp: falcon.Response, **params: str) -> None:
        """Check caller, route, query, server, policy and body, and send the handler's result.

        For the order see the docstring of the module.

        Raises:
            Unauthorized: The request has no caller.
            NotFound: No route has this method at this microversion, or the server does not exist
                for the caller.
            Problem: A check or the handler refuses the request.
        """
        state = req.context
        services, policy = state.services, state.policy
        require_caller(state.caller)
        route = self.row(req.method, state.version)
        if route is None:
            raise microversions.unsupported(state.version)
        request_data.check_path(params.values())
        query = request_data.query_of(req.query_string)
        (route.query or NOTHING).at(state.version).check(query)
        caller = replace(state.caller, admin=policy.allows("context_is_admin", state.caller))
        request = Request(
            context=caller,
            version=state.version,
            store=services.store,
            policy=policy,
            query=query,
            services=services,
            route=route,
            links=Links(state.base, state.shown_version, state.url_project),
            headers=req.headers,
        )
        arguments: list[ServerRecord] = []
        if route.about_server:
            arguments.append(_read_server(request, route, params.pop("server_id")))
        elif route.policy:
            request.require(route.policy)
        request.body = self._body(req, state, route)
        send(resp, route.handler(request, *arguments, **params), route.success)

    def _body(self, req: ComputeHttpRequest, state: ComputeState, route: Route) -> JsonValue:
        """Return the body, checked against the route's schema, or None if the route takes no body.

        Below /v2 unknown keys are removed instead of refused.

        Raises:
            UnsupportedMediaType: The media type is not one of ``BODY_TYPES``.
            BadRequest: The body is not valid JSON, is too complex, or violates the schema.
            TooLarge: The body is larger than the route allows.
        """
        if route.body is None:
            return None
        media_type = request_data.media_type_of(req.content_type or JSON_TYPE)
        if media_type not in BODY_TYPES:
            raise errors.UnsupportedMediaType(
                f"Unsupported Content-Type {media_type[:80]}; send application/json"
            )
        largest = state.services.settings.max_body_bytes
        most = min(largest, SMALL_BODY_BYTES)
        data = request_data.bytes_of(req, largest if route.large_keys else most)
        body = request_data.parse_json(data, lambda problem: "Malformed request body")
        if not isinstance(body, dict) or route.large_keys.isdisjoint(body):
            request_data.check_size(len(data), most)
        schema = route.body.at(state.version)
        if state.is_legacy:
            body = schema.prune(body)
        schema.check(body)
        return body


def _read_server(request: Request, route: Route, server_id: str) -> ServerRecord:
    """Return the row of the route's server, after the check of the route's policy rule.

    If the route has no rule, the handler checks the policy.

    Raises:
        NotFound: The server does not exist for the caller. A deleted server counts only if the
            route serves deleted servers.
        Forbidden: The policy rule denies.
    """
    row: ServerRecord = request.read(servers.show, server_id, request.scope, deleted=route.deleted)
    if route.policy:
        target: Mapping[str, str] = {"project_id": row.project_id, "user_id": row.user_id}
        request.require(route.policy, target)
    return row
