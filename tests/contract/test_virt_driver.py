# SPDX-License-Identifier: Apache-2.0
"""What every virt driver must do, on three hypervisors: memory, libvirt's own mock-up, real QEMU
guests."""

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
from tests.phases import Phases
from tests.waiting import await_true


def test_guest_boots_once_and_knows_who_it_is(rig: Rig) -> None:
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
        for told in (
            "name web <1>",
            "public keys 1",
            "user data runs",
            "user data: web-1",
            "user data ended with 0",
        ):
            assert told in text, text


def test_console_is_read_from_its_end(rig: Rig) -> None:
    if not rig.has_console:
        pytest.skip("libvirt's mock-up has no console log")
    spec = rig.boot(ready=True)
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    whole, end = "", ""

    def agree() -> bool:
        """What the guest said last may still be on its way into the log."""
        nonlocal whole, end
        whole, end = rig.console(spec.server), rig.driver.console_output(spec.server, 10)
        return end == whole.encode()[-10:].decode()

    await_true(agree, 5, lambda: f"{end!r} is not the end of {whole[-100:]!r}")
    assert "guest: booting" in whole and len(end) == 10
    assert rig.driver.console_output(spec.server, 0) == ""


def test_console_log_that_was_turned_over_reads_as_one(tmp_path: Path) -> None:
    pytest.importorskip("libvirt")
    rig = libvirt_test_rig(tmp_path)
    spec = rig.boot()
    home = tmp_path / "instances" / spec.server
    (home / "console.log.0").write_bytes(b"older\n")
    (home / "console.log").write_bytes(b"new \xff\n")
    assert rig.driver.console_output(spec.server, 100) == "older\nnew \N{REPLACEMENT CHARACTER}\n"
    assert rig.driver.console_output(spec.server, 8) == "r\nnew \N{REPLACEMENT CHARACTER}\n"
    rig.clean()


def test_stop_asks_the_guest_first_and_may_be_repeated(rig: Rig) -> None:
    spec = rig.boot(ready=True)
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


def test_stop_without_time_pulls_the_plug(rig: Rig) -> None:
    spec = rig.boot()
    began = time.monotonic()
    assert rig.driver.ensure_stopped(spec.server, 2, 0, QUIET).power_state == SHUTDOWN
    assert time.monotonic() - began < 10


def test_start_may_be_repeated(rig: Rig) -> None:
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


def test_reboot_starts_a_guest_that_is_off(rig: Rig) -> None:
    spec = rig.boot()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    assert rig.driver.reboot(spec.server, 3, 5, QUIET) == DomainState(spec.server, RUNNING, 3)


def test_guest_that_powers_itself_off_is_seen_within_seconds(rig: Rig) -> None:
    if rig.kind == "test":
        pytest.skip("no program runs in a guest of libvirt's mock-up")
    seen: list[tuple[str, object]] = []
    rig.driver.watch(lambda server: seen.append((server, rig.state(server))))
    spec = rig.boot(user_data="#!/bin/sh\necho off by itself\npoweroff -f\n")
    if rig.real:
        await_true(
            lambda: "off by itself" in rig.console(spec.server),
            BOOT_SECONDS,
            lambda: rig.console(spec.server),
        )
    rig.power_off_inside(spec.server)
    await_true(lambda: (spec.server, (SHUTDOWN, 1)) in seen, 20, lambda: f"not told, only {seen}")


def test_watch_tells_of_each_change(rig: Rig) -> None:
    seen: list[str] = []
    rig.driver.watch(seen.append)
    spec = rig.boot()
    await_true(lambda: spec.server in seen, 5, lambda: "no event for a start")
    seen.clear()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    await_true(lambda: spec.server in seen, 5, lambda: "no event for a stop")


def test_absent_means_nothing_is_left(rig: Rig) -> None:
    spec = rig.boot()
    assert rig.kind == "memory" or rig.files(spec.server)
    for _ in range(2):
        rig.driver.ensure_absent(spec.server, 2)
        assert rig.state(spec.server) is None
        assert rig.files(spec.server) == []
    with pytest.raises(VerbFailed):
        rig.driver.console_output(spec.server, 100)


