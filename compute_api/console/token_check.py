# SPDX-License-Identifier: Apache-2.0
"""Check whether the user of a console still has access, by validating the token.

A revoked token ends the sessions that it opened. The same holds for a token whose user or project
was disabled or lost its roles. An expired token does not end them if the identity service supports
``allow_expired``. While the identity service does not answer, open sessions stay and new ones are
refused. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable

from common.clients.http import Http, kind_of
from common.clients.identity import IdentityClient
from common.security.vault import Vault

IsValid = Callable[[str], bool]


class TokenChecker:
    """Validates encrypted tokens.

    Args:
        vault: Decrypts tokens.
        validate: Returns whether a token is valid.
    """

    def __init__(self, vault: Vault, validate: IsValid) -> None:
        self._vault, self._validate = vault, validate

    def is_valid(self, sealed: str | None) -> bool:
        """Return True if the token is valid.

        Args:
            sealed: The token, encrypted by the API. None counts as valid: the API has no key for
                encryption.

        Raises:
            Unavailable: The identity service does not answer or does not accept Kilonova's token,
                or this process cannot decrypt the token.
            Problem: The identity service refuses to validate tokens for Kilonova's user.
        """
        return sealed is None or self._validate(str(self._vault.open(sealed)["token"]))


def keystone(identity: IdentityClient, auth_url: str) -> IsValid:
    """Return a function that validates a token with Keystone, using Kilonova's own token.

    The function returns False for an unknown or revoked token. An expired token is valid if the
    identity service supports ``allow_expired``. The function raises Unavailable if the service does
    not answer or does not accept Kilonova's token, and another Problem if the service refuses the
    validation.
    """
    base = auth_url.rstrip("/")
    http = Http("identity service", base if base.endswith("/v3") else f"{base}/v3")

    def validate(token: str) -> bool:
        def send(own_token: str) -> bool:
            response = http.send(
                "GET",
                f"{http.base()}/auth/tokens",
                own_token,
                headers={"X-Subject-Token": token},
                params={"allow_expired": "true", "nocatalog": "true"},
            )
            if response.status_code in (200, 404):
                return bool(response.status_code == 200)
            raise kind_of(response.status_code)(
                f"The identity service answered {response.status_code} to the validation of a console "
                "user's token; check that [identity] username may validate tokens."
            )

        return identity.with_token(send, "The identity service")

    return validate
