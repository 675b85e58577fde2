# SPDX-License-Identifier: Apache-2.0
"""Notifications over a real RabbitMQ, received with oslo.messaging's own listener.

The tests include a broker that is unreachable or closes the channel.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_config import cfg

from common.domain import errors, ids, states
from common.domain.context import RequestContext
from common.domain.models import Flavor
from common.domain.wire import to_wire
from common.notifications.message import Message
from common.rpc.notifier import EXCHANGE, Notifier
from common.service import config
from common.service.notification_options import BOTH, NotificationSettings
from common.store import schema
from common.store.engine import Store
from common.store.notifications import outbox
from common.store.servers import actions
from conductor.notifications.notification_sender import NotificationSender
from deploy.testing.servers import free_ports
from tests.broker_connection import broker_connection
from tests.contract.test_outbox import Time
from tests.outbox_events import read_outbox
from tests.schemas import memory_store
from tests.server_rows import server_row
from tests.waiting import await_true

# isort: split
import oslo_messaging  # after common.rpc has chosen the threading backend

NEWER = Message(
    True,
    "nova-compute:h1",
    "instance.pause.end",
    {"nova_object.name": "X"},
    False,
    {"request_id": "req-1", "notification_id": 7},
)
OLDER = Message(False, "compute.h1", "compute.instance.reboot.error", {"instance_id": "s"}, True)


class Listener:
    """oslo.messaging's listener on these topics, which records notifications."""

    def __init__(self, conf: cfg.ConfigOpts, url: str, topics: list[str]) -> None:
        self.received: list[tuple[str, str, str, Any, Any]] = []
        transport = oslo_messaging.get_notification_transport(conf, url=url)
        targets = [oslo_messaging.Target(topic=topic, exchange=EXCHANGE) for topic in topics]
        self._server = oslo_messaging.get_notification_listener(
            transport, targets, [self], executor="threading"
        )
        self._server.start()

    def _record(
        self, priority: str, context: Any, publisher: str, event: str, payload: Any
    ) -> None:
        self.received.append((priority, publisher, event, payload, context))

    def info(self, context: Any, publisher: str, event: str, payload: Any, metadata: Any) -> None:
        self._record("info", context, publisher, event, payload)

    def error(self, context: Any, publisher: str, event: str, payload: Any, metadata: Any) -> None:
        self._record("error", context, publisher, event, payload)

    def close(self) -> None:
        self._server.stop()
        self._server.wait()


@pytest.fixture
def conf() -> Iterator[cfg.ConfigOpts]:
    """Options with topics that no other test uses."""
    conf, mine = config.load(), uuid.uuid4().hex
    # Registers the library's options and does not connect.
    Notifier(conf, "rabbit://nobody:none@127.0.0.1:1/")
    conf.set_override(
        "versioned_notifications_topics", [f"versioned-{mine}"], group="notifications"
    )
    conf.set_override("topics", [f"plain-{mine}"], group="oslo_messaging_notifications")
    yield conf
    conf.clear_override("versioned_notifications_topics", group="notifications")
    conf.clear_override("topics", group="oslo_messaging_notifications")


@pytest.mark.parametrize("url", ["no url", "rabbit://u:p@127.0.0.1:secret/"])
def test_notifier_with_malformed_url_names_option_and_hides_url(
    conf: cfg.ConfigOpts, url: str
) -> None:
    conf.set_override("transport_url", url, group="oslo_messaging_notifications")
    with pytest.raises(errors.ConfigError, match="oslo_messaging_notifications") as refusal:
        Notifier(conf)
    conf.clear_override("transport_url", group="oslo_messaging_notifications")
    assert "secret" not in str(refusal.value)


@pytest.fixture
def notifier(conf: cfg.ConfigOpts, rabbitmq_url: str) -> Iterator[Notifier]:
    notifier = Notifier(conf, rabbitmq_url)
    yield notifier
    notifier.close()


@pytest.fixture
def listener(conf: cfg.ConfigOpts, rabbitmq_url: str) -> Iterator[Listener]:
    listener = Listener(
        conf,
        rabbitmq_url,
        [
            *conf.notifications.versioned_notifications_topics,
            *conf.oslo_messaging_notifications.topics,
        ],
    )
    yield listener
    listener.close()


