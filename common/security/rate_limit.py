# SPDX-License-Identifier: Apache-2.0
"""A rate limit for each guest or host, so that a guest in a loop does not slow down others.

Used by the metadata service for guests and by ``rpc.host_link`` for hosts. Thread-safe. Idle guests
and hosts are forgotten.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

MAX_KEYS = 10_000  # The number of keys from which idle keys are removed.


class RateLimiter:
    """A limit of ``rate`` units per second for each key, with bursts of one second's units.

    A unit is a request, a message or a byte.
    """

    def __init__(self, rate: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._monotonic = rate, monotonic
        self._lock = threading.Lock()
        # Key -> units left, time of that count, time of the last logged refusal.
        self._buckets: dict[str, tuple[float, float, float]] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, units: int = 1) -> tuple[float, bool]:
        """Take units from the key's allowance if there are enough.

        The allowance grows by ``rate`` units a second, up to ``rate``. More units than ``rate`` are
        always refused.

        Returns:
            Two values. The first is 0.0 if the units were taken, otherwise the seconds until the
            missing units are there. The second is True if the caller should log the refusal: at
            most once a second for a key.
        """
        with self._lock:
            now = self._monotonic()
            if key not in self._buckets and len(self._buckets) >= MAX_KEYS:
                self._buckets = {
                    name: item for name, item in self._buckets.items() if now - item[1] < 1
                }
            left, at, logged_at = self._buckets.get(key, (float(self._rate), now, -math.inf))
            left = min(float(self._rate), left + (now - at) * self._rate)
            passes = left >= units
            is_news = not passes and now - logged_at >= 1
            self._buckets[key] = (
                left - units * passes,
                now,
                now if is_news else logged_at,
            )
            return 0.0 if passes else (units - left) / self._rate, is_news
