# SPDX-License-Identifier: Apache-2.0
"""Tests of lost commands and guest removals: conductors send them again to a busy host."""

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
    """Servers on h1. Without the last server, they still exceed one batch of repeated commands."""
    host = cloud.hosts["h1"]
    host.driver.host.size = replace(host.driver.host.size, vcpus=64)
    cloud.round()
    servers = cloud.create(BATCH_SIZE + 2, host="h1", forced=True, networks=[], flavor=SMALL)
    cloud.settle()
    return servers


def test_lost_command_is_sent_again_while_host_has_many_commands(
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


def test_lost_command_is_sent_again_while_host_runs_old_attempt_or_undo(
    cloud: Cloud, servers: list[str]
) -> None:
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


def test_lost_guest_removal_is_sent_again_while_host_has_many_commands(
    cloud: Cloud, servers: list[str]
) -> None:
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
