# SPDX-License-Identifier: Apache-2.0
"""The agent process with a hypervisor in memory: registration, exchanges, heartbeats, workers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from common import __version__
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
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import SHUTDOWN
from compute_agent.virt.machine import Monitor
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import QUIET, Fail, Slow
from tests.log_lines import rendered_lines
from tests.unit.compute_agent.test_moving_verbs import Reader
from tests.verbs import new_command, new_verb
from tests.waiting import await_true

SERVER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"
GUEST = GuestSpec(SERVER, 1, "vm", Flavor("1", "m1.nano", 1, 64, 1))
RATIOS = {"VCPU": 4.0}


class Conductor:
    """Records exchanges and heartbeats, and acknowledges each of them."""

    def __init__(self) -> None:
        self.syncs: queue.SimpleQueue[Sync] = queue.SimpleQueue()
        self.to_stop: list[str] = []
        self.beats: queue.SimpleQueue[Heartbeat] = queue.SimpleQueue()
        self.heartbeat_answer: bool | Exception | None = True
        self.is_unreachable = False
        self.secrets = ""

    def heartbeat(self, beat: Heartbeat, timeout: float) -> HeartbeatAnswer | None:
        self.beats.put(beat)
        if isinstance(self.heartbeat_answer, Exception):
            raise self.heartbeat_answer
        if self.heartbeat_answer is None:
            return None
        return HeartbeatAnswer(self.heartbeat_answer, secrets=self.secrets)

    def sync(self, request: Sync, timeout: float) -> tuple[SyncAnswer, Access | None]:
        if self.is_unreachable:
            raise errors.NoAnswer("It does not answer.")
        self.syncs.put(request)
        return SyncAnswer(
            request.session or 7,
            [result.key for result in request.results],
            stop=self.to_stop if request.session == 0 else [],
        ), None

    def await_sync(self, matches: Callable[[Sync], object]) -> Sync:
        """Return the next exchange that matches, or raise queue.Empty after five seconds."""
        while not matches(request := self.syncs.get(timeout=5)):
            continue
        return request


class Images:
    """An image service that has every image, unless ``problem`` is set."""

    def __init__(self) -> None:
        self.downloads: list[tuple[str, str]] = []
        self.problem: errors.Problem | None = None

    def download(self, access: Access, image: str) -> Iterator[bytes]:
        self.downloads.append((access.token, image))
        if self.problem is not None:
            raise self.problem
        yield b"content"


class ManualClock:
    """A clock turned by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


class Rig:
    """The agent process with one guest.

    ``change_guest`` changes the guest's power state, so the agent reports at once. With ``stop``,
    the conductor answers the registration that the guest must not run here.
    """

    def __init__(
        self,
        stop: bool = False,
        script: dict[str, list[Slow | Fail]] | None = None,
        fence_after: float = 0,
        compare_secrets: Callable[[str], bool] = lambda digest: False,
    ) -> None:
        self.facts = {"transfer": "192.0.2.7:16599"}
        self.clock, self.driver = (
            ManualClock(),
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
            facts=lambda: dict(self.facts),
            compare_secrets=compare_secrets,
        )
        self.host.guard()
        self.host.start(1)
        self.registration = self.conductor.await_sync(lambda request: request.session == 0)
        await_true(
            lambda: agent.session != 0,
            5,
            "the answer is taken in: commands of another session are dropped",
        )

    def change_guest(self) -> None:
        is_running = self.driver.domains()[0].power_state == 1
        if is_running:
            self.driver.host.power_off(SERVER)
        else:
            self.driver.ensure_running(SERVER, 1, QUIET)

    def close(self) -> None:
        assert self.host.close() == []
        self.journal.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    new_rig = Rig()
    yield new_rig
    new_rig.close()


def build_expected_inventory(driver: MemoryDriver) -> HostInventory:
    """Build the inventory that the agent reports: the driver's, with ratios, facts and version."""
    return replace(
        driver.host.size,
        ratios=RATIOS,
        facts=driver.host.size.facts | {"transfer": "192.0.2.7:16599"},
        version=__version__,
    )


def test_agent_registration_contains_inventory_ratios_facts_and_domains(rig: Rig) -> None:
    assert rig.registration.inventory == build_expected_inventory(rig.driver)
    assert rig.registration.domains is not None


