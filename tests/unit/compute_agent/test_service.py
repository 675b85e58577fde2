# SPDX-License-Identifier: Apache-2.0
"""The agent process around a hypervisor in memory: what it tells a conductor, and when."""
from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from common import errors
from common.models import Access, Flavor, GuestSpec, ImageRef, Sync, SyncAnswer
from compute_agent.assembly import builds_at_a_time
from compute_agent.journal import Journal
from compute_agent.machine import Monitor
from compute_agent.service import Host
from compute_agent.sync import FULL_REPORT, Agent
from compute_agent.virt.memory import QUIET, MemoryDriver

SERVER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"
RATIOS = {"VCPU": 4.0}


class Conductor:
    """Writes down what it is told, and answers as one that took it in."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[Sync] = queue.SimpleQueue()

    def sync(self, request: Sync, timeout: float) -> tuple[SyncAnswer, Access | None]:
        self.heard.put(request)
        return SyncAnswer(request.session or 7, [result.key for result in request.results]), None

    def hears(self, wanted: Callable[[Sync], object]) -> Sync:
        """The next that is so; queue.Empty after five seconds without one."""
        while not wanted(said := self.heard.get(timeout=5)):
            continue
        return said


class Images:
    """An image service that has what it was asked for, unless it was told why not."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.problem: errors.Problem | None = None

    def download(self, access: Access, image: str) -> Iterator[bytes]:
        self.asked.append((access.token, image))
        if self.problem is not None:
            raise self.problem
        yield b"content"


class Hand:
    """A clock turned by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


class Rig:
    """The process with one guest; ``speak`` lets it tell something now."""

    def __init__(self) -> None:
        self.clock, self.driver = Hand(), MemoryDriver("h1", read_images=True)
        self.driver.ensure_guest(GuestSpec(SERVER, 1, "vm", Flavor("1", "m1.nano", 1, 64, 1)), lambda image: iter(()),
                                 QUIET)
        self.journal, self.conductor, self.images = Journal(":memory:"), Conductor(), Images()
        agent = Agent("h1", self.journal, self.clock, self.driver.boot_id())
        self.host = Host(agent, self.journal, self.driver, self.conductor, self.images,  # type: ignore[arg-type]
                         ratios=RATIOS, monitor=Monitor())
        self.threads = self.host.start(1)
        self.hello = self.conductor.hears(lambda said: said.session == 0)

    def speak(self) -> None:
        running = self.driver.domains()[0].power_state == 1
        if running:
            self.driver.power_off(SERVER)
        else:
            self.driver.ensure_running(SERVER, 1, QUIET)

    def close(self) -> None:
        self.host.close()
        for thread in self.threads:
            thread.join(5)
            assert not thread.is_alive(), thread.name
        self.journal.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_hello_brings_what_the_host_has_with_the_ratios_of_its_configuration(rig: Rig) -> None:
    assert rig.hello.inventory == replace(rig.driver.size, ratios=RATIOS)
    assert rig.hello.domains is not None


def test_what_changed_is_told_with_the_next_full_report_and_only_then(rig: Rig) -> None:
    rig.driver.size = replace(rig.driver.size, memory_mb=77)
    rig.speak()
    assert rig.conductor.hears(lambda said: said.changed).inventory is None
    for _ in range(3):                                      # the lease is renewed on the way
        rig.clock.seconds += FULL_REPORT / 3
        rig.speak()
        told = rig.conductor.hears(lambda said: said.changed)
    assert told.session == 7
    assert told.domains is not None
    assert told.inventory == replace(rig.driver.size, ratios=RATIOS)
    assert told.metrics is not None
    assert 0 <= told.metrics["cpu.percent"] <= 100
    rig.speak()
    assert rig.conductor.hears(lambda said: said.changed).inventory is None


def test_images_fetched_ahead_are_told_at_once(rig: Rig) -> None:
    rig.host.cache_images([ImageRef("one")], Access("http://images", "token"))
    assert rig.conductor.hears(lambda said: said.cached).cached == {"one": ""}
    rig.images.problem = errors.NotFound("There is no such image.")
    rig.host.cache_images([ImageRef("two")], Access("http://images", "newer"))
    assert rig.conductor.hears(lambda said: "two" in said.cached).cached["two"] == "There is no such image."
    assert rig.images.asked == [("token", "one"), ("newer", "two")]


def test_questions(rig: Rig) -> None:
    assert " load average: " in rig.host.query("uptime", {})["uptime"]
    assert set(rig.host.query("domains", {})["domains"]) == {SERVER}
    for verb in ("levitate", "console"):                    # this host offers no consoles
        with pytest.raises(errors.NotImplementedHere, match=f"does not know the question {verb}"):
            rig.host.query(verb, {})
    with pytest.raises(errors.NotFound):
        rig.host.query("console_output", {"server": "none"})
    rig.driver.power_off(SERVER)
    with pytest.raises(errors.Conflict):
        rig.host.query("diagnostics", {"server": SERVER})


@pytest.mark.parametrize(("workers", "most", "builds"), [(12, 10, 10), (4, 10, 3), (12, 0, 11), (1, 10, 1), (2, 2, 1)])
def test_builds_never_take_all_workers(workers: int, most: int, builds: int) -> None:
    assert builds_at_a_time(workers, most) == builds
