# SPDX-License-Identifier: Apache-2.0
"""Hashes of passwords, with Argon2id for a small machine.

9 MiB and 4 passes are among OWASP's recommended settings with little memory, about 25 ms on a
core. `matches` takes as long for a missing user (hash None) as for a wrong password, so
that the response time does not show which users exist.
"""

import secrets

from argon2 import PasswordHasher
from argon2.exceptions import VerificationError

_HASHER = PasswordHasher(time_cost=4, memory_cost=9216, parallelism=1)
_NOBODY = _HASHER.hash(secrets.token_urlsafe(32))


def digest(password: str) -> str:
    """Return the hash to store for `password`."""
    return _HASHER.hash(password)


def matches(stored: str | None, password: str) -> bool:
    """Return True if the hash belongs to the password.

    For None return False, after the same time as for a wrong password.
    """
    try:
        return _HASHER.verify(stored or _NOBODY, password) and stored is not None
    except VerificationError:
        return False
