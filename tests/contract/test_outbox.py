# SPDX-License-Identifier: Apache-2.0
"""The notification outbox on the three databases.

A row is written in the transaction of the change. One sender at a time sends rows in order, and
deletes them once the broker has them. Rows in progress at a crash are sent again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.context import RequestContext
from common.domain.models import Flavor
from common.domain.wire import to_wire
from common.notifications.events import Notice
from common.notifications.message import Message
from common.service.notification_options import BOTH, UNVERSIONED, VERSIONED, NotificationSettings
from common.store import schema
from common.store.engine import Store
from common.store.notifications import outbox
from common.store.servers import actions, immediate_actions, servers
from conductor.notifications.notification_sender import BATCH_SIZE, NotificationSender
from tests.log_lines import logged_fields, rendered_lines
from tests.outbox_events import change_all_but_servers, read_outbox, read_server_events
from tests.server_rows import server_row

USER = RequestContext(user_id="u", project_id="p", roles=("member",), request_id="req-1")
SECRETS = ("secret user data", "sealed password")


class Died(BaseException):
    """Raised to simulate the death of a sender."""


class Time:
    """A clock under control of the test."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class Broker:
    """A broker that records messages. ``refuses`` decides about refusals."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.refuses: Callable[[Message], bool] = lambda message: False

    def send(self, message: Message) -> None:
        if self.refuses(message):
            raise errors.Unavailable("it is away")
        self.sent.append(message)

    def events(self, server: str) -> list[str]:
        return [
            message.event.removeprefix("instance.")
            for message in self.sent
            if server_of(message) == server
        ]


def server_of(message: Message) -> Any:
    return message.payload["nova_object.data"]["uuid"]


@pytest.fixture
def notifying_store(store: Store) -> Store:
    store.notify_with(NotificationSettings("api1"))
    return store


def new_sender(
    store: Store, broker: Broker, owner: str = "c1/1", form: str = VERSIONED, limit: int = 1000
) -> NotificationSender:
    """Return a sender after the first round, which only creates the lease."""
    sender = NotificationSender(store, Time(), broker, owner, form, limit)
    store.write(lambda tx: outbox.take(tx, owner, 1))
    sender.release()
    return sender


def add_servers(store: Store, count: int = 1) -> list[str]:
    names = [ids.new() for _ in range(count)]
    flavor = to_wire(Flavor("1", "m1.nano", 1, 128, 1))
    with store.begin() as tx:
        for name in names:
            tx.execute(
                sa.insert(schema.servers).values(
                    **server_row(
                        name,
                        flavor=flavor,
                        memory_mb=128,
                        user_data=SECRETS[0],
                        password=SECRETS[1],
                        host="h1",
                    )
                )
            )
    return names


def begin(store: Store, server: str, key: str = "os-stop") -> str:
    return store.write(
        lambda tx: actions.begin(
            tx,
            states.row(key),
            server,
            context=USER,
            secrets=SECRETS[1],
            args={"admin_pass": SECRETS[1]},
        )
    )


def send_all(sender: NotificationSender) -> None:
    while sender.send_batch():
        pass


def test_outbox_row_is_written_only_when_action_begin_commits(notifying_store: Store) -> None:
    server = add_servers(notifying_store)[0]
    with pytest.raises(errors.WrongState):
        begin(notifying_store, server, "unpause")
    with notifying_store.begin() as tx:
        actions.begin(tx, states.row("os-stop"), server, context=USER)
        tx.rollback()
    assert read_outbox(notifying_store) == []
    begin(notifying_store, server)
    [row] = read_outbox(notifying_store)
    assert (row.event, row.key, row.publisher) == (
        "instance.power_off.start",
        server,
        "nova-compute:h1",
    )
    assert row.body["request"] == {"id": "req-1", "user": "u", "project": "p"}
    assert row.body["object"]["task_state"] == "powering-off"


def test_supersede_of_ended_action_writes_no_further_outbox_row(notifying_store: Store) -> None:
    """After a restore of the database, an ended action may still hold its server."""
    server = add_servers(notifying_store)[0]
    action = begin(notifying_store, server)
    for _ in range(2):
        notifying_store.write(lambda tx: actions.supersede(tx, action))
    assert [row.event for row in read_outbox(notifying_store)] == [
        "instance.power_off.start",
        "instance.power_off.error",
    ]


def test_outbox_rows_contain_no_secret(notifying_store: Store) -> None:
    server = add_servers(notifying_store)[0]
    for key in ("os-stop", "delete"):
        begin(notifying_store, server, key)
    text = notifying_store.read(
        lambda tx: list(tx.scalars(sa.select(sa.type_coerce(schema.notifications.c.body, sa.Text))))
    )
    assert len(text) == 3
    assert [secret for secret in SECRETS for body in text if secret in body] == []


def test_lock_server_writes_outbox_row_with_publisher_nova_api(notifying_store: Store) -> None:
    server = add_servers(notifying_store)[0]
    notifying_store.write(
        lambda tx: immediate_actions.do(
            tx, states.row("lock"), server, context=USER, args={"locked_reason": "mine"}
        )
    )
    [row] = read_outbox(notifying_store)
    assert (row.event, row.publisher, row.body["object"]["locked_reason"]) == (
        "instance.lock",
        "nova-api:api1",
        "mine",
    )


def test_notification_sender_sends_rows_in_order_and_deletes_them(notifying_store: Store) -> None:
    servers, broker = add_servers(notifying_store, 3), Broker()
    for server in servers:
        begin(notifying_store, server)
        begin(notifying_store, server, "delete")
    sender = new_sender(notifying_store, broker)
    send_all(sender)
    for server in servers:
        assert broker.events(server) == ["power_off.start", "power_off.error", "delete.start"]
    assert read_outbox(notifying_store) == []
    assert sender.send_batch() == 0


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (VERSIONED, ["instance.power_off.start"]),
        (UNVERSIONED, ["compute.instance.power_off.start"]),
        (BOTH, ["instance.power_off.start", "compute.instance.power_off.start"]),
    ],
)
def test_notification_sender_sends_configured_formats(
    notifying_store: Store, form: str, expected: list[str]
) -> None:
    broker = Broker()
    begin(notifying_store, add_servers(notifying_store)[0])
    send_all(new_sender(notifying_store, broker, form=form))
    assert [message.event for message in broker.sent] == expected
    assert {message.publisher for message in broker.sent} <= {"nova-compute:h1", "compute.h1"}


@pytest.mark.parametrize(("where", "again"), [("taken", 0), ("sent", 3)])
def test_notification_sender_sends_rows_left_by_crashed_sender_in_order(
    notifying_store: Store, where: str, again: int
) -> None:
    """The successor with the same name sends all rows at once, in order, with the same numbers."""
    servers, broker = add_servers(notifying_store, 3), Broker()
    for server in servers:
        begin(notifying_store, server)

    def die(point: str) -> None:
        if point == where:
            raise Died

    dying = new_sender(notifying_store, broker)
    dying.fault_point = die
    with pytest.raises(Died):
        dying.send_batch()
    assert len(broker.sent) == again
    assert len(read_outbox(notifying_store)) == 3
    send_all(new_sender(notifying_store, broker))
    assert [server_of(message) for message in broker.sent] == servers[:again] + servers
    numbers = [message.context["notification_id"] for message in broker.sent]
    assert numbers == sorted(numbers[again:])[:again] + sorted(numbers[again:])
    assert read_outbox(notifying_store) == []


def test_notification_sender_sends_only_with_lease(notifying_store: Store) -> None:
    server, broker = add_servers(notifying_store)[0], Broker()
    first, second = new_sender(notifying_store, broker), new_sender(notifying_store, broker, "c2/1")
    begin(notifying_store, server)
    assert first.send_batch() == 1
    begin(notifying_store, server, "delete")
    assert second.send_batch() == 0
    first.release()
    assert second.send_batch() == 2
    begin(notifying_store, server, "delete")
    assert first.send_batch() == 0
    notifying_store.write(
        lambda tx: tx.execute(sa.update(schema.leases).values(until=0))
    )  # expired
    assert first.send_batch() == 2
    assert broker.events(server) == [
        "power_off.start",
        *["power_off.error", "delete.start"],
        *["delete.error", "delete.start"],
    ]


def test_concurrent_notification_senders_keep_order_per_server(notifying_store: Store) -> None:
    servers, broker = add_servers(notifying_store, 4), Broker()
    for _ in range(BATCH_SIZE // 2):
        for server in servers:
            begin(notifying_store, server, "delete")
    expected = {server: read_server_events(notifying_store, server) for server in servers}
    senders = [new_sender(notifying_store, broker, f"c{number}/1") for number in range(3)]
    is_empty = threading.Event()

    def work(sender: NotificationSender) -> None:
        while read_outbox(notifying_store):
            sender.send_batch()
        is_empty.set()

    threads = [threading.Thread(target=work, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert is_empty.is_set()
    assert {server: broker.events(server) for server in servers} == expected


def test_outbox_rows_wait_while_broker_is_unreachable(notifying_store: Store) -> None:
    servers, broker = add_servers(notifying_store, 3), Broker()
    for server in servers:
        begin(notifying_store, server)
    sender = new_sender(notifying_store, broker)
    broker.refuses = lambda message: server_of(message) != servers[0]
    assert sender.send_batch() == 1
    assert [row.key for row in read_outbox(notifying_store)] == servers[1:]
    assert sender.send_batch() == 0
    broker.refuses = lambda message: False
    send_all(sender)
    assert [server_of(message) for message in broker.sent] == servers


def test_outbox_drops_oldest_rows_over_limit_while_broker_is_unreachable(
    notifying_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest rows are dropped with a warning, and only while the broker takes no messages."""
    servers, broker = add_servers(notifying_store, 8), Broker()
    for server in servers:
        begin(notifying_store, server)
    sender = new_sender(notifying_store, broker, limit=5)
    broker.refuses = lambda message: True
    with caplog.at_level("WARNING"):
        assert sender.send_batch() == 0
    assert [row.key for row in read_outbox(notifying_store)] == servers[3:]
    assert logged_fields(
        caplog,
        "the oldest notifications were dropped, because too many were waiting; see [notifications] "
        "outbox_limit",
    ) == [{"count": 3, "limit": 5}]
    broker.refuses = lambda message: False
    send_all(sender)
    assert [server_of(message) for message in broker.sent] == servers[3:]


