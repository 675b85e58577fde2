# SPDX-License-Identifier: Apache-2.0
"""The names of queues that cannot be used now, because a node of the broker hangs or refuses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
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
    """

    def __init__(self, has_nodes: bool = True) -> None:
        self._has_nodes = has_nodes
        self._since: dict[str, float] = {}
        self._refused_until = float("-inf")

    @contextmanager
    def request(self, name: str, seconds: float) -> Iterator[None]:
        """Note that the name is silent if the context fails after its time limit.

        Args:
            name: The name of the queue.
            seconds: The time limit. An earlier failure has another cause.
        """
        began = time.monotonic()
        try:
            yield
        except OSError:
            if time.monotonic() - began >= seconds * 0.9:
                self._since[name] = time.monotonic()
            raise
        self._since.pop(name, None)

    def usable(self, names: Sequence[str]) -> list[str]:
        """Return the names that are not left out, in their order, or all if none remains.

        ``names`` are all names of one queue, and the first one is the best.
        """
        now = time.monotonic()
        if not self._has_nodes:
            return list(names)
        if now < self._refused_until:
            return [names[0]]
        return [name for name in names if not self._is_silent(name, now)] or self._all(names)

    def _is_silent(self, name: str, now: float) -> bool:
        since = self._since.get(name)
        return since is not None and now - since < LEFT_OUT_SECONDS

    def _all(self, names: Iterable[str]) -> list[str]:
        self.forget()
        return list(names)

    def forget(self) -> None:
        """Let silent names be tried again, because no other name can be used."""
        self._since.clear()

    def refuse(self) -> None:
        """Note that the broker refuses further names to this process.

        Why: the broker's user may have the rights of release 0.1.0.
        """
        self.forget()
        self._refused_until = time.monotonic() + REFUSED_SECONDS
