# SPDX-License-Identifier: Apache-2.0
"""The requirements of every virt driver.

The tests run on a host in memory, libvirt's mock-up and real QEMU guests.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.domain import errors
from common.domain.models import DomainState, ImageRef
from compute_agent.sandbox.client import HelperResult, Helpers
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import RUNNING, SHUTDOWN
from compute_agent.virt.libvirt.disks import images, inspection
from compute_agent.virt.libvirt.xml.domain_xml import NAMESPACE, PREFIX
from tests.contract.virt_rigs import (
    BOOT_SECONDS,
    CANARY_AT,
    QUIET,
    Rig,
    another,
    holds_canary,
    libvirt_test_rig,
    tiny_image,
)
from tests.log_lines import rendered_lines
from tests.phases import Phases
from tests.waiting import await_true


def test_ensure_guest_boots_once_with_metadata_and_user_data(rig: Rig) -> None:
    phases = Phases()
    spec = rig.spec(user_data="#!/bin/sh\necho user data: $(hostname)\n")
    for _ in range(2):
        state = rig.driver.ensure_guest(spec, rig.read_image, VerbContext(phases, lambda: False))
        assert state == DomainState(spec.server, RUNNING, 1)
    assert phases[0] == "fetching image" and phases[-1] == "starting"
    assert rig.state(spec.server) == (RUNNING, 1)
    rig.await_boots(spec.server, 1)
    if rig.has_console:
        assert rig.boots(spec.server) == 1
        assert f"id {spec.server}" in rig.console(spec.server).replace(": ", " ")
    if rig.real:
        text = rig.console(spec.server)
        for line in (
            "name web <1>",
            "public keys 1",
            "user data runs",
            "user data: web-1",
            "user data ended with 0",
        ):
            assert line in text, text


def test_console_output_returns_last_bytes_of_log(rig: Rig) -> None:
    if not rig.has_console:
        pytest.skip("libvirt's mock-up has no console log")
    spec = rig.boot(ready=True)
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    log, end = "", ""

    def is_logged() -> bool:
        """Return True once the guest's last output is in the log."""
        nonlocal log, end
        log, end = rig.console(spec.server), rig.driver.console_output(spec.server, 10)
        return end == log.encode()[-10:].decode()

    await_true(is_logged, 5, lambda: f"{end!r} is not the end of {log[-100:]!r}")
    assert "guest: booting" in log and len(end) == 10
    assert rig.driver.console_output(spec.server, 0) == ""


def test_console_output_joins_rotated_log(tmp_path: Path) -> None:
    pytest.importorskip("libvirt")
    rig = libvirt_test_rig(tmp_path)
    spec = rig.boot()
    home = tmp_path / "instances" / spec.server
    (home / "console.log.0").write_bytes(b"older\n")
    (home / "console.log").write_bytes(b"new \xff\n")
    assert rig.driver.console_output(spec.server, 100) == "older\nnew \N{REPLACEMENT CHARACTER}\n"
    assert rig.driver.console_output(spec.server, 8) == "r\nnew \N{REPLACEMENT CHARACTER}\n"
    rig.clean()


def test_stop_with_timeout_shuts_guest_down_and_is_repeatable(rig: Rig) -> None:
    spec = rig.boot(ready=True, image=rig.linux_image)
    for _ in range(2):
        assert rig.driver.ensure_stopped(spec.server, 2, BOOT_SECONDS, QUIET) == DomainState(
            spec.server, SHUTDOWN, 2
        )
    assert rig.state(spec.server) == (SHUTDOWN, 2)
    if rig.real:
        await_true(
            lambda: "power button, going down" in rig.console(spec.server),
            10,
            lambda: rig.console(spec.server)[-500:],
        )


def test_stop_without_timeout_powers_guest_off_at_once(rig: Rig) -> None:
    spec = rig.boot()
    start = time.monotonic()
    assert rig.driver.ensure_stopped(spec.server, 2, 0, QUIET).power_state == SHUTDOWN
    assert time.monotonic() - start < 10


def test_ensure_running_is_repeatable(rig: Rig) -> None:
    spec = rig.boot()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    for _ in range(2):
        assert rig.driver.ensure_running(spec.server, 3, QUIET) == DomainState(
            spec.server, RUNNING, 3
        )
    assert rig.state(spec.server) == (RUNNING, 3)


