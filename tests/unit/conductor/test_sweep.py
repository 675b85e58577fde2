# SPDX-License-Identifier: Apache-2.0
"""The sweep's judgement: whose silence counts, and when nobody's does."""

from __future__ import annotations

import pytest

from common.store.hosts import services
from conductor.engine.sweep import MAX_CLOCK_DIFFERENCE_SECONDS, MAX_DOUBT_SECONDS, Watch, sweep
from tests.schemas import memory_store
from tests.workflows.simulator import Cloud, Time


class Rig:
    """Six hosts that have registered; the conductor has listened long enough to judge."""

    def __init__(self) -> None:
        self.time, self.watch = Time(), Watch()
        self.cloud = Cloud(memory_store(self.time), self.time, hosts=6)
        for host in self.cloud.hosts.values():
            self.cloud.sync(host)
        self.rounds(10, list(self.cloud.hosts), seconds=4)

    def rounds(
        self, count: int, heard: list[str], hears_itself: bool = True, seconds: int = 1
    ) -> list[str]:
        """So many, of so many seconds each; returns who was found down."""
        down: list[str] = []
        for _ in range(count):
            down += sweep(self.cloud.engine, self.watch, heard, hears_itself)
            self.time.pass_by(seconds)
        return down

    def is_up(self, host: str) -> bool:
        return self.cloud.store.read(lambda tx: services.is_up(tx, host))


@pytest.fixture
def rig() -> Rig:
    return Rig()


MOST = ["h2", "h3", "h4", "h5", "h6"]


def test_one_silent_host_among_many_is_down_after_the_silence_and_up_when_it_is_heard(
    rig: Rig,
) -> None:
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


class Apart:
    """Our own clock, which does not jump when the database's does."""

    def __init__(self, time: Time) -> None:
        self._time, self._jumped = time, 0.0

    def monotonic(self) -> float:
        return self._time.monotonic() - self._jumped

    def jump(self, seconds: float) -> None:
        """The database's clock jumps."""
        self._time.pass_by(seconds)
        self._jumped += seconds


def test_a_jump_of_the_databases_clock_proves_nothing(rig: Rig) -> None:
    rig.cloud.engine.clock = clock = Apart(rig.time)
    rig.rounds(2, ["h1", *MOST])
    clock.jump(3600)
    assert MAX_CLOCK_DIFFERENCE_SECONDS < 3600
    assert rig.rounds(20, MOST) == []
    assert rig.is_up("h1")


def deleted_softly(rig: Rig) -> str:
    """A server that is deleted for good after a week."""
    rig.cloud.engine.reclaim_interval = 7 * 86400
    [server] = rig.cloud.create(networks=[])
    rig.cloud.settle()
    rig.cloud.ask(server, "softDelete")
    rig.cloud.settle()
    rig.rounds(1, [*rig.cloud.hosts])
    return server


def is_reclaimed(rig: Rig, server: str) -> bool:
    return rig.cloud.show(server).action is not None


@pytest.mark.parametrize("seconds", [8 * 86400, 60 * 86400])
def test_nobody_is_reclaimed_by_a_clock_that_has_jumped(rig: Rig, seconds: int) -> None:
    rig.cloud.engine.clock = clock = Apart(rig.time)
    server = deleted_softly(rig)
    clock.jump(seconds)
    rig.rounds(20, [*rig.cloud.hosts], seconds=30)
    assert not is_reclaimed(rig, server)
    clock.jump(-seconds)
    rig.rounds(130, [*rig.cloud.hosts], seconds=30)
    assert not is_reclaimed(rig, server), "it has jumped back"


def test_a_clock_that_stays_where_it_jumped_to_is_believed_later(rig: Rig) -> None:
    rig.cloud.engine.clock = clock = Apart(rig.time)
    server = deleted_softly(rig)
    clock.jump(8 * 86400)
    rig.rounds(int(MAX_DOUBT_SECONDS / 30) + 2, [*rig.cloud.hosts], seconds=30)
    assert is_reclaimed(rig, server)
