# SPDX-License-Identifier: Apache-2.0
"""Freezes the file systems of guests while the volume service takes snapshots of their volumes.

A still guest is a guest whose file systems are frozen.

Invariant: each guest is thawed after a time limit, or the log reports the failure of its agent. A
timer ensures this. If the process dies, the mark file in the guest's folder makes the next process
thaw the guest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from common.domain import errors
from common.service.log import get_logger
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING
from compute_agent.virt.libvirt.domains import guest_agent, power
from compute_agent.virt.libvirt.domains.connection import Connection

LOG = get_logger(__name__)
#: Name of the mark file in the guest's folder.
MARK = "still"
#: Seconds between attempts while libvirtd is away.
RETRY_SECONDS = 5.0


class StillGuests:
    """The guests of this host with frozen file systems.

    The constructor schedules the thaw of guests that an earlier process left frozen.

    Args:
        libvirt: Connection to libvirtd.
        instances: Folder of the guests' folders.
        timer: Makes a timer that calls a function after a number of seconds.
    """

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
            self._schedule_thaw(mark.parent.name, 0)

    def hold(self, server: str, seconds: float) -> None:
        """Freeze the guest's file systems until ``let_go``, for at most ``seconds``.

        While libvirtd does not answer, the thaw is retried and the freeze may last longer. If the
        guest's agent fails to thaw, this is logged and the thaw is not retried.

        Raises:
            VerbFailed: The guest does not run or exist, or the agent cannot freeze the file
                systems.
        """
        if power.find(self._libvirt, server).power_state != RUNNING:
            raise VerbFailed(
                "The guest does not run, so its file systems cannot be frozen; start the server first."
            )
        mark = self._instances / server / MARK
        mark.touch()
        self._schedule_thaw(server, seconds)
        if not guest_agent.freeze(self._libvirt, server):
            self.let_go(server)
            raise VerbFailed(guest_agent.ABSENT)

    def let_go(self, server: str) -> None:
        """Thaw the guest's file systems, if ``hold`` has frozen them.

        While libvirtd does not answer, the thaw is scheduled again and this method returns. If the
        guest's agent fails, the failure is logged and the thaw is not tried again.
        """
        mark = self._instances / server / MARK
        if not mark.exists():
            return
        try:
            guest_agent.thaw(self._libvirt, server)
        except errors.NoAnswer:
            self._schedule_thaw(server, RETRY_SECONDS)
            return
        with self._lock:
            timer = self._timers.pop(server, None)
        if timer is not None:
            timer.cancel()
        mark.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop the timers. The next process thaws the guests that are still frozen."""
        with self._lock:
            timers = list(self._timers.values())
            self._timers.clear()
        for timer in timers:
            timer.cancel()

    def _schedule_thaw(self, server: str, seconds: float) -> None:
        def work() -> None:
            LOG.warning(
                "the time limit for frozen file systems of a server has passed: they are thawed",
                server=server,
            )
            self.let_go(server)

        timer = self._timer(seconds, work)
        timer.daemon = True
        with self._lock:
            old = self._timers.pop(server, None)
            self._timers[server] = timer
        if old is not None:
            old.cancel()
        timer.start()
