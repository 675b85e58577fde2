# SPDX-License-Identifier: Apache-2.0
"""Hashes of passwords and of application credentials' secrets: Argon2id, sized for one box.

9 MiB and 4 passes are OWASP's smallest-memory setting but one: about 25 ms on a core. `matches`
takes as long for a user who doesn't exist (hash None) as for a wrong password, so that the time of
an answer doesn't tell who exists.
"""

import secrets

from argon2 import PasswordHasher
from argon2.exceptions import VerificationError

_HASHER = PasswordHasher(time_cost=4, memory_cost=9216, parallelism=1)
_NOBODY = _HASHER.hash(secrets.token_urlsafe(32))


def digest(password: str) -> str:
    """The hash to store for `password`."""
    return _HASHER.hash(password)


def matches(stored: str | None, password: str) -> bool:
    """Whether `password` is the one `stored` was made of."""
    try:
        return _HASHER.verify(stored or _NOBODY, password) and stored is not None
    except VerificationError:
        return False
