# SPDX-License-Identifier: Apache-2.0
"""Send the messages of the outbox: one conductor at a time, in order, until the broker has them.

``conductor.service`` calls this in a thread. If the broker is away, only notifications wait, and
the outbox keeps a limited number of rows. After a crash between send and delete, a message is sent
again with the same ``notification_id`` in its context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from common.domain import errors
from common.domain.clock import SECOND, Clock
from common.notifications.message import Message
from common.notifications.periods import Periods
from common.service.log import get_logger
from common.store.engine import Store
from common.store.notifications import outbox, usage_audit
from common.store.rows import NotificationRow
from conductor.notifications.messages import messages

log = get_logger(__name__)
BATCH_SIZE = 64
#: Interval of the checks whether an audit period is over.
AUDIT_SECONDS = 60.0
#: Attempts to send a message that fails although the broker is reachable.
MAX_TRIES = 3
#: Remaining lease that is needed to send another message.
LEASE_MARGIN_SECONDS = 15.0


class NotificationTransport(Protocol):
    """The connection that sends notifications to the broker."""

    def send(self, message: Message) -> None:
        """Send a message, and return when the broker has taken it.

        Raises:
            Unavailable: The broker has not taken the message, or this is not known.
            Exception: The message cannot be sent to any broker.
        """


def no_fault(where: str) -> None:
    """Do nothing. Tests use a function that crashes the conductor at the point ``where``."""


@dataclass
class NotificationSender:
    """Sends the rows of the outbox.

    Args:
        form: The option ``notification_format``.
        limit: Maximum of waiting rows. Older rows are dropped.
        audit: Periods of the usage audit. None: no audit.
    """

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
        """Send at most ``BATCH_SIZE`` rows in order, and delete the rows from the outbox.

        The batch ends early before a row that cannot be sent now, or if the lease is nearly over.
        Only after such an early end are the oldest rows beyond ``limit`` dropped unsent. Gaps in
        the ids count as rows.

        Returns:
            The number of rows sent, or dropped as in ``_send``. 0 if no row waits, this conductor
            has no lease, or the first row cannot be sent now.
        """
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
        """Write notices of the usage audit for the last complete period, some servers at a time.

        A period that was begun earlier is completed first. The conductors share this work, and the
        next call continues with further servers. Without an audit, or within ``AUDIT_SECONDS``
        after a call that left no server, this returns at once.
        """
        periods, at = self.audit, self.clock.monotonic()
        if periods is None or at - self.audited_at < AUDIT_SECONDS:
            return
        if not self.store.read(lambda tx: usage_audit.is_done(tx, periods)) and self.store.write(
            lambda tx: usage_audit.step(tx, periods)
        ):
            return  # The next call continues with further servers.
        self.audited_at = at

    def _send(self, row: NotificationRow) -> bool:
        """Send the messages of a row, and return True if the caller can delete the row.

        False: the row is tried again later. The row can be deleted at once if its messages cannot
        be built, or if the sending failed ``MAX_TRIES`` times although the broker is reachable.
        """
        try:
            row_messages = messages(row, self.form)
        except Exception:
            log.exception(
                "a notification cannot be built and is dropped",
                notification=row.id,
                event=row.event,
                key=row.key,
            )
            return True
        try:
            for message in row_messages:
                self.transport.send(message)
        except errors.Unavailable as problem:
            if not self.is_away:
                log.warning("notifications wait", problem=problem)
            self.is_away = True
            return False
        except Exception:
            self.tries[row.id] += 1
            is_over = self.tries[row.id] >= MAX_TRIES
            log.exception(
                "a notification cannot be sent",
                notification=row.id,
                event=row.event,
                key=row.key,
                next="it is dropped" if is_over else "it is tried again",
            )
            return is_over
        if self.is_away:
            log.info("notifications are sent again")
        self.is_away = False
        return True

    def _trim(self) -> None:
        if dropped := self.store.write(lambda tx: outbox.trim(tx, self.limit)):
            log.warning(
                "the oldest notifications were dropped, because too many were waiting; see "
                "[notifications] outbox_limit",
                count=dropped,
                limit=self.limit,
            )

    def release(self) -> None:
        """Release this conductor's lease, so that another conductor can continue at once."""
        self.store.write(lambda tx: outbox.let_go(tx, self.owner))
