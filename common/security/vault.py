# SPDX-License-Identifier: Apache-2.0
"""Encryption of stored secrets: secrets of an action until its end, and the user data of servers.

The API seals secrets, and the conductor opens them to send the command. The transaction that
ends the action deletes them. User data is opened for the guest, and for admins on request. Without
a key, user data is stored unencrypted. The key is ``[DEFAULT] secret_key``, the same for all
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
from common.security import secret_lists

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

#: The prefix of a sealed text. It is not valid base64.
SEALED = "sealed:"
_NO_KEY = "This cloud has no [DEFAULT] secret_key to encrypt secrets with; set the option."


class Vault:
    """Seals (encrypts) and opens (decrypts) secrets.

    Args:
        keys: The keys, separated by commas. The first one seals and all open, so that keys can be
            rotated. Empty: calls that need a key raise Unavailable.
    """

    def __init__(self, keys: str) -> None:
        self._keys = secret_lists.split(keys)

    def seal(self, secrets: JsonObject) -> str:
        """Return the secrets encrypted, for the action's row.

        Raises:
            Unavailable: There is no key.
        """
        return str(self._box.encrypt(json.dumps(secrets).encode()).decode())

    def open(self, sealed: str) -> JsonObject:
        """Return the decrypted secrets.

        Raises:
            Unavailable: There is no key, or no key opens the text.
        """
        secrets: JsonObject = json.loads(self._decrypt(sealed))
        return secrets

    def seal_text(self, text: str) -> str:
        """Return the text encrypted and with the prefix ``SEALED``, for a column.

        Raises:
            Unavailable: There is no key.
        """
        return f"{SEALED}{self._box.encrypt(text.encode()).decode()}"

    def open_text(self, kept: str) -> str:
        """Return the decrypted text of a column with the value ``kept``.

        A text without the prefix ``SEALED`` was stored without a key, and is returned unchanged.

        Raises:
            Unavailable: The text has the prefix, and no key opens the text.
        """
        return (
            self._decrypt(kept.removeprefix(SEALED)).decode() if kept.startswith(SEALED) else kept
        )

    def renew(self, sealed: str) -> str:
        """Return the text encrypted with the first key, unchanged if that key opens it.

        Raises:
            Unavailable: There is no key, or no key opens the text.
        """
        try:
            Vault(",".join(self._keys[:1]))._decrypt(sealed)
        except errors.Unavailable:
            return str(self._box.encrypt(self._decrypt(sealed)).decode())
        return sealed

    def renew_text(self, kept: str) -> str:
        """Return the text of a column encrypted with the first key. See ``open_text``.

        Raises:
            Unavailable: There is no key, or no key opens the text.
        """
        if not kept.startswith(SEALED):
            return self.seal_text(kept)
        return f"{SEALED}{self.renew(kept.removeprefix(SEALED))}"

    def derive(self, purpose: str) -> str:
        """Return 64 hexadecimal digits that follow from the first key and the purpose.

        Raises:
            Unavailable: There is no key.
        """
        return self.derive_all(purpose)[0]

    def derive_all(self, purpose: str) -> list[str]:
        """Return the digits of ``derive`` for each key, in the order of the keys.

        The caller thereby recognizes digits that were derived before a new key was put first.

        Raises:
            Unavailable: There is no key.
        """
        if not self._keys:
            raise errors.Unavailable(_NO_KEY)
        return [
            hmac.new(key.encode(), purpose.encode(), hashlib.sha256).hexdigest()
            for key in self._keys
        ]

    def _decrypt(self, sealed: str) -> bytes:
        from cryptography.fernet import InvalidToken

        try:
            return bytes(self._box.decrypt(sealed.encode()))
        except InvalidToken as problem:
            raise errors.Unavailable(
                "Secrets were sealed with another [DEFAULT] secret_key; give all processes the "
                "same key."
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
