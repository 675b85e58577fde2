# SPDX-License-Identifier: Apache-2.0
"""The limit of images that a host downloads at the same time, for both drivers.

A command that waits reports this as its phase, and can be cancelled meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from common.domain.command_progress import CommandPhase
from compute_agent.verb_context import Cancelled, VerbContext

#: Default limit of simultaneous downloads, and seconds between two checks for cancellation.
MAX_DOWNLOADS, LOOK_SECONDS = 2, 0.5


class DownloadLimit:
    """A limit of simultaneous downloads. Thread-safe.

    Args:
        most: Number of downloads that may run at the same time. 0 means no limit.
    """

    def __init__(self, most: int = MAX_DOWNLOADS) -> None:
        self._free = threading.Semaphore(most) if most else None

    @contextmanager
    def one(self, context: VerbContext) -> Iterator[None]:
        """Wait until fewer downloads than the limit run. The ``with`` block counts as a download.

        While waiting, the command reports the phase WAITING_TO_FETCH.

        Raises:
            Cancelled: The command was cancelled while waiting.
        """
        if self._free is None:
            yield
            return
        if not self._free.acquire(blocking=False):
            context.phase(CommandPhase.WAITING_TO_FETCH)
            while not self._free.acquire(timeout=LOOK_SECONDS):
                if context.cancelled():
                    raise Cancelled
        try:
            yield
        finally:
            self._free.release()
