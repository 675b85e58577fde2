# SPDX-License-Identifier: Apache-2.0
"""Features of the memory driver alone: scripted failures, state files, guests that stop."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import replace

import pytest

from common.domain.models import DomainState, Flavor, GuestSpec, ImageRef, Interface
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import RUNNING, SHUTDOWN
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.guest import read_disk
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import QUIET, Fail, Slow

SERVER = str(uuid.UUID(int=1))


def spec(server: str = SERVER, fence: int = 1) -> GuestSpec:
    return GuestSpec(server, fence, "one", Flavor("1", "m1.nano", 1, 128, 1))


def boot(driver: MemoryDriver, fence: int = 1) -> DomainState:
    return driver.ensure_guest(spec(fence=fence), lambda image: iter(()), QUIET)


def test_memory_driver_scripted_failure_fails_one_call_and_leaves_no_guest() -> None:
    driver = MemoryDriver(
        MemoryHost(script={"ensure_guest": [Fail("The disk is full.", retryable=True)]})
    )
    with pytest.raises(VerbFailed, match="disk is full") as caught:
        boot(driver)
    assert caught.value.retryable
    assert driver.domains() == []
    assert boot(driver) == DomainState(SERVER, RUNNING, 1)
    assert list(driver.host.calls) == [
        ("ensure_guest", SERVER),
        ("domains", ""),
        ("ensure_guest", SERVER),
    ]


def test_memory_driver_slow_verb_stops_soon_after_cancel() -> None:
    driver = MemoryDriver(MemoryHost(script={"ensure_guest": [Slow(60)]}))
    cancelled = threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        driver.ensure_guest(
            spec(), lambda image: iter(()), VerbContext(lambda name: None, cancelled.is_set)
        )
    assert time.monotonic() - began < 5
    assert driver.domains() == []


def test_memory_driver_verb_slow_after_effect_keeps_effect_when_cancelled() -> None:
    driver = MemoryDriver(MemoryHost(script={"ensure_guest": [Slow(60, after=True)]}))
    with pytest.raises(Cancelled):
        driver.ensure_guest(
            spec(),
            lambda image: iter(()),
            VerbContext(lambda name: None, lambda: bool(driver.host.guests)),
        )
    assert driver.domains() == [DomainState(SERVER, RUNNING, 1)]


def test_memory_driver_guests_survive_restart_with_state_file(tmp_path) -> None:
    first = MemoryDriver(MemoryHost(state_file=tmp_path / "host.json"))
    boot(first, fence=7)
    second = MemoryDriver(MemoryHost(state_file=tmp_path / "host.json"))
    assert second.domains() == [DomainState(SERVER, RUNNING, 7)]
    assert second.boot_id() == first.boot_id()
    second.ensure_absent(SERVER, 8)
    assert MemoryDriver(MemoryHost(state_file=tmp_path / "host.json")).domains() == []


@pytest.mark.parametrize("writes", [1, 2])
def test_memory_driver_files_survive_kill_while_guest_is_stored(
    tmp_path, writes, monkeypatch
) -> None:
    first = MemoryDriver(MemoryHost(state_file=tmp_path / "host.json"))
    boot(first)
    guest, write, keys = first.host.guests[SERVER], first.host.write, []
    first.host.drop_domain(SERVER)
    first.host.keep_files(SERVER, guest)

    def write_and_die(key: str, value: object) -> None:
        write(key, value)
        keys.append(key)
        if len(keys) == writes:
            raise KeyboardInterrupt

    monkeypatch.setattr(first.host, "write", write_and_die)
    with pytest.raises(KeyboardInterrupt):
        first.host.keep_guest(SERVER, guest)
    second = MemoryHost(state_file=tmp_path / "host.json")
    assert {*second.guests, *second.files} == {SERVER}


def test_memory_driver_interfaces_survive_restart(tmp_path) -> None:
    first = MemoryDriver(MemoryHost(state_file=tmp_path / "host.json"))
    nics = [
        Interface(
            f"port-{number}",
            mac=f"fa:16:3e:00:00:0{number}",
            vif_type="bridge",
            addresses=[{"address": "10.0.0.5"}],
        )
        for number in range(3)
    ]
    first.ensure_guest(replace(spec(), interfaces=nics[:2]), lambda image: iter(()), QUIET)
    first.attach_interface(SERVER, 2, nics[2], QUIET)
    first.detach_interface(SERVER, 3, nics[0], QUIET)
    assert MemoryHost(state_file=tmp_path / "host.json").guests[SERVER].interfaces == nics[1:]


def test_memory_guest_holding_interface_keeps_it_until_powered_off() -> None:
    driver = MemoryDriver()
    nic = Interface("port", mac="fa:16:3e:00:00:01", vif_type="bridge")
    driver.ensure_guest(replace(spec(), interfaces=[nic]), lambda image: iter(()), QUIET)
    driver.host.guests[SERVER].holds_interfaces = True
    with pytest.raises(VerbFailed, match="did not release the interface fa:16:3e:00:00:01"):
        driver.detach_interface(SERVER, 2, nic, QUIET)
    assert driver.host.guests[SERVER].interfaces == [nic]
    driver.host.power_off(SERVER)
    driver.detach_interface(SERVER, 3, nic, QUIET)
    assert driver.host.guests[SERVER].interfaces == []


def test_memory_driver_notifies_watcher_of_power_off_in_guest() -> None:
    driver = MemoryDriver()
    boot(driver)
    servers: list[str] = []
    driver.watch(servers.append)
    driver.host.power_off(SERVER)
    assert servers == [SERVER]
    assert driver.domains() == [DomainState(SERVER, SHUTDOWN, 1)]


def test_memory_guest_ignoring_acpi_is_stopped_after_timeout() -> None:
    driver = MemoryDriver()
    boot(driver)
    driver.host.guests[SERVER].ignores_acpi = True
    began = time.monotonic()
    driver.ensure_stopped(SERVER, 2, 0.1, QUIET)
    assert time.monotonic() - began >= 0.1
    assert driver.domains() == [DomainState(SERVER, SHUTDOWN, 2)]


def test_memory_host_reboot_changes_boot_id_and_stops_guests() -> None:
    driver = MemoryDriver()
    boot(driver)
    before = driver.boot_id()
    driver.host.reboot()
    assert driver.boot_id() != before
    assert driver.domains() == [DomainState(SERVER, SHUTDOWN, 1)]


def test_memory_snapshot_contains_files_of_guest(tmp_path) -> None:
    driver = MemoryDriver(MemoryHost(state_file=tmp_path / "host.json", read_images=True))
    boot(driver)
    driver.host.write_file(SERVER, "canary", "sings")
    stored: list[bytes] = []
    assert driver.snapshot(SERVER, 2, lambda chunks: stored.extend(chunks), QUIET) == len(
        b"".join(stored)
    )
    second = replace(spec(str(uuid.UUID(int=2))), image=ImageRef("copy"))
    driver.ensure_guest(second, lambda image: iter(stored), QUIET)
    assert MemoryHost(state_file=tmp_path / "host.json").guests[second.server].disk == {
        "canary": "sings"
    }
    assert read_disk(b"another image") == {}


def test_memory_guest_password_is_hashed_and_requires_guest_agent(tmp_path) -> None:
    driver = MemoryDriver(MemoryHost(state_file=tmp_path / "host.json"))
    boot(driver)
    driver.set_password(SERVER, "root", "hunter2 indeed")
    guest = driver.host.guests[SERVER]
    assert guest.knows_password("root", "hunter2 indeed")
    assert not guest.knows_password("root", "another") and not guest.knows_password("admin", "")
    assert "hunter2" not in (tmp_path / "host.json").read_text() + repr(guest)
    guest.has_agent = False
    with pytest.raises(VerbFailed, match="agent in the guest does not answer"):
        driver.set_password(SERVER, "root", "more")


def test_memory_guest_of_image_without_agent_refuses_password() -> None:
    driver = MemoryDriver()
    silent = replace(spec(), image=ImageRef("silent", properties={"hw_qemu_guest_agent": "no"}))
    driver.ensure_guest(silent, lambda image: iter(()), QUIET)
    with pytest.raises(VerbFailed, match="agent in the guest does not answer"):
        driver.set_password(SERVER, "root", "more")


def test_memory_guest_counts_each_nmi() -> None:
    driver = MemoryDriver()
    boot(driver)
    driver.inject_nmi(SERVER)
    driver.inject_nmi(SERVER)
    assert driver.host.guests[SERVER].nmis == 2
