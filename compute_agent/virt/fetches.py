# SPDX-License-Identifier: Apache-2.0
"""How many images a host fetches at a time, whatever its hypervisor is.

Used by both drivers around each download. Who must wait says so as its phase, and can be cancelled meanwhile.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from compute_agent.virt.driver import Cancelled, Run

WAITING = "waiting to fetch image"
#: Images at a time, unless the operator says otherwise; seconds between two questions whether to go on.
FETCHES, PATIENCE = 2, 0.5


class Fetches:
    """``most`` 0: as many as are asked for. Thread-safe."""

    def __init__(self, most: int = FETCHES) -> None:
        self._free = threading.Semaphore(most) if most else None

    @contextmanager
    def one(self, run: Run) -> Iterator[None]:
        """A download's turn. Raises Cancelled."""
        if self._free is None:
            yield
            return
        if not self._free.acquire(blocking=False):
            run.phase(WAITING)
            while not self._free.acquire(timeout=PATIENCE):
                if run.cancelled():
                    raise Cancelled
        try:
            yield
        finally:
            self._free.release()