def test_malformed_outbox_row_is_dropped_and_next_is_sent(
    notifying_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    servers, broker = add_servers(notifying_store, 2), Broker()
    begin(notifying_store, servers[0])
    notifying_store.write(
        lambda tx: tx.execute(sa.update(schema.notifications).values(body={"request": {}}))
    )
    begin(notifying_store, servers[1])
    send_all(new_sender(notifying_store, broker))
    assert [server_of(message) for message in broker.sent] == servers[1:]
    assert "cannot be built and is dropped" in caplog.text


def test_unsendable_outbox_row_is_dropped_after_three_attempts(
    notifying_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """An unreachable broker, in contrast, is retried without limit."""
    servers, broker = add_servers(notifying_store, 2), Broker()
    for server in servers:
        begin(notifying_store, server)
    sender = new_sender(notifying_store, broker)

    def refuses(message: Message) -> bool:
        if server_of(message) == servers[0]:
            raise OverflowError("it is too long for the broker")
        return False

    broker.refuses = refuses
    for _ in range(2):
        sender.send_batch()
    assert broker.sent == [] and "is dropped" not in "\n".join(rendered_lines(caplog))
    send_all(sender)
    assert [server_of(message) for message in broker.sent] == servers[1:]
    text = "\n".join(rendered_lines(caplog))
    assert "it is too long for the broker" in text and "it is dropped" in text


def test_notification_sender_stops_before_lease_expires(notifying_store: Store) -> None:
    servers, broker = add_servers(notifying_store, 4), Broker()
    for server in servers:
        begin(notifying_store, server)
    sender = new_sender(notifying_store, broker)

    def slow(message: Message) -> bool:
        sender.clock.seconds += 10  # type: ignore[attr-defined]  # a clock of the test
        return False

    broker.refuses = slow
    assert sender.send_batch() == 2
    assert [row.key for row in read_outbox(notifying_store)] == servers[2:]


def test_action_begin_runs_fewer_statements_with_notifications_off(store: Store) -> None:
    server = add_servers(store)[0]
    statements: list[str] = []

    @sa.event.listens_for(store.engine, "before_cursor_execute")
    def count(connection: Any, cursor: Any, statement: str, *more: Sequence[Any]) -> None:
        statements.append(statement)

    counts = []
    for settings in (None, NotificationSettings("api1")):
        store.notify_with(settings)
        statements.clear()
        begin(store, server, "delete")
        counts.append(len(statements))
    assert read_outbox(store)[0].event == "instance.delete.error", (
        "the second one's supersedes the first one's"
    )
    assert counts == [counts[0], counts[1]] and counts[0] < counts[1]
    assert (
        store.read(
            lambda tx: tx.scalar(sa.select(sa.func.count()).select_from(schema.notifications))
        )
        == 2
    )


def test_changes_of_objects_other_than_servers_write_outbox_rows(notifying_store: Store) -> None:
    expected = change_all_but_servers(notifying_store)
    rows = read_outbox(notifying_store)
    assert [row.event for row in rows] == expected
    pictures = {row.event: row.body["object"] for row in rows}
    assert (
        pictures["aggregate.add_host.start"]["hosts"],
        pictures["aggregate.add_host.end"]["hosts"],
    ) == ([], ["h1"])
    assert pictures["aggregate.update_prop.start"]["name"] == "a"
    assert pictures["aggregate.delete.end"]["name"] == "b"
    assert [row.body["object"]["projects"] for row in rows if row.event == "flavor.update"] == [
        [],
        [],
        ["p"],
        [],
    ]
    assert [row.body["object"]["forced_down"] for row in rows if row.event == "service.update"] == [
        False,
        True,
        False,
    ]
    assert {row.publisher for row in rows} == {
        "nova-compute:h1",
        "nova-api:api1",
        "nova-conductor:api1",
    }
    broker = Broker()
    send_all(new_sender(notifying_store, broker, form=BOTH))
    assert [message.event for message in broker.sent if message.is_versioned] == expected
    older = {message.event for message in broker.sent if not message.is_versioned}
    assert {"aggregate.addhost.end", "keypair.import.end", "servergroup.addmember"} <= older
    assert not {event for event in older if event.startswith(("flavor", "service."))}


def test_non_server_changes_write_no_outbox_row_with_notifications_off(store: Store) -> None:
    change_all_but_servers(store)
    assert read_outbox(store) == []


def test_server_rename_notification_contains_old_name(notifying_store: Store) -> None:
    server, broker = add_servers(notifying_store)[0], Broker()
    for values in ({"name": "new"}, {"name": "new"}, {"tags": ["a"]}, {"description": "d"}):
        notifying_store.write(lambda tx, values=values: servers.update(tx, server, values))
    send_all(new_sender(notifying_store, broker))
    data = [message.payload["nova_object.data"] for message in broker.sent]
    assert [
        (message["display_name"], message["old_display_name"], message["tags"]) for message in data
    ] == [
        ("new", "s", []),
        ("new", None, []),
        ("new", None, ["a"]),
    ]


def test_outbox_add_writes_rows_only_for_existing_servers(notifying_store: Store) -> None:
    servers = add_servers(notifying_store, 5)
    notifying_store.write(
        lambda tx: outbox.add(tx, [Notice("instance.update", server) for server in servers])
    )
    assert [row.key for row in read_outbox(notifying_store)] == servers
    notifying_store.write(lambda tx: outbox.add(tx, [Notice("instance.update", "gone")]))
    assert len(read_outbox(notifying_store)) == 5
