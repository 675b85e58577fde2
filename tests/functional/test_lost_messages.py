# SPDX-License-Identifier: Apache-2.0
"""The delay that a lost message causes.

This is at most 2 seconds for a wakeup message, 7 for a command, and 2 for a report.
"""

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
#: Seconds that a create may take without lost messages, on a machine busy with tests.
ORDINARY = 1.5
#: Seconds between two writes of ``Pulse``.
BEAT = 0.05


class Pulse:
    """A thread that writes to the disk again and again, to measure how long this machine stalls.

    A create may be delayed by the longest stall, in addition to a lost message.
    """

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
        """Return the seconds that a create without lost messages may have taken on this machine."""
        return ORDINARY + max(self._longest, self._measure_gap())

    def close(self) -> None:
        self._end.set()
        self._thread.join(20)

    def _measure_gap(self) -> float:
        return time.monotonic() - self._last - BEAT

    def _beat(self) -> None:
        with self._path.open("wb", buffering=0) as file:
            while not self._end.wait(BEAT):
                file.write(b".")
                os.fsync(file.fileno())
                self._longest = max(self._longest, self._measure_gap())
                self._last = time.monotonic()


@pytest.fixture
def pulse(tmp_path: Path) -> Iterator[Pulse]:
    """Yield the stalls of the machine while the test runs."""
    pulse = Pulse(tmp_path / "pulse")
    yield pulse
    pulse.close()


def measure_delays(cloud: Cloud, servers: list[str], vm_state: str) -> list[float]:
    """Return the sorted durations of the servers' actions in seconds, by the database's clock."""
    cloud.await_state(servers, vm_state, 20)
    rows = cloud.watcher.read(
        lambda tx: tx.execute(
            sa.select(schema.actions.c.created_at, schema.actions.c.finished_at).where(
                schema.actions.c.server_id.in_(servers)
            )
        ).all()
    )
    return sorted((row.finished_at - row.created_at) / 1e6 for row in rows)


def create_one_by_one(cloud: Cloud, count: int, pause: float) -> list[str]:
    """Create servers with pauses, so that requests meet the periodic work at different moments."""
    servers = []
    for _ in range(count):
        servers += cloud.create()
        # The test varies the moment of the request.
        time.sleep(pause)
    return servers


def check_ordinary_delay(cloud: Cloud, pulse: Pulse) -> None:
    """Create three servers and check their delays.

    The first create is slower, because connections are opened.
    """
    for _ in range(3):
        assert measure_delays(cloud, cloud.create(), states.ACTIVE)[-1] < pulse.ordinary()


def test_lost_wakeup_delays_create_within_bound(cloud: Cloud, pulse: Pulse) -> None:
    check_ordinary_delay(cloud, pulse)
    cloud.network.lose = lambda method: method in ("wake", "loop_back")
    seconds = measure_delays(cloud, create_one_by_one(cloud, 8, 0.37), states.ACTIVE)
    assert seconds[-1] <= WAKEUP + pulse.ordinary()
    assert seconds[-1] > 0.2, "no wakeup message was lost"
    assert cloud.findings() == []


def test_lost_command_delays_create_within_bound(cloud: Cloud, pulse: Pulse) -> None:
    check_ordinary_delay(cloud, pulse)
    cloud.network.lose = lambda method: method == "do"
    servers = create_one_by_one(cloud, 10, 0.6)
    seconds = measure_delays(cloud, servers, states.ACTIVE)
    assert seconds[-1] <= COMMAND + pulse.ordinary()
    assert seconds[0] > 1.5, "a command came sooner than it was sent again"
    assert {cloud.count_commands("ensure_guest")[server] for server in servers} == {1}
    assert cloud.findings() == []


def test_lost_command_delays_create_within_bound_as_other_guest_changes(
    cloud: Cloud, pulse: Pulse
) -> None:
    """Changes of other guests do not postpone the host's request for its lost commands."""
    check_ordinary_delay(cloud, pulse)
    other, driver = cloud.create()[0], cloud.drivers["h1"]
    cloud.await_state([other], states.ACTIVE)
    cloud.network.lose = lambda method: method == "do"
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


def test_lost_report_delays_create_within_bound(cloud: Cloud, pulse: Pulse) -> None:
    check_ordinary_delay(cloud, pulse)
    turns = itertools.cycle([True, False])
    cloud.network.lose = lambda method: method == "sync" and next(turns)
    seconds = measure_delays(cloud, create_one_by_one(cloud, 8, 0.43), states.ACTIVE)
    assert seconds[-1] <= REPORT + pulse.ordinary()
    assert seconds[-1] > 0.9, "no report was lost"
    assert cloud.findings() == []


def test_lost_answer_to_report_repeats_no_command(cloud: Cloud, pulse: Pulse) -> None:
    check_ordinary_delay(cloud, pulse)
    turns = itertools.cycle([True, False])
    cloud.network.lose = lambda method: method == "answer to sync" and next(turns)
    servers = create_one_by_one(cloud, 5, 0.43)
    assert measure_delays(cloud, servers, states.ACTIVE)[-1] <= REPORT + pulse.ordinary()
    assert {cloud.count_commands("ensure_guest")[server] for server in servers} == {1}
    assert cloud.findings() == []


def test_lost_command_and_heartbeats_delay_create_within_bound(cloud: Cloud, pulse: Pulse) -> None:
    check_ordinary_delay(cloud, pulse)
    cloud.network.lose = lambda method: method in ("do", "heartbeat")
    assert (
        measure_delays(cloud, create_one_by_one(cloud, 4, 0.6), states.ACTIVE)[-1]
        <= COMMAND + pulse.ordinary()
    )
    assert cloud.findings() == []


@pytest.mark.parametrize(
    ("key", "vm_state"), [("os-stop", states.STOPPED), ("delete", states.DELETED)]
)
def test_lost_command_delays_stop_and_delete_within_bound(
    cloud: Cloud, pulse: Pulse, key: str, vm_state: str
) -> None:
    check_ordinary_delay(cloud, pulse)
    servers = cloud.create(3)
    cloud.await_state(servers, states.ACTIVE)
    cloud.network.lose = lambda method: method == "do"
    for server in servers:
        cloud.begin_action(server, key)
    assert cloud.await_state(servers, vm_state, 20) <= COMMAND + pulse.ordinary()
    cloud.await_idle()
    assert cloud.findings() == []


def test_create_continues_after_lost_request_to_scheduler(cloud: Cloud, pulse: Pulse) -> None:
    check_ordinary_delay(cloud, pulse)
    was_lost = cloud.network.lose_next("select")
    server = cloud.create()[0]
    assert cloud.await_state([server], states.ACTIVE) < 2 + pulse.ordinary()
    assert was_lost()


class FullDisk(Journal):
    """A journal that fails with a full disk when the first result is written."""

    full = True

    def end(self, result: Result) -> None:
        if self.full:
            self.full = False
            raise sqlite3.OperationalError("database or disk is full")
        super().end(result)


def test_command_is_repeated_when_agent_cannot_journal_its_result(
    new_cloud: Callable[..., Cloud], tmp_path: Path
) -> None:
    cloud = new_cloud()
    cloud.start_conductor()
    cloud.start_scheduler()
    cloud.start_agent("h1", FullDisk(tmp_path / "agent.db"))
    server = cloud.create()[0]
    assert cloud.await_state([server], states.ACTIVE) > 1.5
    assert cloud.count_commands("ensure_guest")[server] == 2
    assert cloud.findings() == []