@pytest.mark.parametrize("verb", ["ensure_running", "ensure_stopped", "reboot"])
def test_verb_on_a_server_without_guest_fails_definitely(rig: Rig, verb: str) -> None:
    arguments = (QUIET,) if verb == "ensure_running" else (0, QUIET)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        getattr(rig.driver, verb)(str(uuid.uuid4()), 1, *arguments)


def test_restarted_agent_finds_its_guests(rig: Rig) -> None:
    spec = rig.boot(fence=5)
    boot_id = rig.driver.boot_id()
    again = rig.restart()
    assert rig.state(spec.server) == (RUNNING, 5)
    assert again.boot_id() == boot_id
    assert again.ensure_guest(spec, rig.read_image, QUIET) == DomainState(spec.server, RUNNING, 5)
    if rig.has_console:
        assert rig.boots(spec.server) <= 1


BROKEN = ("<guest/>", "<guest id='not an id' fence='x'/>", "<guest id='" + "9" * 5000 + "'/>")


@pytest.mark.parametrize("broken", BROKEN)
def test_a_guest_that_cannot_be_read_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    libvirt = pytest.importorskip("libvirt")
    rig = libvirt_test_rig(tmp_path)
    lost, kept = rig.boot(), rig.boot()
    connection = libvirt.open("test:///default")
    domain = connection.lookupByUUIDString(lost.server)
    domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, broken, PREFIX, NAMESPACE)
    again = rig.restart()
    told = {state.server for state in again.domains()}
    assert kept.server in told and lost.server not in told
    assert again.ensure_stopped(kept.server, 2, 0, QUIET).power_state == SHUTDOWN
    assert "not a domain of ours" in caplog.text
    again.ensure_absent(kept.server, 3)
    domain.destroy()
    domain.undefine()
    connection.close()


def test_no_disk_shows_what_another_guest_wrote(tmp_path: Path) -> None:
    """Each disk is a file made anew, so nothing of one that was removed is in the next
    (CVE-2012-5625)."""
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
def test_create_cut_short_anywhere_can_be_repeated_or_removed(rig: Rig, phase: str) -> None:
    if rig.kind == "memory" and phase != "starting":
        pytest.skip("memory has one phase")
    repeated, removed = (rig.spec(image=another(rig)) for _ in range(2))
    for spec in (repeated, removed):
        phases = Phases()
        cut = VerbContext(phases, lambda: phase in phases)  # noqa: B023 - asked only while its verb runs
        with pytest.raises(Cancelled):
            rig.driver.ensure_guest(spec, rig.read_image, cut)
        assert (rig.state(spec.server) or (SHUTDOWN,))[0] == SHUTDOWN
    assert rig.driver.ensure_guest(repeated, rig.read_image, QUIET).power_state == RUNNING
    rig.driver.ensure_absent(removed.server, 2)
    assert rig.state(removed.server) is None and rig.files(removed.server) == []


