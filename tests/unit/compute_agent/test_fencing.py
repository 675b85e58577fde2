# SPDX-License-Identifier: Apache-2.0
"""Self-fencing: an agent without a conductor for ``fence_after`` seconds powers off all guests."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from common.domain import errors
from common.domain.models import DomainState, SyncAnswer
from compute_agent import fencing, service
from compute_agent.journal import Journal
from compute_agent.sync import Agent
from compute_agent.virt.driver import SHUTDOWN
from compute_agent.virt.memory.state.script import Fail
from tests.unit.compute_agent.test_service import ManualClock, Rig
from tests.unit.compute_agent.test_sync import INVENTORY
from tests.waiting import await_true, is_true_within


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the periods of fencing and exchanges to milliseconds."""
    monkeypatch.setattr(fencing, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(service, "EXCHANGE_PERIOD_SECONDS", (0.01, 0.02))


def is_off(rig: Rig) -> bool:
    return [state.power_state for state in rig.driver.domains()] == [SHUTDOWN]


def test_fencing_powers_off_guests_when_no_conductor_answers() -> None:
    rig = Rig(script={"pull_plug": [Fail("The hypervisor is busy.")]}, fence_after=90)
    rig.conductor.is_unreachable, rig.conductor.heartbeat_answer = True, None
    rig.clock.seconds += 89
    assert not is_true_within(lambda: is_off(rig), 0.5)
    rig.clock.seconds += 2
    await_true(lambda: is_off(rig), 10, "its guest is off")
    rig.conductor.is_unreachable = False
    registration = rig.conductor.await_sync(lambda request: request.session == 0)
    assert registration.boot_id == f"{rig.registration.boot_id}.1", "as after a boot"
    rig.conductor.is_unreachable, rig.conductor.heartbeat_answer = True, None
    rig.clock.seconds += 1000
    assert not is_true_within(lambda: rig.journal.fencings(rig.driver.boot_id())[0] > 1, 0.5), (
        "nothing runs any more"
    )
    rig.close()


def test_fencing_retries_when_guests_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(fence_after=90)
    rig.conductor.is_unreachable, rig.conductor.heartbeat_answer = True, None
    list_domains = rig.driver.domains

    def fail() -> list[DomainState]:
        raise errors.Unavailable("libvirtd is away")

    monkeypatch.setattr(rig.driver, "domains", fail)
    rig.clock.seconds += 91
    await_true(lambda: "the guests of this host cannot be listed" in caplog.text, 10)
    monkeypatch.setattr(rig.driver, "domains", list_domains)
    await_true(lambda: is_off(rig), 10, "its guest is off")
    rig.close()


def test_fencing_powers_off_guests_while_connection_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messaging library may wait for the broker forever."""
    rig, released = Rig(fence_after=90), threading.Event()
    call_began = threading.Event()

    def hang(*arguments: object) -> None:
        call_began.set()
        released.wait(30)
        raise errors.NoAnswer("cut off")

    monkeypatch.setattr(rig.conductor, "sync", hang)
    rig.change_guest()
    rig.change_guest()
    assert call_began.wait(10)
    rig.clock.seconds += 91
    await_true(lambda: is_off(rig), 10, "its guest is off")
    released.set()
    rig.close()


def test_fencing_invalidates_answers_to_earlier_requests() -> None:
    agent = Agent("h1", Journal(":memory:"), ManualClock(), "boot", fence_after=10)
    first_request = agent.request(True, [], INVENTORY)
    agent.record_answer(first_request, SyncAnswer(5))
    late = agent.request(True, None, None)
    agent.begin_fencing()
    assert agent.session == 0
    agent.record_answer(late, SyncAnswer(5))
    assert agent.needs_registration()
    registration = agent.request(True, [], INVENTORY)
    agent.record_answer(registration, SyncAnswer(6))
    assert (registration.session, registration.boot_id, agent.session) == (0, "boot.1", 6)


def test_fencing_continues_after_agent_is_killed(tmp_path: Path) -> None:
    clock, journal = ManualClock(), Journal(tmp_path / "agent.db")
    Agent("h1", journal, clock, "boot", fence_after=90).begin_fencing()
    killed = Agent("h1", journal, clock, "boot", fence_after=90)
    assert killed.fences_itself()
    killed.end_fencing()
    restarted = Agent("h1", journal, clock, "boot", fence_after=90)
    assert not restarted.fences_itself()
    assert restarted.request(True, None, None).boot_id == "boot.1"
    assert Agent("h1", journal, clock, "next boot").request(True, None, None).boot_id == "next boot"
    journal.close()


def test_guests_keep_running_without_conductor_by_default() -> None:
    rig = Rig()
    rig.conductor.is_unreachable, rig.conductor.heartbeat_answer = True, None
    rig.clock.seconds += 100_000
    assert not is_true_within(lambda: is_off(rig), 0.5)
    rig.close()
