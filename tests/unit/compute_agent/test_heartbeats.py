# SPDX-License-Identifier: Apache-2.0
"""When a heartbeat stands in for the exchange, and what its answer means for the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.models import DomainState, HeartbeatAnswer
from compute_agent.sync import LEASE_SECONDS, Agent
from tests.unit.compute_agent.test_sync import INVENTORY, Rig, command


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_heartbeat_stands_in_while_there_is_nothing_to_tell(rig: Rig) -> None:
    said = rig.agent.heartbeat()
    assert said is not None
    assert (said.host, said.session) == ("h1", 5)
    rig.agent.heard(HeartbeatAnswer(True))
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None
    assert rig.agent.heartbeat() is None, "something is in hand"
    rig.finish(work)
    assert rig.agent.heartbeat() is None, "there is a result"
    rig.exchange()
    assert rig.agent.heartbeat() == said


@pytest.mark.parametrize(
    "told",
    [
        lambda agent: agent.changed([DomainState("s", 4, 1)]),
        lambda agent: agent.cached("image", ""),
        lambda agent: agent.noticed(INVENTORY, {"cpu.percent": 1.0}),
        lambda agent: agent.noticed(replace(INVENTORY, memory_mb=2), None),
    ],
    ids=["domain", "image", "metrics", "inventory"],
)
def test_news_need_an_exchange(rig: Rig, told: Callable[[Agent], None]) -> None:
    told(rig.agent)
    assert rig.agent.heartbeat() is None
    rig.exchange()
    assert rig.agent.heartbeat() is not None


def test_a_heartbeat_that_is_answered_renews_the_lease_and_no_other(rig: Rig) -> None:
    for answered in (True, True, False):
        rig.clock.seconds += LEASE_SECONDS - 1
        rig.agent.looked([])
        assert rig.agent.heartbeat() is not None
        if answered:
            rig.agent.heard(HeartbeatAnswer(True))
    rig.clock.seconds += 2
    assert rig.agent.needs_registration()
    assert rig.agent.heartbeat() is None


def test_a_host_that_is_waited_for_tells_all_its_domains(rig: Rig) -> None:
    assert rig.agent.heartbeat() is not None
    rig.agent.heard(HeartbeatAnswer(False))
    assert rig.agent.heartbeat() is None
    assert rig.agent.wants_full_report()
    assert not rig.agent.looks_again(), "they are to be told, not only looked at"


def test_the_heartbeat_says_when_domains_changed(rig: Rig) -> None:
    before = rig.agent.heartbeat()
    for _ in range(2):
        rig.clock.seconds += LEASE_SECONDS - 1
        assert not rig.agent.looks_again()
        rig.exchange()
    rig.clock.seconds += 2
    assert rig.agent.looks_again()
    assert rig.agent.heartbeat() is None
    rig.agent.looked([])
    assert rig.agent.heartbeat() == before
    rig.agent.looked([DomainState("s", 1, 1), DomainState("t", 4, 1)])
    changed = rig.agent.heartbeat()
    assert changed != before
    rig.agent.looked([DomainState("t", 4, 1), DomainState("s", 1, 1)])
    assert rig.agent.heartbeat() == changed
