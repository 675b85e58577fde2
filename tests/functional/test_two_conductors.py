# SPDX-License-Identifier: Apache-2.0
"""Two conductors at once: everything is done once, whoever does it, also when one of them ends in
the middle."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.domain import states
from tests.functional.cloud import Cloud

SERVERS = 40


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_forty_creates_are_done_once_each(new_cloud: Callable[..., Cloud], kind: str) -> None:
    cloud = new_cloud(kind)
    cloud.start(hosts=3, conductors=2)
    servers = [server for _ in range(SERVERS // 2) for server in (*cloud.create(), *cloud.create())]
    cloud.await_state(servers, states.ACTIVE, 60)
    assert cloud.made("ensure_guest") == dict.fromkeys(servers, 1)
    for server in servers[::2]:
        cloud.begin_action(server, "os-stop")
    for server in servers[1::2]:
        cloud.begin_action(server, "delete")
    cloud.await_state(servers[::2], states.STOPPED, 60)
    cloud.await_state(servers[1::2], states.DELETED, 60)
    cloud.await_idle()
    assert cloud.made("ensure_stopped") == dict.fromkeys(servers[::2], 1)
    assert cloud.findings() == []


def test_one_ends_in_the_middle_and_the_other_goes_on(new_cloud: Callable[..., Cloud]) -> None:
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
    assert cloud.made("ensure_guest") == dict.fromkeys(servers, 1)
    cloud.await_idle()
    assert cloud.findings() == []
