# SPDX-License-Identifier: Apache-2.0
"""Commands and debts that were lost on their way are sent again in time, whatever else the host has
in hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.domain import ids, states
from conductor.engine import reports
from conductor.engine.lost_commands import BATCH_SIZE
from tests.workflows.simulator import FLAVOR, Cloud

SMALL = replace(FLAVOR, memory_mb=64)


@pytest.fixture
def servers(cloud: Cloud) -> list[str]:
    """One more than a host is sent again in one answer, and another one."""
    host = cloud.hosts["h1"]
    host.driver.host.size = replace(host.driver.host.size, vcpus=64)
    cloud.round()
    made = cloud.create(BATCH_SIZE + 2, host="h1", forced=True, networks=[], flavor=SMALL)
    cloud.settle()
    return made


def test_a_lost_command_is_sent_again_beside_many_that_are_in_hand(
    cloud: Cloud, servers: list[str]
) -> None:
    host, victim = cloud.hosts["h1"], servers[-1]
    for server in servers[:-1]:
        cloud.ask(server, "createImage", args={"image_id": ids.new(), "name": "long"})
    cloud.advance()
    cloud.time.pass_by(3)
    cloud.lose = lambda kind: kind == "do"
    cloud.ask(victim, "os-stop")
    cloud.advance()
    cloud.lose = lambda kind: False
    cloud.time.pass_by(5)
    cloud.sync(host)
    assert victim in {work.command.server for work in host.agent._work.values()}
    cloud.settle()
    assert cloud.show(victim).vm_state == states.STOPPED


def test_another_command_of_the_same_action_stands_for_nothing(
    cloud: Cloud, servers: list[str]
) -> None:
    """What an older attempt has left in hand, or an undo."""
    host, victim = cloud.hosts["h1"], servers[0]
    cloud.lose = lambda kind: kind == "do"
    action = cloud.ask(victim, "os-stop")
    cloud.advance()
    cloud.lose = lambda kind: False
    cloud.time.pass_by(5)
    request = replace(
        host.agent.request(True, None, None),
        working=[f"do/{action}/stop/0", f"undo/{action}/stop/1", "?"],
    )
    [answer] = reports.handle(cloud.engine, [request])
    assert not isinstance(answer, Exception)
    assert [str(command.key) for command in answer.commands] == [f"do/{action}/stop/1"]


def test_a_debt_is_sent_beside_many_that_are_in_hand(cloud: Cloud, servers: list[str]) -> None:
    host, victim = cloud.hosts["h1"], servers[-1]
    for server in servers[:-1]:
        cloud.ask(server, "delete")
    cloud.advance()
    cloud.time.pass_by(3)
    cloud.lose = lambda kind: kind == "do"
    cloud.ask(victim, "delete")
    cloud.advance()
    cloud.lose = lambda kind: False
    cloud.time.pass_by(5)
    cloud.sync(host)
    assert victim in {work.command.server for work in host.agent._work.values()}
    cloud.settle()
    assert cloud.domains(victim) == []
