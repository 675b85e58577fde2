# SPDX-License-Identifier: Apache-2.0
"""Notifications of two conductors while the broker for notifications is down for some time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from threading import Lock

import pytest

from common.domain import states
from common.domain.errors import Unavailable
from common.notifications.message import Message
from common.service.notification_options import NotificationSettings
from tests.functional.cloud import Cloud
from tests.outbox_events import read_outbox

LIFE = [
    "create.start",
    "create.end",
    "power_off.start",
    "power_off.end",
    "delete.start",
    "shutdown.start",
    "shutdown.end",
    "delete.end",
]


class Broker:
    """The broker of several conductors, which refuses messages while ``is_away``."""

    def __init__(self) -> None:
        self.events_by_server: dict[str, list[str]] = defaultdict(list)
        self.legacy_servers: set[str] = set()
        self.is_away, self._lock = False, Lock()

    def send(self, message: Message) -> None:
        if self.is_away:
            raise Unavailable("it is away")
        with self._lock:
            if message.is_versioned:
                server = message.payload["nova_object.data"]["uuid"]
                self.events_by_server[server].append(message.event.removeprefix("instance."))
            else:
                self.legacy_servers.add(message.payload["instance_id"])


@pytest.mark.parametrize("kind", ["sqlite", "mariadb", "postgresql"])
def test_notifications_of_each_server_are_sent_in_order_after_broker_outage(
    new_cloud: Callable[..., Cloud], kind: str
) -> None:
    cloud, broker = new_cloud(kind), Broker()
    cloud.store.notify_with(NotificationSettings("api"))
    cloud.start_conductor("c1", broker)
    cloud.start_conductor("c2", broker)
    cloud.start_scheduler()
    cloud.start_agent("h1")
    servers = cloud.create(8)
    cloud.await_state(servers, states.ACTIVE)
    broker.is_away = True
    for server in servers:
        cloud.begin_action(server, "os-stop")
    began = time.monotonic()
    cloud.await_state(servers, states.STOPPED)
    assert time.monotonic() - began < 15, "a broker that is away holds up nothing"
    for server in servers:
        cloud.begin_action(server, "delete")
    cloud.await_state(servers, states.DELETED)
    cloud.await_idle()
    assert {row.key for row in read_outbox(cloud.watcher)} >= set(servers), (
        "services are told of too"
    )
    broker.is_away = False
    cloud.await_true(lambda: not read_outbox(cloud.watcher), 20, "all is told")
    assert {server: broker.events_by_server[server] for server in servers} == dict.fromkeys(
        servers, LIFE
    )
    assert broker.legacy_servers == set(servers)
    assert cloud.findings() == []
