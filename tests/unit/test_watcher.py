# SPDX-License-Identifier: Apache-2.0
"""What the watcher of the e2e ring takes for a proof that two domains of one server ran at the same
moment, and that it says so when it did not look."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.watcher import KERNEL, MOMENT, WAYS, Sighting, Sightings, Watcher
from tests.waiting import await_true


def story(*sightings: tuple[str, float]) -> list[str]:
    """Each takes a tenth of a second."""
    seen = Sightings("sight")
    return [seen.note("s", Sighting(host, began, began + 0.1)) for host, began in sightings]


def test_here_there_and_here_again_is_two() -> None:
    *before, proof = story(("a", 0.0), ("b", 0.2), ("a", 0.4))
    assert before == ["", ""] and "ran on a and b at the same moment" in proof


def test_what_goes_on_elsewhere_is_one() -> None:
    assert not any(story(("a", 0.0), ("a", 0.2), ("b", 0.4), ("b", 0.6)))


def test_looks_that_overlap_prove_nothing() -> None:
    assert not any(story(("a", 0.0), ("b", 0.05), ("a", 0.1), ("b", 0.15)))


def test_there_and_back_in_a_while_is_one() -> None:
    assert not any(story(("a", 0.0), ("b", 0.2), ("a", 0.2 + MOMENT)))


def test_back_after_a_rest_is_one() -> None:
    seen = Sightings("sight")
    assert not seen.note("s", Sighting("a", 0.0, 0.1))
    seen.rested("s", "a")
    assert not seen.note("s", Sighting("b", 0.2, 0.3))
    assert not seen.note("s", Sighting("a", 0.4, 0.5))


def test_servers_do_not_mix() -> None:
    seen = Sightings("sight")
    assert not any(
        seen.note(server, Sighting(host, began, began + 0.1))
        for server, host, began in (("s", "a", 0.0), ("t", "b", 0.2), ("s", "a", 0.4))
    )


class Falters(dict[str, Path]):
    """Cannot be read the first two times."""

    left = 2

    def items(self) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise FileNotFoundError("task")
        return super().items()


def test_a_look_that_fails_is_told_and_others_follow() -> None:
    watcher = Watcher({}, Falters()).start()
    try:
        with (
            pytest.raises(AssertionError, match=f"{KERNEL} failed: FileNotFoundError"),
            watcher.watching(),
        ):
            await_true(lambda: watcher.looks[KERNEL], 10, "a look after the first failure")
        assert len(watcher.violations) == 1
    finally:
        watcher.stop()


def test_one_way_of_looking_does_not_stand_for_the_other() -> None:
    watcher = Watcher({}, {}).start()
    try:
        with (
            pytest.raises(AssertionError, match=f"looked 0 times by {WAYS[0]}"),
            watcher.watching(),
        ):
            time.sleep(1.1)  # a watch of less than a second need not have looked
    finally:
        watcher.stop()
