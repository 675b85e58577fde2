# SPDX-License-Identifier: Apache-2.0
"""Middleware of the Compute API, in addition to that of all services (``http.middleware``).

Each class has one task, and reads and writes ``req.context``, a ``ComputeState``. The classes are
independent of operations. ``app`` defines their order.
"""

from __future__ import annotations

import re

import falcon

from common.domain import errors
from compute_api.compute import routes
from compute_api.compute.request import microversions
from compute_api.compute.request.dependencies import Services
from compute_api.http.microversions import HEADER
from compute_api.http.middleware import HttpRequest, RequestState
from compute_api.http.policy import Policy

#: The paths of the version documents. Any other path of the API needs a token.
VERSION_DOCUMENTS = re.compile(r"/v2|/v2\.1(/versions(/[^/]+)?)?")


class ComputeState(RequestState):
    """The data about one request, which the middleware collects."""

    #: Scheme, host and prefix of links.
    base: str = ""
    #: The root in the request's path: v2.1 or v2.
    shown_version: str = "v2.1"
    #: True below /v2.
    is_legacy: bool = False
    url_project: str = ""
    ends_with_slash: bool = False
    #: True if the request needs no token.
    is_public: bool = False
    #: The services of this application.
    services: Services
    policy: Policy


class ComputeHttpRequest(HttpRequest):
    """Falcon's request with a ``ComputeState`` as context."""

    context_type = ComputeState
    context: ComputeState


class Dependencies:
    """Gives each request the services and the policy of its application.

    Why: all applications of a process share their endpoints.
    """

    def __init__(self, services: Services, policy: Policy) -> None:
        self._services, self._policy = services, policy

    def process_request(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
        req.context.services, req.context.policy = self._services, self._policy


class ApiRoots:
    """Converts all forms of a URL to one, for example /v2.1/servers.

    Below /v2 the API is the version from before microversions. The path may contain a project id
    before the resource. As in Nova, a path with a slash at the end is a 404, except for the roots.
    Why: a request for a resource with an empty id must not become a request for the whole list.
    """

    def __init__(self, public_url: str | None) -> None:
        self._public = public_url.rstrip("/") if public_url else None

    def process_request(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
        state = req.context
        state.base = self._public or (req.prefix.rstrip("/"))
        root, *parts = [part for part in req.path.split("/") if part] or [""]
        if root not in ("v2.1", "v2"):
            # The list of versions, or a path that does not exist.
            state.is_public = True
            return
        state.shown_version, state.is_legacy = root, root == "v2"
        if len(parts) > 1 and parts[0] not in routes.NOUNS and parts[1] in routes.NOUNS:
            state.url_project = parts.pop(0)
        elif len(parts) == 1 and req.path.endswith("/") and _is_project(parts[0]):
            # An endpoint in the catalogue ends with the project id. The response is the version
            # document, for callers with a token.
            state.url_project = parts.pop()
        state.ends_with_slash = bool(parts) and req.path.endswith("/")
        req.path = "/v2.1/" + "/".join(parts) if parts else "/" + root
        # Decide by the converted path, because that is the path that is served.
        is_document = VERSION_DOCUMENTS.fullmatch(req.path) is not None
        state.is_public = is_document and not state.url_project

    def process_resource(
        self,
        req: ComputeHttpRequest,
        resp: falcon.Response,
        resource: object,
        params: dict[str, str],
    ) -> None:
        if req.context.ends_with_slash:
            raise falcon.HTTPNotFound()


def _is_project(part: str) -> bool:
    return part not in routes.NOUNS and part != "versions"


class UrlProjects:
    """Refuses a URL with a project other than the token's project, with 400."""

    def process_request(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
        url_project, caller = req.context.url_project, req.context.caller
        if url_project and url_project != caller.project_id:
            raise errors.BadRequest(
                f"Malformed request URL: URL's project_id '{url_project[:64]}' doesn't match "
                f"Context's project_id '{caller.project_id}'"
            )


class ComputeVersions:
    """Stores the microversion of the request, and adds the version headers to the response.

    Below /v2 the version is the lowest, and the response has no version headers.
    """

    def process_request(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
        state = req.context
        if req.path.startswith("/v2.1"):
            state.version = (
                microversions.MIN if state.is_legacy else microversions.chosen(req.headers)
            )

    def process_response(
        self, req: ComputeHttpRequest, resp: falcon.Response, resource: object, succeeded: bool
    ) -> None:
        state = req.context
        if not state.version or state.is_legacy:
            return
        version = microversions.text(state.version)
        resp.set_header(HEADER, f"compute {version}")
        resp.set_header(microversions.OLDER_HEADER, version)
        resp.append_header("Vary", f"{HEADER}, {microversions.OLDER_HEADER}")
