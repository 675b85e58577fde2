# SPDX-License-Identifier: Apache-2.0
"""Storms over two hosts in memory, so that many servers live and die meanwhile. No server may end
in ERROR, get stuck, be doubled or leave anything.

What is struck follows from KILONOVA_E2E_SEED. The long storm takes KILONOVA_STORM_SECONDS, 40 as it
comes; with 1200 it is the one that a release has to survive.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from deploy.one_machine.machine.supervise import FIRST_PAUSE
from deploy.testing.servers import Servers
from tests.bench.load import percentile
from tests.e2e.conftest import without_guests
from tests.e2e.live import SETTLE, Live
from tests.e2e.storm import PROCESSES, SERVICES, Client, Storm, clients, rage
from tests.waiting import await_true, slowdown

SEED = int(os.environ.get("KILONOVA_E2E_SEED", "1"))
SECONDS = float(os.environ.get("KILONOVA_STORM_SECONDS", "40"))
CLIENTS, STRIKES, EVERY = 6, 15, 1.0  # seconds
#: What a killed service may take on an idle machine, where systemd waits so long first
#: (tests/unit/deploy/test_units.py).
BACK_SECONDS, RESTART_SECONDS = 6.0, 1.0


def nothing_is_left(live: Live, found: Sequence[Client]) -> None:
    """Every server has lived and is gone, nothing of it is anywhere, and the oracle agrees."""
    made = [server for one in found for server in one.made]
    assert len(made) >= len(found)
    await_true(
        lambda: not any(live.remains(server) for server in made),
        SETTLE,
        lambda: [live.remains(server) for server in made],
    )
    everybody = live.rest("kilonova-admin")
    assert [
        server["name"]
        for server in everybody.call("GET", "/servers?all_tenants=1").body["servers"]
        if server["name"].startswith("storm-")
    ] == []
    live.judge()


def test_nothing_is_lost_doubled_or_stuck(
    in_memory: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second some process is killed, and once the broker forgets everything."""
    dice, struck = random.Random(SEED), []
    storm = Storm(in_memory, dice)
    with clients(in_memory, CLIENTS) as found:
        for number in range(STRIKES):
            if number == STRIKES // 2:
                storm.wipe()
            struck.append(dice.choice(PROCESSES))
            storm.kill(struck[-1])
            time.sleep(EVERY * dice.uniform(0.5, 1.5))  # a storm has no rhythm
    with capsys.disabled():
        print(
            f"\n{sum(len(one.made) for one in found)} servers lived through storm {SEED}: {', '.join(struck)}"
        )
    nothing_is_left(in_memory, found)


@pytest.mark.slice("operations")
def test_six_killed_services_are_back_at_once(
    in_memory: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under load; and every server that was accepted reaches its state and is deleted as asked."""
    storm, took = Storm(in_memory, random.Random(SEED)), dict[str, tuple[float, float]]()
    with clients(in_memory, CLIENTS) as found:
        await_true(lambda: all(one.made for one in found), SETTLE, "the clients are at work")
        for name in SERVICES:
            before = slowdown()
            took[name] = storm.back_after(name), max(before, slowdown())
    with capsys.disabled():
        shown = ", ".join(f"{name} {one:.1f} s ({slow:.1f})" for name, (one, slow) in took.items())
        print(f"\nback after kill -9, and how many times slower the machine was: {shown}")
    restarts = BACK_SECONDS - RESTART_SECONDS + FIRST_PAUSE  # what the supervisor waits for less
    assert {name: one for name, (one, slow) in took.items() if one > restarts * slow} == {}
    nothing_is_left(in_memory, found)


@pytest.fixture(
    params=[
        pytest.param("postgresql", marks=pytest.mark.slice("operations")),
        pytest.param("mariadb", marks=pytest.mark.slice("operations")),
    ]
)
def storm(request: pytest.FixtureRequest) -> Iterator[Storm]:
    """A cloud whose database is a server that only it uses. Its folder is none of pytest's, which
    another run of pytest closes to all but root."""
    kind = request.param
    with tempfile.TemporaryDirectory(prefix="kn-storm-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            url = sa.make_url(servers.start(kind)).set(database="storm")
            admin = sa.create_engine(
                url.set(database={"postgresql": "postgres", "mariadb": "mysql"}[kind]),
                isolation_level="AUTOCOMMIT",
                poolclass=sa.NullPool,
            )
            with admin.connect() as connection:
                connection.exec_driver_sql("CREATE DATABASE storm")
            with without_guests(database_url=url.render_as_string(hide_password=False)) as live:
                yield Storm(live, random.Random(SEED), servers, kind)


@pytest.mark.timeout(SECONDS + 900)
def test_a_storm_over_everything(storm: Storm, capsys: pytest.CaptureFixture[str]) -> None:
    with clients(storm.live, CLIENTS) as found:
        await_true(lambda: all(one.made for one in found), SETTLE, "the clients are at work")
        took = rage(storm, found, SECONDS)
    every = [seconds for times in took.values() for seconds in times]
    lived = [ended - asked for one in found for asked, ended in one.made.values()]
    told = partial("{0}: p50 {1:.1f} s, p99 {2:.1f} s, {3} times".format)
    with capsys.disabled():
        print(
            f"\nstorm {SEED} over {storm.database}, {SECONDS:g} s, {len(lived)} servers lived through it; until one "
            "could be created again after a fault:"
        )
        for name, times in (
            *sorted(took.items()),
            ("any fault", every),
            ("creates, from request to ACTIVE", lived),
        ):
            print(told(name, percentile(times, 0.5), percentile(times, 0.99), len(times)))
    nothing_is_left(storm.live, found)
