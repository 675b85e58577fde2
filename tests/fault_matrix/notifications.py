# SPDX-License-Identifier: Apache-2.0
"""A check of the notifications that a cell's cloud sends.

Each committed transition is notified at least once, in order per server, and no other transition.
The conductor's real sender runs. In every cell its first message finds no broker, and the sender is
killed once between sending and deleting a row.
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
from tests.outbox_events import read_outbox
from tests.workflows.simulator import Cloud

#: Rows that may wait in the outbox.
MOST = 100_000
FAILED = ("failed", "superseded")
_OF_STEPS = {
    name for of in WORKFLOWS.events.values() for one in fields(of) for name in getattr(of, one.name)
}
#: Notifications of the begin and the end of actions, without those of steps.
NAMES = {
    name
    for of in map(events.event_names, states.BY_WORKFLOW.values())
    for name in (*of.begun, *of.done, *of.failed)
} - _OF_STEPS


class CellNotifications:
    """The outbox of one cell, with a broker in memory.

    Actions from before the cell are ignored.
    """

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        cloud.store.notify_with(NotificationSettings("api"))
        query = sa.select(schema.actions.c.id)
        self._before = set(cloud.store.read(lambda tx: tx.scalars(query).all()))
        self._written: dict[int, NotificationRow] = {}
        self._arrived: list[int] = []
        self._is_away = self._dies = True

    def send(self, message: Message) -> None:
        """Record the message as arrived. The first call fails because the broker is away."""
        if self._is_away:
            self._is_away = False
            raise errors.Unavailable("The broker is away.")
        self._arrived.append(int(message.context["notification_id"]))

    def _kill_once(self, where: str) -> None:
        """Kill the sender once, after a message was sent and before its row is deleted."""
        if where == "sent" and self._arrived and self._dies:
            self._dies = False
            raise Killed

    def deliver(self) -> None:
        """Send all notifications of the outbox."""
        store, time = self._cloud.store, self._cloud.time
        self._written |= {row.id: row for row in read_outbox(store)}
        sender = NotificationSender(store, time, self, "c1", BOTH, MOST, self._kill_once)
        while not store.read(outbox.is_empty):
            with suppress(Killed):
                sender.send_batch()

    def check(self) -> None:
        """Deliver the rest, and compare the notifications with the actions."""
        self.deliver()
        rows, arrived = list(self._written.values()), list(dict.fromkeys(self._arrived))
        assert arrived == sorted(self._written), f"{arrived} arrived of {sorted(self._written)}"
        for server, actions_of_server in self._read_actions_by_server().items():
            expected = [name for row in actions_of_server for name in self._list_expected(row)]
            actual = [row.event for row in rows if row.key == server and row.event in NAMES]
            assert actual == expected, f"notified of {actual}, and what happened is {expected}"

    def _read_actions_by_server(self) -> dict[str, list[ActionRow]]:
        """Return the cell's actions by server, in order."""
        actions_by_server: dict[str, list[ActionRow]] = {}
        query = sa.select(schema.actions).order_by(schema.actions.c.created_at, sa.text("rowid"))
        for row in self._cloud.store.read(lambda tx: tx.execute(query).all()):
            if row.id not in self._before and row.workflow:
                actions_by_server.setdefault(row.server_id, []).append(row)
        return actions_by_server

    def _list_expected(self, row: ActionRow) -> list[str]:
        """Return the notifications that an ended action must have sent."""
        assert row.state in actions.ENDED, f"{row.workflow} is {row.state}"
        names_of_workflow = events.event_names(states.BY_WORKFLOW[row.workflow])
        names = names_of_workflow.begun + (
            names_of_workflow.failed if row.state in FAILED else names_of_workflow.done
        )
        return [name for name in names if name in NAMES]


class Killed(Exception):
    """Raised in place of kill -9 of the sender."""
