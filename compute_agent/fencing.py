# SPDX-License-Identifier: Apache-2.0
"""Self-fencing: a host without contact to conductors stops all guests ([agent] fence_after).

Fencing has a thread that needs only the clock, the hypervisor and the journal. Why: the thread that
exchanges messages with conductors may hang in a broken connection.

Invariant: the journal is written before the first guest is stopped. So the next agent continues a
fencing that was interrupted, and after a fencing the host reports another boot id.
"""

from __future__ import annotations

import threading

from common.service.log import get_logger
from compute_agent.sync import Agent
from compute_agent.virt.driver import PAUSED, RUNNING, Driver

log = get_logger(__name__)
#: Seconds between two checks of the clock.
LOOK_SECONDS = 1.0


def power_off(driver: Driver, server: str) -> bool:
    """Power off a guest that must not run on this host.

    Returns:
        False if the driver failed, which is logged. The caller must then retry.
    """
    try:
        driver.pull_plug(server)
    except Exception:
        log.exception(
            "the domain of a server must not run on this host and cannot be powered off; the "
            "agent retries, and starts no guest until then",
            server=server,
        )
        return False
    return True


class Fencing:
    """The loop that fences this host.

    Args:
        agent: Decides whether the host must fence itself.
        driver: Lists the guests and powers them off.
        lock: The lock of all threads that use ``agent``.
    """

    def __init__(self, agent: Agent, driver: Driver, lock: threading.Lock) -> None:
        self._agent, self._driver, self._lock = agent, driver, lock

    def watch(self, stop: threading.Event) -> None:
        """Check once a second whether the host must fence itself, and power off its guests if so.

        Return when ``stop`` is set.
        """
        while not stop.wait(LOOK_SECONDS):
            if self._agent.fences_itself():
                self._fence()

    def _fence(self) -> None:
        """Power off all running or paused guests, and end the fencing when all are off.

        The begin is journalled only if a guest runs or the hypervisor fails. If guests cannot be
        listed or powered off, the fencing does not end, and the next check retries.
        """
        try:
            running = self._running()
            if running != []:
                log.error(
                    "no conductor has answered for [agent] fence_after seconds: this host powers off its guests"
                )
                with self._lock:
                    self._agent.begin_fencing()
            if running is not None and not [
                server for server in running if not power_off(self._driver, server)
            ]:
                with self._lock:
                    self._agent.end_fencing()
        except Exception:
            log.exception("the fencing of this host cannot be journalled; the next check retries")

    def _running(self) -> list[str] | None:
        """Return the servers with a running or paused guest, or None if the hypervisor fails."""
        try:
            return [
                state.server
                for state in self._driver.domains()
                if state.power_state in (RUNNING, PAUSED)
            ]
        except Exception:
            log.exception("the guests of this host cannot be listed; the next check retries")
            return None
