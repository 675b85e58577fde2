# SPDX-License-Identifier: Apache-2.0
"""The rate limit of each guest or host, so that one in a loop takes nothing from the others.

Used by the metadata service for guests and by ``rpc.host_link`` for hosts. Thread-safe. Quiet
guests and hosts are forgotten.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

MAX_KEYS = 10_000  # keys that are remembered before the quiet ones are forgotten


class RateLimiter:
    """``rate`` units a second for each key, and as many at once after a second of quiet.

    A unit is a request, a message or a byte.
    """

    def __init__(self, rate: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._monotonic = rate, monotonic
        self._lock = threading.Lock()
        self._known: dict[
            str, tuple[float, float, float]
        ] = {}  # key -> units left, when that was, last news

    def __len__(self) -> int:
        return len(self._known)

    def take(self, key: str, units: int = 1) -> tuple[float, bool]:
        """Take units from the key's allowance, if it has them.

        Returns:
            0.0 if the request may pass, otherwise the seconds until it may. True if a refusal is
            worth logging, which it is once a second.
        """
        with self._lock:
            now = self._monotonic()
            if key not in self._known and len(self._known) >= MAX_KEYS:
                self._known = {
                    known: item for known, item in self._known.items() if now - item[1] < 1
                }
            left, at, logged_at = self._known.get(key, (float(self._rate), now, -math.inf))
            left = min(float(self._rate), left + (now - at) * self._rate)
            passes = left >= units
            is_news = not passes and now - logged_at >= 1
            self._known[key] = (
                left - units * passes,
                now,
                now if is_news else logged_at,
            )
            return 0.0 if passes else (units - left) / self._rate, is_news
