# SPDX-License-Identifier: Apache-2.0
"""The driver's verbs for actions of a server.

The tests run on a host in memory, libvirt's mock-up and real QEMU guests. A canary on the guest's
disk shows which data survive. A real guest writes the canary at its first boot, and logs at each
boot whether the canary exists.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from common.domain import errors
from common.domain.models import DomainState, FailureReason, GuestSpec
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.memory.driver import MemoryDriver
from tests.contract.virt_rigs import (
    BOOT_SECONDS,
    QUIET,
    TICKS,
    Rig,
    another,
)
from tests.disks import base, plain
from tests.phases import Phases
from tests.waiting import await_true

#: A timeout longer than any test may take. A test fails if a verb waits for this timeout.
FOREVER = 100


def test_pause_is_repeatable_and_ended_by_start_reboot_or_stop(rig: Rig) -> None:
    spec = rig.boot()
    for _ in range(2):
        assert rig.driver.ensure_paused(spec.server, 2, QUIET) == DomainState(
            spec.server, PAUSED, 2
        )
    assert rig.state(spec.server) == (PAUSED, 2)
    assert rig.driver.ensure_running(spec.server, 3, QUIET) == DomainState(spec.server, RUNNING, 3)
    rig.driver.ensure_paused(spec.server, 4, QUIET)
    assert rig.driver.reboot(spec.server, 5, FOREVER, QUIET) == DomainState(spec.server, RUNNING, 5)
    rig.driver.ensure_paused(spec.server, 6, QUIET)
    assert rig.driver.ensure_stopped(spec.server, 7, FOREVER, QUIET) == DomainState(
        spec.server, SHUTDOWN, 7
    )
    with pytest.raises(VerbFailed, match="does not run"):
        rig.driver.ensure_paused(spec.server, 8, QUIET)
    assert rig.state(spec.server) == (SHUTDOWN, 7)


def test_start_of_suspended_guest_resumes_saved_memory(rig: Rig) -> None:
    phases = Phases()
    spec = rig.boot(ready=True, user_data=TICKS)
    for _ in range(2):
        state = rig.driver.ensure_suspended(spec.server, 2, VerbContext(phases, lambda: False))
        assert state == DomainState(spec.server, SHUTDOWN, 2)
    assert phases[0].startswith("saving memory")
    rig.restart()
    assert rig.state(spec.server) == (SHUTDOWN, 2)
    before = rig.console(spec.server).count("tick")
    for _ in range(2):
        assert rig.driver.ensure_running(spec.server, 3, QUIET) == DomainState(
            spec.server, RUNNING, 3
        )
    assert rig.state(spec.server) == (RUNNING, 3)
    if rig.real:
        await_true(
            lambda: f"tick {before + 3}\n" in rig.console(spec.server).replace("\r", ""),
            20,
            lambda: rig.console(spec.server)[-500:],
        )
    if rig.has_console:
        assert rig.boots(spec.server) == 1
    rig.driver.ensure_paused(spec.server, 4, QUIET)
    assert rig.driver.ensure_suspended(spec.server, 5, QUIET).power_state == SHUTDOWN
    assert rig.driver.ensure_running(spec.server, 6, QUIET).power_state == RUNNING


@pytest.mark.parametrize("verb", ["stop", "reboot", "absent"])
def test_stop_reboot_or_removal_of_suspended_guest_discards_saved_memory(
    rig: Rig, verb: str, request: pytest.FixtureRequest
) -> None:
    spec = rig.boot()
    rig.driver.ensure_suspended(spec.server, 2, QUIET)
    if verb == "reboot":
        assert rig.driver.reboot(spec.server, 3, FOREVER, QUIET) == DomainState(
            spec.server, RUNNING, 3
        )
    elif verb == "stop":
        assert rig.driver.ensure_stopped(spec.server, 3, FOREVER, QUIET) == DomainState(
            spec.server, SHUTDOWN, 3
        )
        with pytest.raises(VerbFailed, match="does not run"):
            rig.driver.ensure_suspended(spec.server, 4, QUIET)
    else:
        rig.driver.ensure_absent(spec.server, 3)
        assert rig.state(spec.server) is None and rig.files(spec.server) == []
    if isinstance(rig.driver, MemoryDriver) and verb == "reboot":
        assert rig.boots(spec.server) == 2
    if rig.real:
        folder = request.getfixturevalue("private_libvirtd")
        assert [path for path in folder.rglob("*.save") if spec.server in path.name] == []


def test_suspend_cancelled_before_memory_is_saved_leaves_guest_running(rig: Rig) -> None:
    spec = rig.boot()
    with pytest.raises(Cancelled):
        rig.driver.ensure_suspended(spec.server, 2, VerbContext(lambda name: None, lambda: True))
    assert rig.state(spec.server) == (RUNNING, 1)
    answers = iter([False])
    start = time.monotonic()
    try:
        rig.driver.ensure_suspended(
            spec.server, 2, VerbContext(lambda name: None, lambda: next(answers, True))
        )
    except Cancelled:
        assert rig.state(spec.server) == (RUNNING, 1)
    else:
        # The cancellation came too late.
        assert rig.state(spec.server) == (SHUTDOWN, 2)
    assert time.monotonic() - start < 5
    assert rig.driver.ensure_suspended(spec.server, 3, QUIET) == DomainState(
        spec.server, SHUTDOWN, 3
    )


def test_rebuild_replaces_disk_once_and_not_on_missing_image_or_cancel(rig: Rig) -> None:
    spec = rig.boot_with_canary()
    image = rig.linux_image if rig.real else another(rig)
    new_spec = replace(spec, fence=2, name="anew", image=image)

    def raise_not_found(image: str) -> Iterator[bytes]:
        raise errors.NotFound("No image was found.")

    phases = Phases()
    files = rig.files(spec.server)
    with pytest.raises(VerbFailed, match="No image was found"):
        rig.driver.rebuild(new_spec, raise_not_found, True, QUIET)
    with pytest.raises(Cancelled):
        rig.driver.rebuild(
            new_spec, rig.read_image, True, VerbContext(phases, lambda: "making disks" in phases)
        )
    assert rig.state(spec.server) == (RUNNING, 1)
    assert [path for path in rig.files(spec.server) if path.name != "config.new"] == files
    for _ in range(2):
        assert rig.driver.rebuild(new_spec, rig.read_image, True, QUIET) == DomainState(
            spec.server, RUNNING, 2
        )
    assert sorted(plain(path.name) for path in rig.files(spec.server)) == sorted(
        plain(path.name) for path in files
    )
    assert not rig.has_canary(spec.server, 2)
    if rig.has_console:
        assert rig.boots(spec.server) == 2
    if rig.real:
        assert "name anew" in rig.console(spec.server)


def test_rebuild_of_suspended_or_absent_guest_sets_requested_power_state(rig: Rig) -> None:
    spec = rig.boot()
    rig.driver.ensure_suspended(spec.server, 2, QUIET)
    off = DomainState(spec.server, SHUTDOWN, 3)
    for _ in range(2):
        assert rig.driver.rebuild(replace(spec, fence=3), rig.read_image, False, QUIET) == off
    assert (
        rig.driver.rebuild(replace(spec, fence=3), rig.read_image, True, QUIET).power_state
        == RUNNING
    )
    rig.driver.ensure_absent(spec.server, 4)
    assert (
        rig.driver.rebuild(replace(spec, fence=5), rig.read_image, False, QUIET).power_state
        == SHUTDOWN
    )


def test_rescue_boots_rescue_image_and_keeps_own_disk(rig: Rig) -> None:
    spec = rig.boot_with_canary()
    # Only a guest with an operating system sees the second disk.
    image = rig.linux_image if rig.real else another(rig)
    files = rig.files(spec.server)
    phases = Phases()
    rescued, unrescued = replace(spec, fence=2), replace(spec, fence=3)
    with pytest.raises(Cancelled):
        rig.driver.rescue(
            rescued,
            image,
            rig.read_image,
            VerbContext(phases, lambda: "making disks" in phases),
        )
    assert rig.state(spec.server) == (RUNNING, 1) and rig.files(spec.server) == files
    with pytest.raises(VerbFailed) as failure:
        rig.driver.rescue(rescued, replace(image, hash_value="0" * 64), rig.read_image, QUIET)
    assert failure.value.reason is FailureReason.UNTOUCHED
    assert rig.state(spec.server) == (RUNNING, 1) and rig.files(spec.server) == files
    for _ in range(2):
        state = rig.driver.rescue(rescued, image, rig.read_image, QUIET)
        assert state == DomainState(spec.server, RUNNING, 2)
    assert rig.has_canary(spec.server, 2, "vdb")
    assert rig.driver.diagnostics(spec.server)["num_disks"] == (2 if rig.kind == "memory" else 3)
    if rig.real:
        assert "vda holds []" in rig.console(spec.server).split("guest: booting")[2]
    for _ in range(2):
        assert rig.driver.unrescue(unrescued, QUIET) == DomainState(spec.server, RUNNING, 3)
    assert rig.has_canary(spec.server, 3)
    assert rig.files(spec.server) == files
    if rig.has_console:
        assert rig.boots(spec.server) == 3
    check_stable_rescue_keeps_place_of_own_disk(rig, spec)


def check_stable_rescue_keeps_place_of_own_disk(rig: Rig, spec: GuestSpec) -> None:
    image = replace(rig.linux_image, properties={"hw_rescue_bus": "usb"})
    assert (
        rig.driver.rescue(replace(spec, fence=4), image, rig.read_image, QUIET).power_state
        == RUNNING
    )
    assert rig.has_canary(spec.server, 4)
    if rig.real:
        assert "vdb holds" not in rig.console(spec.server).split("guest: booting")[4]
        own_disk, *other_disks = rig.driver.diagnostics(spec.server)["disk_details"]
        assert own_disk["read_bytes"] < 5 << 20 < max(disk["read_bytes"] for disk in other_disks)


def test_stable_rescue_boots_from_every_disk_device_and_bus(rig: Rig) -> None:
    spec = rig.boot()
    places = [("cdrom", ""), ("", "scsi"), ("cdrom", "sata"), ("disk", ""), ("", "ide")]
    for fence, (device, bus) in enumerate(places, start=2):
        image = replace(rig.image, properties={"hw_rescue_device": device, "hw_rescue_bus": bus})
        state = rig.driver.rescue(replace(spec, fence=fence), image, rig.read_image, QUIET)
        assert state == DomainState(spec.server, RUNNING, fence)


def test_rescue_with_floppy_device_is_refused(rig: Rig) -> None:
    if rig.kind == "memory":
        pytest.skip("memory has no buses")
    spec = rig.boot()
    floppy = replace(rig.image, properties={"hw_rescue_device": "floppy"})
    with pytest.raises(VerbFailed, match="cannot be a floppy"):
        rig.driver.rescue(replace(spec, fence=2), floppy, rig.read_image, QUIET)
    assert rig.state(spec.server) == (RUNNING, 1)


def test_rescue_and_rebuild_ignore_partial_files_of_killed_agent(rig: Rig) -> None:
    if rig.kind == "memory":
        pytest.skip("memory makes no files")
    spec = rig.boot()
    files = rig.files(spec.server)
    home = rig.folder / "instances" / spec.server
    content = base(home).name.removeprefix("base.")
    for name in (
        "disk.part",
        f"base.{content}.part",
        "config.new",
        "rescue",
        f"rescue.base.{content}",
        "rescue.part",
        f"rescue.base.{content}.part",
    ):
        (home / name).write_bytes(b"half")
    assert (
        rig.driver.rescue(replace(spec, fence=2), rig.image, rig.read_image, QUIET).power_state
        == RUNNING
    )
    assert rig.driver.unrescue(replace(spec, fence=3), QUIET).power_state == RUNNING
    assert [path for path in rig.files(spec.server) if "rescue" in path.name] == []
    assert (
        rig.driver.rebuild(replace(spec, fence=4), rig.read_image, True, QUIET).power_state
        == RUNNING
    )
    assert rig.files(spec.server) == files


def test_inject_nmi_reaches_kernel_and_fails_when_guest_is_off(rig: Rig) -> None:
    spec = rig.boot(ready=True, image=rig.linux_image)
    rig.driver.inject_nmi(spec.server)
    if rig.has_console:
        await_true(
            lambda: "NMI received" in rig.console(spec.server),
            5,
            lambda: rig.console(spec.server)[-1000:],
        )
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    with pytest.raises(VerbFailed, match="does not run"):
        rig.driver.inject_nmi(spec.server)


def test_diagnostics_have_fields_of_api_and_fail_when_guest_is_off(rig: Rig) -> None:
    spec = rig.boot()
    diagnostics = rig.driver.diagnostics(spec.server)
    assert {
        name: diagnostics[name]
        for name in ("state", "driver", "hypervisor_os", "config_drive", "num_cpus")
    } == {
        "state": "running",
        "driver": "libvirt",
        "hypervisor_os": "linux",
        "config_drive": True,
        "num_cpus": 1,
    }
    assert set(diagnostics) == {
        "state",
        "driver",
        "hypervisor",
        "hypervisor_os",
        "uptime",
        "config_drive",
        "num_cpus",
        "num_disks",
        "num_nics",
        "memory_details",
        "cpu_details",
        "disk_details",
        "nic_details",
    }
    assert 0 <= diagnostics["uptime"] < BOOT_SECONDS and isinstance(diagnostics["hypervisor"], str)
    assert (
        diagnostics["memory_details"]["maximum"] == 128
        and diagnostics["memory_details"]["used"] > 0
    )
    assert [set(cpu) for cpu in diagnostics["cpu_details"]] == [{"id", "time", "utilisation"}]
    assert len(diagnostics["disk_details"]) == diagnostics["num_disks"] > 0 and diagnostics[
        "num_nics"
    ] == len(diagnostics["nic_details"])
    for disk in diagnostics["disk_details"]:
        assert set(disk) == {
            "read_bytes",
            "read_requests",
            "write_bytes",
            "write_requests",
            "errors_count",
        }
        assert all(isinstance(disk[name], int) for name in disk if name != "errors_count")
    rig.driver.ensure_paused(spec.server, 2, QUIET)
    assert rig.driver.diagnostics(spec.server)["state"] == "paused"
    rig.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    with pytest.raises(VerbFailed, match="does not run"):
        rig.driver.diagnostics(spec.server)


@pytest.mark.parametrize(
    "verb",
    [
        "ensure_paused",
        "ensure_suspended",
        "rescue",
        "unrescue",
        "snapshot",
        "inject_nmi",
        "set_password",
        "diagnostics",
    ],
)
def test_driver_verb_on_server_without_guest_raises_verb_failed(rig: Rig, verb: str) -> None:
    spec = rig.spec()
    arguments: dict[str, tuple[Any, ...]] = {
        "rescue": (spec, rig.image, rig.read_image, QUIET),
        "unrescue": (spec, QUIET),
        "snapshot": (spec.server, 1, list, QUIET),
        "inject_nmi": (spec.server,),
        "diagnostics": (spec.server,),
        "set_password": (spec.server, "root", "s3cret"),
    }
    with pytest.raises(VerbFailed, match="no guest on this host"):
        getattr(rig.driver, verb)(*arguments.get(verb, (spec.server, 1, QUIET)))
    assert rig.state(spec.server) is None and rig.files(spec.server) == []
