# SPDX-License-Identifier: Apache-2.0
"""The notifications of a cell's cloud: each change of state that was committed, at least
once, of each server in order, and nothing that did not happen.

The sender is the conductor's. Its first message finds no broker, and it is killed once between
sending and striking, in every cell.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields

import sqlalchemy as sa

from common.domain import errors, states
from common.notifications import events
from common.notifications.message import Message
from common.service.notification_options import BOTH, NotificationSettings
from common.store import schema
from common.store.notifications import outbox
from common.store.rows import ActionRow, NotificationRow
from common.store.servers import actions
from conductor.notifications.notification_sender import NotificationSender
from conductor.workflows import WORKFLOWS
from tests.told import read_outbox
from tests.workflows.simulator import Cloud

MOST = 100_000  #: rows that may wait
FAILED = ("failed", "superseded")
#: What begins and ends of actions tell, and no step.
_OF_STEPS = {
    name for of in WORKFLOWS.events.values() for one in fields(of) for name in getattr(of, one.name)
}
NAMES = {
    name
    for of in map(events.event_names, states.BY_WORKFLOW.values())
    for name in (*of.begun, *of.done, *of.failed)
} - _OF_STEPS


class CellNotifications:
    """The messages of one cell, as a broker has them. Of what has ended before nobody tells."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        cloud.store.notify_with(NotificationSettings("api"))
        query = sa.select(schema.actions.c.id)
        self._before = set(cloud.store.read(lambda tx: tx.scalars(query).all()))
        self._written: dict[int, NotificationRow] = {}
        self._arrived: list[int] = []
        self._is_away = self._dies = True

    def send(self, message: Message) -> None:
        """To the broker."""
        if self._is_away:
            self._is_away = False
            raise errors.Unavailable("The broker is away.")
        self._arrived.append(int(message.context["notification_id"]))

    def _killed(self, where: str) -> None:
        if where == "sent" and self._arrived and self._dies:
            self._dies = False
            raise Killed

    def deliver(self) -> None:
        """Send what waits."""
        store, time = self._cloud.store, self._cloud.time
        self._written |= {row.id: row for row in read_outbox(store)}
        sender = NotificationSender(store, time, self, "c1", BOTH, MOST, self._killed)
        while not store.read(outbox.is_empty):
            with suppress(Killed):
                sender.send_batch()

    def check(self) -> None:
        """Deliver the rest, and compare."""
        self.deliver()
        rows, arrived = list(self._written.values()), list(dict.fromkeys(self._arrived))
        assert arrived == sorted(self._written), f"{arrived} arrived of {sorted(self._written)}"
        for server, begun in self._by_server().items():
            wanted = [name for row in begun for name in self._expected(row)]
            found = [row.event for row in rows if row.key == server and row.event in NAMES]
            assert found == wanted, f"notified of {found}, and what happened is {wanted}"

    def _by_server(self) -> dict[str, list[ActionRow]]:
        """What was asked for, in order."""
        found: dict[str, list[ActionRow]] = {}
        query = sa.select(schema.actions).order_by(schema.actions.c.created_at, sa.text("rowid"))
        for row in self._cloud.store.read(lambda tx: tx.execute(query).all()):
            if row.id not in self._before and row.workflow:
                found.setdefault(row.server_id, []).append(row)
        return found

    def _expected(self, row: ActionRow) -> list[str]:
        """Its begin and its end."""
        assert row.state in actions.ENDED, f"{row.workflow} is {row.state}"
        found = events.event_names(states.BY_WORKFLOW[row.workflow])
        names = found.begun + (found.failed if row.state in FAILED else found.done)
        return [name for name in names if name in NAMES]


class Killed(Exception):
    """Of the sender: kill -9."""
