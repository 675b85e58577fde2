# SPDX-License-Identifier: Apache-2.0
"""Lists of secrets in one option, so that an old and a new secret are valid side by side.

docs/secrets.md describes how an operator changes a secret with this.
"""

from __future__ import annotations


def split(text: str) -> list[str]:
    """Return the secrets of an option, which commas separate. The first secret is the one in use.

    All others are accepted, for example from processes that do not have the first secret yet.
    """
    return [secret for part in text.split(",") if (secret := part.strip())]
