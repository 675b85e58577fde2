# SPDX-License-Identifier: Apache-2.0
"""The names of queues that cannot be used now, because a node of the broker hangs or refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

#: How long a name is left out after the broker did not answer a request about it. Longer than
#: RabbitMQ needs to notice that a node is cut off (net_ticktime, 60 s).
LEFT_OUT_SECONDS = 120.0
#: How long only first names are used after the broker has refused to let this process read another.
REFUSED_SECONDS = 600.0


class SilentNames:
    """Remembers names about which the broker did not answer, and leaves them out for a while.

    Args:
        has_nodes: True if the broker has several nodes. With one node no name is ever left out,
            because a further name would be at the same node.
        seconds: How long a name is left out.
    """

    def __init__(self, has_nodes: bool = True, seconds: float = LEFT_OUT_SECONDS) -> None:
        self.has_nodes, self._seconds = has_nodes, seconds
        self._since: dict[str, float] = {}
        self._refused_until = float("-inf")

    @contextmanager
    def request(self, name: str, seconds: float) -> Iterator[None]:
        """Note that the name is silent if the context fails after its time limit.

        Args:
            name: The name of the queue.
            seconds: The time limit. A failure before the limit does not mark the name.
        """
        began = time.monotonic()
        try:
            yield
        except OSError:
            if time.monotonic() - began >= seconds * 0.9:
                self._since[name] = time.monotonic()
            raise
        self.record_answer(name)

    def record_answer(self, name: str) -> None:
        """Note that the queue of this name works."""
        self._since.pop(name, None)

    def list_usable(self, names: Sequence[str]) -> list[str]:
        """Return the names that are not left out, in their order, or all if none remains.

        ``names`` are all names of one queue, and the first one is the best.
        """
        now = time.monotonic()
        if not self.has_nodes:
            return list(names)
        if now < self._refused_until:
            return [names[0]]
        return [name for name in names if not self._is_silent(name, now)] or self._forget(names)

    def _is_silent(self, name: str, now: float) -> bool:
        since = self._since.get(name)
        return since is not None and now - since < self._seconds

    def _forget(self, names: Sequence[str]) -> list[str]:
        for name in names:
            self.record_answer(name)
        return list(names)

    def forget(self) -> None:
        """Let all silent names be tried again, because no other name can be used."""
        self._since.clear()

    def refuse(self) -> None:
        """Note that the broker refuses further names to this process.

        Why: the broker's user may have the rights of release 0.1.0.
        """
        self.forget()
        self._refused_until = time.monotonic() + REFUSED_SECONDS
