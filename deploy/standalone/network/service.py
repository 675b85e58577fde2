# SPDX-License-Identifier: Apache-2.0
"""The thread beside the requests: tells the compute service of events, gives routers of dead hosts to living ones."""

import logging
import threading

from deploy.standalone.network.fabric import Fabric
from deploy.standalone.network.placing import place_routers
from deploy.standalone.network.telling import Listener, tell

LOG = logging.getLogger("standalone.network")
SHORTEST_SECONDS, LONGEST_SECONDS = 0.5, 15.0
LOOK_SECONDS = 1.0      # how often it looks for routers without a living host


class Service:
    """What runs as long as the process does."""

    def __init__(self, fabric: Fabric, listener: Listener) -> None:
        self._fabric, self._listener = fabric, listener
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """Let go of requests that wait for hosts, and of the thread: the process is about to end."""
        self._fabric.hosts.end()
        self._ending.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        pause = SHORTEST_SECONDS
        while not self._ending.is_set():
            try:
                place_routers(self._fabric)
                self._fabric.news.clear()
                is_told = tell(self._fabric, self._listener)
            except Exception:
                LOG.exception("A round of the events' thread failed; it tries again.")
                is_told = False
            if is_told:
                pause = SHORTEST_SECONDS
                self._fabric.news.wait(LOOK_SECONDS)
            else:
                self._ending.wait(pause)
                pause = min(LONGEST_SECONDS, 2 * pause)
