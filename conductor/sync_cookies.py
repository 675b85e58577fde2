# SPDX-License-Identifier: Apache-2.0
"""Is what a host says said now, or was it kept by somebody and sent again?

Each answer to a host brings a cookie, and what the host says next brings it back. A cookie is made
of the conductors' secret, the host, its session and the time, so that every conductor knows it
again and nobody has to keep it. It is good for one to two minutes; a registration is good once,
because it ends the session that its cookie is made of.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable

from common.host_keys import mac

SLOT_SECONDS = 30
#: those that count, from now on; a conductor's clock may be half a minute ahead
SLOTS = (
    0,
    -1,
    -2,
    -3,
    1,
)


class SyncCookies:
    """Makes cookies, and knows them again. ``wall`` tells the time, which all conductors' machines
    have in common."""

    def __init__(self, secret: str, wall: Callable[[], float] = time.time) -> None:
        self._secret, self._wall = secret, wall

    def cookie(self, host: str, session: int) -> str:
        """For what this host says next."""
        return self._made(host, session, self._slot())

    def is_fresh(self, host: str, session: int, cookie: str) -> bool:
        """Was this cookie given to the host in this session, and lately?"""
        slot = self._slot()
        return any(
            hmac.compare_digest(self._made(host, session, slot + away), cookie) for away in SLOTS
        )

    def _slot(self) -> int:
        return int(self._wall() // SLOT_SECONDS)

    def _made(self, host: str, session: int, slot: int) -> str:
        return mac(self._secret, "cookie", host, session, slot).hex()[:32]
