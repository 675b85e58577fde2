# SPDX-License-Identifier: Apache-2.0
"""Turns: a queue of requests for each server, of which only the first polls the database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """The requests of this process that wait to begin an action, in one queue per server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def first(self, server_id: str, timeout_seconds: float) -> Iterator[None]:
        """Wait for this request's turn at the server, and hold the turn during the with block.

        Only one request of this process at a time has the turn. After the timeout the block runs
        without the turn. The order of the waiting requests is not defined.
        """
        with self._lock:
            line, length = self._lines.get(server_id, (threading.Lock(), 0))
            self._lines[server_id] = line, length + 1
        is_first = line.acquire(timeout=timeout_seconds)
        try:
            yield
        finally:
            if is_first:
                line.release()
            with self._lock:
                line, length = self._lines.pop(server_id)
                if length > 1:
                    self._lines[server_id] = line, length - 1
