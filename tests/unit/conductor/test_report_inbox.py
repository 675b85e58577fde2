# SPDX-License-Identifier: Apache-2.0
"""``ReportInbox``: which reports of hosts the next round of a conductor takes."""

from __future__ import annotations

import pytest

from common.domain import errors
from common.domain.models import Sync, SyncAnswer
from conductor.engine.report_inbox import (
    MAX_FULL_REPORTS,
    MAX_REPORTS,
    PATIENCE_SECONDS,
    ReportInbox,
)


class Clock:
    seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inbox(clock: Clock) -> ReportInbox:
    return ReportInbox(clock.monotonic)


def take_hosts(inbox: ReportInbox) -> list[str]:
    return [waiting.sync.host for waiting in inbox.take()]


def test_inbox_takes_few_full_reports_and_many_others(inbox: ReportInbox) -> None:
    """A registration, and a report of all domains, is a full report."""
    for number in range(MAX_FULL_REPORTS):
        inbox.put(Sync(f"new{number}", 0))
        inbox.put(Sync(f"full{number}", 7, domains=[]))
        inbox.put(Sync(f"up{number}", 7))
    hosts = take_hosts(inbox)
    assert {host for host in hosts if host.startswith("up")} == {
        f"up{number}" for number in range(MAX_FULL_REPORTS)
    }
    assert len(hosts) == 2 * MAX_FULL_REPORTS
    assert len(take_hosts(inbox)) == MAX_FULL_REPORTS
    assert take_hosts(inbox) == []


def test_inbox_takes_newest_reports_first(inbox: ReportInbox) -> None:
    for number in range(MAX_REPORTS + 2):
        inbox.put(Sync(f"h{number}", 7))
    assert take_hosts(inbox) == [f"h{number}" for number in range(MAX_REPORTS + 1, 1, -1)]
    inbox.wait(60)  # The rest still waits, so this returns at once.
    assert take_hosts(inbox) == ["h1", "h0"]
    assert take_hosts(inbox) == []


def test_inbox_refuses_older_report_of_same_host(inbox: ReportInbox) -> None:
    older, newer = inbox.put(Sync("h1", 0, number=1)), inbox.put(Sync("h1", 0, number=2))
    [taken] = inbox.take()
    assert taken.sync.number == 2
    with pytest.raises(errors.Unavailable, match="h1"):
        older.result(0)
    taken.answer.set_result(SyncAnswer(3))
    assert newer.result(0) == SyncAnswer(3)


def test_inbox_refuses_report_after_patience_of_agent(inbox: ReportInbox, clock: Clock) -> None:
    late = [inbox.put(Sync("h1", 0)), inbox.put(Sync("h2", 7))]
    clock.seconds += PATIENCE_SECONDS + 0.1
    inbox.put(Sync("h3", 0))
    assert take_hosts(inbox) == ["h3"]
    for answer in late:
        with pytest.raises(errors.Unavailable, match="waited too long"):
            answer.result(0)


def test_closed_inbox_refuses_waiting_and_further_reports(inbox: ReportInbox) -> None:
    waiting = [inbox.put(Sync("h1", 0)), inbox.put(Sync("h2", 7))]
    inbox.close()
    for answer in waiting:
        with pytest.raises(errors.Unavailable, match="stopping"):
            answer.result(0)
    with pytest.raises(errors.Unavailable, match="stopping"):
        inbox.put(Sync("h1", 0))
    inbox.wait(60)
    assert inbox.take() == []
