# SPDX-License-Identifier: Apache-2.0
"""Secrets at rest, readable with the key only: an action's until it ends, and the user data of
servers.

The API seals, the conductor opens when it sends the command; the action forgets its secrets in the
transaction that ends it. User data is opened for the guest and for admins who are shown it. In a
cloud without a key it is kept as it came. The key is ``[DEFAULT] secret_key``, the same for all
processes of a cloud.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from functools import cached_property
from typing import TYPE_CHECKING

from common.domain import errors
from common.domain.json_types import JsonObject

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

#: What a sealed text begins with; no base64 does.
SEALED = "sealed:"
_NO_KEY = "This cloud has no [DEFAULT] secret_key to keep secrets with; set one."


class Vault:
    """Seals and opens with one key. Several keys, separated by commas: the first seals, all open
    (rotation)."""

    def __init__(self, keys: str) -> None:
        self._keys = [key.strip() for key in keys.split(",") if key.strip()]

    def seal(self, secrets: JsonObject) -> str:
        """The secrets as text for the action's row.

        Raises:
            Unavailable: there is no key.
        """
        return str(self._box.encrypt(json.dumps(secrets).encode()).decode())

    def open(self, sealed: str) -> JsonObject:
        """The secrets again.

        Raises:
            Unavailable: there is no key, or another one sealed them.
        """
        secrets: JsonObject = json.loads(self._opened(sealed))
        return secrets

    def seal_text(self, text: str) -> str:
        """The text for a column, recognizable as sealed.

        Raises:
            Unavailable: there is no key.
        """
        return f"{SEALED}{self._box.encrypt(text.encode()).decode()}"

    def open_text(self, kept: str) -> str:
        """The text of a column, which may be an old one that is not sealed.

        Raises:
            Unavailable: there is no key, or another one sealed it.
        """
        return self._opened(kept.removeprefix(SEALED)).decode() if kept.startswith(SEALED) else kept

    def derive(self, purpose: str) -> str:
        """A secret that everybody with the first key makes alike and nobody else can: 64
        hexadecimal digits.

        Raises:
            Unavailable: there is no key.
        """
        return self.derive_all(purpose)[0]

    def derive_all(self, purpose: str) -> list[str]:
        """The same of every key: what was made with any of them is still known.

        Raises:
            Unavailable: there is no key.
        """
        if not self._keys:
            raise errors.Unavailable(_NO_KEY)
        return [
            hmac.new(key.encode(), purpose.encode(), hashlib.sha256).hexdigest()
            for key in self._keys
        ]

    def _opened(self, sealed: str) -> bytes:
        from cryptography.fernet import InvalidToken

        try:
            return bytes(self._box.decrypt(sealed.encode()))
        except InvalidToken as problem:
            raise errors.Unavailable(
                "Secrets were sealed with another [DEFAULT] secret_key; give all processes the "
                "same one."
            ) from problem

    @cached_property
    def _box(self) -> MultiFernet:
        from cryptography.fernet import Fernet, MultiFernet

        if not self._keys:
            raise errors.Unavailable(_NO_KEY)
        return MultiFernet(
            [
                Fernet(base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest()))
                for key in self._keys
            ]
        )
