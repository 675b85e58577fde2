# SPDX-License-Identifier: Apache-2.0
"""The agent process around a hypervisor in memory: what it tells a conductor, and when."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from common.domain import errors
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import (
    Access,
    Command,
    Control,
    FailureReason,
    Flavor,
    GuestSpec,
    Heartbeat,
    HeartbeatAnswer,
    HostInventory,
    ImageRef,
    Sync,
    SyncAnswer,
)
from common.domain.verbs import Destination, LiveMigrate, control_command
from compute_agent import service
from compute_agent.assembly import builds_at_a_time
from compute_agent.journal import Journal
from compute_agent.service import AgentProcess
from compute_agent.sync import FULL_REPORT_SECONDS, HANG_SECONDS, Agent
from compute_agent.virt.driver import SHUTDOWN
from compute_agent.virt.machine import Monitor
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import QUIET, Fail, Slow
from tests.unit.compute_agent.test_moving_verbs import Reader
from tests.verbs import new_command, new_verb
from tests.waiting import await_true

SERVER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"
GUEST = GuestSpec(SERVER, 1, "vm", Flavor("1", "m1.nano", 1, 64, 1))
RATIOS = {"VCPU": 4.0}


class Conductor:
    """Writes down what it is told, and answers as one that took it in."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[Sync] = queue.SimpleQueue()
        self.to_stop: list[str] = []
        self.beats: queue.SimpleQueue[Heartbeat] = queue.SimpleQueue()
        self.says: bool | Exception | None = True
        self.is_away = False

    def heartbeat(self, beat: Heartbeat, timeout: float) -> HeartbeatAnswer | None:
        self.beats.put(beat)
        if isinstance(self.says, Exception):
            raise self.says
        return None if self.says is None else HeartbeatAnswer(self.says)

    def sync(self, request: Sync, timeout: float) -> tuple[SyncAnswer, Access | None]:
        if self.is_away:
            raise errors.NoAnswer("It does not answer.")
        self.heard.put(request)
        return SyncAnswer(
            request.session or 7,
            [result.key for result in request.results],
            stop=self.to_stop if request.session == 0 else [],
        ), None

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
    """The process with one guest; ``speak`` lets it tell something now. ``stop``: the guest must
    not run here."""

    def __init__(
        self,
        stop: bool = False,
        script: dict[str, list[Slow | Fail]] | None = None,
        fence_after: float = 0,
    ) -> None:
        self.clock, self.driver = (
            Hand(),
            MemoryDriver(MemoryHost("h1", read_images=True, script=script)),
        )
        self.driver.ensure_guest(GUEST, lambda image: iter(()), QUIET)
        self.journal, self.conductor, self.images = Journal(":memory:"), Conductor(), Images()
        self.conductor.to_stop = [SERVER] if stop else []
        agent = Agent(
            "h1", self.journal, self.clock, self.driver.boot_id(), fence_after=fence_after
        )
        self.host = AgentProcess(
            agent,
            self.journal,
            self.driver,
            self.conductor,
            self.images,  # type: ignore[arg-type]
            ratios=RATIOS,
            monitor=Monitor(),
            facts=lambda: {"transfer": "192.0.2.7:16599"},
        )
        self.host.guard()
        self.host.start(1)
        self.registration = self.conductor.hears(lambda said: said.session == 0)
        await_true(
            lambda: agent.session != 0,
            5,
            "the answer is taken in: commands of another session are dropped",
        )

    def speak(self) -> None:
        running = self.driver.domains()[0].power_state == 1
        if running:
            self.driver.host.power_off(SERVER)
        else:
            self.driver.ensure_running(SERVER, 1, QUIET)

    def close(self) -> None:
        assert self.host.close() == []
        self.journal.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def told_of(driver: MemoryDriver) -> HostInventory:
    """What the host has, with what its configuration says."""
    return replace(
        driver.host.size,
        ratios=RATIOS,
        facts=driver.host.size.facts | {"transfer": "192.0.2.7:16599"},
    )


def test_registration_brings_what_the_host_has_and_what_its_configuration_says(rig: Rig) -> None:
    assert rig.registration.inventory == told_of(rig.driver)
    assert rig.registration.domains is not None


