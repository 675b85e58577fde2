# SPDX-License-Identifier: Apache-2.0
"""Notifications while everything runs: real conductors and their threads, and a broker that comes
and goes."""

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
from tests.told import all_told

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
    """What several conductors send to; away while it is told so."""

    def __init__(self) -> None:
        self.heard: dict[str, list[str]] = defaultdict(list)
        self.older: set[str] = set()
        self.is_away, self._lock = False, Lock()

    def send(self, message: Message) -> None:
        if self.is_away:
            raise Unavailable("it is away")
        with self._lock:
            if message.is_versioned:
                server = message.payload["nova_object.data"]["uuid"]
                self.heard[server].append(message.event.removeprefix("instance."))
            else:
                self.older.add(message.payload["instance_id"])


@pytest.mark.parametrize("kind", ["sqlite", "mariadb", "postgresql"])
def test_servers_live_and_die_while_the_broker_comes_and_goes(
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
    assert {row.key for row in all_told(cloud.watcher)} >= set(servers), "services are told of too"
    broker.is_away = False
    cloud.await_true(lambda: not all_told(cloud.watcher), 20, "all is told")
    assert {server: broker.heard[server] for server in servers} == dict.fromkeys(servers, LIFE)
    assert broker.older == set(servers)
    assert cloud.findings() == []
