# SPDX-License-Identifier: Apache-2.0
"""Who is asking: the one place where X-Auth-Token becomes a `Token` and where 401 and 403 are decided.

Two kinds of right exist: an admin (the role, in any project or domain) may do everything; everybody else may
do what concerns themselves. Other services validate tokens with the role service, and read limits with the role
reader in the whole cloud.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import falcon

from deploy.standalone.database import Database
from deploy.standalone.identity import tokens
from deploy.standalone.identity.authenticate import unauthorized
from deploy.standalone.identity.throttle import Throttle
from deploy.standalone.identity.tokens import Token


def utc_now() -> datetime:
    """The time, as the gate's default clock."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class Gate:
    """The database with the clock and the lifetime of tokens, and what slows guesses down."""

    database: Database
    lifetime: timedelta
    clock: Callable[[], datetime] = utc_now
    throttle: Throttle = field(default_factory=Throttle)

    def caller(self, req: falcon.Request) -> Token:
        """The token of the request. Raises 401."""
        secret = req.get_header("X-Auth-Token")
        token = self.load(secret) if secret else None
        if token is None:
            raise unauthorized()
        return token

    def admin(self, req: falcon.Request) -> Token:
        """The token of an admin. Raises 401 or 403."""
        return self.allow(self.caller(req), lambda token: token.is_admin)

    def self_or_admin(self, req: falcon.Request, user_id: str) -> Token:
        """The token of that user or of an admin. Raises 401 or 403."""
        return self.allow(self.caller(req), lambda token: token.is_admin or token.user_id == user_id)

    def allow(self, token: Token, rule: Callable[[Token], bool]) -> Token:
        """`token` if `rule` holds for it. Raises 403."""
        if not rule(token):
            raise falcon.HTTPForbidden(description="You are not authorized to perform the requested action.")
        return token

    def load(self, secret: str) -> Token | None:
        """What a token's secret is worth now."""
        with self.database.read() as connection:
            return tokens.load(connection, secret, self.clock())