def test_what_must_not_run_here_is_off_before_anything_is_started() -> None:
    rig = Rig(stop=True, script={"pull_plug": [Fail("The hypervisor is busy.")]})
    start = new_command("ensure_running", "a", "start", server="another", session=7)
    rig.host.do([start], None)
    rig.conductor.hears(lambda said: any(state.power_state == SHUTDOWN for state in said.changed))
    rig.host.do([start], None)
    told = rig.conductor.hears(lambda said: said.results).results[0]
    assert (told.key, told.status) == (str(start.key), "failed"), (
        "there is no such guest; it was tried"
    )
    done = [verb for verb, _ in rig.driver.host.calls if verb in ("pull_plug", "ensure_running")]
    assert done == ["pull_plug", "pull_plug", "ensure_running"]
    assert rig.driver.domains()[0].fence == 1
    rig.close()


def migrating(rig: Rig, to: dict[str, Any]) -> Command:
    """A live migration that the process has begun."""
    verb = LiveMigrate(guest=GUEST, to=Destination(details=to), shared=False)
    migrate = new_command(verb, "a", "migrate", server=SERVER, session=7)
    rig.host.do([migrate], None)
    await_true(lambda: ("live_migrate", SERVER) in rig.driver.host.calls, 5, lambda: "not begun")
    return migrate


def test_a_migration_goes_on_when_the_process_is_told_to_end() -> None:
    rig, destination = Rig(script={"live_migrate": [Slow(0.3)]}), MemoryDriver(MemoryHost("h2"))
    rig.driver.offer(SERVER, 1, "open sesame", QUIET)
    to = destination.prepare_incoming(
        GUEST, Reader(rig.driver, SERVER, "open sesame"), False, {}, lambda image: iter(()), QUIET
    )
    migrating(rig, to)
    rig.host.close()
    await_true(destination.domains, 5, lambda: "it was given up")
    assert rig.driver.domains() == []
    rig.close()


def test_a_wish_reaches_a_migration_that_runs() -> None:
    rig = Rig(script={"live_migrate": [Slow(60)]})
    migrate = migrating(rig, {})
    abort = control_command(migrate.key, Control.ABORT, server=SERVER, fence=1, session=7)
    rig.host.do([abort], None)
    told = rig.conductor.hears(
        lambda said: any(result.key == str(migrate.key) for result in said.results)
    ).results
    assert {
        (result.status, result.reason) for result in told if result.key == str(migrate.key)
    } == {("failed", FailureReason.ABORTED)}
    rig.close()


def test_what_changed_is_told_with_the_next_full_report_and_only_then(rig: Rig) -> None:
    rig.driver.host.size = replace(rig.driver.host.size, memory_mb=77)
    rig.speak()
    assert rig.conductor.hears(lambda said: said.changed).inventory is None
    for _ in range(3):  # the lease is renewed on the way
        rig.clock.seconds += FULL_REPORT_SECONDS / 3
        rig.speak()
        told = rig.conductor.hears(lambda said: said.changed)
    assert told.session == 7
    assert told.domains is not None
    assert told.inventory == told_of(rig.driver)
    assert told.metrics is not None
    assert 0 <= told.metrics["cpu.percent"] <= 100
    rig.speak()
    assert rig.conductor.hears(lambda said: said.changed).inventory is None


def test_images_fetched_ahead_are_told_at_once(rig: Rig) -> None:
    rig.host.cache_images([ImageRef("one")], Access("http://images", "token"))
    assert rig.conductor.hears(lambda said: said.cached).cached == {"one": ""}
    rig.images.problem = errors.NotFound("There is no such image.")
    rig.host.cache_images([ImageRef("two")], Access("http://images", "newer"))
    assert (
        rig.conductor.hears(lambda said: "two" in said.cached).cached["two"]
        == "There is no such image."
    )
    assert rig.images.asked == [("token", "one"), ("newer", "two")]


def test_questions(rig: Rig) -> None:
    assert " load average: " in rig.host.query("uptime", {})["uptime"]
    assert set(rig.host.query("domains", {})["domains"]) == {SERVER}
    for verb in ("levitate", "console"):  # this host offers no consoles
        with pytest.raises(errors.NotImplementedHere, match=f"does not know the query {verb}"):
            rig.host.query(verb, {})
    with pytest.raises(errors.NotFound):
        rig.host.query("console_output", {"server": "none"})
    rig.driver.host.power_off(SERVER)
    with pytest.raises(errors.Conflict):
        rig.host.query("diagnostics", {"server": SERVER})


