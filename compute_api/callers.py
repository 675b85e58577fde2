# SPDX-License-Identifier: Apache-2.0
"""Who asks, as the wrapper around an application (``tokens``) says it in the WSGI environment.

The compute and the placement application both believe nobody else; nothing but this reads what was said.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common import errors
from common.context import RequestContext


def confirmed(environ: Mapping[str, Any], request_id: str, remote_address: str | None) -> RequestContext:
    """The caller, without the token.

    Raises:
        Unauthorized: nobody is confirmed. Forbidden: the token is of no project.
    """
    user, project = environ.get("HTTP_X_USER_ID", ""), environ.get("HTTP_X_PROJECT_ID", "")
    if environ.get("HTTP_X_IDENTITY_STATUS") != "Confirmed" or not user:
        raise errors.Unauthorized("The request you have made requires authentication.")
    if not project:
        raise errors.Forbidden("The token has no project scope; ask for one with a project.")
    return RequestContext(
        user_id=user, project_id=project, request_id=request_id,
        roles=_roles(environ.get("HTTP_X_ROLES", "")), service_roles=_roles(environ.get("HTTP_X_SERVICE_ROLES", "")),
        user_domain_id=environ.get("HTTP_X_USER_DOMAIN_ID"), project_domain_id=environ.get("HTTP_X_PROJECT_DOMAIN_ID"),
        system_scope=environ.get("HTTP_OPENSTACK_SYSTEM_SCOPE"), remote_address=remote_address)


def _roles(text: str) -> tuple[str, ...]:
    return tuple(role.strip() for role in text.split(",") if role.strip())
