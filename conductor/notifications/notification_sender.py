# SPDX-License-Identifier: Apache-2.0
"""Sending what the outbox has: by one conductor at a time, in order, until the broker has each
message.

A plain function; the thread that calls it lives in ``conductor.service``. A broker that is away
holds up nothing else: the rows wait, up to a limit. What was sent and not struck before a crash is
sent again, with the same ``notification_id`` in its context.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from common.domain import errors
from common.domain.clock import SECOND, Clock
from common.notifications.message import Message
from common.notifications.periods import Periods
from common.store.engine import Store
from common.store.notifications import outbox, usage_audit
from common.store.rows import NotificationRow
from conductor.notifications.messages import messages

log = logging.getLogger(__name__)
BATCH_SIZE = 64
AUDIT_SECONDS = 60.0  #: between two looks whether a period is over
MAX_TRIES = 3  #: to send a message that fails, and not because the broker is away
LEASE_MARGIN_SECONDS = 15.0  #: of the lease that must be left when a message is sent


class NotificationTransport(Protocol):
    """Where messages go."""

    def send(self, message: Message) -> None:
        """Returns when it is safe there; raises Unavailable."""


def no_fault(where: str) -> None:
    """The fault point of ordinary operation: nothing happens."""


@dataclass
class NotificationSender:
    """What sending needs. form: the option notification_format; limit: rows that may wait; audit:
    of which periods the servers that ran are told."""

    store: Store
    clock: Clock
    transport: NotificationTransport
    owner: str
    form: str
    limit: int
    fault_point: Callable[[str], None] = no_fault
    audit: Periods | None = None
    is_away: bool = False
    audited_at: float = -AUDIT_SECONDS
    tries: Counter[int] = field(default_factory=Counter)

    def send_batch(self) -> int:
        """Send what is there, a batch at most; returns how many rows went."""
        if self.store.read(outbox.is_empty):
            return 0
        began = self.clock.monotonic()
        rows = self.store.write(lambda tx: outbox.take(tx, self.owner, BATCH_SIZE))
        self.fault_point("taken")
        sent = []
        for row in rows:
            if (
                self.clock.monotonic() - began > outbox.LEASE / SECOND - LEASE_MARGIN_SECONDS
                or not self._send(row)
            ):
                break
            sent.append(row.id)
            self.tries.pop(row.id, None)
        self.fault_point("sent")
        if sent:
            self.store.write(lambda tx: outbox.strike(tx, sent))
        if len(sent) < len(rows):
            self._trim()
        return len(sent)

    def audit_usage(self) -> None:
        """Write what is to be told of a period that is over, once for all conductors, some servers
        at a time."""
        periods, moment = self.audit, self.clock.monotonic()
        if periods is None or moment - self.audited_at < AUDIT_SECONDS:
            return
        if not self.store.read(lambda tx: usage_audit.is_done(tx, periods)) and self.store.write(
            lambda tx: usage_audit.step(tx, periods)
        ):
            return  # the next ones in the next round, between two rounds of sending
        self.audited_at = moment

    def _send(self, row: NotificationRow) -> bool:
        """Is the row done with? One of which no message can be made never will be, and one that was
        sent in vain ``MAX_TRIES`` times, other than because the broker is away, is given up."""
        try:
            made = messages(row, self.form)
        except Exception:
            log.exception(
                "notification %d, %s of %s, cannot be told and is dropped",
                row.id,
                row.event,
                row.key,
            )
            return True
        try:
            for message in made:
                self.transport.send(message)
        except errors.Unavailable as problem:
            if not self.is_away:
                log.warning("notifications wait: %s", problem)
            self.is_away = True
            return False
        except Exception:
            self.tries[row.id] += 1
            is_over = self.tries[row.id] >= MAX_TRIES
            log.exception(
                "notification %d, %s of %s, cannot be sent and %s",
                row.id,
                row.event,
                row.key,
                "is dropped" if is_over else "is tried again",
            )
            return is_over
        if self.is_away:
            log.info("notifications are sent again")
        self.is_away = False
        return True

    def _trim(self) -> None:
        if dropped := self.store.write(lambda tx: outbox.trim(tx, self.limit)):
            log.warning(
                "%d notifications, the oldest, were dropped: more than %d wait, see [notifications] "
                "outbox_limit",
                dropped,
                self.limit,
            )

    def release(self) -> None:
        """Another conductor may go on at once."""
        self.store.write(lambda tx: outbox.let_go(tx, self.owner))