def test_agent_powers_off_guest_in_stop_list_before_starting_others() -> None:
    rig = Rig(stop=True, script={"pull_plug": [Fail("The hypervisor is busy.")]})
    start = new_command("ensure_running", "a", "start", server="another", session=7)
    rig.host.do([start], None)
    rig.conductor.await_sync(
        lambda request: any(state.power_state == SHUTDOWN for state in request.changed)
    )
    rig.host.do([start], None)
    result = rig.conductor.await_sync(lambda request: request.results).results[0]
    assert (result.key, result.status) == (str(start.key), "failed"), (
        "there is no such guest; it was tried"
    )
    done = [verb for verb, _ in rig.driver.host.calls if verb in ("pull_plug", "ensure_running")]
    assert done == ["pull_plug", "pull_plug", "ensure_running"]
    assert rig.driver.domains()[0].fence == 1
    rig.close()


def start_migration(rig: Rig, to: dict[str, Any]) -> Command:
    """Start a live migration and return the command."""
    verb = LiveMigrate(guest=GUEST, to=Destination(details=to), shared=False)
    migrate = new_command(verb, "a", "migrate", server=SERVER, session=7)
    rig.host.do([migrate], None)
    await_true(lambda: ("live_migrate", SERVER) in rig.driver.host.calls, 5, lambda: "not begun")
    return migrate


def test_live_migration_continues_when_agent_is_closed() -> None:
    rig, destination = Rig(script={"live_migrate": [Slow(0.3)]}), MemoryDriver(MemoryHost("h2"))
    rig.driver.offer(SERVER, 1, "open sesame", QUIET)
    to = destination.prepare_incoming(
        GUEST, Reader(rig.driver, SERVER, "open sesame"), False, {}, lambda image: iter(()), QUIET
    )
    start_migration(rig, to)
    rig.host.close()
    await_true(destination.domains, 5, lambda: "it was given up")
    assert rig.driver.domains() == []
    rig.close()


def test_abort_command_fails_running_live_migration_as_aborted() -> None:
    rig = Rig(script={"live_migrate": [Slow(60)]})
    migrate = start_migration(rig, {})
    abort = control_command(migrate.key, Control.ABORT, server=SERVER, fence=1, session=7)
    rig.host.do([abort], None)
    results = rig.conductor.await_sync(
        lambda request: any(result.key == str(migrate.key) for result in request.results)
    ).results
    assert {
        (result.status, result.reason) for result in results if result.key == str(migrate.key)
    } == {("failed", FailureReason.ABORTED)}
    rig.close()


def test_changed_inventory_is_reported_only_with_next_full_report(rig: Rig) -> None:
    rig.driver.host.size = replace(rig.driver.host.size, memory_mb=77)
    rig.change_guest()
    assert rig.conductor.await_sync(lambda request: request.changed).inventory is None
    for _ in range(3):  # each exchange renews the lease
        rig.clock.seconds += FULL_REPORT_SECONDS / 3
        rig.change_guest()
        report = rig.conductor.await_sync(lambda request: request.changed)
    assert report.session == 7
    assert report.domains is not None
    assert report.inventory == build_expected_inventory(rig.driver)
    assert report.metrics is not None
    assert 0 <= report.metrics["cpu.percent"] <= 100
    rig.change_guest()
    assert rig.conductor.await_sync(lambda request: request.changed).inventory is None


def test_agent_reports_success_and_failure_of_image_prefetch_at_once(rig: Rig) -> None:
    rig.host.cache_images([ImageRef("one")], Access("http://images", "token"))
    assert rig.conductor.await_sync(lambda request: request.cached).cached == {"one": ""}
    rig.images.problem = errors.NotFound("There is no such image.")
    rig.host.cache_images([ImageRef("two")], Access("http://images", "newer"))
    assert (
        rig.conductor.await_sync(lambda request: "two" in request.cached).cached["two"]
        == "There is no such image."
    )
    assert rig.images.downloads == [("token", "one"), ("newer", "two")]


def test_agent_query_returns_data_and_raises_for_unknown_query_or_server(rig: Rig) -> None:
    assert " load average: " in rig.host.query("uptime", {})["uptime"]
    assert set(rig.host.query("domains", {})["domains"]) == {SERVER}
    for verb in ("levitate", "console"):  # the process has no console relay
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
def test_builds_at_a_time_leaves_one_of_several_workers_free(
    workers: int, most: int, builds: int
) -> None:
    assert builds_at_a_time(workers, most) == builds


