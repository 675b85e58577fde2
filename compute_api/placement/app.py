# SPDX-License-Identifier: Apache-2.0
"""The WSGI application of the placement service.

``service.application`` calls ``create`` once per process, and tests call it too. The wrapper for
authentication stores the caller in the WSGI environment. Without a token only the version document
is served.

A request passes these checks in order: request id, microversion, caller, path, method, route of the
microversion, content type, policy, accepted type, schemas of query and body. Then the handler runs.
"""

from __future__ import annotations

import email.utils
import time
from typing import Any
from wsgiref.types import WSGIApplication

import falcon

from common.domain import errors
from common.domain.clock import SECOND
from common.domain.json_types import JsonValue
from common.store.engine import Store
from common.store.placement import providers
from compute_api.http import request_data
from compute_api.http.faults import answered_with
from compute_api.http.microversions import HEADER, Range
from compute_api.http.middleware import Authentication, HttpRequest, RequestIds, require_caller
from compute_api.http.policy import Policy
from compute_api.http.response import JSON_TYPE, send
from compute_api.http.routing import Endpoint, by_path
from compute_api.placement import faults, microversions, routes
from compute_api.placement.policies import PLACEMENT_RULES
from compute_api.placement.request import PlacementRequest
from compute_api.placement.routes import PlacementRoute
from compute_api.placement.schemas import PlacementSchema

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
WITH_CACHE_HEADERS = Range("1.15")
MAX_BODY_BYTES = 1024 * 1024


def create(store: Store, policy: Policy | None = None) -> WSGIApplication:
    """Build the WSGI application of the placement service.

    Args:
        store: The database.
        policy: The policy. None: the default rules.
    """
    middleware: list[Any] = [
        RequestIds("X-Openstack-Request-Id"),
        PlacementVersions(),
        Authentication(lambda req: bool(req.path == "/")),
    ]
    app: Any = falcon.App(media_type=JSON_TYPE, request_type=HttpRequest, middleware=middleware)
    app.resp_options.default_media_type = None
    app.req_options.strip_url_path_trailing_slash = True
    answered_with(app, faults.handle)
    policy = policy or Policy(PLACEMENT_RULES)
    for path, rows in by_path(routes.ROUTES).items():
        app.add_route(path, PlacementEndpoint(rows, store, policy))
    application: WSGIApplication = app
    return application


class PlacementVersions:
    """Reads the microversion of a request, and adds the version headers to the response."""

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        """Store the requested microversion. Falcon calls this before routing.

        Raises:
            BadRequest: The header has no valid version.
            NotAcceptable: The version is not supported.
        """
        req.context.version = microversions.chosen(req.headers)

    def process_response(
        self, req: HttpRequest, resp: falcon.Response, resource: object, succeeded: bool
    ) -> None:
        """Add OpenStack-API-Version and Vary. Falcon calls this at the end, also after an error."""
        resp.set_header(
            HEADER, f"{microversions.SERVICE} {microversions.text(req.context.version)}"
        )
        resp.append_header("Vary", HEADER.lower())


class PlacementEndpoint(Endpoint[PlacementRoute, HttpRequest]):
    """All methods of one path. Unsupported methods get Placement's error texts."""

    def __init__(self, rows: list[PlacementRoute], store: Store, policy: Policy) -> None:
        super().__init__(rows, METHODS)
        self._store, self._policy = store, policy
        self._methods = list(dict.fromkeys(row.method for row in rows))

    def serve(self, req: HttpRequest, resp: falcon.Response, **params: str) -> None:
        """Check and answer a request. Falcon calls this for every method.

        Raises:
            Problem, HTTPError: A check or the handler refuses the request.
        """
        version = req.context.version
        route = self._find_route(req.method, version)
        if not route.is_public:
            require_caller(req.context.caller)
        request_data.check_path(params.values())
        request = PlacementRequest(
            context=req.context.caller,
            version=version,
            store=self._store,
            policy=self._policy,
            query=request_data.query_of(req.query_string),
            base=req.prefix,
            prefix=req.root_path,
        )
        _check_content_type(req, route)
        if route.policy:
            request.require(route.policy)
        if route.success == 200 and not req.client_accepts(JSON_TYPE):
            raise falcon.HTTPNotAcceptable()
        route.query.check_query(
            version, {name: values[-1] for name, values in request.query.items()}
        )
        if route.body is not None:
            request.body = self._read_body(req, request, route.body, params)
        response = send(resp, route.handler(request, **params), route.success)
        if version in WITH_CACHE_HEADERS and route.cached:
            modified = time.time() if response.modified is None else response.modified / SECOND
            resp.set_header("Last-Modified", email.utils.formatdate(modified, usegmt=True))
            resp.set_header("Cache-Control", "no-cache")

    def _read_body(
        self,
        req: HttpRequest,
        request: PlacementRequest,
        schema: PlacementSchema,
        params: dict[str, str],
    ) -> JsonValue:
        body = request_data.json_of(
            req, MAX_BODY_BYTES, lambda problem: f"Malformed JSON: {problem}"
        )
        try:
            schema.check_body(request.version, body)
        except errors.BadRequest:
            # A missing provider takes precedence over an invalid body.
            if "provider_uuid" in params:
                request.read(providers.show, params["provider_uuid"])
            raise
        return body

    def _find_route(self, method: str, version: int) -> PlacementRoute:
        if method not in self._methods:
            raise falcon.HTTPMethodNotAllowed(
                self._methods, description=f"The method {method} is not allowed for this resource."
            )
        if row := self.row(method, version):
            return row
        if any(row.path in routes.OLD_PATHS for row in self.rows):
            raise falcon.HTTPMethodNotAllowed(
                [row.method for row in self.rows if version in row.versions]
            )
        raise errors.NotFound("The resource could not be found.")


def _check_content_type(req: HttpRequest, route: PlacementRoute) -> None:
    """Check Content-Length, and that the body of a route with a schema is JSON.

    Raises:
        BadRequest: Content-Length is no number, or a body has no content type.
        UnsupportedMediaType: The route has a body schema, and the content type is not JSON.
    """
    length, content_type = req.env.get("CONTENT_LENGTH") or "", req.env.get("CONTENT_TYPE") or None
    if length and not length.isdecimal():
        raise errors.BadRequest("content-length header must be an integer")
    if length.strip("0") and not content_type:
        raise errors.BadRequest("content-type header required when content-length > 0")
    if route.body is not None and request_data.media_type_of(content_type) != JSON_TYPE:
        raise errors.UnsupportedMediaType(
            f"The media type {content_type} is not supported, use {JSON_TYPE}"
        )
