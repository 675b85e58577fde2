# SPDX-License-Identifier: Apache-2.0
"""The throttle of wrong passwords: leaky buckets that failures fill. A full bucket refuses.

There is a bucket for each pair of address and user, and one for each address. A missing user has a
bucket too, and a failed proof takes as long, so neither shows which users exist. Clients at one
address cannot lock a user out at another. The throttle is thread-safe.
"""

import threading
import time
from collections.abc import Callable, Hashable

import falcon

from common.security.unproved import origin
from deploy.one_machine.services.identity import passwords

#: The capacity in failures, and the seconds in which one failure leaks.
USER_LIMIT, ADDRESS_LIMIT = (5, 10.0), (30, 5.0)
MAX_BUCKETS = 10_000


class Throttle:
    """The buckets of one process. See the module's docstring."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._empty_at: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._empty_at)

    def attempts(self, address: str) -> "Attempts":
        """Return the `Attempts` of one request from this address.

        All addresses of an IPv6 /64 network count as one address.
        """
        return Attempts(self, origin((address, 0)))

    def wait(self, key: Hashable, size: int, seconds: float) -> float:
        """Return the seconds until the bucket has room for a failure. 0 means now.

        Args:
            key: The bucket.
            size: The capacity in failures.
            seconds: The time in which one failure leaks.
        """
        with self._lock:
            return max(0.0, self._empty_at.get(key, 0.0) - self._monotonic() - (size - 1) * seconds)

    def failed(self, key: Hashable, seconds: float) -> None:
        """Add a failure, which leaks in this many seconds, to a bucket.

        Before a new bucket would exceed ``MAX_BUCKETS``, empty buckets are removed, and if there
        are no empty buckets, the oldest bucket.
        """
        with self._lock:
            now = self._monotonic()
            if key not in self._empty_at and len(self._empty_at) >= MAX_BUCKETS:
                self._empty_at = {
                    bucket: empty_at
                    for bucket, empty_at in self._empty_at.items()
                    if empty_at > now
                }
                while len(self._empty_at) >= MAX_BUCKETS:
                    del self._empty_at[next(iter(self._empty_at))]
            self._empty_at[key] = max(self._empty_at.get(key, 0.0), now) + seconds

    def succeeded(self, key: Hashable) -> None:
        """Empty a bucket, after a correct password."""
        with self._lock:
            self._empty_at.pop(key, None)


class Attempts:
    """The attempts of one request to prove an identity, from one address."""

    def __init__(self, throttle: Throttle, address: str) -> None:
        self._throttle, self._address = throttle, address

    def matches(self, who: Hashable, stored: str | None, secret: str) -> bool:
        """Check a password as `passwords.matches` does, and count a failure.

        A wrong password adds a failure to two buckets: that of the user at this address, and that
        of the address. A correct password empties the first.

        Args:
            who: The user, by the name or id in the request.
            stored: The stored hash, or None for a missing user.
            secret: The password.

        Raises:
            HTTPTooManyRequests: A bucket is full. The password is not checked.
        """
        buckets = (((self._address, who), *USER_LIMIT), (self._address, *ADDRESS_LIMIT))
        wait = max(self._throttle.wait(key, size, seconds) for key, size, seconds in buckets)
        if wait > 0:
            raise falcon.HTTPTooManyRequests(
                description=f"Too many wrong passwords: try again in {int(wait) + 1} seconds.",
                retry_after=int(wait) + 1,
            )
        if passwords.matches(stored, secret):
            self._throttle.succeeded(buckets[0][0])
            return True
        for key, _, seconds in buckets:
            self._throttle.failed(key, seconds)
        return False
