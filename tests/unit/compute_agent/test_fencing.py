# SPDX-License-Identifier: Apache-2.0
"""A host that hears no conductor for too long makes its own guests off, whatever else hangs."""

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
from tests.unit.compute_agent.test_service import Hand, Rig
from tests.unit.compute_agent.test_sync import INVENTORY
from tests.waiting import await_true, is_true_within


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done every few seconds is done many times a second."""
    monkeypatch.setattr(fencing, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(service, "EXCHANGE_PERIOD_SECONDS", (0.01, 0.02))


def is_off(rig: Rig) -> bool:
    return [state.power_state for state in rig.driver.domains()] == [SHUTDOWN]


def test_a_host_that_hears_nobody_makes_its_guests_off() -> None:
    rig = Rig(script={"pull_plug": [Fail("The hypervisor is busy.")]}, fence_after=90)
    rig.conductor.is_away, rig.conductor.says = True, None
    rig.clock.seconds += 89
    assert not is_true_within(lambda: is_off(rig), 0.5)
    rig.clock.seconds += 2
    await_true(lambda: is_off(rig), 10, "its guest is off")
    rig.conductor.is_away = False
    registration = rig.conductor.hears(lambda said: said.session == 0)
    assert registration.boot_id == f"{rig.registration.boot_id}.1", "as after a boot"
    rig.conductor.is_away, rig.conductor.says = True, None
    rig.clock.seconds += 1000
    assert not is_true_within(lambda: rig.journal.fencings(rig.driver.boot_id())[0] > 1, 0.5), (
        "nothing runs any more"
    )
    rig.close()


def test_a_hypervisor_that_says_nothing_does_not_end_the_talk(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(fence_after=90)
    rig.conductor.is_away, rig.conductor.says = True, None
    seen = rig.driver.domains

    def gone() -> list[DomainState]:
        raise errors.Unavailable("libvirtd is away")

    monkeypatch.setattr(rig.driver, "domains", gone)
    rig.clock.seconds += 91
    await_true(lambda: "the guests of this host cannot be listed" in caplog.text, 10)
    monkeypatch.setattr(rig.driver, "domains", seen)
    await_true(lambda: is_off(rig), 10, "its guest is off")
    rig.close()


def test_guests_are_made_off_while_the_connection_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messaging library may wait for its broker without end."""
    rig, over = Rig(fence_after=90), threading.Event()
    asked = threading.Event()

    def hang(*arguments: object) -> None:
        asked.set()
        over.wait(30)
        raise errors.NoAnswer("cut off")

    monkeypatch.setattr(rig.conductor, "sync", hang)
    rig.speak()
    rig.speak()
    assert asked.wait(10)
    rig.clock.seconds += 91
    await_true(lambda: is_off(rig), 10, "its guest is off")
    over.set()
    rig.close()


def test_an_answer_to_what_was_asked_before_the_fencing_is_void() -> None:
    agent = Agent("h1", Journal(":memory:"), Hand(), "boot", fence_after=10)
    asked = agent.request(True, [], INVENTORY)
    agent.record_answer(asked, SyncAnswer(5))
    late = agent.request(True, None, None)
    agent.begin_fencing()
    assert agent.session == 0
    agent.record_answer(late, SyncAnswer(5))
    assert agent.needs_registration()
    registration = agent.request(True, [], INVENTORY)
    agent.record_answer(registration, SyncAnswer(6))
    assert (registration.session, registration.boot_id, agent.session) == (0, "boot.1", 6)


def test_a_host_goes_on_with_making_its_guests_off_after_a_kill(tmp_path: Path) -> None:
    clock, journal = Hand(), Journal(tmp_path / "agent.db")
    Agent("h1", journal, clock, "boot", fence_after=90).begin_fencing()
    killed = Agent("h1", journal, clock, "boot", fence_after=90)
    assert killed.fences_itself()
    killed.end_fencing()
    again = Agent("h1", journal, clock, "boot", fence_after=90)
    assert not again.fences_itself()
    assert again.request(True, None, None).boot_id == "boot.1"
    assert Agent("h1", journal, clock, "next boot").request(True, None, None).boot_id == "next boot"
    journal.close()


def test_by_default_guests_run_on_without_a_conductor() -> None:
    rig = Rig()
    rig.conductor.is_away, rig.conductor.says = True, None
    rig.clock.seconds += 100_000
    assert not is_true_within(lambda: is_off(rig), 0.5)
    rig.close()
