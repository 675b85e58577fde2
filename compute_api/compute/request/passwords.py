# SPDX-License-Identifier: Apache-2.0
"""Passwords and injected files of guests, which are stored encrypted until their action has ended.

Create, rebuild, rescue, evacuate and changePassword use them. Only the response of the
request that begins the action shows the password. A repeated create can show the password again
(``create.idempotency``).

Invariant: logs, journals and arguments of actions contain no password. A cloud without [DEFAULT]
secret_key shows passwords without storing them, and refuses files and changePassword.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from common.domain import errors
from common.security.vault import Vault

LETTERS = "".join(sorted(set(string.ascii_letters + string.digits) - set("0O1Il")))
_LENGTH = 12


def generate() -> str:
    """Return a random password of letters and digits that are hard to confuse."""
    return "".join(secrets.choice(LETTERS) for _ in range(_LENGTH))


def derive(code: str) -> str:
    """Return the password for ``code``, a text of hexadecimal digits.

    The same code always gives the same password.
    """
    return "".join(LETTERS[byte % len(LETTERS)] for byte in bytes.fromhex(code)[:_LENGTH])


def seal_text(vault: Vault | None, text: str | None) -> str | None:
    """Return user data for the server's row, encrypted if the cloud has a key.

    Returns None without user data.
    """
    return vault.seal_text(text) if vault is not None and text else text or None


def seal(
    vault: Vault | None, password: str | None, files: Sequence[dict[str, str]] = (), **more: object
) -> str | None:
    """Return the encrypted secrets for the action's row, or None without secrets or without a key.

    Empty values are left out. Without a key the action runs without the password.

    Args:
        vault: Encrypts with the cloud's key. None means that the cloud has no key.
        password: The new password, or None.
        files: Files for the config drive, with path and contents.
        more: Further secrets by name.

    Raises:
        NotImplementedHere: There are files, and this cloud has no key.
    """
    if vault is None and files:
        raise errors.NotImplementedHere(
            "This cloud has no [DEFAULT] secret_key to encrypt injected files, so it cannot store "
            "them. Leave personality out."
        )
    fields = {"admin_pass": password, "files": list(files), **more}
    fields = {name: value for name, value in fields.items() if value}
    return vault.seal(fields) if vault is not None and fields else None
