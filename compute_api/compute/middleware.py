# SPDX-License-Identifier: Apache-2.0
"""What the Compute API does to every request beside what all services do (``edge.middleware``), in
``app``'s order.

Each class is one concern and reads and writes ``req.context``, a ``ComputeState``. Nothing here
knows an operation.
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
    """What is known of a request so far."""

    base: str = ""  #: scheme, host and prefix of links
    shown_version: str = "v2.1"  #: the root that was asked for: v2.1 or v2
    is_legacy: bool = False  #: below /v2
    url_project: str = ""
    ends_with_slash: bool = False
    is_public: bool = False  #: no token is needed
    services: Services  #: of this application
    policy: Policy


class ComputeHttpRequest(HttpRequest):
    """Falcon's request with our state on it."""

    context_type = ComputeState
    context: ComputeState


class Dependencies:
    """Give each request the services and the policy of this application. All applications of a
    process share their endpoints."""

    def __init__(self, services: Services, policy: Policy) -> None:
        self._services, self._policy = services, policy

    def process_request(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
        """Called by falcon."""
        req.context.services, req.context.policy = self._services, self._policy


class ApiRoots:
    """Brings every way to write a URL to one: /v2.1/servers.

    /v2 is the same API as it was before microversions. A project id may stand before the resource.
    As at Nova nothing is found at a path that ends with a slash, but for the roots: an empty id
    must not turn one thing into the list of all.
    """

    def __init__(self, public_url: str | None) -> None:
        self._public = public_url.rstrip("/") if public_url else None

    def process_request(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
        """Called by falcon."""
        state = req.context
        state.base = self._public or (req.prefix.rstrip("/"))
        root, *parts = [part for part in req.path.split("/") if part] or [""]
        if root not in ("v2.1", "v2"):
            state.is_public = True  # the list of versions, or nothing
            return
        state.shown_version, state.is_legacy = root, root == "v2"
        if len(parts) > 1 and parts[0] not in routes.NOUNS and parts[1] in routes.NOUNS:
            state.url_project = parts.pop(0)
        elif len(parts) == 1 and req.path.endswith("/") and _is_project(parts[0]):
            # The endpoint of a catalogue, which ends in the project id: the version document, for
            # those with a token.
            state.url_project = parts.pop()
        state.ends_with_slash = bool(parts) and req.path.endswith("/")
        req.path = "/v2.1/" + "/".join(parts) if parts else "/" + root
        # Decided on the path that is served, not on the one that was asked for.
        is_document = VERSION_DOCUMENTS.fullmatch(req.path) is not None
        state.is_public = is_document and not state.url_project

    def process_resource(
        self,
        req: ComputeHttpRequest,
        resp: falcon.Response,
        resource: object,
        params: dict[str, str],
    ) -> None:
        """Called by falcon."""
        if req.context.ends_with_slash:
            raise falcon.HTTPNotFound()


def _is_project(part: str) -> bool:
    return part not in routes.NOUNS and part != "versions"


class UrlProjects:
    """The project in a URL is the token's; 400 for another one."""

    def process_request(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
        """Called by falcon."""
        given, caller = req.context.url_project, req.context.caller
        if given and given != caller.project_id:
            raise errors.BadRequest(
                f"Malformed request URL: URL's project_id '{given[:64]}' doesn't match "
                f"Context's project_id '{caller.project_id}'"
            )


class ComputeVersions:
    """Which version the request chose, and the headers that say so."""

    def process_request(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
        """Called by falcon."""
        state = req.context
        if req.path.startswith("/v2.1"):
            state.version = (
                microversions.MIN if state.is_legacy else microversions.chosen(req.headers)
            )

    def process_response(
        self, req: ComputeHttpRequest, resp: falcon.Response, resource: object, succeeded: bool
    ) -> None:
        """Called by falcon."""
        state = req.context
        if not state.version or state.is_legacy:
            return
        version = microversions.text(state.version)
        resp.set_header(HEADER, f"compute {version}")
        resp.set_header(microversions.OLDER_HEADER, version)
        resp.append_header("Vary", f"{HEADER}, {microversions.OLDER_HEADER}")
