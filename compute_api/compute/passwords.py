# SPDX-License-Identifier: Apache-2.0
"""Passwords for guests, and files that are injected: shown once in the answer, encrypted until
their action has ended.

Used by what creates, rebuilds and rescues servers. A password is in no log, no journal and no
argument of an action. In a cloud without a [DEFAULT] secret_key passwords are shown and not kept,
and files are refused."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from common import errors
from common.vault import Vault

LETTERS = "".join(sorted(set(string.ascii_letters + string.digits) - set("0O1Il")))
_LENGTH = 12


def generate() -> str:
    """A random one, of letters and digits that nobody confuses."""
    return "".join(secrets.choice(LETTERS) for _ in range(_LENGTH))


def derived(code: str) -> str:
    """Return the password that follows from a secret code of hexadecimal digits."""
    return "".join(LETTERS[byte % len(LETTERS)] for byte in bytes.fromhex(code)[:_LENGTH])


def sealed_text(vault: Vault | None, text: str | None) -> str | None:
    """What the server's row keeps of its user data; without a key the text itself."""
    return vault.seal_text(text) if vault is not None and text else text or None


def sealed(
    vault: Vault | None, password: str | None, files: Sequence[dict[str, str]] = (), **more: object
) -> str | None:
    """What the action's row keeps of them; None when there is nothing, or no key.

    Raises:
        NotImplementedHere: there are files and no key.
    """
    if vault is None and files:
        raise errors.NotImplementedHere(
            "This cloud cannot keep injected files until they are written; its operator "
            "can give it a [DEFAULT] secret_key."
        )
    given = {"admin_pass": password, "files": list(files), **more}
    kept = {name: value for name, value in given.items() if value}
    return vault.seal(kept) if vault is not None and kept else None
