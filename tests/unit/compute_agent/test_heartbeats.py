# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: when the agent sends one instead of an exchange, and the effect of the answer."""

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


def test_heartbeat_is_sent_when_agent_has_nothing_to_report(rig: Rig) -> None:
    beat = rig.agent.heartbeat()
    assert beat is not None
    assert (beat.host, beat.session) == ("h1", 5)
    rig.agent.record_heartbeat_answer(HeartbeatAnswer(True))
    rig.agent.accept([command()])
    work = rig.agent.take()
    assert work is not None
    assert rig.agent.heartbeat() is None, "something is in hand"
    rig.finish(work)
    assert rig.agent.heartbeat() is None, "there is a result"
    rig.exchange()
    assert rig.agent.heartbeat() == beat


@pytest.mark.parametrize(
    "record_news",
    [
        lambda agent: agent.record_changes([DomainState("s", 4, 1)]),
        lambda agent: agent.record_prefetch("image", ""),
        lambda agent: agent.record_host(INVENTORY, {"cpu.percent": 1.0}),
        lambda agent: agent.record_host(replace(INVENTORY, memory_mb=2), None),
        lambda agent: agent.record_host(INVENTORY, None, ["s"]),
    ],
    ids=["domain", "image", "metrics", "inventory", "files"],
)
def test_heartbeat_is_not_sent_while_agent_has_something_to_report(
    rig: Rig, record_news: Callable[[Agent], None]
) -> None:
    record_news(rig.agent)
    assert rig.agent.heartbeat() is None
    rig.exchange()
    assert rig.agent.heartbeat() is not None


def test_report_contains_files_without_guest_only_after_change(rig: Rig) -> None:
    """A report is repeated until acknowledged. An empty list counts as a change."""

    def report_files(*servers: str) -> list[str] | None:
        rig.agent.record_host(INVENTORY, None, servers)
        return rig.agent.request(True, None, None).files

    rig.agent.record_host(INVENTORY, None, [])
    rig.exchange()
    beat, quiet = rig.agent.heartbeat(), len(json.dumps(to_wire(rig.agent.request(True, [], None))))
    assert report_files() is None
    assert report_files("s", "r") == report_files("r", "s") == ["r", "s"]
    rig.exchange()
    assert report_files("s", "r") is None
    assert len(json.dumps(to_wire(rig.agent.request(True, [], None)))) == quiet
    assert rig.agent.heartbeat() == beat
    assert report_files() == []


def test_many_files_without_guest_are_reported_in_pages_until_acknowledged(rig: Rig) -> None:
    """A page is repeated until acknowledged. The last page has no upper bound.

    When few files are left, all of them are in one report without bounds.
    """

    def report_files(*servers: str) -> tuple[list[str] | None, list[str] | None]:
        rig.agent.record_host(INVENTORY, None, servers)
        request = rig.agent.request(True, [], None)
        return request.files, request.files_between

    rig.exchange()
    quiet = len(json.dumps(to_wire(rig.agent.request(True, [], None))))
    many = [f"{number:036}" for number in range(2 * MOST_FILES + 1)]
    first, second = many[:MOST_FILES], many[MOST_FILES:-1]
    for _ in range(2):
        for _ in range(2):
            assert report_files(*many) == (first, ["", first[-1]])
            request = rig.agent.request(True, [], None)
            assert len(json.dumps(to_wire(request))) < quiet + 42 * MOST_FILES
        rig.exchange()
        assert report_files(*many) == (second, [first[-1], second[-1]])
        rig.exchange()
        assert report_files(*many) == (many[-1:], [second[-1], ""])
        rig.exchange()
    assert report_files("s", "r") == (["r", "s"], None)


def test_files_of_command_in_progress_are_not_reported(rig: Rig) -> None:
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


def test_lease_is_renewed_only_by_answered_heartbeat(rig: Rig) -> None:
    for answered in (True, True, False):
        rig.clock.seconds += LEASE_SECONDS - 1
        rig.agent.record_domains([])
        assert rig.agent.heartbeat() is not None
        if answered:
            rig.agent.record_heartbeat_answer(HeartbeatAnswer(True))
    rig.clock.seconds += 2
    assert rig.agent.needs_registration()
    assert rig.agent.heartbeat() is None


def test_heartbeat_answer_false_requires_full_report(rig: Rig) -> None:
    assert rig.agent.heartbeat() is not None
    rig.agent.record_heartbeat_answer(HeartbeatAnswer(False))
    assert rig.agent.heartbeat() is None
    assert rig.agent.wants_full_report()
    assert not rig.agent.is_look_due(), "they are to be told, not only looked at"


def test_heartbeat_differs_when_domains_changed(rig: Rig) -> None:
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