@pytest.fixture
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the period of exchanges to milliseconds."""
    monkeypatch.setattr(service, "EXCHANGE_PERIOD_SECONDS", (0.01, 0.02))


@pytest.mark.usefixtures("short_periods")
def test_idle_agent_sends_only_heartbeats_until_guest_changes(rig: Rig) -> None:
    rig.conductor.beats.get(timeout=5)
    rig.conductor.syncs = queue.SimpleQueue()  # drop the exchanges of the start
    for _ in range(50):
        rig.conductor.beats.get(timeout=5)
    assert rig.conductor.syncs.empty()
    rig.change_guest()
    assert rig.conductor.await_sync(lambda request: request.changed)
    rig.conductor.beats.get(timeout=5)


@pytest.mark.usefixtures("short_periods")
def test_agent_reports_facts_at_once_after_secrets_are_renewed() -> None:
    """Without this, the facts would wait for the next full report."""

    def renew(digest: str) -> bool:
        is_new = digest not in ("", rig.facts.get("secrets"))
        if is_new:
            rig.facts["secrets"] = digest
        return is_new

    rig = Rig(compare_secrets=renew)
    rig.conductor.secrets = "digest"
    report = rig.conductor.await_sync(lambda request: request.session and request.inventory)
    assert report.inventory is not None and report.inventory.facts["secrets"] == "digest"
    rig.close()


@pytest.mark.usefixtures("short_periods")
def test_agent_reports_all_domains_when_heartbeat_answer_is_false(rig: Rig) -> None:
    rig.conductor.beats.get(timeout=5)
    rig.conductor.heartbeat_answer = False
    assert [
        state.server
        for state in rig.conductor.await_sync(
            lambda request: request.session == 7 and request.ask
        ).domains
        or ()
    ] == [SERVER]


@pytest.mark.usefixtures("short_periods")
@pytest.mark.parametrize(
    "heartbeat_answer", [None, TypeError("nobody foresaw this")], ids=["silence", "a failure"]
)
def test_agent_sends_sync_when_heartbeats_are_not_answered(
    rig: Rig, heartbeat_answer: Exception | None
) -> None:
    """Conductors of the previous release do not answer heartbeats."""
    rig.conductor.heartbeat_answer = heartbeat_answer
    for _ in range(5):
        assert rig.conductor.await_sync(lambda request: request.session == 7 and request.ask)
    beats = 0
    while not rig.conductor.beats.empty():
        rig.conductor.beats.get()
        beats += 1
    assert rig.conductor.await_sync(lambda request: request.session == 7 and request.ask)
    assert (rig.conductor.beats.empty(), beats > 0) == (True, True)


def is_completed(rig: Rig, command: Command) -> bool:
    """Send a command, and return True when the agent reports the result."""
    rig.host.do([command], None)
    return bool(
        rig.conductor.await_sync(
            lambda request: any(result.key == str(command.key) for result in request.results)
        )
    )


def test_guest_ignoring_power_button_occupies_no_worker() -> None:
    rig = Rig(script={"ensure_stopped": [Slow(60)], "reboot": [Slow(60)]})
    for verb in ("ensure_stopped", "reboot"):
        rig.host.do(
            [new_command(new_verb(verb, timeout=60), verb, "power", server=verb, session=7)], None
        )
    assert is_completed(rig, new_command("ensure_paused", "c", "pause", server=SERVER, session=7))
    rig.close()


@pytest.mark.parametrize("verb", ["set_password", "snapshot_volume"])
def test_guest_agent_without_answer_occupies_no_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    released, ended = threading.Event(), threading.Event()

    def await_release(*args: object) -> None:
        released.wait(5)
        ended.set()
        raise VerbFailed("The agent in the guest does not answer.")

    monkeypatch.setattr(rig.driver, verb, await_release)
    rig.host.do([new_command(verb, "a", "ask", server="slow", session=7)], None)
    assert is_completed(rig, new_command("ensure_paused", "b", server=SERVER, session=7))
    assert not ended.is_set()
    released.set()


@pytest.mark.usefixtures("short_periods")
def test_agent_replaces_hanging_worker(
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
        rig.conductor.await_sync(lambda request: request.ask)
        rig.conductor.syncs = queue.SimpleQueue()
    assert is_completed(rig, new_command("ensure_paused", "b", "pause", server=SERVER, session=7))
    phases = rig.conductor.await_sync(lambda request: request.phases).phases
    assert phases["do/a/suspend/1"] == CommandProgress(
        CommandPhase.QUEUED, stalled_verb="ensure_suspended"
    )
    assert any(
        "a command gives no sign of life" in line
        and "verb=ensure_suspended server=hangs progress=" in line
        for line in rendered_lines(caplog)
    )
    released.set()
    assert rig.conductor.await_sync(
        lambda request: any(result.key == "do/a/suspend/1" for result in request.results)
    )
    await_true(
        lambda: sum(thread.name.startswith("worker") for thread in threading.enumerate()) == 1,
        5,
        "there is one worker again",
    )
