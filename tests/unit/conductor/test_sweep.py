# SPDX-License-Identifier: Apache-2.0
"""The sweep: detection of silent hosts, and doubt about the conductor, its hosts and its clock."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import errors
from common.store.hosts import services
from conductor.engine.sweep import (
    MAX_CLOCK_DIFFERENCE_SECONDS,
    MAX_DOUBT_SECONDS,
    Watch,
    begin_due,
    sweep,
)
from tests.schemas import memory_store
from tests.workflows.simulator import Cloud, Time


class SweepCloud:
    """A cloud of six registered hosts whose conductor has listened long enough to judge silence."""

    def __init__(self) -> None:
        self.time, self.watch = Time(), Watch()
        self.cloud = Cloud(memory_store(self.time), self.time, hosts=6)
        for host in self.cloud.hosts.values():
            self.cloud.sync(host)
        self.run_sweeps(10, list(self.cloud.hosts), seconds=4)

    def run_sweeps(
        self, count: int, heard: list[str], hears_itself: bool = True, seconds: int = 1
    ) -> list[str]:
        """Run ``count`` sweeps and return the hosts detected as down.

        Args:
            count: Number of sweeps.
            heard: Hosts with a heartbeat before each sweep.
            hears_itself: False if the conductor's own messages do not arrive.
            seconds: Seconds after each sweep.
        """
        down: list[str] = []
        for _ in range(count):
            down += sweep(self.cloud.engine, self.watch, heard, hears_itself)
            self.time.pass_by(seconds)
        return down

    def is_up(self, host: str) -> bool:
        return self.cloud.store.read(lambda tx: services.is_up(tx, host))


@pytest.fixture
def simulation() -> SweepCloud:
    return SweepCloud()


OTHER_HOSTS = ["h2", "h3", "h4", "h5", "h6"]


def test_sweep_marks_silent_host_down_and_up_again_when_heard(
    simulation: SweepCloud,
) -> None:
    assert simulation.run_sweeps(25, OTHER_HOSTS) == []
    assert simulation.is_up("h1")
    assert simulation.run_sweeps(10, OTHER_HOSTS) == ["h1"]
    assert not simulation.is_up("h1")
    assert simulation.run_sweeps(1, ["h1", *OTHER_HOSTS]) == []
    assert simulation.is_up("h1")


def test_sweep_marks_no_host_down_when_most_hosts_are_silent(simulation: SweepCloud) -> None:
    assert simulation.run_sweeps(90, ["h1"]) == []
    assert simulation.is_up("h6")
    assert simulation.watch.doubtful
    simulation.run_sweeps(2, ["h1", *OTHER_HOSTS])
    assert not simulation.watch.doubtful


def test_sweep_marks_no_host_down_when_the_conductor_does_not_hear_itself(
    simulation: SweepCloud,
) -> None:
    assert simulation.run_sweeps(90, OTHER_HOSTS, hears_itself=False) == []
    assert simulation.is_up("h1")


def test_sweep_counts_host_silence_from_when_conductor_hears_itself(
    simulation: SweepCloud,
) -> None:
    simulation.run_sweeps(60, OTHER_HOSTS, hears_itself=False)
    assert simulation.run_sweeps(simulation.cloud.engine.host_silence, OTHER_HOSTS) == []
    assert simulation.run_sweeps(3, OTHER_HOSTS) == ["h1"]


class SeparateClock:
    """The conductor's own clock, which does not jump with the clock of the database."""

    def __init__(self, time: Time) -> None:
        self._time, self._jumped = time, 0.0

    def monotonic(self) -> float:
        return self._time.monotonic() - self._jumped

    def jump(self, seconds: float) -> None:
        """Move the database's clock forward, or back if ``seconds`` is negative."""
        self._time.pass_by(seconds)
        self._jumped += seconds


def test_sweep_marks_no_host_down_after_a_jump_of_the_database_clock(
    simulation: SweepCloud,
) -> None:
    simulation.cloud.engine.clock = clock = SeparateClock(simulation.time)
    simulation.run_sweeps(2, ["h1", *OTHER_HOSTS])
    clock.jump(3600)
    assert MAX_CLOCK_DIFFERENCE_SECONDS < 3600
    assert simulation.run_sweeps(20, OTHER_HOSTS) == []
    assert simulation.is_up("h1")


def soft_delete_server(simulation: SweepCloud) -> str:
    """Return a soft-deleted server that is reclaimed after a week."""
    simulation.cloud.engine.reclaim_interval = 7 * 86400
    [server] = simulation.cloud.create(networks=[])
    simulation.cloud.settle()
    simulation.cloud.ask(server, "softDelete")
    simulation.cloud.settle()
    simulation.run_sweeps(1, [*simulation.cloud.hosts])
    return server


def is_reclaimed(simulation: SweepCloud, server: str) -> bool:
    return simulation.cloud.show(server).action is not None


@pytest.mark.parametrize("seconds", [8 * 86400, 60 * 86400])
def test_sweep_reclaims_no_soft_deleted_server_after_database_clock_jump(
    simulation: SweepCloud, seconds: int
) -> None:
    simulation.cloud.engine.clock = clock = SeparateClock(simulation.time)
    server = soft_delete_server(simulation)
    clock.jump(seconds)
    simulation.run_sweeps(20, [*simulation.cloud.hosts], seconds=30)
    assert not is_reclaimed(simulation, server)
    clock.jump(-seconds)
    simulation.run_sweeps(130, [*simulation.cloud.hosts], seconds=30)
    assert not is_reclaimed(simulation, server), "the clock has jumped back"


def test_sweep_reclaims_soft_deleted_server_when_the_clock_stays_ahead(
    simulation: SweepCloud,
) -> None:
    simulation.cloud.engine.clock = clock = SeparateClock(simulation.time)
    server = soft_delete_server(simulation)
    clock.jump(8 * 86400)
    simulation.run_sweeps(int(MAX_DOUBT_SECONDS / 30) + 2, [*simulation.cloud.hosts], seconds=30)
    assert is_reclaimed(simulation, server)


def test_sweep_ends_at_first_due_server_when_database_does_not_answer(
    simulation: SweepCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = simulation.cloud
    cloud.engine.reclaim_interval = 1
    for server in cloud.create(3, networks=[]):
        cloud.settle()
        cloud.ask(server, "softDelete")
    cloud.settle()
    simulation.time.pass_by(5)
    writes = []

    def fail(work: Any) -> None:
        writes.append(work)
        raise errors.NoStore

    monkeypatch.setattr(cloud.engine.store, "write", fail)
    with pytest.raises(errors.NoStore):
        begin_due(cloud.engine)
    assert len(writes) == 1
