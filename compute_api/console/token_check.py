# SPDX-License-Identifier: Apache-2.0
"""Whether the user of a console may still have it: whether the identity service says that the token
is good.

A token that was revoked, or whose user or project was disabled or lost its roles, ends the sessions
that it opened. An expired one does not, as long as the identity service answers for expired tokens
(``allow_expired``). While the identity service does not answer, open sessions stay and no new one
opens. Thread-safe."""

from __future__ import annotations

from collections.abc import Callable

from common.clients.http import Http, kind_of
from common.clients.identity import IdentityClient
from common.security.vault import Vault

IsValid = Callable[[str], bool]


class TokenChecker:
    """``asked`` says whether a token is still good."""

    def __init__(self, vault: Vault, asked: IsValid) -> None:
        self._vault, self._asked = vault, asked

    def is_valid(self, sealed: str | None) -> bool:
        """True if the caller's token is good.

        Args:
            sealed: the token as the API sealed it. None if the API has no key to seal tokens.

        Raises:
            Unavailable: the identity service does not answer.
        """
        return sealed is None or self._asked(str(self._vault.open(sealed)["token"]))


def keystone(identity: IdentityClient, auth_url: str) -> IsValid:
    """Ask Keystone, with Kilonova's own token."""
    base = auth_url.rstrip("/")
    http = Http("identity service", base if base.endswith("/v3") else f"{base}/v3")

    def asked(token: str) -> bool:
        def ask(own: str) -> bool:
            answer = http.send(
                "GET",
                f"{http.base()}/auth/tokens",
                own,
                headers={"X-Subject-Token": token},
                params={"allow_expired": "true", "nocatalog": "true"},
            )
            if answer.status_code in (200, 404):
                return bool(answer.status_code == 200)
            raise kind_of(answer.status_code)(
                f"The identity service answered {answer.status_code} when asked for the "
                "token of a console's user; may [identity] username validate tokens?"
            )

        return identity.with_token(ask, "The identity service")

    return asked