@pytest.mark.slice("default")
def test_reboot_happens_once_for_each_fence(rig: Rig) -> None:
    spec = rig.boot(ready=True)
    for fence, boots in ((2, 2), (2, 2), (3, 3)):
        assert rig.driver.reboot(spec.server, fence, BOOT_SECONDS, QUIET) == DomainState(
            spec.server, RUNNING, fence
        )
        rig.await_boots(spec.server, boots)
        if rig.has_console:
            assert rig.boots(spec.server) == boots
    assert rig.state(spec.server) == (RUNNING, 3)


def test_reboot_starts_stopped_guest(rig: Rig) -> None:
    spec = rig.boot()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    assert rig.driver.reboot(spec.server, 3, 5, QUIET) == DomainState(spec.server, RUNNING, 3)


def test_driver_watch_reports_guest_poweroff_from_inside_within_seconds(rig: Rig) -> None:
    if rig.kind == "test":
        pytest.skip("no program runs in a guest of libvirt's mock-up")
    events: list[tuple[str, object]] = []
    rig.driver.watch(lambda server: events.append((server, rig.state(server))))
    spec = rig.boot(user_data="#!/bin/sh\necho off by itself\npoweroff -f\n")
    if rig.real:
        await_true(
            lambda: "off by itself" in rig.console(spec.server),
            BOOT_SECONDS,
            lambda: rig.console(spec.server),
        )
    rig.power_off_inside(spec.server)
    await_true(
        lambda: (spec.server, (SHUTDOWN, 1)) in events, 20, lambda: f"not told, only {events}"
    )


def test_driver_watch_reports_start_and_stop_of_guest(rig: Rig) -> None:
    events: list[str] = []
    rig.driver.watch(events.append)
    spec = rig.boot()
    await_true(lambda: spec.server in events, 5, lambda: "no event for a start")
    events.clear()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    await_true(lambda: spec.server in events, 5, lambda: "no event for a stop")


def test_ensure_absent_removes_guest_and_files_and_is_repeatable(rig: Rig) -> None:
    spec = rig.boot()
    assert rig.kind == "memory" or rig.files(spec.server)
    for _ in range(2):
        rig.driver.ensure_absent(spec.server, 2)
        assert rig.state(spec.server) is None
        assert rig.files(spec.server) == []
    with pytest.raises(VerbFailed):
        rig.driver.console_output(spec.server, 100)


@pytest.mark.parametrize("verb", ["ensure_running", "ensure_stopped", "reboot"])
def test_start_stop_or_reboot_of_missing_guest_raises_verb_failed(rig: Rig, verb: str) -> None:
    arguments = (QUIET,) if verb == "ensure_running" else (0, QUIET)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        getattr(rig.driver, verb)(str(uuid.uuid4()), 1, *arguments)


def test_restarted_driver_finds_running_guest(rig: Rig) -> None:
    spec = rig.boot(fence=5)
    boot_id = rig.driver.boot_id()
    driver = rig.restart()
    assert rig.state(spec.server) == (RUNNING, 5)
    assert driver.boot_id() == boot_id
    assert driver.ensure_guest(spec, rig.read_image, QUIET) == DomainState(spec.server, RUNNING, 5)
    if rig.has_console:
        assert rig.boots(spec.server) <= 1


BROKEN = ("<guest/>", "<guest id='not an id' fence='x'/>", "<guest id='" + "9" * 5000 + "'/>")


@pytest.mark.parametrize("broken", BROKEN)
def test_domains_skip_guest_with_unreadable_metadata(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    libvirt = pytest.importorskip("libvirt")
    rig = libvirt_test_rig(tmp_path)
    damaged, intact = rig.boot(), rig.boot()
    connection = libvirt.open("test:///default")
    domain = connection.lookupByUUIDString(damaged.server)
    domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, broken, PREFIX, NAMESPACE)
    driver = rig.restart()
    servers = {state.server for state in driver.domains()}
    assert intact.server in servers and damaged.server not in servers
    assert driver.ensure_stopped(intact.server, 2, 0, QUIET).power_state == SHUTDOWN
    assert any("no server id or fence of Kilonova" in line for line in rendered_lines(caplog))
    driver.ensure_absent(intact.server, 3)
    domain.destroy()
    domain.undefine()
    connection.close()


