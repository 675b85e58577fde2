# SPDX-License-Identifier: Apache-2.0
"""Tests of a database that lost its last commits in a fail-over or a restore.

Hosts have higher fences than the database. Actions must work without an operator.
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
    """Return a server on h1.

    The database has lost the last actions, and so has a lower fence than h1.
    """
    cloud.round()
    server_id = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    before = cloud.show(server_id).fence
    for _ in range(LOST // 2):
        for key in ("os-stop", "os-start"):
            cloud.ask(server_id, key)
            cloud.settle()
    assert cloud.show(server_id).fence == before + LOST
    for table in (schema.servers.c.id, schema.guests.c.server_id):
        cloud.store.write(
            lambda tx, key=table: tx.execute(
                sa.update(key.table).where(key == server_id).values(fence=before)
            )
        )
    return server_id


def test_stop_and_start_succeed_after_database_lost_last_commits(cloud: Cloud, server: str) -> None:
    for key, state in (("os-stop", states.STOPPED), ("os-start", states.ACTIVE)):
        cloud.ask(server, key)
        cloud.settle(limit=20)
        assert cloud.show(server).vm_state == state
    assert cloud.findings() == []


def test_delete_removes_guest_after_lost_commits(cloud: Cloud, server: str) -> None:
    cloud.ask(server, "delete")
    cloud.settle(limit=20)
    assert (cloud.show(server).deleted, cloud.domains(server)) == (1, [])
    assert cloud.findings() == []


def test_delete_removes_guest_after_lost_commits_when_host_returns(
    cloud: Cloud, server: str
) -> None:
    """The host was unreachable during the delete."""
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
def test_server_fence_rises_above_fence_of_host_after_lost_commits(
    cloud: Cloud, server: str, registration: bool
) -> None:
    """Afterwards conductors accept the host's reports about the server again."""
    host_fence = cloud.show(server).fence + LOST
    if registration:
        cloud.hosts["h1"].restart()
    cloud.idle(65)
    assert cloud.show(server).fence > host_fence
    cloud.hosts["h1"].driver.host.power_off(server)
    cloud.idle(65)
    assert cloud.show(server).vm_state == states.STOPPED
    assert cloud.findings() == []


def test_late_command_of_ended_action_leaves_fence_unchanged(cloud: Cloud) -> None:
    """Without lost commits, a refusal does not raise the fence."""
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    cloud.ask(server, "os-stop")
    cloud.advance()
    late_command = cloud.sent[-1]
    cloud.settle()
    cloud.ask(server, "os-start")
    cloud.settle()
    fence = cloud.show(server).fence
    cloud.do(late_command[0], [late_command[1]])
    cloud.settle()
    assert (cloud.show(server).fence, cloud.show(server).vm_state) == (fence, states.ACTIVE)


def snapshot_database(cloud: Cloud) -> Callable[[], None]:
    """Return a function that restores the present content of the database."""
    tables = schema.metadata.sorted_tables
    content = cloud.store.read(
        lambda tx: [
            [dict(row._mapping) for row in tx.execute(sa.select(table))] for table in tables
        ]
    )

    def set_back(tx: sa.Connection) -> None:
        for table in reversed(tables):
            tx.execute(sa.delete(table))
        for table, rows in zip(tables, content, strict=True):
            if rows:
                tx.execute(sa.insert(table), rows)

    return lambda: cloud.store.write(set_back)


def read_running_hosts(cloud: Cloud, server: str) -> list[str]:
    """Return the hosts on which the server runs."""
    return [
        host.name
        for host in cloud.hosts.values()
        for state in host.driver.domains()
        if state.server == server and state.power_state == states.RUNNING
    ]


@pytest.mark.parametrize("move", ["resize", "os-migrateLive"])
def test_guest_is_stopped_and_reported_when_commits_of_its_move_are_lost(
    cloud: Cloud, move: str
) -> None:
    """The guest on the unrecorded host stops before the server can start elsewhere.

    The disk is kept, and the doctor reports the guest.
    """
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back = snapshot_database(cloud)
    cloud.move(server, move, bigger(cloud, server) if move == "resize" else None)
    cloud.settle()
    assert read_running_hosts(cloud, server) == ["h2"]
    set_back()
    cloud.idle(80)
    assert read_running_hosts(cloud, server) == []
    assert "h2" in cloud.domains(server)
    [finding] = [finding for finding in cloud.findings() if finding.invariant == "domain-known"]
    assert finding.subject == server
    assert f"kilonova host adopt h2 {server}" in finding.text


def test_server_can_be_started_at_source_after_commits_of_resize_are_lost(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back = snapshot_database(cloud)
    cloud.move(server, "resize", bigger(cloud, server))
    cloud.settle()
    set_back()
    cloud.idle(65)
    assert cloud.show(server).vm_state == states.STOPPED
    cloud.watcher = lambda: None  # The watcher would report the guest without a record.
    cloud.ask(server, "os-start")
    cloud.settle()
    assert (cloud.show(server).vm_state, read_running_hosts(cloud, server)) == (
        states.ACTIVE,
        ["h1"],
    )


def test_guest_of_server_lost_from_database_keeps_running_and_is_reported(cloud: Cloud) -> None:
    register(cloud)
    set_back = snapshot_database(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back()
    cloud.hosts["h1"].restart()
    cloud.idle(65)
    assert read_running_hosts(cloud, server) == ["h1"]
    [finding] = cloud.findings()
    assert (finding.invariant, finding.subject) == ("domain-known", server)
    assert f"kilonova host discard h1 {server}" in finding.text


def test_server_with_lost_commits_of_delete_is_reported_and_deletable(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    set_back = snapshot_database(cloud)
    cloud.ask(server, "delete")
    cloud.settle()
    set_back()
    cloud.idle(65)
    [finding] = cloud.findings()
    assert (finding.invariant, finding.subject) == ("guest-there", server)
    assert f"openstack server delete {server}" in finding.text
    cloud.ask(server, "delete")
    cloud.settle(limit=20)
    assert (cloud.show(server).deleted, cloud.findings()) == (1, [])


def test_create_is_placed_again_when_commit_of_its_claim_is_lost(cloud: Cloud) -> None:
    """The host registers before the new claim, and stops the guest that is not placed there."""
    register(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    set_back = snapshot_database(cloud)
    cloud.settle()
    set_back()
    cloud.hosts["h1"].restart()
    cloud.sync(cloud.hosts["h1"])
    cloud.hosts["h1"].work()
    assert read_running_hosts(cloud, server) == []
    cloud.settle()
    cloud.idle(65)
    assert (cloud.show(server).vm_state, read_running_hosts(cloud, server)) == (
        states.ACTIVE,
        ["h1"],
    )
    assert cloud.findings() == []
