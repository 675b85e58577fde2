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

from common.security import secret_lists
from common.security.host_keys import mac

SLOT_SECONDS = 30
#: Valid slots, relative to the current slot. A conductor's clock may be half a minute ahead.
SLOTS = (0, -1, -2, -3, 1)


class SyncCookies:
    """Create and check cookies.

    The clocks of all conductors must agree to within half a minute, see ``SLOTS``.

    Args:
        secrets: The secrets, separated by commas. The first one makes cookies, all are accepted.
        wall: Returns the time in seconds since 1970.
    """

    def __init__(self, secrets: str, wall: Callable[[], float] = time.time) -> None:
        self._secrets, self._wall = secret_lists.split(secrets), wall

    def cookie(self, host: str, session: int) -> str:
        """Return the cookie that the host's next report or heartbeat must contain."""
        return _compute_cookie(self._secrets[0], host, session, self._slot())

    def is_fresh(self, host: str, session: int, cookie: str) -> bool:
        """Return True if a conductor issued this cookie for this host and session recently.

        A cookie is valid for 90 to 120 seconds, plus or minus the difference between the clocks of
        the two conductors.
        """
        slot = self._slot()
        return any(
            hmac.compare_digest(_compute_cookie(secret, host, session, slot + away), cookie)
            for secret in self._secrets
            for away in SLOTS
        )

    def _slot(self) -> int:
        return int(self._wall() // SLOT_SECONDS)


def _compute_cookie(secret: str, host: str, session: int, slot: int) -> str:
    return mac(secret, "cookie", host, session, slot).hex()[:32]
