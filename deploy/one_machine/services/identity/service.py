# SPDX-License-Identifier: Apache-2.0
"""The service object of the identity service's resources, and the caller of a request.

A caller with the role admin, in any project or domain, may do everything. Other users may only read
and change their own data. Other services validate tokens with the role service, and read limits
with the role reader in the whole cloud.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import falcon

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.identity import tokens
from deploy.one_machine.services.identity.authenticate import unauthorized
from deploy.one_machine.services.identity.throttle import Throttle
from deploy.one_machine.services.identity.tokens import Token
from deploy.one_machine.services.resource import Transaction


def utc_now() -> datetime:
    """Return the present time in UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class IdentityService:
    """The database, the lifetime of tokens, the clock, and the throttle of wrong passwords."""

    database: Database
    lifetime: timedelta
    clock: Callable[[], datetime] = utc_now
    throttle: Throttle = field(default_factory=Throttle)

    @contextmanager
    def change(self) -> Iterator[Transaction]:
        """Yield a writing transaction, which commits if the block succeeds."""
        with self.database.write() as connection:
            yield Transaction(connection)

    def settle(self, change: Transaction) -> None:
        """Do nothing, because a change has no effects on other processes."""

    def load(self, secret: str) -> Token | None:
        """Return the token with this secret, or None if it is not valid now."""
        with self.database.read() as connection:
            return tokens.load(connection, secret, self.clock())


class TokenAuthentication:
    """Falcon middleware that answers 401 without a valid token, and sets `req.context.caller`.

    The caller is the `Token` of the header X-Auth-Token. Methods in a resource's `open_methods`
    need no token, and have no caller.
    """

    def __init__(self, service: IdentityService) -> None:
        self._service = service

    def process_resource(
        self, req: falcon.Request, resp: falcon.Response, resource: object, params: object
    ) -> None:
        if req.method in getattr(resource, "open_methods", ()):
            return
        secret = req.get_header("X-Auth-Token")
        token = self._service.load(secret) if secret else None
        if token is None:
            raise unauthorized()
        req.context.caller = token


def require(allowed: bool) -> None:
    """Refuse the request if `allowed` is False.

    Raises:
        HTTPForbidden: `allowed` is False.
    """
    if not allowed:
        raise falcon.HTTPForbidden(
            description="You are not authorized to perform the requested action."
        )
