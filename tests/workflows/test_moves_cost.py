# SPDX-License-Identifier: Apache-2.0
"""What a move costs in SQL statements of the conductor and in messages when nothing else happens:
counted, and kept small. Looks that find nothing to do are no part of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import states
from conductor.engine import runner
from conductor.engine.engine import Lane
from conductor.workflows import WORKFLOWS
from tests.workflows.moves import clouds, lead_up, server_on
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud, Host

#: Statements and messages of a server with one port, whose files travel.
COSTS = {
    "resize": (96, 10),
    "confirmResize": (34, 2),
    "os-migrateLive": (124, 10),
    "evacuate": (75, 3),
}


class Meter:
    """Counts what work costs that has something to do."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.executed, self.statements, self.messages = cloud, 0, 0, 0
        sa.event.listen(cloud.store.engine, "before_cursor_execute", self._count)
        self._sync, self._do = cloud.sync, cloud.do
        cloud.advance, cloud.sync, cloud.do = self.advance, self.sync, self.do  # type: ignore[method-assign]

    def _count(self, *what: Any) -> None:
        self.executed += 1

    def advance(self) -> None:
        took = 1
        while took:
            took = 0
            for lane in (Lane.INSIDE, *WORKFLOWS.lanes):
                before, taken = self.executed, runner.advance(self.cloud.engine, lane)
                self.statements += (self.executed - before) if taken else 0
                took += taken

    def sync(self, host: Host, ask: bool = True) -> None:
        tells, before = host.agent.has_news(), self.executed
        self._sync(host, ask)
        self.statements += (self.executed - before) if tells else 0
        self.messages += tells

    def do(self, host: str, commands: list[Any]) -> None:
        self.messages += 1
        self._do(host, commands)


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = clouds()
    yield cloud
    cloud.store.close()


@pytest.mark.parametrize("key", COSTS)
def test_statements_and_messages_of_one_move(cloud: Cloud, key: str) -> None:
    server = server_on(cloud)
    lead_up(cloud, server, "revertResize" if key == "confirmResize" else key)
    cloud.watcher = lambda: None
    meter = Meter(cloud)
    ask(cloud, server, key)
    cloud.settle()
    print(f"\n{key}: {meter.statements} statements, {meter.messages} messages")
    assert cloud.show(server).vm_state == (states.RESIZED if key == "resize" else states.ACTIVE)
    assert meter.statements <= COSTS[key][0]
    assert meter.messages <= COSTS[key][1]
