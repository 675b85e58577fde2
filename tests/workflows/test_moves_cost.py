# SPDX-License-Identifier: Apache-2.0
"""Tests of the SQL statements and messages of moves, and of the life of a server, without faults.

Statements of rounds without due work are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import states
from conductor.engine import runner
from conductor.engine.engine import Lane
from conductor.workflows import WORKFLOWS
from tests.statements import find_rebuilt_statements
from tests.workflows.moves import boot_server, create_cloud, lead_up
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud, Host

#: Action -> most statements and messages for a server with one port on local storage.
COSTS = {
    "resize": (96, 10),
    "confirmResize": (34, 2),
    "os-migrateLive": (124, 10),
    "evacuate": (75, 3),
}


class Meter:
    """Counts the SQL statements and messages of a cloud, except those of rounds without work."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.executed, self.statements, self.messages = cloud, 0, 0, 0
        sa.event.listen(cloud.store.engine, "before_cursor_execute", self._count)
        self._sync, self._do = cloud.sync, cloud.do
        cloud.advance, cloud.sync, cloud.do = self.advance, self.sync, self.do  # type: ignore[method-assign]

    def _count(self, *event: Any) -> None:
        self.executed += 1

    def advance(self) -> None:
        total = 1
        while total:
            total = 0
            for lane in (Lane.INSIDE, *WORKFLOWS.lanes):
                before, advanced = self.executed, runner.advance(self.cloud.engine, lane)
                self.statements += (self.executed - before) if advanced else 0
                total += advanced

    def sync(self, host: Host, ask: bool = True) -> None:
        has_news, before = host.agent.has_news(), self.executed
        self._sync(host, ask)
        self.statements += (self.executed - before) if has_news else 0
        self.messages += has_news

    def do(self, host: str, commands: list[Any]) -> None:
        self.messages += 1
        self._do(host, commands)


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = create_cloud()
    yield cloud
    cloud.store.close()


@pytest.mark.parametrize("key", COSTS)
def test_move_stays_within_limit_of_statements_and_messages(cloud: Cloud, key: str) -> None:
    server = boot_server(cloud)
    lead_up(cloud, server, "revertResize" if key == "confirmResize" else key)
    cloud.watcher = lambda: None
    meter = Meter(cloud)
    ask(cloud, server, key)
    cloud.settle()
    print(f"\n{key}: {meter.statements} statements, {meter.messages} messages")
    assert cloud.show(server).vm_state == (states.RESIZED if key == "resize" else states.ACTIVE)
    assert meter.statements <= COSTS[key][0]
    assert meter.messages <= COSTS[key][1]


def test_repeated_life_of_server_builds_no_statement(cloud: Cloud) -> None:
    cloud.watcher = lambda: None

    def live() -> None:
        server = boot_server(cloud)
        for key in ("os-stop", "os-start", "resize", "confirmResize", "delete"):
            ask(cloud, server, key)
            cloud.settle()

    assert find_rebuilt_statements(cloud.store.engine, live) == []
