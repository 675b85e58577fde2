# SPDX-License-Identifier: Apache-2.0
"""The background thread: sends events to the compute service, moves routers away from dead hosts.

Events are sent in the order of their commits. Events that the compute service refuses for good, for
example because the server is deleted, are dropped. While the compute service is unavailable, events
are kept for an hour.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from sqlalchemy import delete, select

from common.service.log import get_logger
from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.network.fabric import Fabric
from deploy.one_machine.services.network.routers import place_routers
from deploy.one_machine.services.network.schema import events

LOG = get_logger("standalone.network")
BATCH_SIZE, KEEP_SECONDS = 100, 3600
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 15.0
# Seconds between two checks for routers without a living host.
CHECK_SECONDS = 1.0


class EventReceiver(Protocol):
    """The compute service, as external.ComputeEvents."""

    def send_events(self, events: Collection[Mapping[str, str]]) -> bool:
        """Send events to the compute service.

        Args:
            events: The events, as in Nova's API os-server-external-events.

        Returns:
            False if the caller must send the events again later. True if the compute service
            accepted them, or refuses them for good.
        """


class BackgroundThread:
    """The thread of the process for events and routers."""

    def __init__(self, fabric: Fabric, receiver: EventReceiver) -> None:
        self._fabric, self._receiver = fabric, receiver
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Release the requests that wait for hosts, and let the thread end after this round."""
        self._fabric.hosts.end()
        self._ending.set()

    def _run(self) -> None:
        pause = MIN_PAUSE_SECONDS
        while not self._ending.is_set():
            try:
                place_routers(self._fabric)
                self._fabric.has_events.clear()
                is_done = send_events(self._fabric, self._receiver)
            except Exception:
                LOG.exception("a round of the background thread failed; the next round retries")
                is_done = False
            if is_done:
                pause = MIN_PAUSE_SECONDS
                self._fabric.has_events.wait(CHECK_SECONDS)
            else:
                self._ending.wait(pause)
                pause = min(MAX_PAUSE_SECONDS, 2 * pause)


def send_events(
    fabric: Fabric, receiver: EventReceiver, now: Callable[[], float] = time.time
) -> bool:
    """Send all stored events in batches, oldest first, and delete each batch that was sent.

    Events older than ``KEEP_SECONDS`` are not sent, but deleted with their batch. Of equal events
    in a batch only the last is sent. Events that the receiver refuses for good count as sent.

    Args:
        fabric: The service object.
        receiver: The compute service.
        now: Returns the present time in seconds.

    Returns:
        False if events remain, which the caller must send again later.
    """
    while True:
        with fabric.database.read() as connection:
            rows = connection.execute(select(events).order_by(events.c.id).limit(BATCH_SIZE)).all()
        if not rows:
            return True
        if not _send(rows, receiver, now):
            return False
        with fabric.database.write() as connection:
            connection.execute(delete(events).where(events.c.id <= rows[-1].id))


def _send(rows: Sequence[DbRow], receiver: EventReceiver, now: Callable[[], float]) -> bool:
    fresh = [row for row in rows if row.created > now() - KEEP_SECONDS]
    if len(fresh) < len(rows):
        LOG.error(
            "events were dropped that the compute service did not accept for an hour",
            count=len(rows) - len(fresh),
        )
    batch = [
        {"name": row.name, "server_uuid": row.server, "status": row.status}
        | ({"tag": row.tag} if row.tag else {})
        for row in fresh
    ]
    # An event only makes the receiver read the state again, so the last of equal events suffices.
    last_places = {tuple(sorted(event.items())): place for place, event in enumerate(batch)}
    return not fresh or receiver.send_events(
        [batch[place] for place in sorted(last_places.values())]
    )
