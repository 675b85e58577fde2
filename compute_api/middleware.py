# SPDX-License-Identifier: Apache-2.0
"""What is done to every request before and after its handler, one class a concern, in the order of ``app``.

Each reads and writes ``req.context`` (a ``State``). Nothing here knows an operation.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import falcon
import orjson

from common import errors, ids
from common.context import RequestContext
from compute_api import callers, microversions, reading, routes


class State:
    """What is known of a request so far."""

    request_id: str
    base: str = ""
    shown_version: str = "v2.1"
    legacy: bool = False
    url_project: str = ""
    ends_with_slash: bool = False
    open: bool = False
    version: int = 0
    caller: RequestContext


class HttpRequest(falcon.Request):
    """Falcon's request with our state on it."""

    context_type = State
    context: State  # type: ignore[assignment]  # falcon's declaration is of its own bag of attributes


class RequestIds:
    """Every answer says which request it answers; a client's own id is kept beside ours."""

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        req.context.request_id = ids.new_request()

    def process_response(self, req: HttpRequest, resp: falcon.Response, resource: Any, succeeded: bool) -> None:
        resp.set_header("X-Compute-Request-Id", req.context.request_id)
        resp.set_header("X-Openstack-Request-Id", req.context.request_id)


class Sizes:
    """A body that says it is too long is refused before any of it is read."""

    def __init__(self, max_body: int) -> None:
        self._max = max_body

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        reading.check_length(req, self._max)


class Roots:
    """Brings every way to write a URL to one: /v2.1/servers.

    /v2 is the same API as it was before microversions. A project id may stand before the resource. As at Nova nothing
    is found at a path that ends with a slash, but for the roots: an empty id must not turn one thing into the list of
    all.
    """

    def __init__(self, public_url: str | None) -> None:
        self._public = public_url.rstrip("/") if public_url else None

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        state = req.context
        state.base = self._public or (req.prefix.rstrip("/"))
        root, *parts = [part for part in req.path.split("/") if part] or [""]
        state.open = root not in ("v2.1", "v2") or not parts or parts[0] == "versions"
        if root not in ("v2.1", "v2"):
            return
        state.shown_version, state.legacy = root, root == "v2"
        if len(parts) > 1 and parts[0] not in routes.NOUNS and parts[1] in routes.NOUNS:
            state.url_project = parts.pop(0)
        state.ends_with_slash = bool(parts) and req.path.endswith("/")
        req.path = "/v2.1/" + "/".join(parts) if parts else "/" + root

    def process_resource(self, req: HttpRequest, resp: falcon.Response, resource: Any, params: dict[str, str]) -> None:
        if req.context.ends_with_slash:
            raise falcon.HTTPNotFound()


class Callers:
    """Who asks, as the wrapper around the application found out; 401 for nobody, except where that is no matter."""

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        state, said = req.context, req.env.get
        if state.open:
            return
        caller = callers.confirmed(req.env, state.request_id, req.remote_addr)
        if state.url_project and state.url_project != caller.project_id:
            raise errors.BadRequest(f"Malformed request URL: URL's project_id '{state.url_project[:64]}' doesn't match "
                                    f"Context's project_id '{caller.project_id}'")
        asked_with = said("HTTP_X_OPENSTACK_REQUEST_ID", "")
        state.caller = replace(
            caller, token=said("HTTP_X_AUTH_TOKEN", ""), project_name=said("HTTP_X_PROJECT_NAME"),
            global_request_id=asked_with if ids.is_request(asked_with) else None)


class Microversions:
    """Which version the request chose, and the headers that say so."""

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        state = req.context
        if req.path.startswith("/v2.1"):
            state.version = microversions.MIN if state.legacy else microversions.chosen(req.headers)

    def process_response(self, req: HttpRequest, resp: falcon.Response, resource: Any, succeeded: bool) -> None:
        state = req.context
        if not state.version or state.legacy:
            return
        version = microversions.text(state.version)
        resp.set_header(microversions.MODERN, f"compute {version}")
        resp.set_header(microversions.OLDER, version)
        resp.append_header("Vary", f"{microversions.MODERN}, {microversions.OLDER}")


def body_of(req: HttpRequest, most: int) -> Any:
    """The body as JSON; never more of it than ``most`` bytes is read.

    Raises:
        TooLarge, UnsupportedMediaType, BadRequest.
    """
    kind = (req.content_type or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise errors.UnsupportedMediaType(f"Unsupported Content-Type {kind[:80]}; send application/json")
    data = reading.bytes_of(req, most)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as problem:
        raise errors.BadRequest("Malformed request body") from problem
    reading.refuse_unfit(data, body)
    return body
