# SPDX-License-Identifier: Apache-2.0
"""The sweep's judgement: whose silence counts, and when nobody's does."""
from __future__ import annotations

import pytest

from common.store import services
from conductor.sweep import JUMP, Watch, sweep
from tests.schemas import memory_store
from tests.workflows.simulator import Cloud, Time


class Rig:
    """Six hosts that have said hello; the conductor has listened long enough to judge."""

    def __init__(self) -> None:
        self.time, self.watch = Time(), Watch()
        self.cloud = Cloud(memory_store(self.time), self.time, hosts=6)
        for host in self.cloud.hosts.values():
            self.cloud.sync(host)
        self.rounds(40, list(self.cloud.hosts))

    def rounds(self, seconds: int, heard: list[str], hears_itself: bool = True) -> list[str]:
        """A second each; returns who was found down."""
        down: list[str] = []
        for _ in range(seconds):
            down += sweep(self.cloud.engine, self.watch, heard, hears_itself)
            self.time.pass_by(1)
        return down

    def is_up(self, host: str) -> bool:
        return self.cloud.store.read(lambda tx: services.is_up(tx, host))


@pytest.fixture
def rig() -> Rig:
    return Rig()


MOST = ["h2", "h3", "h4", "h5", "h6"]


def test_one_silent_host_among_many_is_down_after_the_silence_and_up_when_it_is_heard(rig: Rig) -> None:
    assert rig.rounds(25, MOST) == []
    assert rig.is_up("h1")
    assert rig.rounds(10, MOST) == ["h1"]
    assert not rig.is_up("h1")
    assert rig.rounds(1, ["h1", *MOST]) == []
    assert rig.is_up("h1")


def test_when_most_are_silent_nobody_is_judged(rig: Rig) -> None:
    assert rig.rounds(90, ["h1"]) == []
    assert rig.is_up("h6")
    assert rig.watch.doubtful
    rig.rounds(2, ["h1", *MOST])
    assert not rig.watch.doubtful


def test_a_conductor_that_does_not_hear_itself_judges_nobody(rig: Rig) -> None:
    assert rig.rounds(90, MOST, hears_itself=False) == []
    assert rig.is_up("h1")


def test_after_it_hears_itself_again_it_listens_first(rig: Rig) -> None:
    rig.rounds(60, MOST, hears_itself=False)
    assert rig.rounds(rig.cloud.engine.host_silence, MOST) == []
    assert rig.rounds(3, MOST) == ["h1"]


def test_a_jump_of_the_databases_clock_proves_nothing(rig: Rig) -> None:
    class Apart:
        """Our own clock, which did not jump."""

        def monotonic(self) -> float:
            return rig.time.monotonic() - (3600 if jumped else 0)
    jumped = False
    rig.cloud.engine.clock = Apart()
    rig.rounds(2, ["h1", *MOST])
    rig.time.pass_by(3600)
    jumped = True
    assert JUMP < 3600
    assert rig.rounds(20, MOST) == []
    assert rig.is_up("h1")
