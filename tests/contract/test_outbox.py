# SPDX-License-Identifier: Apache-2.0
"""The outbox on three databases: rows come with the transition, go in order when the broker has
them, one sender at a time; what is killed between is sent again."""

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
from tests.server_rows import server_row
from tests.told import change_all_but_servers, read_outbox, read_server_events

USER = RequestContext(user_id="u", project_id="p", roles=("member",), request_id="req-1")
SECRETS = ("secret user data", "sealed password")


class Died(BaseException):
    """The sender was killed."""


class Time:
    """A clock that is turned by hand."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class Broker:
    """Keeps what it takes; ``refuses`` says what it does not."""

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.refuses: Callable[[Message], bool] = lambda message: False

    def send(self, message: Message) -> None:
        if self.refuses(message):
            raise errors.Unavailable("it is away")
        self.taken.append(message)

    def events(self, server: str) -> list[str]:
        return [one.event.removeprefix("instance.") for one in self.taken if uuid(one) == server]


def uuid(message: Message) -> Any:
    return message.payload["nova_object.data"]["uuid"]


@pytest.fixture
def telling(store: Store) -> Store:
    store.notify_with(NotificationSettings("api1"))
    return store


def teller(
    store: Store, broker: Broker, owner: str = "c1/1", form: str = VERSIONED, limit: int = 1000
) -> NotificationSender:
    """The first round ever only makes the lease: that is over."""
    made = NotificationSender(store, Time(), broker, owner, form, limit)
    store.write(lambda tx: outbox.take(tx, owner, 1))
    made.release()
    return made


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


def tell_all(one: NotificationSender) -> None:
    while one.send_batch():
        pass


def test_a_row_is_there_when_the_transition_is(telling: Store) -> None:
    server = add_servers(telling)[0]
    with pytest.raises(errors.WrongState):
        begin(telling, server, "unpause")
    with telling.begin() as tx:
        actions.begin(tx, states.row("os-stop"), server, context=USER)
        tx.rollback()
    assert read_outbox(telling) == []
    begin(telling, server)
    [row] = read_outbox(telling)
    assert (row.event, row.key, row.publisher) == (
        "instance.power_off.start",
        server,
        "nova-compute:h1",
    )
    assert row.body["request"] == {"id": "req-1", "user": "u", "project": "p"}
    assert row.body["object"]["task_state"] == "powering-off"


def test_no_secret_is_written(telling: Store) -> None:
    server = add_servers(telling)[0]
    for key in ("os-stop", "delete"):
        begin(telling, server, key)
    text = telling.read(
        lambda tx: list(tx.scalars(sa.select(sa.type_coerce(schema.notifications.c.body, sa.Text))))
    )
    assert len(text) == 3
    assert [secret for secret in SECRETS for body in text if secret in body] == []


def test_a_lock_is_told_at_once_by_the_api(telling: Store) -> None:
    server = add_servers(telling)[0]
    telling.write(
        lambda tx: immediate_actions.do(
            tx, states.row("lock"), server, context=USER, args={"locked_reason": "mine"}
        )
    )
    [row] = read_outbox(telling)
    assert (row.event, row.publisher, row.body["object"]["locked_reason"]) == (
        "instance.lock",
        "nova-api:api1",
        "mine",
    )


def test_rows_go_in_order_and_are_gone(telling: Store) -> None:
    servers, broker = add_servers(telling, 3), Broker()
    for server in servers:
        begin(telling, server)
        begin(telling, server, "delete")
    one = teller(telling, broker)
    tell_all(one)
    for server in servers:
        assert broker.events(server) == ["power_off.start", "power_off.error", "delete.start"]
    assert read_outbox(telling) == []
    assert one.send_batch() == 0


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (VERSIONED, ["instance.power_off.start"]),
        (UNVERSIONED, ["compute.instance.power_off.start"]),
        (BOTH, ["instance.power_off.start", "compute.instance.power_off.start"]),
    ],
)
def test_each_format_is_sent_where_wanted(telling: Store, form: str, expected: list[str]) -> None:
    broker = Broker()
    begin(telling, add_servers(telling)[0])
    tell_all(teller(telling, broker, form=form))
    assert [one.event for one in broker.taken] == expected
    assert {one.publisher for one in broker.taken} <= {"nova-compute:h1", "compute.h1"}


@pytest.mark.parametrize(("where", "again"), [("taken", 0), ("sent", 3)])
def test_what_a_dead_sender_had_in_hand_is_sent_again(
    telling: Store, where: str, again: int
) -> None:
    """By its successor of the same name at once; in order, under the same number."""
    servers, broker = add_servers(telling, 3), Broker()
    for server in servers:
        begin(telling, server)

    def die(point: str) -> None:
        if point == where:
            raise Died

    dying = teller(telling, broker)
    dying.fault_point = die
    with pytest.raises(Died):
        dying.send_batch()
    assert len(broker.taken) == again
    assert len(read_outbox(telling)) == 3
    tell_all(teller(telling, broker))
    assert [uuid(one) for one in broker.taken] == servers[:again] + servers
    numbers = [one.context["notification_id"] for one in broker.taken]
    assert numbers == sorted(numbers[again:])[:again] + sorted(numbers[again:])
    assert read_outbox(telling) == []


def test_only_who_has_the_lease_sends(telling: Store) -> None:
    server, broker = add_servers(telling)[0], Broker()
    first, second = teller(telling, broker), teller(telling, broker, "c2/1")
    begin(telling, server)
    assert first.send_batch() == 1
    begin(telling, server, "delete")
    assert second.send_batch() == 0
    first.release()
    assert second.send_batch() == 2
    begin(telling, server, "delete")
    assert first.send_batch() == 0
    telling.write(lambda tx: tx.execute(sa.update(schema.leases).values(until=0)))  # it ran out
    assert first.send_batch() == 2
    assert broker.events(server) == [
        "power_off.start",
        *["power_off.error", "delete.start"],
        *["delete.error", "delete.start"],
    ]


def test_two_senders_at_once_keep_the_order(telling: Store) -> None:
    servers, broker = add_servers(telling, 4), Broker()
    for _ in range(BATCH_SIZE // 2):
        for server in servers:
            begin(telling, server, "delete")
    expected = {server: read_server_events(telling, server) for server in servers}
    senders = [teller(telling, broker, f"c{number}/1") for number in range(3)]
    left = threading.Event()

    def work(one: NotificationSender) -> None:
        while read_outbox(telling):
            one.send_batch()
        left.set()

    threads = [threading.Thread(target=work, args=(one,)) for one in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert left.is_set()
    assert {server: broker.events(server) for server in servers} == expected


def test_while_the_broker_is_away_rows_wait(telling: Store) -> None:
    servers, broker = add_servers(telling, 3), Broker()
    for server in servers:
        begin(telling, server)
    one = teller(telling, broker)
    broker.refuses = lambda message: uuid(message) != servers[0]
    assert one.send_batch() == 1
    assert [row.key for row in read_outbox(telling)] == servers[1:]
    assert one.send_batch() == 0
    broker.refuses = lambda message: False
    tell_all(one)
    assert [uuid(message) for message in broker.taken] == servers


def test_no_more_than_the_limit_wait(telling: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The oldest go, with a warning, and only while nobody takes them."""
    servers, broker = add_servers(telling, 8), Broker()
    for server in servers:
        begin(telling, server)
    one = teller(telling, broker, limit=5)
    broker.refuses = lambda message: True
    with caplog.at_level("WARNING"):
        assert one.send_batch() == 0
    assert [row.key for row in read_outbox(telling)] == servers[3:]
    assert "3 notifications, the oldest, were dropped" in caplog.text
    broker.refuses = lambda message: False
    tell_all(one)
    assert [uuid(message) for message in broker.taken] == servers[3:]


