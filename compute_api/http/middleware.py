# SPDX-License-Identifier: Apache-2.0
"""What every API does to a request before its route is found: request id, size, caller.

Each class is one concern and reads and writes ``req.context``, a ``RequestState``.
``authentication`` says in the WSGI environment who the caller is; headers of a client are never
taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import falcon

from common.domain import errors, ids
from common.domain.context import RequestContext
from common.domain.json_types import JsonMapping
from compute_api.http import access_log, request_data

UNAUTHENTICATED = "The request you have made requires authentication."
#: Who asks for what needs no token.
ANONYMOUS = RequestContext(user_id="", project_id="", roles=(), request_id="")


class RequestState:
    """What is known of a request so far."""

    request_id: str
    version: int = 0
    caller: RequestContext = ANONYMOUS


class HttpRequest(falcon.Request):
    """Falcon's request with our state on it."""

    context_type = RequestState
    context: RequestState  # type: ignore[assignment]  # falcon's declaration is of its own bag of attributes


RequestT = TypeVar("RequestT", bound=HttpRequest)


class RequestIds:
    """Every response says which request it answers."""

    def __init__(self, *headers: str) -> None:
        self._headers = headers

    def process_request(self, req: HttpRequest, resp: falcon.Response) -> None:
        """Called by falcon."""
        req.context.request_id = access_log.begun(req.env, req.context)

    def process_resource(
        self, req: HttpRequest, resp: falcon.Response, resource: object, params: object
    ) -> None:
        """Called by falcon."""
        req.env[access_log.ROUTE] = req.uri_template

    def process_response(
        self, req: HttpRequest, resp: falcon.Response, resource: object, succeeded: bool
    ) -> None:
        """Called by falcon."""
        for header in self._headers:
            resp.set_header(header, req.context.request_id)


class BodySizes:
    """A body that says it is too long is refused before any of it is read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Called by falcon."""
        request_data.check_length(req, self._max_bytes)


class Authentication(Generic[RequestT]):
    """Who asks; 401 for nobody, except for what is public."""

    def __init__(self, is_public: Callable[[RequestT], bool]) -> None:
        self._is_public = is_public

    def process_request(self, req: RequestT, resp: falcon.Response) -> None:
        """Called by falcon."""
        if not self._is_public(req):
            req.context.caller = authenticated_context(
                req.env, req.context.request_id, req.remote_addr
            )


def require_caller(caller: RequestContext) -> None:
    """Let an endpoint refuse an anonymous caller itself, whatever the middleware let pass.

    Raises:
        Unauthorized: no token was checked for this request.
    """
    if not caller.user_id:
        raise errors.Unauthorized(UNAUTHENTICATED)


def authenticated_context(
    environ: JsonMapping, request_id: str, remote_address: str | None
) -> RequestContext:
    """The caller, with the token.

    Raises:
        Unauthorized: nobody is confirmed. Forbidden: the token is of no project.
    """
    user, project = environ.get("HTTP_X_USER_ID", ""), environ.get("HTTP_X_PROJECT_ID", "")
    given = environ.get("HTTP_X_OPENSTACK_REQUEST_ID", "")
    if environ.get("HTTP_X_IDENTITY_STATUS") != "Confirmed" or not user:
        raise errors.Unauthorized(UNAUTHENTICATED)
    if not project:
        raise errors.Forbidden("The token has no project scope; ask for one with a project.")
    return RequestContext(
        user_id=user,
        project_id=project,
        request_id=request_id,
        token=environ.get("HTTP_X_AUTH_TOKEN", ""),
        project_name=environ.get("HTTP_X_PROJECT_NAME"),
        roles=_roles(environ.get("HTTP_X_ROLES", "")),
        service_roles=_roles(environ.get("HTTP_X_SERVICE_ROLES", "")),
        user_domain_id=environ.get("HTTP_X_USER_DOMAIN_ID"),
        project_domain_id=environ.get("HTTP_X_PROJECT_DOMAIN_ID"),
        system_scope=environ.get("HTTP_OPENSTACK_SYSTEM_SCOPE"),
        remote_address=remote_address,
        global_request_id=given if ids.is_request(given) else None,
    )


def _roles(text: str) -> tuple[str, ...]:
    return tuple(role.strip() for role in text.split(",") if role.strip())