def test_new_and_rebuilt_disks_contain_no_data_of_removed_guest(tmp_path: Path) -> None:
    """Each disk is a new file and contains no data of a removed disk (CVE-2012-5625)."""
    pytest.importorskip("libvirt")
    rig = libvirt_test_rig(tmp_path)
    first = rig.boot()
    [disk] = [path for path in rig.files(first.server) if path.name == "disk"]
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", f"write -P {ord('c')} {CANARY_AT} 64k", disk],
        check=True,
        capture_output=True,
    )
    assert holds_canary(disk)
    rig.driver.ensure_absent(first.server, 2)
    for _ in range(3):
        spec = rig.boot()
        [disk] = [path for path in rig.files(spec.server) if path.name == "disk"]
        assert not holds_canary(disk)
    rig.driver.rebuild(replace(spec, fence=2), rig.read_image, False, QUIET)
    assert not holds_canary(disk)
    rig.clean()


@pytest.mark.parametrize("phase", ["fetching image", "making disks", "starting"])
def test_ensure_guest_cancelled_in_any_phase_can_be_repeated_or_removed(
    rig: Rig, phase: str
) -> None:
    if rig.kind == "memory" and phase != "starting":
        pytest.skip("memory has one phase")
    repeated, removed = (rig.spec(image=another(rig)) for _ in range(2))
    for spec in (repeated, removed):
        phases = Phases()
        cut = VerbContext(phases, lambda: phase in phases)  # noqa: B023 - called only while its verb runs
        with pytest.raises(Cancelled):
            rig.driver.ensure_guest(spec, rig.read_image, cut)
        assert (rig.state(spec.server) or (SHUTDOWN,))[0] == SHUTDOWN
    assert rig.driver.ensure_guest(repeated, rig.read_image, QUIET).power_state == RUNNING
    rig.driver.ensure_absent(removed.server, 2)
    assert rig.state(removed.server) is None and rig.files(removed.server) == []


def test_ensure_guest_is_cancelled_within_5_seconds_while_image_hangs(rig: Rig) -> None:
    cancelled, hang = threading.Event(), threading.Event()

    def read(image: str) -> Iterator[bytes]:
        while not hang.wait(0.05 if rig.kind == "memory" else 60):
            yield b""

    spec = rig.spec()
    threading.Timer(0.2, cancelled.set).start()
    start = time.monotonic()
    with pytest.raises(Cancelled):
        rig.driver.ensure_guest(spec, read, VerbContext(lambda name: None, cancelled.is_set))
    assert time.monotonic() - start < 5
    hang.set()
    assert rig.state(spec.server) is None


@pytest.mark.parametrize("kind", ["backing file", "data file", "vmdk", "too large", "checksum"])
def test_ensure_guest_refuses_hostile_image_before_any_tool_runs(
    rig: Rig, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rig.kind == "memory" and kind != "checksum":
        pytest.skip("memory reads no formats")
    content, reason = create_hostile_image(kind, tmp_path)
    image = ImageRef(
        str(uuid.uuid4()),
        "qcow2",
        len(content),
        "sha512",
        "0" * 128 if kind == "checksum" else hashlib.sha512(content).hexdigest(),
    )
    programs: list[str] = []
    execute = Helpers.execute

    def record_program(
        helpers: Helpers, program: Sequence[str], *args: Any, **options: Any
    ) -> HelperResult:
        programs.append(program[0])
        return execute(helpers, ["/usr/bin/false"], *args, **options)

    # The driver runs all programs through this method.
    monkeypatch.setattr(Helpers, "execute", record_program)
    spec = rig.spec(image=image)
    with pytest.raises(VerbFailed, match=reason):
        rig.driver.ensure_guest(spec, lambda name: iter([content]), QUIET)
    assert programs == []
    assert rig.state(spec.server) is None and rig.files(spec.server) == []
    if rig.kind != "memory":
        monkeypatch.setattr(images, "INSPECTIONS", inspection.InspectionCache())
        with pytest.raises(VerbFailed, match="could not make a disk|image is damaged"):
            rig.driver.ensure_guest(rig.spec(), rig.read_image, QUIET)
        assert programs != []


def create_hostile_image(kind: str, folder: Path) -> tuple[bytes, str]:
    """Return (content, pattern of the error) of a hostile image, which qemu-img creates."""
    path = folder / "hostile"
    if kind == "vmdk":
        return (
            b'# Disk DescriptorFile\ncreateType="monolithicFlat"\nRW 1 FLAT "/etc/shadow" 0\n'.ljust(
                4096
            ),
            "vmdk",
        )
    options, reason = {
        "backing file": (
            ["-u", "-b", "/etc/shadow", "-F", "raw"],
            "not safe to use: .*backing file",
        ),
        "data file": (["-o", f"data_file={folder}/outside"], "not safe to use: .*data_file"),
        "too large": ([], "100.00 GiB does not fit .* 1 GiB"),
        "checksum": ([], "checksum"),
    }[kind]
    size = "100G" if kind == "too large" else "1M"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", *options, str(path), size], check=True
    )
    return path.read_bytes(), reason


