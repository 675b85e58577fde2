# SPDX-License-Identifier: Apache-2.0
"""What the resources of the identity service work on, and the caller of a request.

Two kinds of right exist: an admin (the role, in any project or domain) may do everything; everybody
else may do what concerns themselves. Other services validate tokens with the role service, and read
limits with the role reader in the whole cloud.
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
    """The time."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class IdentityService:
    """The database with the clock and the lifetime of tokens, and what slows guesses down."""

    database: Database
    lifetime: timedelta
    clock: Callable[[], datetime] = utc_now
    throttle: Throttle = field(default_factory=Throttle)

    @contextmanager
    def change(self) -> Iterator[Transaction]:
        """A writing transaction."""
        with self.database.write() as connection:
            yield Transaction(connection)

    def settle(self, change: Transaction) -> None:
        """Nothing is left to do."""

    def load(self, secret: str) -> Token | None:
        """What a token's secret is worth now."""
        with self.database.read() as connection:
            return tokens.load(connection, secret, self.clock())


class TokenAuthentication:
    """Falcon middleware: `req.context.caller` is the token of the request. A resource names its
    `open_methods`."""

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
    """Raises 403 unless it is allowed."""
    if not allowed:
        raise falcon.HTTPForbidden(
            description="You are not authorized to perform the requested action."
        )
