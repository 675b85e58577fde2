# SPDX-License-Identifier: Apache-2.0
"""A database that has lost its last commits, by a fail-over or a restore: hosts know higher fences than it does.

Everything goes on without anybody's hand, and a delete removes.
"""
from __future__ import annotations

import pytest
import sqlalchemy as sa

from common import states
from common.store import schema
from tests.workflows.simulator import Cloud

LOST = 4


@pytest.fixture
def server(cloud: Cloud) -> str:
    """A server that has run through some actions, of which the database knows only the first."""
    cloud.round()
    made = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    before = cloud.show(made).fence
    for _ in range(LOST // 2):
        for key in ("os-stop", "os-start"):
            cloud.ask(made, key)
            cloud.settle()
    assert cloud.show(made).fence == before + LOST
    for table in (schema.servers.c.id, schema.guests.c.server_id):
        cloud.store.write(lambda tx, key=table: tx.execute(
            sa.update(key.table).where(key == made).values(fence=before)))
    return made


def test_an_action_is_carried_out(cloud: Cloud, server: str) -> None:
    for key, state in (("os-stop", states.STOPPED), ("os-start", states.ACTIVE)):
        cloud.ask(server, key)
        cloud.settle(limit=20)
        assert cloud.show(server).vm_state == state
    assert cloud.findings() == []


def test_a_delete_removes(cloud: Cloud, server: str) -> None:
    cloud.ask(server, "delete")
    cloud.settle(limit=20)
    assert (cloud.show(server).deleted, cloud.domains(server)) == (1, [])
    assert cloud.findings() == []


def test_a_debt_that_outlived_its_delete_is_paid(cloud: Cloud, server: str) -> None:
    """The host was away while the server was deleted."""
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.ask(server, "delete")
    for _ in range(60):
        cloud.round()
    assert cloud.show(server).deleted == 1
    cloud.cut.clear()
    cloud.settle(limit=20)
    assert cloud.domains(server) == []
    assert cloud.findings() == []


@pytest.mark.parametrize("hello", [True, False], ids=["hello", "report"])
def test_a_host_s_fences_are_taken_in(cloud: Cloud, server: str, hello: bool) -> None:
    """So that what it says of the server counts again."""
    known = cloud.hosts["h1"].agent._fences[server]
    if hello:
        cloud.hosts["h1"].restart()
    for _ in range(65):
        cloud.round()
    assert cloud.show(server).fence > known
    cloud.hosts["h1"].driver.power_off(server)
    for _ in range(65):
        cloud.round()
    assert cloud.show(server).vm_state == states.STOPPED
    assert cloud.findings() == []


def test_a_late_command_of_an_ended_action_raises_nothing(cloud: Cloud) -> None:
    """Without lost commits a refusal is what it always was."""
    cloud.round()
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    cloud.ask(server, "os-stop")
    cloud.advance()
    late = cloud.sent[-1]
    cloud.settle()
    cloud.ask(server, "os-start")
    cloud.settle()
    fence = cloud.show(server).fence
    cloud.do(late[0], [late[1]])
    cloud.settle()
    assert (cloud.show(server).fence, cloud.show(server).vm_state) == (fence, states.ACTIVE)