def test_missing_image_raises_verb_failed_and_outage_raises_unavailable(rig: Rig) -> None:
    def raise_not_found(image: str) -> Iterator[bytes]:
        raise errors.NotFound("No image was found.")

    def raise_unavailable(image: str) -> Iterator[bytes]:
        raise errors.Unavailable("The image service does not answer.")

    spec = rig.spec()
    with pytest.raises(VerbFailed, match="No image was found"):
        rig.driver.ensure_guest(spec, raise_not_found, QUIET)
    with pytest.raises(errors.Unavailable):
        rig.driver.ensure_guest(spec, raise_unavailable, QUIET)
    assert rig.state(spec.server) is None


def test_ensure_guest_leaves_no_files_after_unexpected_failure(rig: Rig) -> None:
    if rig.kind == "memory":
        pytest.skip("memory makes no config drive")
    spec = replace(rig.spec(), user_data="not base64")
    with pytest.raises(VerbFailed, match="could not make the server's guest"):
        rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert rig.state(spec.server) is None and rig.files(spec.server) == []


def test_inventory_has_positive_amounts_and_hostname(rig: Rig) -> None:
    inventory = rig.driver.inventory()
    assert (
        inventory.vcpus > 0
        and inventory.memory_mb > 0
        and inventory.disk_gb > 0
        and inventory.hypervisor_hostname
    )
    assert rig.driver.boot_id()


@pytest.mark.kvm_or_tcg
def test_tiny_image_is_small_and_built_once(private_libvirtd: Path, bootable: Path) -> None:
    first_stat = bootable.stat()
    assert first_stat.st_size < 30 << 20
    assert tiny_image(bootable.parent).stat().st_mtime_ns == first_stat.st_mtime_ns


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_guests_and_driver_survive_kill_of_libvirtd(rig: Rig, private_libvirtd: Path) -> None:
    events: list[str] = []
    rig.driver.watch(events.append)
    spec = rig.boot()
    kill_daemon(private_libvirtd)
    await_true(
        lambda: state_if_reachable(rig, spec.server) == ((RUNNING, 1),),
        20,
        lambda: "libvirtd not back",
    )
    kill_daemon(private_libvirtd)
    events.clear()
    assert rig.driver.ensure_stopped(spec.server, 2, 0, QUIET) == DomainState(
        spec.server, SHUTDOWN, 2
    )
    await_true(lambda: spec.server in events, 20, lambda: "no events after libvirtd came back")


def state_if_reachable(rig: Rig, server: str) -> tuple[tuple[int, int] | None, ...]:
    """Return a tuple with the state of the server's guest.

    The tuple is empty if libvirtd does not answer.
    """
    try:
        return (rig.state(server),)
    except errors.NoAnswer:
        return ()


def kill_daemon(folder: Path) -> None:
    """Send SIGKILL to libvirtd. The supervisor starts libvirtd again."""
    serving = (folder / "lock").read_text().strip()
    (first,) = Path(f"/proc/{serving}/task/{serving}/children").read_text().split()
    for child in Path(f"/proc/{first}/task/{first}/children").read_text().split():
        # Another child may end meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{child}/comm").read_text().strip() == "libvirtd":
                os.kill(int(child), signal.SIGKILL)
                return
    raise AssertionError("no libvirtd runs")
