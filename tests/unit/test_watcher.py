# SPDX-License-Identifier: Apache-2.0
"""The watcher of the e2e ring: proof of two simultaneous domains of a server, and missing looks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.watcher import KERNEL, MOMENT, WAYS, Sighting, Sightings, Watcher
from tests.waiting import await_true


def proofs_of(*sightings: tuple[str, float]) -> list[str]:
    """Return the proofs after each sighting, a host and a start, that takes a tenth of a second."""
    all_sightings = Sightings("sight")
    return [
        all_sightings.note("s", Sighting(host, start, start + 0.1)) for host, start in sightings
    ]


def test_server_seen_on_host_a_then_b_then_a_again_proves_two_domains() -> None:
    *before, proof = proofs_of(("a", 0.0), ("b", 0.2), ("a", 0.4))
    assert before == ["", ""] and "ran on a and b at the same moment" in proof


def test_server_seen_on_one_host_then_another_does_not_prove_two_domains() -> None:
    assert not any(proofs_of(("a", 0.0), ("a", 0.2), ("b", 0.4), ("b", 0.6)))


def test_server_seen_in_overlapping_looks_does_not_prove_two_domains() -> None:
    assert not any(proofs_of(("a", 0.0), ("b", 0.05), ("a", 0.1), ("b", 0.15)))


def test_server_back_on_host_after_a_second_does_not_prove_two_domains() -> None:
    assert not any(proofs_of(("a", 0.0), ("b", 0.2), ("a", 0.2 + MOMENT)))


def test_server_back_on_host_after_stop_there_does_not_prove_two_domains() -> None:
    all_sightings = Sightings("sight")
    assert not all_sightings.note("s", Sighting("a", 0.0, 0.1))
    all_sightings.note_idle("s", "a")
    assert not all_sightings.note("s", Sighting("b", 0.2, 0.3))
    assert not all_sightings.note("s", Sighting("a", 0.4, 0.5))


def test_sightings_of_two_servers_on_two_hosts_do_not_prove_one_server_runs_twice() -> None:
    all_sightings = Sightings("sight")
    assert not any(
        all_sightings.note(server, Sighting(host, start, start + 0.1))
        for server, host, start in (("s", "a", 0.0), ("t", "b", 0.2), ("s", "a", 0.4))
    )


class FailingPaths(dict[str, Path]):
    """A dictionary whose first two reads fail."""

    left = 2

    def items(self) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise FileNotFoundError("task")
        return super().items()


def test_watcher_reports_a_failed_look_and_continues() -> None:
    watcher = Watcher({}, FailingPaths()).start()
    try:
        with (
            pytest.raises(AssertionError, match=f"{KERNEL} failed: FileNotFoundError"),
            watcher.watching(),
        ):
            await_true(lambda: watcher.looks[KERNEL], 10, "a look after the first failure")
        assert len(watcher.violations) == 1
    finally:
        watcher.stop()


def test_watcher_reports_when_one_way_of_looking_made_no_look() -> None:
    watcher = Watcher({}, {}).start()
    try:
        with (
            pytest.raises(AssertionError, match=f"looked 0 times by {WAYS[0]}"),
            watcher.watching(),
        ):
            # A watch of less than a second may have no look.
            time.sleep(1.1)
    finally:
        watcher.stop()