def test_a_row_of_which_no_message_can_be_made_holds_up_none(
    telling: Store, caplog: pytest.LogCaptureFixture
) -> None:
    servers, broker = add_servers(telling, 2), Broker()
    begin(telling, servers[0])
    telling.write(
        lambda tx: tx.execute(sa.update(schema.notifications).values(body={"request": {}}))
    )
    begin(telling, servers[1])
    tell_all(teller(telling, broker))
    assert [uuid(message) for message in broker.taken] == servers[1:]
    assert "cannot be told and is dropped" in caplog.text


def test_a_row_that_cannot_be_sent_holds_up_others_for_three_tries(
    telling: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Not because the broker is away: that is waited for, however long."""
    servers, broker = add_servers(telling, 2), Broker()
    for server in servers:
        begin(telling, server)
    one = teller(telling, broker)

    def refuses(message: Message) -> bool:
        if uuid(message) == servers[0]:
            raise OverflowError("it is too long for the broker")
        return False

    broker.refuses = refuses
    for _ in range(2):
        one.send_batch()
    assert broker.taken == [] and "is dropped" not in caplog.text
    tell_all(one)
    assert [uuid(message) for message in broker.taken] == servers[1:]
    assert "it is too long for the broker" in caplog.text and "is dropped" in caplog.text


def test_a_sender_stops_before_its_lease_runs_out(telling: Store) -> None:
    servers, broker = add_servers(telling, 4), Broker()
    for server in servers:
        begin(telling, server)
    one = teller(telling, broker)

    def slow(message: Message) -> bool:
        one.clock.seconds += 10  # type: ignore[attr-defined]  # it is ours
        return False

    broker.refuses = slow
    assert one.send_batch() == 2
    assert [row.key for row in read_outbox(telling)] == servers[2:]


def test_nothing_is_asked_where_nothing_is_told(store: Store) -> None:
    server = add_servers(store)[0]
    asked: list[str] = []

    @sa.event.listens_for(store.engine, "before_cursor_execute")
    def count(connection: Any, cursor: Any, statement: str, *more: Sequence[Any]) -> None:
        asked.append(statement)

    found = []
    for telling in (None, NotificationSettings("api1")):
        store.notify_with(telling)
        asked.clear()
        begin(store, server, "delete")
        found.append(len(asked))
    assert read_outbox(store)[0].event == "instance.delete.error", (
        "the second one's supersedes the first one's"
    )
    assert found == [found[0], found[1]] and found[0] < found[1]
    assert (
        store.read(
            lambda tx: tx.scalar(sa.select(sa.func.count()).select_from(schema.notifications))
        )
        == 2
    )


def test_what_is_no_server_is_told_too(telling: Store) -> None:
    expected = change_all_but_servers(telling)
    rows = read_outbox(telling)
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
    tell_all(teller(telling, broker, form=BOTH))
    assert [one.event for one in broker.taken if one.is_versioned] == expected
    older = {one.event for one in broker.taken if not one.is_versioned}
    assert {"aggregate.addhost.end", "keypair.import.end", "servergroup.addmember"} <= older
    assert not {event for event in older if event.startswith(("flavor", "service."))}


def test_what_is_no_server_costs_nothing_where_it_is_not_told(store: Store) -> None:
    change_all_but_servers(store)
    assert read_outbox(store) == []


def test_another_name_is_told_with_the_old_one(telling: Store) -> None:
    server, broker = add_servers(telling)[0], Broker()
    for values in ({"name": "new"}, {"name": "new"}, {"tags": ["a"]}, {"description": "d"}):
        telling.write(lambda tx, values=values: servers.update(tx, server, values))
    tell_all(teller(telling, broker))
    data = [one.payload["nova_object.data"] for one in broker.taken]
    assert [(one["display_name"], one["old_display_name"], one["tags"]) for one in data] == [
        ("new", "s", []),
        ("new", None, []),
        ("new", None, ["a"]),
    ]


def test_many_notices_are_written_at_once(telling: Store) -> None:
    servers = add_servers(telling, 5)
    telling.write(
        lambda tx: outbox.add(tx, [Notice("instance.update", server) for server in servers])
    )
    assert [row.key for row in read_outbox(telling)] == servers
    telling.write(lambda tx: outbox.add(tx, [Notice("instance.update", "gone")]))
    assert len(read_outbox(telling)) == 5
