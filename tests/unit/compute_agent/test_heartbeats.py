# SPDX-License-Identifier: Apache-2.0
"""When a heartbeat stands in for the exchange, and what its answer means for the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from common.domain.models import DomainState, HeartbeatAnswer
from common.domain.wire import to_wire
from compute_agent.sync import LEASE_SECONDS, MOST_FILES, Agent
from tests.unit.compute_agent.test_sync import INVENTORY, Rig, command


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_heartbeat_stands_in_while_there_is_nothing_to_tell(rig: Rig) -> None:
    said = rig.agent.heartbeat()
    assert said is not None
    assert (said.host, said.session) == ("h1", 5)
    rig.agent.record_heartbeat_answer(HeartbeatAnswer(True))
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
        lambda agent: agent.record_changes([DomainState("s", 4, 1)]),
        lambda agent: agent.record_prefetch("image", ""),
        lambda agent: agent.record_host(INVENTORY, {"cpu.percent": 1.0}),
        lambda agent: agent.record_host(replace(INVENTORY, memory_mb=2), None),
        lambda agent: agent.record_host(INVENTORY, None, ["s"]),
    ],
    ids=["domain", "image", "metrics", "inventory", "files"],
)
def test_news_need_an_exchange(rig: Rig, told: Callable[[Agent], None]) -> None:
    told(rig.agent)
    assert rig.agent.heartbeat() is None
    rig.exchange()
    assert rig.agent.heartbeat() is not None


def test_files_without_a_guest_are_told_when_they_change(rig: Rig) -> None:
    """Until they have been heard; a host that has none says so once in a session."""

    def reported(*servers: str) -> list[str] | None:
        rig.agent.record_host(INVENTORY, None, servers)
        return rig.agent.request(True, None, None).files

    rig.agent.record_host(INVENTORY, None, [])
    rig.exchange()
    beat, quiet = rig.agent.heartbeat(), len(json.dumps(to_wire(rig.agent.request(True, [], None))))
    assert reported() is None
    assert reported("s", "r") == reported("r", "s") == ["r", "s"]
    rig.exchange()
    assert reported("s", "r") is None
    assert len(json.dumps(to_wire(rig.agent.request(True, [], None)))) == quiet
    assert rig.agent.heartbeat() == beat
    assert reported() == []


def test_many_files_are_told_in_pages_over_and_over(rig: Rig) -> None:
    """A page again until it has been heard; the last goes to the end. All of them, once they are
    few."""

    def reported(*servers: str) -> tuple[list[str] | None, list[str] | None]:
        rig.agent.record_host(INVENTORY, None, servers)
        said = rig.agent.request(True, [], None)
        return said.files, said.files_between

    rig.exchange()
    quiet = len(json.dumps(to_wire(rig.agent.request(True, [], None))))
    many = [f"{number:036}" for number in range(2 * MOST_FILES + 1)]
    first, second = many[:MOST_FILES], many[MOST_FILES:-1]
    for _ in range(2):
        for _ in range(2):
            assert reported(*many) == (first, ["", first[-1]])
            said = rig.agent.request(True, [], None)
            assert len(json.dumps(to_wire(said))) < quiet + 42 * MOST_FILES
        rig.exchange()
        assert reported(*many) == (second, [first[-1], second[-1]])
        rig.exchange()
        assert reported(*many) == (many[-1:], [second[-1], ""])
        rig.exchange()
    assert reported("s", "r") == (["r", "s"], None)


def test_files_that_a_command_works_at_are_not_told(rig: Rig) -> None:
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None
    for _ in range(2):
        rig.agent.record_host(INVENTORY, None, [work.command.server])
        assert rig.agent.request(True, None, None).files == []
        rig.finish(work)
    rig.exchange()
    rig.agent.record_host(INVENTORY, None, [work.command.server])
    assert rig.agent.request(True, None, None).files == [work.command.server]


def test_a_heartbeat_that_is_answered_renews_the_lease_and_no_other(rig: Rig) -> None:
    for answered in (True, True, False):
        rig.clock.seconds += LEASE_SECONDS - 1
        rig.agent.record_domains([])
        assert rig.agent.heartbeat() is not None
        if answered:
            rig.agent.record_heartbeat_answer(HeartbeatAnswer(True))
    rig.clock.seconds += 2
    assert rig.agent.needs_registration()
    assert rig.agent.heartbeat() is None


def test_a_host_that_is_waited_for_tells_all_its_domains(rig: Rig) -> None:
    assert rig.agent.heartbeat() is not None
    rig.agent.record_heartbeat_answer(HeartbeatAnswer(False))
    assert rig.agent.heartbeat() is None
    assert rig.agent.wants_full_report()
    assert not rig.agent.is_look_due(), "they are to be told, not only looked at"


def test_the_heartbeat_says_when_domains_changed(rig: Rig) -> None:
    before = rig.agent.heartbeat()
    for _ in range(2):
        rig.clock.seconds += LEASE_SECONDS - 1
        assert not rig.agent.is_look_due()
        rig.exchange()
    rig.clock.seconds += 2
    assert rig.agent.is_look_due()
    assert rig.agent.heartbeat() is None
    rig.agent.record_domains([])
    assert rig.agent.heartbeat() == before
    rig.agent.record_domains([DomainState("s", 1, 1), DomainState("t", 4, 1)])
    changed = rig.agent.heartbeat()
    assert changed != before
    rig.agent.record_domains([DomainState("t", 4, 1), DomainState("s", 1, 1)])
    assert rig.agent.heartbeat() == changed
