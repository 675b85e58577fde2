# SPDX-License-Identifier: Apache-2.0
"""The verbs behind a server's actions, on the same hypervisors: what survives, what vanishes, what
is refused.

A canary on the guest's disk tells: a real guest plants it at its first boot and says at each boot
what it finds.
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

#: Longer than any test may take: a verb that waits for it fails the test.
FOREVER = 100


def test_pause_keeps_the_guest_where_it_is(rig: Rig) -> None:
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


def test_suspended_guest_goes_on_where_it_was(rig: Rig) -> None:
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
def test_saved_memory_is_given_up_by_a_hard_verb(
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


def test_suspend_cut_off_leaves_the_guest_as_it_was(rig: Rig) -> None:
    spec = rig.boot()
    with pytest.raises(Cancelled):
        rig.driver.ensure_suspended(spec.server, 2, VerbContext(lambda name: None, lambda: True))
    assert rig.state(spec.server) == (RUNNING, 1)
    answers = iter([False])
    began = time.monotonic()
    try:
        rig.driver.ensure_suspended(
            spec.server, 2, VerbContext(lambda name: None, lambda: next(answers, True))
        )
    except Cancelled:
        assert rig.state(spec.server) == (RUNNING, 1)
    else:  # the cancel came too late
        assert rig.state(spec.server) == (SHUTDOWN, 2)
    assert time.monotonic() - began < 5
    assert rig.driver.ensure_suspended(spec.server, 3, QUIET) == DomainState(
        spec.server, SHUTDOWN, 3
    )


def test_rebuild_replaces_the_disk_once_and_only_when_it_can(rig: Rig) -> None:
    spec = rig.boot_with_canary()
    anew = replace(spec, fence=2, name="anew", image=another(rig))

    def gone(image: str) -> Iterator[bytes]:
        raise errors.NotFound("No image was found.")

    phases = Phases()
    files = rig.files(spec.server)
    with pytest.raises(VerbFailed, match="No image was found"):
        rig.driver.rebuild(anew, gone, True, QUIET)
    with pytest.raises(Cancelled):
        rig.driver.rebuild(
            anew, rig.read_image, True, VerbContext(phases, lambda: "making disks" in phases)
        )
    assert rig.state(spec.server) == (RUNNING, 1)
    assert [path for path in rig.files(spec.server) if path.name != "config.new"] == files
    for _ in range(2):
        assert rig.driver.rebuild(anew, rig.read_image, True, QUIET) == DomainState(
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


def test_rebuild_of_a_guest_that_is_off_or_gone(rig: Rig) -> None:
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


def test_rescue_boots_another_disk_and_keeps_the_own_one(rig: Rig) -> None:
    spec = rig.boot_with_canary()
    files = rig.files(spec.server)
    phases = Phases()
    rescued, back = replace(spec, fence=2), replace(spec, fence=3)
    with pytest.raises(Cancelled):
        rig.driver.rescue(
            rescued,
            another(rig),
            rig.read_image,
            VerbContext(phases, lambda: "making disks" in phases),
        )
    assert rig.state(spec.server) == (RUNNING, 1) and rig.files(spec.server) == files
    with pytest.raises(VerbFailed) as failure:
        rig.driver.rescue(
            rescued, replace(another(rig), hash_value="0" * 64), rig.read_image, QUIET
        )
    assert failure.value.reason is FailureReason.UNTOUCHED
    assert rig.state(spec.server) == (RUNNING, 1) and rig.files(spec.server) == files
    for _ in range(2):
        state = rig.driver.rescue(rescued, another(rig), rig.read_image, QUIET)
        assert state == DomainState(spec.server, RUNNING, 2)
    assert rig.has_canary(spec.server, 2, "vdb")
    assert rig.driver.diagnostics(spec.server)["num_disks"] == (2 if rig.kind == "memory" else 3)
    if rig.real:
        assert "vda holds []" in rig.console(spec.server).split("guest: booting")[2]
    for _ in range(2):
        assert rig.driver.unrescue(back, QUIET) == DomainState(spec.server, RUNNING, 3)
    assert rig.has_canary(spec.server, 3)
    assert rig.files(spec.server) == files
    if rig.has_console:
        assert rig.boots(spec.server) == 3
    stable_rescue_leaves_the_own_disk_in_its_place(rig, spec)


def stable_rescue_leaves_the_own_disk_in_its_place(rig: Rig, spec: GuestSpec) -> None:
    image = replace(rig.image, properties={"hw_rescue_bus": "usb"})
    assert (
        rig.driver.rescue(replace(spec, fence=4), image, rig.read_image, QUIET).power_state
        == RUNNING
    )
    assert rig.has_canary(spec.server, 4)
    if rig.real:
        assert "vdb holds" not in rig.console(spec.server).split("guest: booting")[4]
        own, *others = rig.driver.diagnostics(spec.server)["disk_details"]
        assert own["read_bytes"] < 5 << 20 < max(disk["read_bytes"] for disk in others)


def test_stable_rescue_from_every_kind_of_disk(rig: Rig) -> None:
    spec = rig.boot()
    places = [("cdrom", ""), ("", "scsi"), ("cdrom", "sata"), ("disk", ""), ("", "ide")]
    for fence, (device, bus) in enumerate(places, start=2):
        image = replace(rig.image, properties={"hw_rescue_device": device, "hw_rescue_bus": bus})
        state = rig.driver.rescue(replace(spec, fence=fence), image, rig.read_image, QUIET)
        assert state == DomainState(spec.server, RUNNING, fence)


def test_rescue_disk_at_an_impossible_place_is_refused(rig: Rig) -> None:
    if rig.kind == "memory":
        pytest.skip("memory has no buses")
    spec = rig.boot()
    floppy = replace(rig.image, properties={"hw_rescue_device": "floppy"})
    with pytest.raises(VerbFailed, match="cannot be a floppy"):
        rig.driver.rescue(replace(spec, fence=2), floppy, rig.read_image, QUIET)
    assert rig.state(spec.server) == (RUNNING, 1)


def test_what_an_agent_that_died_left_behind_is_in_nobodys_way(rig: Rig) -> None:
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


def test_nmi_reaches_the_kernel(rig: Rig) -> None:
    spec = rig.boot(ready=True)
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


def test_diagnostics_have_the_shape_of_the_api(rig: Rig) -> None:
    spec = rig.boot()
    told = rig.driver.diagnostics(spec.server)
    assert {
        name: told[name]
        for name in ("state", "driver", "hypervisor_os", "config_drive", "num_cpus")
    } == {
        "state": "running",
        "driver": "libvirt",
        "hypervisor_os": "linux",
        "config_drive": True,
        "num_cpus": 1,
    }
    assert set(told) == {
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
    assert 0 <= told["uptime"] < BOOT_SECONDS and isinstance(told["hypervisor"], str)
    assert told["memory_details"]["maximum"] == 128 and told["memory_details"]["used"] > 0
    assert [set(cpu) for cpu in told["cpu_details"]] == [{"id", "time", "utilisation"}]
    assert len(told["disk_details"]) == told["num_disks"] > 0 and told["num_nics"] == len(
        told["nic_details"]
    )
    for disk in told["disk_details"]:
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
def test_verb_on_a_server_without_guest_fails_definitely(rig: Rig, verb: str) -> None:
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
