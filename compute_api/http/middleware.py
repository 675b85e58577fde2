# SPDX-License-Identifier: Apache-2.0
"""Middleware of every API: request id, size of the body, caller.

Each class handles one concern and stores its result in ``req.context``, a ``RequestState``. The
module ``authentication`` stores the caller in the WSGI environment. Identity headers of clients are
ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import falcon

from common.domain import errors, ids
from common.domain.context import RequestContext
from common.domain.json_types import JsonMapping
from compute_api.http import access_log, request_data

UNAUTHENTICATED = "The request you have made requires authentication."
#: The caller of a public operation.
ANONYMOUS = RequestContext(user_id="", project_id="", roles=(), request_id="")


class RequestState:
    """The data about a request that the middleware collects."""

    request_id: str
    version: int = 0
    caller: RequestContext = ANONYMOUS


class HttpRequest(falcon.Request):
    """Falcon's request with a ``RequestState``."""

    context_type = RequestState
    context: RequestState  # type: ignore[assignment]  # falcon's declaration is of its own bag of attributes


RequestT = TypeVar("RequestT", bound=HttpRequest)


class RequestIds:
    """Chooses the id of each request, and adds the id to the response in these headers."""

    def __init__(self, *headers: str) -> None:
        self._headers = headers

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        """Store the request id, of ``log_requests`` or new. Falcon calls this before routing."""
        req.context.request_id = access_log.begin_request(req.env, req.context)

    def process_resource(
        self, req: HttpRequest, resp: falcon.Response, resource: object, params: object
    ) -> None:
        """Store the template of the path for the log. Falcon calls this after a route matched."""
        req.env[access_log.ROUTE] = req.uri_template

    def process_response(
        self, req: HttpRequest, resp: falcon.Response, resource: object, succeeded: bool
    ) -> None:
        """Add the request id to the response. Falcon calls this at the end, also after an error."""
        for header in self._headers:
            resp.set_header(header, req.context.request_id)


class BodySizes:
    """Refuses a too large body by the declared length, before reading data."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Check Content-Length. A body without Content-Length passes. Falcon calls this.

        Raises:
            TooLarge: Content-Length exceeds ``max_bytes``.
        """
        request_data.check_length(req, self._max_bytes)


class Authentication(Generic[RequestT]):
    """Identifies the caller, and refuses anonymous requests unless the operation is public."""

    def __init__(self, is_public: Callable[[RequestT], bool]) -> None:
        self._is_public = is_public

    def process_request(self, req: RequestT, resp: falcon.Response) -> None:
        """Store the caller, unless the operation is public. Falcon calls this before routing.

        Raises:
            Unauthorized: The operation is not public, and the request has no validated token.
            Forbidden: The operation is not public, and the token has no project.
        """
        if not self._is_public(req):
            req.context.caller = authenticated_context(
                req.env, req.context.request_id, req.remote_addr
            )


def require_caller(caller: RequestContext) -> None:
    """Check in the endpoint that the caller has a user id, independently of the middleware.

    Raises:
        Unauthorized: The caller is anonymous.
    """
    if not caller.user_id:
        raise errors.Unauthorized(UNAUTHENTICATED)


def authenticated_context(
    environ: JsonMapping, request_id: str, remote_address: str | None
) -> RequestContext:
    """Return the caller that ``authentication`` stored in the WSGI environment, with the token.

    Args:
        environ: The WSGI environment.
        request_id: Id of this request.
        remote_address: Address of the client.

    Raises:
        Unauthorized: The request has no validated token, or the token has no user.
        Forbidden: The token has no project.
    """
    user, project = environ.get("HTTP_X_USER_ID", ""), environ.get("HTTP_X_PROJECT_ID", "")
    calling_request = environ.get("HTTP_X_OPENSTACK_REQUEST_ID", "")
    if environ.get("HTTP_X_IDENTITY_STATUS") != "Confirmed" or not user:
        raise errors.Unauthorized(UNAUTHENTICATED)
    if not project:
        raise errors.Forbidden("The token has no project scope; request a token for a project.")
    return RequestContext(
        user_id=user,
        project_id=project,
        request_id=request_id,
        token=environ.get("HTTP_X_AUTH_TOKEN", ""),
        project_name=environ.get("HTTP_X_PROJECT_NAME"),
        roles=_split_roles(environ.get("HTTP_X_ROLES", "")),
        service_roles=_split_roles(environ.get("HTTP_X_SERVICE_ROLES", "")),
        user_domain_id=environ.get("HTTP_X_USER_DOMAIN_ID"),
        project_domain_id=environ.get("HTTP_X_PROJECT_DOMAIN_ID"),
        system_scope=environ.get("HTTP_OPENSTACK_SYSTEM_SCOPE"),
        remote_address=remote_address,
        global_request_id=calling_request if ids.is_request(calling_request) else None,
    )


def _split_roles(text: str) -> tuple[str, ...]:
    return tuple(role.strip() for role in text.split(",") if role.strip())