@pytest.fixture
def store() -> Iterator[Store]:
    store = memory_store(lambda: time.time_ns() // 1000)
    store.notify_with(NotificationSettings("api1"))
    yield store
    store.close()


def add_server(store: Store) -> str:
    name = ids.new()
    with store.begin() as tx:
        tx.execute(
            sa.insert(schema.servers).values(
                **server_row(
                    name,
                    flavor=to_wire(Flavor("1", "m1.nano", 1, 128, 1)),
                    memory_mb=128,
                    host="h1",
                )
            )
        )
    return name


def test_notifier_sends_versioned_and_unversioned_format_to_listener(
    notifier: Notifier, listener: Listener
) -> None:
    for message in (NEWER, OLDER):
        notifier.send(message)
    await_true(lambda: len(listener.received) == 2, 10, "both arrive")
    newer, older = sorted(listener.received, reverse=True, key=lambda notification: notification[0])
    assert newer[:4] == ("info", NEWER.publisher, NEWER.event, NEWER.payload)
    assert newer[4].items() >= NEWER.context.items()
    assert older[:4] == ("error", OLDER.publisher, OLDER.event, OLDER.payload)


def test_notification_sent_before_listener_exists_is_received_later(
    notifier: Notifier, conf: cfg.ConfigOpts, rabbitmq_url: str
) -> None:
    notifier.send(NEWER)
    late = Listener(conf, rabbitmq_url, conf.notifications.versioned_notifications_topics)
    await_true(
        lambda: [notification[2] for notification in late.received] == [NEWER.event],
        10,
        "it arrives",
    )
    late.close()


def test_notifier_raises_for_unserializable_payload_and_sends_next(
    notifier: Notifier, listener: Listener
) -> None:
    with pytest.raises((TypeError, ValueError)):
        notifier.send(replace(NEWER, payload={1j: object()}))
    notifier.send(OLDER)
    await_true(
        lambda: [notification[2] for notification in listener.received] == [OLDER.event],
        10,
        "the next one arrives",
    )


def test_notifier_raises_unavailable_in_time_when_broker_is_unreachable(
    conf: cfg.ConfigOpts,
) -> None:
    away = Notifier(conf, f"rabbit://nobody:none@127.0.0.1:{free_ports(1)}/")
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match="did not accept the notification"):
        away.send(NEWER)
    assert time.monotonic() - began < 15
    away.close()


def test_notifier_reopens_closed_channel(
    notifier: Notifier, listener: Listener, rabbitmq_url: str
) -> None:
    """The exchange is deleted, so the broker closes the channel and keeps the connection."""
    notifier.send(NEWER)
    with broker_connection(rabbitmq_url) as broker:
        broker.default_channel.exchange_delete(EXCHANGE)

    def is_sent() -> bool:
        try:
            notifier.send(OLDER)
        except errors.Unavailable:
            return False
        return True

    await_true(is_sent, 20, "it is taken again")


def test_stop_and_delete_notifications_arrive_with_starts_in_order(
    notifier: Notifier, listener: Listener, store: Store
) -> None:
    """The path is: outbox, sender, broker and the library's listener."""
    server = add_server(store)
    context = RequestContext(user_id="u", project_id="p", roles=("member",), request_id="req-1")
    for key in ("os-stop", "delete"):
        store.write(lambda tx, key=key: actions.begin(tx, states.row(key), server, context=context))
    sender = NotificationSender(store, Time(), notifier, "c1/1", BOTH, 1000)
    store.write(lambda tx: outbox.take(tx, "c1/1", 1))
    assert sender.send_batch() == 3
    await_true(lambda: len(listener.received) == 6, 10, "all arrive")
    newer = [
        notification
        for notification in listener.received
        if notification[2].startswith("instance.")
    ]
    assert sorted(notification[2] for notification in newer) == [
        "instance.delete.start",
        "instance.power_off.error",
        "instance.power_off.start",
    ]
    infos = [notification[2] for notification in newer if notification[0] == "info"]
    assert infos == ["instance.power_off.start", "instance.delete.start"], (
        "in one queue they keep their order"
    )
    assert {notification[3]["nova_object.data"]["uuid"] for notification in newer} == {server}
    assert read_outbox(store) == []
