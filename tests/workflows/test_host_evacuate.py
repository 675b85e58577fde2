# SPDX-License-Identifier: Apache-2.0
"""Tests of ``kilonova host evacuate``: the output of the command, and the servers afterwards.

The simulated cloud has three hosts, and runs one round per second of the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.store.engine import Store
from deploy.operator.hosts import restore as host_restore
from tests.schemas import memory_store, upgrade
from tests.workflows.frozen import register
from tests.workflows.operators import Operator, kinds, silence
from tests.workflows.simulator import Cloud, Time


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    """Yield a cloud of three registered hosts."""
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts=3)
    register(cloud)
    yield cloud
    cloud.store.close()


@pytest.fixture
def operator(cloud: Cloud) -> Operator:
    return Operator(cloud)


def kill_host_with_servers(cloud: Cloud, host: str = "h1") -> tuple[list[str], str]:
    """Create four servers on the host, and cut the power of the host.

    Returns:
        Two running servers and a stopped server in a list, and a paused server.
    """
    servers = cloud.create(4, host=host, forced=True)
    cloud.settle()
    cloud.ask(servers[2], "os-stop")
    cloud.ask(servers[3], "pause")
    cloud.settle()
    silence(cloud, host)
    for server in servers:
        cloud.hosts[host].driver.host.power_off(server)
    return servers[:3], servers[3]


def test_host_evacuate_moves_servers_of_host_forced_down(cloud: Cloud, operator: Operator) -> None:
    servers, paused = kill_host_with_servers(cloud)
    cloud.force_down("h1")
    assert operator.evacuate() == 1
    assert {cloud.show(server).host for server in servers} <= {"h2", "h3"}
    assert [cloud.show(server).vm_state for server in servers] == [
        states.ACTIVE,
        states.ACTIVE,
        states.STOPPED,
    ]
    assert cloud.show(paused).host == "h1"
    assert f"openstack server set --state active {paused}" in operator.text
    assert "1 servers left, 3 moved" in operator.said[-1]
    assert operator.said[-1].endswith(
        "; 3 guests are still to be removed there: kilonova host removals h1"
    )

    cloud.cut.discard("h1")
    cloud.hosts["h1"].restart()
    assert host_restore.give_back(cloud.store, "h1", operator.said.append) == 1, (
        "it has not registered yet"
    )
    cloud.settle()
    assert host_restore.give_back(cloud.store, "h1", operator.said.append) == 0
    assert all(cloud.domains(server) == [cloud.show(server).host] for server in servers)
    assert cloud.findings() == []


def test_host_evacuate_waits_for_evacuation_by_user(tmp_path: Path) -> None:
    """The user's evacuation claims a destination between two statements of one read.

    The read must contain the server. Otherwise the command would report an empty host although the
    evacuation can still fail.
    """
    time = Time()
    cloud = Cloud(upgrade(Store(f"sqlite:///{tmp_path}/k.db", time=time)), time, hosts=3)
    cloud.round()
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.kill("h1")
    statements: list[str] = []

    def evacuate_by_user(connection: object, cursor: object, statement: str, *more: object) -> None:
        if "OR migrations.dest_host" in statement and cloud.show(server).host == "h1":
            statements.append(statement)
            # The first statement is a check of the command before the host action begins.
            if len(statements) == 2:
                cloud.move(server, "evacuate", host=None, forced=False, stopped=False, shared=None)
                cloud.advance()

    sa.event.listen(cloud.store.engine, "after_cursor_execute", evacuate_by_user)
    operator = Operator(cloud)
    assert operator.evacuate() == 0
    assert len(statements) == 2 and operator.seconds_left < 600
    assert (cloud.show(server).vm_state, cloud.show(server).task_state) == (states.ACTIVE, None), (
        "it has ended"
    )
    assert cloud.findings() == []
    cloud.store.close()


def test_host_evacuate_is_refused_for_unfenced_silent_and_running_host(
    cloud: Cloud, operator: Operator
) -> None:
    _servers, _ = kill_host_with_servers(cloud)
    assert operator.evacuate() == 1
    assert re.search(
        "does not prove that its guests are dead.*service set --down h1", operator.said[-1]
    )
    assert operator.evacuate(dry_run=True) == 1
    assert operator.said[-2] == "3 of 4 servers would move; nothing was changed"
    assert operator.said[-1].startswith("the evacuation would be refused: Host h1 is silent")
    assert operator.evacuate("h2") == 1
    assert re.search("still in use.*kilonova host drain h2", operator.said[-1])
    assert kinds(cloud) == {}


def test_host_evacuate_calls_fencing_hook_and_moves_servers_of_silent_host(
    cloud: Cloud, operator: Operator
) -> None:
    servers, _ = kill_host_with_servers(cloud)
    fenced_hosts: list[str] = []
    cloud.engine.fence_host = fenced_hosts.append
    assert operator.evacuate() == 1
    assert set(fenced_hosts) == {"h1"}
    assert {cloud.show(server).host for server in servers} <= {"h2", "h3"}
    assert host_restore.give_back(cloud.store, "h1", operator.said.append) == 1
    assert "it was fenced, and its agent has not registered since" in operator.text
    assert cloud.findings() == []


def test_host_evacuate_fails_when_fencing_hook_fails(cloud: Cloud, operator: Operator) -> None:
    servers, _ = kill_host_with_servers(cloud)
    calls: list[str] = []

    def fence(host: str) -> None:
        calls.append(host)
        raise errors.Conflict("The fencing hook ended with 3; host h1 may still run its guests.")

    cloud.engine.fence_host = fence
    assert operator.evacuate() == 1
    assert len(calls) == 2, "two at a time, and no third"
    assert "the step fence failed: The fencing hook ended with 3" in operator.said[-1]
    assert {cloud.show(server).host for server in servers} == {"h1"}


def test_host_evacuate_supersedes_live_migration_from_host_forced_down(
    cloud: Cloud, operator: Operator
) -> None:
    server = cloud.create(host="h1", forced=True)[0]
    cloud.settle()
    cloud.move(server, "os-migrateLive", host=None, forced=False)
    cloud.advance()
    silence(cloud, "h1")
    cloud.force_down("h1")
    assert operator.evacuate() == 0
    assert cloud.show(server).host in ("h2", "h3") and cloud.show(server).vm_state == states.ACTIVE


def test_host_evacuate_fails_when_host_returns_during_fencing(
    cloud: Cloud, operator: Operator
) -> None:
    _servers, _ = kill_host_with_servers(cloud)

    def fence(host: str) -> None:
        """Reconnect the host, which was only cut off."""
        cloud.cut.discard("h1")

    cloud.engine.fence_host = fence
    assert operator.evacuate() == 1
    assert cloud.findings() == []
