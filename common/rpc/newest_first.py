# SPDX-License-Identifier: Apache-2.0
"""A pool of threads that processes the newest item first, and drops items that waited too long.

Why the newest: if there are more requests than threads, the sender of the oldest request has given
up. With the oldest first, no request would be answered in time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from common.service.log import get_logger

log = get_logger(__name__)
Item = TypeVar("Item")


class NewestFirst(Generic[Item]):
    """Calls ``work`` with each item in one of several threads.

    Args:
        work: Processes an item. An exception is logged.
        at_once: The number of threads.
        stale_seconds: An item that waited longer for a thread is dropped.
        name: The prefix of the names of the threads.
    """

    def __init__(
        self, work: Callable[[Item], None], at_once: int, stale_seconds: float, name: str
    ) -> None:
        self._work, self._at_once, self._stale_seconds = work, at_once, stale_seconds
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix=name)
        #: Items and the monotonic times of their arrival, in the order of arrival.
        self.waiting: deque[tuple[float, Item]] = deque()
        self._lock, self._running = threading.Lock(), 0

    def put(self, item: Item) -> None:
        """Process the item as soon as a thread is free. Do not wait for it.

        Raises:
            RuntimeError: The pool is closed.
        """
        now = time.monotonic()
        with self._lock:
            while self.waiting and now - self.waiting[0][0] > self._stale_seconds:
                self.waiting.popleft()
            self.waiting.append((now, item))
            if self._running == self._at_once:
                return
            self._running += 1
        self._pool.submit(self._run)

    def _run(self) -> None:
        """Process items until none waits."""
        while True:
            with self._lock:
                if not self.waiting:
                    self._running -= 1
                    return
                came_at, item = self.waiting.pop()
            if time.monotonic() - came_at > self._stale_seconds:
                continue
            try:
                self._work(item)
            except Exception:
                log.exception("a request cannot be processed and is dropped")

    def close(self) -> None:
        """End the threads after their present items, without waiting for them."""
        with self._lock:
            self.waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
