# SPDX-License-Identifier: Apache-2.0
"""What a lost message costs, in seconds beyond the ordinary: wakeup message 2, command 7, report 2
(docs: the promises)."""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.models import Result
from common.store import schema
from compute_agent.journal import Journal
from compute_agent.virt.memory.state.script import QUIET
from tests.functional.cloud import Cloud

WAKEUP, COMMAND, REPORT = 2.0, 7.0, 2.0
#: seconds that a create may take when nothing is lost, on a machine that is busy with us
ORDINARY = 1.5
BEAT = 0.05  #: seconds between two looks whether the machine stands still


class Pulse:
    """A thread that writes to the disk again and again: it knows how long this machine stood still
    at the longest. A create may have stood still as long, whatever was lost."""

    def __init__(self, path: Path) -> None:
        self._path, self._longest, self._last, self._end = (
            path,
            0.0,
            time.monotonic(),
            threading.Event(),
        )
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def ordinary(self) -> float:
        """Seconds that a create may have taken here when nothing was lost."""
        return ORDINARY + max(self._longest, self._gap())

    def close(self) -> None:
        self._end.set()
        self._thread.join(20)

    def _gap(self) -> float:
        return time.monotonic() - self._last - BEAT

    def _beat(self) -> None:
        with self._path.open("wb", buffering=0) as file:
            while not self._end.wait(BEAT):
                file.write(b".")
                os.fsync(file.fileno())
                self._longest = max(self._longest, self._gap())
                self._last = time.monotonic()


@pytest.fixture
def pulse(tmp_path: Path) -> Iterator[Pulse]:
    """Of the machine, while the test runs."""
    pulse = Pulse(tmp_path / "pulse")
    yield pulse
    pulse.close()


def delays(cloud: Cloud, servers: list[str], vm_state: str) -> list[float]:
    """Seconds from each server's request to its end, by the database's clock."""
    cloud.await_state(servers, vm_state, 20)
    rows = cloud.watcher.read(
        lambda tx: tx.execute(
            sa.select(schema.actions.c.created_at, schema.actions.c.finished_at).where(
                schema.actions.c.server_id.in_(servers)
            )
        ).all()
    )
    return sorted((row.finished_at - row.created_at) / 1e6 for row in rows)


def created_one_by_one(cloud: Cloud, count: int, pause: float) -> list[str]:
    """Creates at different moments of everybody's periods."""
    servers = []
    for _ in range(count):
        servers += cloud.create()
        time.sleep(pause)  # the moment is what is tried here
    return servers


def ordinary(cloud: Cloud, pulse: Pulse) -> None:
    """The first create is slower: connections are opened."""
    for _ in range(3):
        assert delays(cloud, cloud.create(), states.ACTIVE)[-1] < pulse.ordinary()


def test_a_lost_doorbell(cloud: Cloud, pulse: Pulse) -> None:
    ordinary(cloud, pulse)
    cloud.network.lose = lambda what: what in ("wake", "loop_back")
    found = delays(cloud, created_one_by_one(cloud, 8, 0.37), states.ACTIVE)
    assert found[-1] <= WAKEUP + pulse.ordinary()
    assert found[-1] > 0.2, "no wakeup message was lost"
    assert cloud.findings() == []


def test_a_lost_command(cloud: Cloud, pulse: Pulse) -> None:
    ordinary(cloud, pulse)
    cloud.network.lose = lambda what: what == "do"
    servers = created_one_by_one(cloud, 10, 0.6)
    found = delays(cloud, servers, states.ACTIVE)
    assert found[-1] <= COMMAND + pulse.ordinary()
    assert found[0] > 1.5, "a command came sooner than it was sent again"
    assert {cloud.made("ensure_guest")[server] for server in servers} == {1}
    assert cloud.findings() == []


