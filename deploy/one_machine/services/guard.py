# SPDX-License-Identifier: Apache-2.0
"""The authentication of an embedded service, with keystonemiddleware.

The middleware validates tokens at the identity service as the user kilonova, and
`HeaderAuthentication` makes a caller of the result. The password comes from a file or from
KILONOVA_SERVICE_PASSWORD. The password is never a command-line argument, because every user of the
machine can read arguments.
"""

import argparse
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import falcon
from keystoneauth1.exceptions import ConnectionError as IdentitySilent
from keystonemiddleware.auth_token import AuthProtocol
from oslo_config.cfg import ConfigOpts

from deploy.one_machine.services.json_types import Body
from deploy.one_machine.services.web import App, secret

TOKEN_CACHE_SECONDS = 30
"""For how long a revoked token may still work."""
ANSWER_SECONDS = 4
"""For how long each of the two requests to the identity service may wait."""
SILENT = b'{"message": "The identity service does not answer; try again later."}'


def add_identity_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `identity_of` reads."""
    parser.add_argument(
        "--auth-url", required=True, metavar="URL", help="of the identity service, with /v3"
    )
    parser.add_argument("--username", default="kilonova")
    parser.add_argument("--project", default="service")
    parser.add_argument("--password-file")


def identity_of(options: argparse.Namespace) -> Body:
    """Return the options for keystonemiddleware, with the password of the service's user.

    Raises:
        SystemExit: There is no password.
        OSError: The password file cannot be read.
    """
    return {
        "auth_type": "password",
        "auth_url": options.auth_url,
        "username": options.username,
        "password": secret(options.password_file, "KILONOVA_SERVICE_PASSWORD"),
        "project_name": options.project,
        "user_domain_id": "default",
        "project_domain_id": "default",
        "www_authenticate_uri": options.auth_url,
        "token_cache_time": TOKEN_CACHE_SECONDS,
        "include_service_catalog": False,
        "service_token_roles_required": True,
        "http_connect_timeout": ANSWER_SECONDS,
        "http_request_max_retries": 0,
    }


def add_authentication(app: App, identity: Body, is_open: Callable[[str], bool]) -> WSGIApplication:
    """Return the app behind keystonemiddleware. Requests to open paths go to the app directly.

    If the identity service does not answer, the response is 503.

    Args:
        app: The app.
        identity: Options from `identity_of`.
        is_open: True for a path that needs no token, for example that of the versions.
    """
    # The middleware warns of every option that belongs to the authentication plugin.
    logging.getLogger("keystonemiddleware._common.config").setLevel(logging.ERROR)
    options = ConfigOpts()
    options([], project="kilonova", default_config_files=[], default_config_dirs=[])
    behind = AuthProtocol(app, {**identity, "oslo_config_config": options})

    def choose(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        inner: WSGIApplication = app if is_open(environ["PATH_INFO"]) else behind
        try:
            return inner(environ, start_response)
        except IdentitySilent:
            headers = [("Content-Type", "application/json"), ("Retry-After", "1")]
            start_response("503 Service Unavailable", headers)
            return [SILENT]

    return choose


@dataclass(frozen=True)
class Caller:
    """The project, the user and the roles of a valid token."""

    #: The roles that may write.
    WRITERS: ClassVar = frozenset({"admin", "manager", "member", "service"})

    project_id: str
    roles: frozenset[str]
    user_id: str = ""
    #: True if the request has a valid service token beside the user's token.
    has_service_token: bool = False
    #: The user's own token, for requests to other services as the user.
    token: str = field(default="", repr=False)

    @property
    def is_admin(self) -> bool:
        return "admin" in self.roles

    @property
    def is_service(self) -> bool:
        """True if a service, for example the compute service, sends the request.

        A service sends a user's token with a service token, or its own token.
        """
        return self.has_service_token or "service" in self.roles

    @property
    def may_write(self) -> bool:
        """True if the token has a project and one of the roles ``WRITERS``."""
        return bool(self.project_id and self.roles & self.WRITERS)


class HeaderAuthentication:
    """Falcon middleware that refuses requests without a valid token, except for open paths.

    This class trusts the headers of keystonemiddleware and stores the caller in
    `req.context.caller`.
    """

    def __init__(self, is_open: Callable[[str], bool], caller_class: type[Caller]) -> None:
        self._is_open, self._caller_class = is_open, caller_class

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        if self._is_open(req.path):
            return
        if req.get_header("X-Identity-Status") != "Confirmed":
            raise falcon.HTTPUnauthorized(
                description="The request you have made requires authentication.",
                challenges=["Keystone"],
            )
        services = (req.get_header("X-Service-Roles") or "").split(",")
        is_service = req.get_header("X-Service-Identity-Status") == "Confirmed"
        req.context.caller = self._caller_class(
            req.get_header("X-Project-Id") or "",
            frozenset((req.get_header("X-Roles") or "").split(",")),
            user_id=req.get_header("X-User-Id") or "",
            has_service_token=is_service and "service" in services,
            token=req.get_header("X-Auth-Token") or "",
        )
