# SPDX-License-Identifier: Apache-2.0
"""A thread of each conductor that checks that the conductors' queues work.

The listener alone does not notice that a node of the broker with a queue is cut off or hangs,
because its own node goes on sending heartbeats. A queue can also vanish without a sign.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from common.rpc import host_queues
from common.rpc.broker import BROKEN, Connect, Connection
from common.rpc.broker_client import Probe
from common.rpc.silent_names import SilentNames
from common.service.log import get_logger

log = get_logger(__name__)
WATCH_SECONDS = 5.0
#: Pause before a check by another node of the broker.
OTHER_NODE_SECONDS = 1.0
#: Number of rounds between two searches for a better name.
ROUNDS_FOR_BETTER_NAME = 2


class DoorWatch:
    """Checks the conductors' queues every few seconds, over a connection of its own.

    Args:
        connect: Opens a connection to the broker.
        prefix: Prefix of every name at the broker.
        queues: Returns the names of the queues that the listener reads, by door.
        silent: Notes the names about which the broker does not answer.
        replace: Called when the listener must declare the queues again.
        check: Called in each round, to check the connection for answers to hosts.
    """

    def __init__(
        self,
        connect: Connect,
        prefix: str,
        queues: Callable[[], Mapping[str, str]],
        silent: SilentNames,
        replace: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        self._prefix, self._queues, self._has_nodes = prefix, queues, connect.has_nodes
        self._silent, self._replace, self._check = silent, replace, check
        self._probe, self._stops, self._round = Probe(connect), threading.Event(), 0
        self._thread = threading.Thread(target=self._run, name="door-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Request the end of the thread. Do not wait for it."""
        self._stops.set()

    def close(self) -> None:
        self.stop()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        seconds = WATCH_SECONDS
        while not self._stops.wait(seconds):
            self._round, seconds = self._round + 1, WATCH_SECONDS
            try:
                self._check()
                broken_queue = self._find_broken_queue(self._probe.open())
            except BROKEN as problem:
                log.info("the conductors' queues cannot be checked", problem=problem)
                self._probe.close()
                seconds = OTHER_NODE_SECONDS
            except Exception:
                log.exception("a check of the conductors' queues failed")
                self._probe.close()
            else:
                if broken_queue:
                    log.warning(
                        "a queue of the conductors does not work or has a better name, so the "
                        "conductor declares its queues again",
                        queue=broken_queue,
                    )
                    self._replace()
        self._probe.close()

    def _find_broken_queue(self, connection: Connection) -> str | None:
        """Return the first name that no longer works or is not the best one, or None."""
        queues = self._queues()
        for queue in queues.values():
            exists = self._exists(connection, queue)
            if exists is None and not self._has_nodes:  # Another name would be at the same node.
                return None
            if not exists:
                return queue
        if self._round % ROUNDS_FOR_BETTER_NAME:
            return None
        for door, queue in queues.items():
            names = host_queues.door_names(self._prefix, door)
            for better in names[: names.index(queue)]:
                exists = self._exists(connection, better)
                if exists is not False:
                    return queue if exists else None
        return None

    def _exists(self, connection: Connection, queue: str) -> bool | None:
        """Return True if the queue exists, or None if the broker does not answer.

        After None, the connection cannot be used any more.
        """
        try:
            return host_queues.exists(connection, queue, self._silent)
        except TimeoutError:
            self._probe.close()
            return None