def test_hanging_image_service_lets_go_within_five_seconds(rig: Rig) -> None:
    cancelled, hang = threading.Event(), threading.Event()

    def read(image: str) -> Iterator[bytes]:
        while not hang.wait(0.05 if rig.kind == "memory" else 60):
            yield b""

    spec = rig.spec()
    threading.Timer(0.2, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        rig.driver.ensure_guest(spec, read, VerbContext(lambda name: None, cancelled.is_set))
    assert time.monotonic() - began < 5
    hang.set()
    assert rig.state(spec.server) is None


@pytest.mark.parametrize("kind", ["backing file", "data file", "vmdk", "too large", "checksum"])
def test_hostile_image_is_refused_before_any_tool_opens_it(
    rig: Rig, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rig.kind == "memory" and kind != "checksum":
        pytest.skip("memory reads no formats")
    content, reason = hostile(kind, tmp_path)
    image = ImageRef(
        str(uuid.uuid4()),
        "qcow2",
        len(content),
        "sha512",
        "0" * 128 if kind == "checksum" else hashlib.sha512(content).hexdigest(),
    )
    ran: list[str] = []
    execute = Helpers.execute

    def watched(helpers: Helpers, program: Sequence[str], *given: Any, **more: Any) -> HelperResult:
        ran.append(program[0])
        return execute(helpers, ["/usr/bin/false"], *given, **more)

    monkeypatch.setattr(Helpers, "execute", watched)  # the one door for programs
    spec = rig.spec(image=image)
    with pytest.raises(VerbFailed, match=reason):
        rig.driver.ensure_guest(spec, lambda name: iter([content]), QUIET)
    assert ran == []
    assert rig.state(spec.server) is None and rig.files(spec.server) == []
    if rig.kind != "memory":
        monkeypatch.setattr(images, "INSPECTIONS", inspection.InspectionCache())
        with pytest.raises(VerbFailed, match="could not make the disk|image is damaged"):
            rig.driver.ensure_guest(rig.spec(), rig.read_image, QUIET)
        assert ran != []


def hostile(kind: str, folder: Path) -> tuple[bytes, str]:
    """(content, why it is refused), made by qemu-img itself."""
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


def test_missing_image_is_definite_and_an_absent_image_service_is_not(rig: Rig) -> None:
    def gone(image: str) -> Iterator[bytes]:
        raise errors.NotFound("No image was found.")

    def away(image: str) -> Iterator[bytes]:
        raise errors.Unavailable("The image service does not answer.")

    spec = rig.spec()
    with pytest.raises(VerbFailed, match="No image was found"):
        rig.driver.ensure_guest(spec, gone, QUIET)
    with pytest.raises(errors.Unavailable):
        rig.driver.ensure_guest(spec, away, QUIET)
    assert rig.state(spec.server) is None


def test_failure_that_nobody_foresaw_leaves_nothing_either(rig: Rig) -> None:
    if rig.kind == "memory":
        pytest.skip("memory makes no config drive")
    spec = replace(rig.spec(), user_data="not base64")
    with pytest.raises(VerbFailed, match="could not make the server's guest"):
        rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert rig.state(spec.server) is None and rig.files(spec.server) == []


def test_inventory_is_plausible(rig: Rig) -> None:
    has = rig.driver.inventory()
    assert has.vcpus > 0 and has.memory_mb > 0 and has.disk_gb > 0 and has.hypervisor_hostname
    assert rig.driver.boot_id()


@pytest.mark.kvm_or_tcg
def test_tiny_image_is_small_and_made_once(private_libvirtd: Path, bootable: Path) -> None:
    made = bootable.stat()
    assert made.st_size < 30 << 20
    assert tiny_image(bootable.parent).stat().st_mtime_ns == made.st_mtime_ns


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_guests_and_driver_outlive_libvirtd(rig: Rig, private_libvirtd: Path) -> None:
    seen: list[str] = []
    rig.driver.watch(seen.append)
    spec = rig.boot()
    kill_daemon(private_libvirtd)
    await_true(lambda: says(rig, spec.server) == ((RUNNING, 1),), 20, lambda: "libvirtd not back")
    kill_daemon(private_libvirtd)
    seen.clear()
    assert rig.driver.ensure_stopped(spec.server, 2, 0, QUIET) == DomainState(
        spec.server, SHUTDOWN, 2
    )
    await_true(lambda: spec.server in seen, 20, lambda: "no events after libvirtd came back")


def says(rig: Rig, server: str) -> tuple[tuple[int, int] | None, ...]:
    """The state of the server's guest, nothing while libvirtd does not answer."""
    try:
        return (rig.state(server),)
    except errors.NoAnswer:
        return ()


def kill_daemon(folder: Path) -> None:
    """SIGKILL to libvirtd itself; what supervises it starts another."""
    serving = (folder / "lock").read_text().strip()
    (first,) = Path(f"/proc/{serving}/task/{serving}/children").read_text().split()
    for child in Path(f"/proc/{first}/task/{first}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):  # another child that ends meanwhile
            if Path(f"/proc/{child}/comm").read_text().strip() == "libvirtd":
                os.kill(int(child), signal.SIGKILL)
                return
    raise AssertionError("no libvirtd runs")
