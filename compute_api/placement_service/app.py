# SPDX-License-Identifier: Apache-2.0
"""The WSGI application of the placement service: what every request passes through, in the order it does.

``create`` is called once a process by ``service.application``, and by tests. Authentication of tokens is a wrapper
around it that says in the environment who asks; an unknown caller gets no further than the version document.
The order: request id · microversion · caller · path · method · route of that version · content type · policy ·
accepted type · query and body against their schemas · handler.
"""
from __future__ import annotations

import email.utils
import time
from typing import Any

import falcon
import orjson

from common import errors, ids
from common.clock import SECOND
from common.context import RequestContext
from common.store import providers
from common.store.engine import Store
from compute_api import callers, reading
from compute_api.placement_service import faults, routes, versions
from compute_api.placement_service.request import Answer, Request
from compute_api.placement_service.routes import Route
from compute_api.placement_service.rules import RULES
from compute_api.policy import Policy

JSON = "application/json"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
CACHE_HEADERS = 15                  # since this version answers say when what they show changed
MAX_BODY = 1024 * 1024


class State:
    """What is known of a request so far."""

    request_id: str
    version: int = versions.MIN
    caller = RequestContext(user_id="", project_id="", roles=(), request_id="")        # nobody


class HttpRequest(falcon.Request):
    """Falcon's request with our state on it."""

    context_type = State
    context: State  # type: ignore[assignment]  # falcon's declaration is of its own bag of attributes


def create(store: Store, policy: Policy | None = None) -> Any:
    """The application over this store; ``policy``: in place of the defaults."""
    app: Any = falcon.App(media_type=JSON, request_type=HttpRequest, middleware=[RequestIds(), Versions(), Callers()])
    app.resp_options.default_media_type = None
    app.req_options.strip_url_path_trailing_slash = True
    app.add_error_handler(Exception, faults.handle)
    app.add_error_handler(falcon.HTTPError, faults.handle)      # falcon has one of its own for these
    policy = policy or Policy(rules=RULES)
    for path, rows in routes.by_path().items():
        app.add_route(path, Endpoint(rows, store, policy))
    return app


class RequestIds:
    """Every answer says which request it answers."""

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        req.context.request_id = ids.new_request()

    def process_response(self, req: HttpRequest, resp: falcon.Response, resource: Any, succeeded: bool) -> None:
        resp.set_header("X-Openstack-Request-Id", req.context.request_id)


class Versions:
    """Which version the request chose, and the headers that say so."""

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        req.context.version = versions.chosen(req.get_header(versions.HEADER) or "")

    def process_response(self, req: HttpRequest, resp: falcon.Response, resource: Any, succeeded: bool) -> None:
        resp.set_header(versions.HEADER, f"{versions.SERVICE} {versions.text(req.context.version)}")
        resp.append_header("Vary", versions.HEADER.lower())


class Callers:
    """Who asks, as the wrapper around the application found out; 401 for nobody, except for the versions."""

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        if req.path != "/":
            req.context.caller = callers.confirmed(req.env, req.context.request_id, req.remote_addr)


class Endpoint:
    """One path: among its rows the method and the microversion choose, and the row says the rest."""

    def __init__(self, rows: list[Route], store: Store, policy: Policy) -> None:
        self._rows, self._store, self._policy = rows, store, policy
        self._methods = list(dict.fromkeys(row.method for row in rows))
        for method in METHODS:
            setattr(self, f"on_{method.lower()}", self._serve)

    def _serve(self, req: HttpRequest, resp: falcon.Response, **params: str) -> None:
        route = self._row(req.method, req.context.version)
        if any("\x00" in value for value in params.values()):
            raise errors.NotFound("The resource could not be found.")
        request = Request(req.context.caller, req.context.version, self._store, self._policy,
                          reading.query_of(req.query_string), req.prefix, req.root_path)
        _check_type(req, route)
        if route.rule:
            request.require(route.rule)
        if route.success == 200 and not req.client_accepts(JSON):
            raise falcon.HTTPNotAcceptable()
        route.query.check_query(request.version, {name: values[-1] for name, values in request.query.items()})
        if route.body is not None:
            request.body = self._body(req, request, route, params)
        _send(resp, req.context.version, route, route.handler(request, **params))

    def _body(self, req: HttpRequest, request: Request, route: Route, params: dict[str, str]) -> Any:
        assert route.body is not None
        body = _body_of(req)
        try:
            route.body.check_body(request.version, body)
        except errors.BadRequest:       # what is not there is said first
            if "provider_uuid" in params:
                request.read(providers.show, params["provider_uuid"])
            raise
        return body

    def _row(self, method: str, version: int) -> Route:
        if method not in self._methods:
            raise falcon.HTTPMethodNotAllowed(self._methods,
                                              description=f"The method {method} is not allowed for this resource.")
        for row in self._rows:
            if row.method == method and version in row.versions:
                return row
        if any(row.path in routes.OLD_PATHS for row in self._rows):
            raise falcon.HTTPMethodNotAllowed([row.method for row in self._rows if version in row.versions])
        raise errors.NotFound("The resource could not be found.")


def _check_type(req: HttpRequest, route: Route) -> None:
    """Raises BadRequest or UnsupportedMediaType: a body must say that it is JSON."""
    length, kind = req.env.get("CONTENT_LENGTH") or "", req.env.get("CONTENT_TYPE") or None
    if length and not length.isdecimal():
        raise errors.BadRequest("content-length header must be an integer")
    if length.strip("0") and not kind:
        raise errors.BadRequest("content-type header required when content-length > 0")
    if route.body is not None and (kind or "").partition(";")[0].strip().lower() != JSON:
        raise errors.UnsupportedMediaType(f"The media type {kind} is not supported, use {JSON}")


def _body_of(req: HttpRequest) -> Any:
    data = reading.bytes_of(req, MAX_BODY)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as problem:
        raise errors.BadRequest(f"Malformed JSON: {problem}") from problem
    reading.refuse_unfit(data, body)
    return body


def _send(resp: falcon.Response, version: int, route: Route, outcome: Any) -> None:
    answer = outcome if isinstance(outcome, Answer) else Answer(outcome)
    resp.status = answer.status or route.success
    resp.set_headers(dict(answer.headers))
    if version >= CACHE_HEADERS and route.cached:
        at = time.time() if answer.modified is None else answer.modified / SECOND
        resp.set_header("Last-Modified", email.utils.formatdate(at, usegmt=True))
        resp.set_header("Cache-Control", "no-cache")
    if answer.body is not None:
        resp.data = orjson.dumps(answer.body)
        resp.content_type = JSON
