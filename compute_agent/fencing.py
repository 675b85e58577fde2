# SPDX-License-Identifier: Apache-2.0
"""A host that hears no conductor stops its own guests ([agent] fence_after).

This has a thread of its own, which needs only the clock, the hypervisor and the journal: the thread
that talks with the conductor may hang in the connection that is cut. Must stay true: the journal is
written before the first guest is stopped, so that fencing goes on after a kill, and the host then
reports another boot.
"""

from __future__ import annotations

import logging
import threading

from compute_agent.sync import Agent
from compute_agent.virt.driver import PAUSED, RUNNING, Driver

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0  #: between two looks at the clock


def make_off(driver: Driver, server: str) -> bool:
    """Stop a guest that must not run here, at once; False when that has to be tried again."""
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
    """``lock`` guards the agent."""

    def __init__(self, agent: Agent, driver: Driver, lock: threading.Lock) -> None:
        self._agent, self._driver, self._lock = agent, driver, lock

    def watch(self, stop: threading.Event) -> None:
        """Loop until the process ends."""
        while not stop.wait(LOOK_SECONDS):
            if self._agent.fences_itself():
                self._fence()

    def _fence(self) -> None:
        """Stop all guests. What fails is tried again at the next look; where nothing runs nothing
        is reported."""
        try:
            running = self._running()
            if running != []:
                log.error(
                    "no conductor was heard for [agent] fence_after seconds: this host stops its guests"
                )
                with self._lock:
                    self._agent.begin_fencing()
            if running is not None and not [
                one for one in running if not make_off(self._driver, one)
            ]:
                with self._lock:
                    self._agent.fenced()
        except Exception:
            log.exception("the journal cannot be written; it is tried again")

    def _running(self) -> list[str] | None:
        """The servers whose guests run here or are paused; None: the hypervisor does not answer."""
        try:
            return [
                state.server
                for state in self._driver.domains()
                if state.power_state in (RUNNING, PAUSED)
            ]
        except Exception:
            log.exception("the guests of this host cannot be listed; it is tried again")
            return None
