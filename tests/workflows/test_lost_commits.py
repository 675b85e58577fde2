# SPDX-License-Identifier: Apache-2.0
"""A database that has lost its last commits, by a fail-over or a restore: hosts know higher fences
than it does.

Everything goes on without anybody's hand, and a delete removes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from common.domain import states
from common.store import schema
from tests.workflows.frozen import register
from tests.workflows.scenarios import bigger
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
        cloud.store.write(
            lambda tx, key=table: tx.execute(
                sa.update(key.table).where(key == made).values(fence=before)
            )
        )
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
    cloud.idle(60)
    assert cloud.show(server).deleted == 1
    cloud.cut.clear()
    cloud.settle(limit=20)
    assert cloud.domains(server) == []
    assert cloud.findings() == []


@pytest.mark.parametrize("registration", [True, False], ids=["registration", "report"])
def test_a_host_s_fences_are_taken_in(cloud: Cloud, server: str, registration: bool) -> None:
    """So that what it says of the server counts again."""
    known = cloud.show(server).fence + LOST
    if registration:
        cloud.hosts["h1"].restart()
    cloud.idle(65)
    assert cloud.show(server).fence > known
    cloud.hosts["h1"].driver.host.power_off(server)
    cloud.idle(65)
    assert cloud.show(server).vm_state == states.STOPPED
    assert cloud.findings() == []


def test_a_late_command_of_an_ended_action_raises_nothing(cloud: Cloud) -> None:
    """Without lost commits a refusal is what it always was."""
    register(cloud)
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


def everything(cloud: Cloud) -> Callable[[], None]:
    """What the database has now: called, it has that again."""
    tables = schema.metadata.sorted_tables
    kept = cloud.store.read(
        lambda tx: [[dict(row._mapping) for row in tx.execute(sa.select(one))] for one in tables]
    )

    def set_back(tx: sa.Connection) -> None:
        for table in reversed(tables):
            tx.execute(sa.delete(table))
        for table, rows in zip(tables, kept, strict=True):
            if rows:
                tx.execute(sa.insert(table), rows)

    return lambda: cloud.store.write(set_back)


def running(cloud: Cloud, server: str) -> list[str]:
    """Hosts where the server runs."""
    return [
        host.name
        for host in cloud.hosts.values()
        for state in host.driver.domains()
        if state.server == server and state.power_state == states.RUNNING
    ]


@pytest.mark.parametrize("move", ["resize", "os-migrateLive"])
def test_a_move_that_was_lost_doubles_nothing(cloud: Cloud, move: str) -> None:
    """What runs where the server is not, by what the database has left, is off before anybody
    starts it; its disk stays, and the doctor tells of it."""
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back = everything(cloud)
    cloud.move(server, move, bigger(cloud, server) if move == "resize" else None)
    cloud.settle()
    assert running(cloud, server) == ["h2"]
    set_back()
    cloud.idle(80)
    assert running(cloud, server) == []
    assert "h2" in cloud.domains(server)
    [found] = [one for one in cloud.findings() if one.invariant == "domain-known"]
    assert found.subject == server
    assert f"kilonova host adopt h2 {server}" in found.text


def test_a_server_whose_move_was_lost_goes_on(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back = everything(cloud)
    cloud.move(server, "resize", bigger(cloud, server))
    cloud.settle()
    set_back()
    cloud.idle(65)
    assert cloud.show(server).vm_state == states.STOPPED
    cloud.watcher = lambda: None  # a guest that nobody knows is a finding
    cloud.ask(server, "os-start")
    cloud.settle()
    assert (cloud.show(server).vm_state, running(cloud, server)) == (states.ACTIVE, ["h1"])


def test_a_guest_of_a_server_that_was_lost_is_kept_and_told_of(cloud: Cloud) -> None:
    register(cloud)
    set_back = everything(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back()
    cloud.hosts["h1"].restart()
    cloud.idle(65)
    assert running(cloud, server) == ["h1"]
    [found] = cloud.findings()
    assert (found.invariant, found.subject) == ("domain-known", server)
    assert f"kilonova host discard h1 {server}" in found.text


def test_a_server_whose_delete_was_lost_is_told_of_and_can_be_deleted(cloud: Cloud) -> None:
    """Its guest is gone for good."""
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back = everything(cloud)
    cloud.ask(server, "delete")
    cloud.settle()
    set_back()
    cloud.idle(65)
    [found] = cloud.findings()
    assert (found.invariant, found.subject) == ("guest-there", server)
    assert f"openstack server delete {server}" in found.text
    cloud.ask(server, "delete")
    cloud.settle(limit=20)
    assert (cloud.show(server).deleted, cloud.findings()) == (1, [])


def test_a_create_whose_place_was_lost_is_placed_again_and_runs(cloud: Cloud) -> None:
    """Its host hears meanwhile that the server is not there, and makes its guest off."""
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    set_back = everything(cloud)
    cloud.settle()
    set_back()
    cloud.hosts["h1"].restart()
    cloud.sync(cloud.hosts["h1"])
    cloud.hosts["h1"].work()
    assert running(cloud, server) == []
    cloud.settle()
    cloud.idle(65)
    assert (cloud.show(server).vm_state, running(cloud, server)) == (states.ACTIVE, ["h1"])
    assert cloud.findings() == []
