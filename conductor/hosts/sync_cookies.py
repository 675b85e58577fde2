# SPDX-License-Identifier: Apache-2.0
"""Cookies that prove that a report is new, and not a recorded one.

Each answer to a host contains a cookie, and the next report returns it. A cookie is made of the
conductors' secret, the host, its session and the time. So every conductor recognizes it, and none
stores it. A cookie is good for about two minutes. A registration is good once, because it ends
the session of its cookie.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable

from common.security.host_keys import mac

SLOT_SECONDS = 30
#: Valid slots, relative to the current slot. A conductor's clock may be half a minute ahead.
SLOTS = (0, -1, -2, -3, 1)


class SyncCookies:
    """Create and check cookies.

    The clocks of all conductors must agree to within half a minute, see ``SLOTS``.
    """

    def __init__(self, secret: str, wall: Callable[[], float] = time.time) -> None:
        self._secret, self._wall = secret, wall

    def cookie(self, host: str, session: int) -> str:
        """Return the cookie that the host's next report or heartbeat must contain."""
        return self._compute_cookie(host, session, self._slot())

    def is_fresh(self, host: str, session: int, cookie: str) -> bool:
        """Return True if a conductor issued this cookie for this host and session recently.

        A cookie is valid for 90 to 120 seconds, plus or minus the difference between the clocks of
        the two conductors.
        """
        slot = self._slot()
        return any(
            hmac.compare_digest(self._compute_cookie(host, session, slot + away), cookie)
            for away in SLOTS
        )

    def _slot(self) -> int:
        return int(self._wall() // SLOT_SECONDS)

    def _compute_cookie(self, host: str, session: int, slot: int) -> str:
        return mac(self._secret, "cookie", host, session, slot).hex()[:32]
