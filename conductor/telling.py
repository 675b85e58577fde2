# SPDX-License-Identifier: Apache-2.0
"""Sending what the outbox has: by one conductor at a time, in order, until the broker has each message.

A plain function; the thread that calls it lives in ``conductor.service``. A broker that is away holds up nothing else:
the rows wait, up to a limit. What was sent and not struck before a crash is sent again, with the same
``notification_id`` in its context.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from common import errors
from common.clock import SECOND, Clock
from common.notifications.messages import Message, messages
from common.store import outbox
from common.store.engine import Row, Store

log = logging.getLogger(__name__)
AT_ONCE = 64
MARGIN = 15.0                #: seconds of the lease that must be left when a message is sent


class Post(Protocol):
    """Where messages go."""

    def send(self, message: Message) -> None:
        """Returns when it is safe there; raises Unavailable."""


def no_fault(where: str) -> None:
    """The fault point of ordinary operation: nothing happens."""


@dataclass
class Teller:
    """What sending needs. form: the option notification_format; limit: rows that may wait."""

    store: Store
    clock: Clock
    post: Post
    owner: str
    form: str
    limit: int
    fault_point: Callable[[str], None] = no_fault
    is_away: bool = False

    def tell(self) -> int:
        """Send what is there, a batch at most; returns how many rows went."""
        if self.store.read(outbox.is_empty):
            return 0
        began = self.clock.monotonic()
        rows = self.store.write(lambda tx: outbox.take(tx, self.owner, AT_ONCE))
        self.fault_point("taken")
        sent = []
        for row in rows:
            if self.clock.monotonic() - began > outbox.LEASE / SECOND - MARGIN or not self._send(row):
                break
            sent.append(row.id)
        self.fault_point("sent")
        if sent:
            self.store.write(lambda tx: outbox.strike(tx, sent))
        if len(sent) < len(rows):
            self._trim()
        return len(sent)

    def _send(self, row: Row[Any]) -> bool:
        """Is the row done with? One of which no message can be made never will be."""
        try:
            made = messages(row, self.form)
        except Exception:
            log.exception("notification %d, %s of %s, cannot be told and is dropped", row.id, row.event, row.key)
            return True
        try:
            for message in made:
                self.post.send(message)
        except errors.Unavailable as problem:
            if not self.is_away:
                log.warning("notifications wait: %s", problem)
            self.is_away = True
            return False
        if self.is_away:
            log.info("notifications are sent again")
        self.is_away = False
        return True

    def _trim(self) -> None:
        if dropped := self.store.write(lambda tx: outbox.trim(tx, self.limit)):
            log.warning("%d notifications, the oldest, were dropped: more than %d wait, see [notifications] "
                        "outbox_limit", dropped, self.limit)

    def let_go(self) -> None:
        """Another conductor may go on at once."""
        self.store.write(lambda tx: outbox.let_go(tx, self.owner))
