# SPDX-License-Identifier: Apache-2.0
"""Two conductors: each command is executed once, also when a conductor ends during creates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.domain import states
from tests.functional.cloud import Cloud

SERVERS = 40


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_two_conductors_execute_each_command_once(
    new_cloud: Callable[..., Cloud], kind: str
) -> None:
    cloud = new_cloud(kind)
    cloud.start(hosts=3, conductors=2)
    servers = [server for _ in range(SERVERS // 2) for server in (*cloud.create(), *cloud.create())]
    cloud.await_state(servers, states.ACTIVE, 60)
    assert cloud.count_commands("ensure_guest") == dict.fromkeys(servers, 1)
    for server in servers[::2]:
        cloud.begin_action(server, "os-stop")
    for server in servers[1::2]:
        cloud.begin_action(server, "delete")
    cloud.await_state(servers[::2], states.STOPPED, 60)
    cloud.await_state(servers[1::2], states.DELETED, 60)
    cloud.await_idle()
    assert cloud.count_commands("ensure_stopped") == dict.fromkeys(servers[::2], 1)
    assert cloud.findings() == []


def test_second_conductor_completes_creates_when_first_ends(
    new_cloud: Callable[..., Cloud],
) -> None:
    cloud = new_cloud()
    first = cloud.start_conductor("c1")
    cloud.start_conductor("c2")
    cloud.start_scheduler()
    for host in ("h1", "h2"):
        cloud.start_agent(host)
    servers = [server for _ in range(10) for server in cloud.create()]
    first.close()
    servers += [server for _ in range(10) for server in cloud.create()]
    cloud.await_state(servers, states.ACTIVE, 60)
    assert cloud.count_commands("ensure_guest") == dict.fromkeys(servers, 1)
    cloud.await_idle()
    assert cloud.findings() == []
