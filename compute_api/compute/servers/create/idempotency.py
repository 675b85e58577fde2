# SPDX-License-Identifier: Apache-2.0
"""Idempotency-Keys of creates: how a repeated request is recognized, and its password shown again.

Invariant: the contents of the database do not allow checks of guesses of the password. In a cloud
with a secret_key this also holds for the rest of the body, because digests depend on the
secret_key. A cloud without a secret_key shows a generated password in the first answer only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

import orjson

from common.domain import errors
from common.domain.json_types import JsonObject
from common.security.vault import Vault
from compute_api.compute.request import passwords

_PURPOSE = "idempotency"


def parse_key(text: str | None) -> str | None:
    """Check and return the value of the header Idempotency-Key. None means no header.

    Raises:
        BadRequest: The value is empty, longer than 255 characters, or not printable ASCII.
    """
    if text is None:
        return None
    if not 0 < len(text) <= 255 or not text.isascii() or not text.isprintable():
        raise errors.BadRequest("Idempotency-Key: give 1 to 255 printable ASCII characters.")
    return text


class IdempotentBody:
    """The body of a create, with the Idempotency-Key of the request or None.

    Computes the digests of the body, and the password of the new servers.
    """

    def __init__(
        self, vault: Vault | None, project_id: str, key: str | None, body: JsonObject
    ) -> None:
        self.key = key
        self._project_id = project_id
        self._given = body["server"].get("adminPass") or None
        self._random = passwords.generate()
        secrets = vault.derive_all(_PURPOSE) if vault is not None and key is not None else ()
        #: Digests of the body -> the secrets that make them, newest secret first.
        self._secrets: Mapping[str, str | None] = (
            {_mac(secret, "body", _bytes(body)): secret for secret in secrets}
            if secrets
            else {hashlib.sha256(_bytes(_without_password(body))).hexdigest(): None}
        )

    @property
    def digests(self) -> Sequence[str]:
        """The digests of this body: one for each accepted secret_key, the newest key first.

        If the secret_key or the Idempotency-Key is missing, there is one digest, which depends only
        on the body without adminPass. New rows are stored with the first digest.
        """
        return list(self._secrets)

    def password(self, server_id: str) -> str:
        """Return the password of the new servers.

        This is adminPass of the body. Without adminPass the password is derived from the
        Idempotency-Key and the secret_key, or random if one of these keys is missing.

        Args:
            server_id: Id of the first of the new servers.
        """
        return self._password(server_id, self.digests[0]) or self._random

    def password_again(self, server_id: str, digest: str) -> str | None:
        """Return the password for the answer to a repeated request, or None if it is unknown.

        This is adminPass of the body, or else the derived password. With a secret_key it is the
        password of the first answer. Without a secret_key the first body may have had another
        adminPass, and a random password is unknown.

        Args:
            server_id: Id of the first server that the first request created.
            digest: The digest that the first request stored, one of ``digests``.
        """
        return self._password(server_id, digest)

    def _password(self, server_id: str, digest: str) -> str | None:
        secret = self._secrets[digest]
        if self._given is not None or secret is None:
            return self._given
        text = f"{self._project_id}\n{self.key}\n{server_id}"
        return passwords.derive(_mac(secret, "password", text.encode()))


def _bytes(body: JsonObject) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SORT_KEYS)


def _without_password(body: JsonObject) -> JsonObject:
    """Return the body without adminPass.

    Why: without a secret_key the digest would allow guesses of the password.
    """
    server = {name: value for name, value in body["server"].items() if name != "adminPass"}
    return {**body, "server": server}


def _mac(secret: str, purpose: str, data: bytes) -> str:
    return hmac.new(secret.encode(), purpose.encode() + b"\n" + data, hashlib.sha256).hexdigest()