@pytest.mark.parametrize(
    ("workers", "most", "builds"), [(12, 10, 10), (4, 10, 3), (12, 0, 11), (1, 10, 1), (2, 2, 1)]
)
def test_builds_never_take_all_workers(workers: int, most: int, builds: int) -> None:
    assert builds_at_a_time(workers, most) == builds


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The periodic exchange comes many times a second."""
    monkeypatch.setattr(service, "EXCHANGE_PERIOD_SECONDS", (0.01, 0.02))


@pytest.mark.usefixtures("often")
def test_an_idle_host_sends_heartbeats_until_it_has_news(rig: Rig) -> None:
    rig.conductor.beats.get(timeout=5)
    rig.conductor.heard = queue.SimpleQueue()  # what the start has left over
    for _ in range(50):
        rig.conductor.beats.get(timeout=5)
    assert rig.conductor.heard.empty()
    rig.speak()
    assert rig.conductor.hears(lambda said: said.changed)
    rig.conductor.beats.get(timeout=5)


@pytest.mark.usefixtures("often")
def test_a_host_that_is_waited_for_syncs_with_all_its_domains(rig: Rig) -> None:
    rig.conductor.beats.get(timeout=5)
    rig.conductor.says = False
    assert [
        state.server
        for state in rig.conductor.hears(lambda said: said.session == 7 and said.ask).domains or ()
    ] == [SERVER]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    "says", [None, TypeError("nobody foresaw this")], ids=["silence", "a failure"]
)
def test_where_nobody_answers_heartbeats_it_syncs(rig: Rig, says: Exception | None) -> None:
    """Conductors of the release before do not."""
    rig.conductor.says = says
    for _ in range(5):
        assert rig.conductor.hears(lambda said: said.session == 7 and said.ask)
    beats = 0
    while not rig.conductor.beats.empty():
        rig.conductor.beats.get()
        beats += 1
    assert rig.conductor.hears(lambda said: said.session == 7 and said.ask)
    assert (rig.conductor.beats.empty(), beats > 0) == (True, True)


def ends(rig: Rig, command: Command) -> bool:
    """Is a command carried out?"""
    rig.host.do([command], None)
    return bool(
        rig.conductor.hears(
            lambda said: any(result.key == str(command.key) for result in said.results)
        )
    )


def test_a_guest_that_ignores_the_button_occupies_no_worker() -> None:
    rig = Rig(script={"ensure_stopped": [Slow(60)], "reboot": [Slow(60)]})
    for verb in ("ensure_stopped", "reboot"):
        rig.host.do(
            [new_command(new_verb(verb, timeout=60), verb, "power", server=verb, session=7)], None
        )
    assert ends(rig, new_command("ensure_paused", "c", "pause", server=SERVER, session=7))
    rig.close()


@pytest.mark.usefixtures("often")
def test_another_worker_takes_the_place_of_one_that_hangs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, began = threading.Event(), threading.Event()

    def hang(server: str, fence: int, run: object) -> None:
        began.set()
        released.wait(20)

    monkeypatch.setattr(rig.driver, "ensure_suspended", hang)
    rig.host.do([new_command("ensure_suspended", "a", "suspend", server="hangs", session=7)], None)
    assert began.wait(5)
    for _ in range(int(HANG_SECONDS / 20)):
        rig.clock.seconds += 20
        rig.conductor.hears(lambda said: said.ask)
        rig.conductor.heard = queue.SimpleQueue()
    assert ends(rig, new_command("ensure_paused", "b", "pause", server=SERVER, session=7))
    phases = rig.conductor.hears(lambda said: said.phases).phases
    assert phases["do/a/suspend/1"] == CommandProgress(
        CommandPhase.QUEUED, stalled_verb="ensure_suspended"
    )
    assert "gives no sign of life" in caplog.text
    released.set()
    assert rig.conductor.hears(
        lambda said: any(result.key == "do/a/suspend/1" for result in said.results)
    )
    await_true(
        lambda: sum(thread.name.startswith("worker") for thread in threading.enumerate()) == 1,
        5,
        "there is one worker again",
    )
