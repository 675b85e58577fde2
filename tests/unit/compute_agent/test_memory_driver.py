# SPDX-License-Identifier: Apache-2.0
"""What only the hypervisor in memory can do: follow a script, outlive its process, stop by itself."""
from __future__ import annotations

import threading
import time
import uuid

import pytest

from common.models import DomainState, Flavor, GuestSpec
from compute_agent.virt.driver import RUNNING, SHUTDOWN, Cancelled, Run, VerbFailed
from compute_agent.virt.memory import QUIET, Fail, MemoryDriver, Slow

SERVER = str(uuid.UUID(int=1))


def spec(server: str = SERVER, fence: int = 1) -> GuestSpec:
    return GuestSpec(server, fence, "one", Flavor("1", "m1.nano", 1, 128, 1))


def boot(driver: MemoryDriver, fence: int = 1) -> DomainState:
    return driver.ensure_guest(spec(fence=fence), lambda image: iter(()), QUIET)


def test_script_fails_one_call_and_leaves_nothing() -> None:
    driver = MemoryDriver(script={"ensure_guest": [Fail("The disk is full.", retryable=True)]})
    with pytest.raises(VerbFailed, match="disk is full") as caught:
        boot(driver)
    assert caught.value.retryable
    assert driver.domains() == []
    assert boot(driver) == DomainState(SERVER, RUNNING, 1)
    assert list(driver.calls) == [("ensure_guest", SERVER), ("domains", ""), ("ensure_guest", SERVER)]


def test_slow_verb_stops_soon_after_it_is_cancelled() -> None:
    driver = MemoryDriver(script={"ensure_guest": [Slow(60)]})
    cancelled = threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        driver.ensure_guest(spec(), lambda image: iter(()), Run(lambda name: None, cancelled.is_set))
    assert time.monotonic() - began < 5
    assert driver.domains() == []


def test_slow_after_the_effect_has_the_effect() -> None:
    driver = MemoryDriver(script={"ensure_guest": [Slow(60, after=True)]})
    with pytest.raises(Cancelled):
        driver.ensure_guest(spec(), lambda image: iter(()), Run(lambda name: None, lambda: bool(driver.guests)))
    assert driver.domains() == [DomainState(SERVER, RUNNING, 1)]


def test_guests_outlive_the_process_when_there_is_a_state_file(tmp_path) -> None:
    first = MemoryDriver(state_file=tmp_path / "host.json")
    boot(first, fence=7)
    second = MemoryDriver(state_file=tmp_path / "host.json")
    assert second.domains() == [DomainState(SERVER, RUNNING, 7)]
    assert second.boot_id() == first.boot_id()
    second.ensure_absent(SERVER, 8)
    assert MemoryDriver(state_file=tmp_path / "host.json").domains() == []


def test_power_off_inside_the_guest_is_told_to_the_watcher() -> None:
    driver = MemoryDriver()
    boot(driver)
    seen: list[str] = []
    driver.watch(seen.append)
    driver.power_off(SERVER)
    assert seen == [SERVER]
    assert driver.domains() == [DomainState(SERVER, SHUTDOWN, 1)]


def test_guest_that_ignores_acpi_costs_the_time_limit() -> None:
    driver = MemoryDriver()
    boot(driver)
    driver.guests[SERVER].ignores_acpi = True
    began = time.monotonic()
    driver.ensure_stopped(SERVER, 2, 0.1, QUIET)
    assert time.monotonic() - began >= 0.1
    assert driver.domains() == [DomainState(SERVER, SHUTDOWN, 2)]


def test_rebooted_host_has_another_boot_id_and_nothing_runs() -> None:
    driver = MemoryDriver()
    boot(driver)
    before = driver.boot_id()
    driver.reboot_host()
    assert driver.boot_id() != before
    assert driver.domains() == [DomainState(SERVER, SHUTDOWN, 1)]
