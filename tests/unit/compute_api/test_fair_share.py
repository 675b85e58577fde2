# SPDX-License-Identifier: Apache-2.0
"""Lanes, in which the projects of a process take turns."""

from __future__ import annotations

from compute_api.http.fair_share import MAX_WAIT_SECONDS, MAX_WAITING, Admission, Lane


class Lines:
    """Requests that enter a lane with three places, two of them for one project."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lane = Lane(3, 2, lambda: self.now)
        self.resumed: list[str] = []

    def request(self, name: str) -> Admission:
        """Send a request of the project with the name's first letter.

        Without a free place the request waits.
        """
        admission = Admission(self.lane, lambda: self.resumed.append(name))
        admission.project = name[0]
        if not self.lane.enter(admission):
            self.lane.wait(admission)
        return admission


def test_fair_share_limits_concurrent_requests_of_one_project() -> None:
    lines = Lines()
    assert [lines.request("a").holds_place for _ in range(3)] == [True, True, False]
    assert lines.request("b").holds_place


def test_fair_share_limits_concurrent_requests_of_all_projects() -> None:
    lines = Lines()
    assert [lines.request(name).holds_place for name in "abcd"] == [True, True, True, False]


def test_fair_share_resumes_waiting_requests_of_projects_in_turn() -> None:
    lines = Lines()
    running = [lines.request(name) for name in ("a1", "b1", "c1")]
    waiting = [lines.request(name) for name in ("a2", "a3", "a4", "b2", "c2")]
    for admission in (*running, waiting[0], waiting[3]):
        lines.lane.leave(admission)
    assert lines.resumed == ["a2", "b2", "c2", "a3", "a4"]


def test_request_leaving_twice_admits_only_one_waiting_request() -> None:
    lines = Lines()
    first, second = lines.request("a1"), lines.request("a2")
    for _ in range(2):
        lines.lane.leave(first)
    assert second.holds_place
    assert [lines.request(name).holds_place for name in ("a3", "a4")] == [True, False]


def test_freed_slot_goes_to_waiting_request_and_not_new_one_of_project() -> None:
    lines = Lines()
    running = [lines.request(name) for name in ("a1", "a2")]
    lines.request("a3")
    lines.lane.leave(running[0])
    assert lines.resumed == ["a3"]
    assert not lines.request("a4").holds_place


def test_request_resumes_at_once_when_slot_was_freed_before_its_wait() -> None:
    lines = Lines()
    running = [lines.request(name) for name in ("a1", "a2")]
    late = Admission(lines.lane, lambda: lines.resumed.append("a3"))
    late.project = "a"
    assert not lines.lane.enter(late)
    lines.lane.leave(running[0])
    lines.lane.wait(late)
    assert (lines.resumed, late.holds_place) == (["a3"], True)


def test_waiting_request_is_refused_after_maximum_wait() -> None:
    lines = Lines()
    for name in ("a1", "a2"):
        lines.request(name)
    old = lines.request("a3")
    lines.now += MAX_WAIT_SECONDS / 2
    young = lines.request("a4")
    lines.now += MAX_WAIT_SECONDS / 2 + 1
    lines.lane.refuse_late()
    assert lines.resumed == ["a3"]
    assert (old.is_refused, old.holds_place, young.is_refused) == (True, False, False)


def test_request_is_refused_at_once_when_queue_of_project_is_full() -> None:
    lines = Lines()
    waiting = [lines.request("a") for _ in range(2 + MAX_WAITING)]
    assert not any(admission.is_refused for admission in waiting)
    assert lines.request("a").is_refused
    assert lines.request("b").holds_place