def test_a_lost_command_while_its_host_always_has_news(cloud: Cloud, pulse: Pulse) -> None:
    """News of other guests do not put off the question what the host should be doing."""
    ordinary(cloud, pulse)
    other, driver = cloud.create()[0], cloud.drivers["h1"]
    cloud.await_state([other], states.ACTIVE)
    cloud.network.lose = lambda what: what == "do"
    flips, next_at = (
        itertools.cycle(
            [lambda: driver.host.power_off(other), lambda: driver.ensure_running(other, 1, QUIET)]
        ),
        [0.0],
    )

    def flip() -> None:
        if time.monotonic() > next_at[0]:
            next(flips)()
            next_at[0] = time.monotonic() + 0.4

    server = cloud.create()[0]
    assert cloud.await_state([server], states.ACTIVE, 20, flip) <= COMMAND + pulse.ordinary()


def test_a_lost_report(cloud: Cloud, pulse: Pulse) -> None:
    ordinary(cloud, pulse)
    turns = itertools.cycle([True, False])
    cloud.network.lose = lambda what: what == "sync" and next(turns)
    found = delays(cloud, created_one_by_one(cloud, 8, 0.43), states.ACTIVE)
    assert found[-1] <= REPORT + pulse.ordinary()
    assert found[-1] > 0.9, "no report was lost"
    assert cloud.findings() == []


def test_a_lost_answer_to_a_report_costs_the_tenant_nothing(cloud: Cloud, pulse: Pulse) -> None:
    ordinary(cloud, pulse)
    turns = itertools.cycle([True, False])
    cloud.network.lose = lambda what: what == "answer to sync" and next(turns)
    servers = created_one_by_one(cloud, 5, 0.43)
    assert delays(cloud, servers, states.ACTIVE)[-1] <= REPORT + pulse.ordinary()
    assert {cloud.made("ensure_guest")[server] for server in servers} == {1}
    assert cloud.findings() == []


def test_a_lost_command_while_heartbeats_are_lost_too(cloud: Cloud, pulse: Pulse) -> None:
    ordinary(cloud, pulse)
    cloud.network.lose = lambda what: what in ("do", "heartbeat")
    assert (
        delays(cloud, created_one_by_one(cloud, 4, 0.6), states.ACTIVE)[-1]
        <= COMMAND + pulse.ordinary()
    )
    assert cloud.findings() == []


@pytest.mark.parametrize(
    ("key", "vm_state"), [("os-stop", states.STOPPED), ("delete", states.DELETED)]
)
def test_a_lost_command_of_other_actions(
    cloud: Cloud, pulse: Pulse, key: str, vm_state: str
) -> None:
    ordinary(cloud, pulse)
    servers = cloud.create(3)
    cloud.await_state(servers, states.ACTIVE)
    cloud.network.lose = lambda what: what == "do"
    for server in servers:
        cloud.begin_action(server, key)
    assert cloud.await_state(servers, vm_state, 20) <= COMMAND + pulse.ordinary()
    cloud.await_idle()
    assert cloud.findings() == []


def test_a_scheduler_that_does_not_answer_is_waited_for(cloud: Cloud, pulse: Pulse) -> None:
    ordinary(cloud, pulse)
    was_lost = cloud.network.next_one("select")
    server = cloud.create()[0]
    assert cloud.await_state([server], states.ACTIVE) < 2 + pulse.ordinary()
    assert was_lost()


class FullDisk(Journal):
    """The disk is full when the first result is written."""

    full = True

    def end(self, result: Result) -> None:
        if self.full:
            self.full = False
            raise sqlite3.OperationalError("database or disk is full")
        super().end(result)


def test_a_result_that_could_not_be_journalled_is_sent_for_again(
    new_cloud: Callable[..., Cloud], tmp_path: Path
) -> None:
    cloud = new_cloud()
    cloud.start_conductor()
    cloud.start_scheduler()
    cloud.start_agent("h1", FullDisk(tmp_path / "agent.db"))
    server = cloud.create()[0]
    assert cloud.await_state([server], states.ACTIVE) > 1.5
    assert cloud.made("ensure_guest")[server] == 2
    assert cloud.findings() == []
