# SPDX-License-Identifier: Apache-2.0
"""Self-fencing: a host without contact to conductors stops all guests ([agent] fence_after).

Fencing has a thread that needs only the clock, the hypervisor and the journal. Because: the thread
that talks with conductors may hang in the connection that was cut.

Invariant: the journal is written before the first guest is stopped. So fencing continues after a
kill, and the host afterwards reports another boot.
"""

from __future__ import annotations

import logging
import threading

from compute_agent.sync import Agent
from compute_agent.virt.driver import PAUSED, RUNNING, Driver

log = logging.getLogger(__name__)
#: Seconds between two checks of the clock.
LOOK_SECONDS = 1.0


def power_off(driver: Driver, server: str) -> bool:
    """Power off a guest that must not run on this host.

    Returns:
        False if the driver failed. The caller must then retry.
    """
    try:
        driver.pull_plug(server)
    except Exception:
        log.exception(
            "the domain of server %s must not run here and could not be stopped; it is tried again, and "
            "nothing is started until then",
            server,
        )
        return False
    return True


class Fencing:
    """The loop that fences this host. ``lock`` guards the agent."""

    def __init__(self, agent: Agent, driver: Driver, lock: threading.Lock) -> None:
        self._agent, self._driver, self._lock = agent, driver, lock

    def watch(self, stop: threading.Event) -> None:
        """Check once a second whether the host must fence itself, until ``stop`` is set."""
        while not stop.wait(LOOK_SECONDS):
            if self._agent.fences_itself():
                self._fence()

    def _fence(self) -> None:
        """Stop all guests, and end the fencing when all are off.

        If a guest cannot be stopped, the next check retries. If no guest runs, no fencing is
        recorded as begun.
        """
        try:
            running = self._running()
            if running != []:
                log.error(
                    "no conductor was heard for [agent] fence_after seconds: this host stops its guests"
                )
                with self._lock:
                    self._agent.begin_fencing()
            if running is not None and not [
                server for server in running if not power_off(self._driver, server)
            ]:
                with self._lock:
                    self._agent.end_fencing()
        except Exception:
            log.exception("the journal cannot be written; it is tried again")

    def _running(self) -> list[str] | None:
        """Return the servers with a running or paused guest, or None if the hypervisor fails."""
        try:
            return [
                state.server
                for state in self._driver.domains()
                if state.power_state in (RUNNING, PAUSED)
            ]
        except Exception:
            log.exception("the guests of this host cannot be listed; it is tried again")
            return None
