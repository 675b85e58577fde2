# SPDX-License-Identifier: Apache-2.0
"""How often wrong passwords may be tried: a leaky bucket takes each failure, and a full one
refuses.

There is one for each address and user, and one for each address. A user who does not exist has one
too, and a failed proof takes as long for them, so that neither tells who exists. Nobody is locked
out from elsewhere. Thread-safe.
"""

import threading
import time
from collections.abc import Callable, Hashable

import falcon

from common.security.unproved import origin
from deploy.one_machine.services.identity import passwords

#: Failures that fit, and the seconds in which one is forgotten.
USER_LIMIT, ADDRESS_LIMIT = (5, 10.0), (30, 5.0)
MAX_BUCKETS = 10_000


class Throttle:
    """Of one process."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._empty_at: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._empty_at)

    def attempts(self, address: str) -> "Attempts":
        """Those of one request from this address."""
        return Attempts(self, origin((address, 0)))

    def wait(self, key: Hashable, size: int, seconds: float) -> float:
        """In how many seconds there is room for a failure; 0: now."""
        with self._lock:
            return max(0.0, self._empty_at.get(key, 0.0) - self._monotonic() - (size - 1) * seconds)

    def failed(self, key: Hashable, seconds: float) -> None:
        """One more failure."""
        with self._lock:
            now = self._monotonic()
            if key not in self._empty_at and len(self._empty_at) >= MAX_BUCKETS:
                self._empty_at = {known: at for known, at in self._empty_at.items() if at > now}
                while len(self._empty_at) >= MAX_BUCKETS:
                    del self._empty_at[next(iter(self._empty_at))]
            self._empty_at[key] = max(self._empty_at.get(key, 0.0), now) + seconds

    def succeeded(self, key: Hashable) -> None:
        """It is who it says: what went wrong before is forgotten."""
        with self._lock:
            self._empty_at.pop(key, None)


class Attempts:
    """Proofs by secrets, from one address."""

    def __init__(self, throttle: Throttle, address: str) -> None:
        self._throttle, self._address = throttle, address

    def matches(self, who: Hashable, stored: str | None, secret: str) -> bool:
        """As `passwords.matches`; `who` is what the request calls them. Raises 429 after too many
        failures."""
        buckets = (((self._address, who), *USER_LIMIT), (self._address, *ADDRESS_LIMIT))
        wait = max(self._throttle.wait(key, size, seconds) for key, size, seconds in buckets)
        if wait > 0:
            raise falcon.HTTPTooManyRequests(
                description="Too many wrong passwords: try again later.", retry_after=int(wait) + 1
            )
        if passwords.matches(stored, secret):
            self._throttle.succeeded(buckets[0][0])
            return True
        for key, _, seconds in buckets:
            self._throttle.failed(key, seconds)
        return False
