# SPDX-License-Identifier: Apache-2.0
"""Passwords for guests: made here, told once in the answer, and kept sealed until the action that sets them ends; and
files that are injected, kept in the same way.

Called by what creates, rebuilds and rescues servers. Nothing else ever sees one: no log, no journal, no argument of
an action. In a cloud without a [DEFAULT] secret_key passwords are told and not kept, and files are refused.
"""
from __future__ import annotations

import hashlib
import hmac
import secrets
import string
from collections.abc import Sequence
from typing import Any

from common import errors
from common.vault import Vault

_LETTERS = "".join(sorted(set(string.ascii_letters + string.digits) - set("0O1Il")))
_LENGTH = 12


def new() -> str:
    """A random one, of letters and digits that nobody confuses."""
    return "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH))


def derived(server_id: str, key: str) -> str:
    """The one of a server that was asked for with an Idempotency-Key: only who knows the key can make it again."""
    made = hmac.new(key.encode(), server_id.encode(), hashlib.sha256).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in made[:_LENGTH])


def sealed(vault: Vault | None, password: str | None, files: Sequence[dict[str, str]] = (), **more: Any) -> str | None:
    """What the action's row keeps of them; None when there is nothing, or no key.

    Raises:
        NotImplementedHere: there are files and no key.
    """
    if vault is None and files:
        raise errors.NotImplementedHere("This cloud cannot keep injected files until they are written; its operator "
                                        "can give it a [DEFAULT] secret_key.")
    given = {"admin_pass": password, "files": list(files), **more}
    kept = {name: value for name, value in given.items() if value}
    return vault.seal(kept) if vault is not None and kept else None
