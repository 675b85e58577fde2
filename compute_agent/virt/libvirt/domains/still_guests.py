# SPDX-License-Identifier: Apache-2.0
"""Guests whose file systems are held still for somebody else: while snapshots of their volumes are
made at the block storage service.

Must stay true: each is let go after its time whatever happens. A timer does it when nobody else
has; a file beside the guest's disks says it to the next process when this one dies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from common.domain import errors
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING
from compute_agent.virt.libvirt.domains import guest_agent, power
from compute_agent.virt.libvirt.domains.connection import Connection

LOG = logging.getLogger(__name__)
MARK = "still"  #: the file's name in the guest's folder
RETRY_SECONDS = 5.0  #: while libvirtd is away


class StillGuests:
    """Those of one host. ``timer`` calls a function after so many seconds."""

    def __init__(
        self,
        libvirt: Connection,
        instances: Path,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        self._libvirt, self._instances, self._timer = libvirt, instances, timer
        self._timers: dict[str, threading.Timer] = {}
        self._lock = threading.Lock()
        for mark in sorted(instances.glob(f"*/{MARK}")):
            self._later(mark.parent.name, 0)

    def hold(self, server: str, seconds: float) -> None:
        """Write out the guest's file systems and hold them still. VerbFailed: it cannot be done."""
        if power.find(self._libvirt, server).power_state != RUNNING:
            raise VerbFailed("The guest does not run, so its file systems cannot be frozen.")
        mark = self._instances / server / MARK
        mark.touch()
        self._later(server, seconds)
        if not guest_agent.freeze(self._libvirt, server):
            self.let_go(server)
            raise VerbFailed(guest_agent.ABSENT)

    def let_go(self, server: str) -> None:
        """The guest goes on; one that is not held does so already."""
        mark = self._instances / server / MARK
        if not mark.exists():
            return
        try:
            guest_agent.thaw(self._libvirt, server)
        except errors.NoAnswer:
            self._later(server, RETRY_SECONDS)
            return
        with self._lock:
            timer = self._timers.pop(server, None)
        if timer is not None:
            timer.cancel()
        mark.unlink(missing_ok=True)

    def close(self) -> None:
        """The next process lets those go that are held."""
        with self._lock:
            timers = list(self._timers.values())
            self._timers.clear()
        for timer in timers:
            timer.cancel()

    def _later(self, server: str, seconds: float) -> None:
        def work() -> None:
            LOG.warning("the guest of server %s was held still long enough: it goes on", server)
            self.let_go(server)

        timer = self._timer(seconds, work)
        timer.daemon = True
        with self._lock:
            old = self._timers.pop(server, None)
            self._timers[server] = timer
        if old is not None:
            old.cancel()
        timer.start()
