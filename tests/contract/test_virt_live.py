# SPDX-License-Identifier: Apache-2.0
"""Real guests that move while they run, between two libvirtds: what only libvirt and QEMU can get
wrong.

One guest counts in its memory and changes it all the time; every way in which a migration may fail
must leave it counting where it is. What both drivers owe is in test_virt_moves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from common.domain import errors
from common.domain.command_progress import CommandProgress
from common.domain.models import DomainState, FailureReason, GuestSpec
from common.domain.wire import to_wire
from compute_agent.verb_context import Cancelled, MigrationAborted, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SERIAL, SPICE, VNC
from compute_agent.virt.libvirt.domains import jobs
from compute_agent.virt.libvirt.domains.connection import (
    JOB_OPERATION_MIGRATION_OUT,
    JOB_OPERATION_SAVE,
    Connection,
)
from compute_agent.virt.libvirt.driver import LibvirtDriver
from compute_agent.virt.libvirt.migration import live_migration
from compute_agent.virt.libvirt.xml import nova_xml
from tests import spice
from tests.contract.test_virt_driver import kill_daemon, state_if_reachable
from tests.contract.virt_pairs import Machines
from tests.contract.virt_rigs import BOOT_SECONDS, NANO, QUIET
from tests.contract.virt_travellers import SLOW, Steered, Traveller
from tests.phases import Phases
from tests.waiting import await_true

pytestmark = [pytest.mark.kvm_or_tcg, pytest.mark.slice("moves")]
REPOSITORY = Path(__file__).resolve().parents[2]
USERFAULTFD = Path("/proc/sys/vm/unprivileged_userfaultfd")


@pytest.fixture(scope="module")
def travellers() -> Iterator[list[Traveller]]:
    made: list[Traveller] = []
    yield made
    for traveller in made:
        traveller.clean()


@pytest.fixture
def busy(machines: Machines, bootable: Path, travellers: list[Traveller]) -> Traveller:
    """A guest that counts, wherever it is: the last test's, unless that has failed."""
    if not travellers or not travellers[-1].is_well:
        travellers.append(Traveller(machines, bootable))
    travellers[-1].is_well = False
    return travellers[-1]


def test_guest_goes_on_there_and_comes_back(busy: Traveller) -> None:
    for converging in (False, True):
        steered, before = Steered(), time.monotonic()
        told = busy.leaves(run=steered.run, auto_converge=converging)
        assert told["bytes"] > 20 << 20
        assert 0 < told["job_seconds"] < time.monotonic() - before
        assert steered.told[-1]["memory_total"] >= NANO.memory_mb << 20
        busy.came()
        assert busy.holds_what_was_written()
        for stored in (False, True):
            described = ElementTree.fromstring(busy.here.describe(busy.server, stored))
            assert len(described.findall(f"metadata/{{{nova_xml.NAMESPACE}}}instance")) == 1
    with busy.here.driver.console(busy.server, SERIAL) as serial:
        serial.settimeout(BOOT_SECONDS)
        assert serial.recv(1)


def test_wish_to_abort_leaves_it_where_it_is(busy: Traveller) -> None:
    steered = Steered("abort")
    with pytest.raises(VerbFailed) as failed:
        busy.leaves(run=steered.run, bandwidth=SLOW)
    assert failed.value.reason is FailureReason.ABORTED
    busy.stayed()


@pytest.mark.parametrize(
    "when",
    [lambda told: True, lambda told: told["disk_total"] and not told["disk_remaining"]],
    ids=["at once", "once its disk is there"],
)
def test_wish_to_abort_is_heard_whenever_it_comes(
    busy: Traveller, when: Callable[[Mapping[str, int]], bool]
) -> None:
    """Also just when QEMU sets up the journey of its memory."""
    for _ in range(3):
        with pytest.raises(MigrationAborted):
            busy.leaves(
                run=Steered(
                    "abort", when=lambda told: when(told) or told["memory_processed"] > 0
                ).run,
                bandwidth=SLOW,
            )
        busy.stayed()


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (False, {"operation": JOB_OPERATION_MIGRATION_OUT}),
        (
            True,
            {
                "operation": JOB_OPERATION_MIGRATION_OUT,
                "disk_total": 9 << 20,
                "disk_processed": 1 << 20,
                "disk_remaining": 8 << 20,
            },
        ),
        (
            False,
            {
                "operation": JOB_OPERATION_MIGRATION_OUT,
                "disk_total": 9 << 20,
                "disk_processed": 9 << 20,
                "disk_remaining": 0,
            },
        ),
        (
            True,
            {
                "operation": JOB_OPERATION_MIGRATION_OUT,
                "disk_total": 9 << 20,
                "disk_processed": 9 << 20,
                "memory_processed": 1 << 20,
            },
        ),
        (False, {"operation": JOB_OPERATION_SAVE, "memory_processed": 0}),
        (True, {"operation": JOB_OPERATION_SAVE, "memory_processed": 1 << 20}),
        (True, {"operation": 0}),
    ],
)
@pytest.mark.slice("default")
def test_migration_that_is_only_set_up_is_not_told_to_end(ends: bool, told: dict[str, int]) -> None:
    assert jobs.is_abortable(told) == ends


def test_cancel_leaves_it_where_it_is(busy: Traveller) -> None:
    steered = Steered(cancels=True)
    with pytest.raises(Cancelled):
        busy.leaves(run=steered.run, bandwidth=SLOW)
    since = time.monotonic() - next(
        at
        for at, told in zip(steered.moments, steered.told, strict=True)
        if told["memory_processed"] > 0
    )
    assert since < 5
    busy.prepared()  # what may still be ending there is in nobody's way
    busy.stayed()


@pytest.mark.parametrize("has_died", [False, True], ids=["libvirt says so", "nobody says so"])
def test_cancelled_guest_that_libvirt_leaves_paused_goes_on(
    busy: Traveller, monkeypatch: pytest.MonkeyPatch, has_died: bool
) -> None:
    """QEMU at the destination dies as the guest is handed over, later than the cancel waits."""
    begun, raised = threading.Event(), threading.Event()

    def breaks_off(libvirt: Connection, server: str, *how: object) -> None:
        begun.set()
        assert raised.wait(20)
        libvirt.pause(server)
        raise (errors.NoAnswer if has_died else VerbFailed)("operation failed: it broke off")

    monkeypatch.setattr(live_migration, "CANCEL_SECONDS", 0)
    monkeypatch.setattr(Connection, "move", breaks_off)
    to, agent = busy.prepared(), busy.agent(busy.at)
    with pytest.raises(Cancelled):
        agent.live_migrate(busy.spec, to, False, VerbContext(lambda name: None, begun.is_set))
    raised.set()
    busy.stayed()
    agent.close()


def test_time_out_leaves_it_where_it_is(busy: Traveller) -> None:
    begun = time.monotonic()
    with pytest.raises(VerbFailed, match="within 2 seconds and was aborted"):
        busy.leaves(bandwidth=SLOW, completion_timeout=1)
    assert time.monotonic() - begun > 2
    busy.stayed()


def test_time_out_completes_it(busy: Traveller) -> None:
    busy.leaves(bandwidth=SLOW, completion_timeout=1, timeout_action="force_complete")
    busy.came()


def test_wish_to_complete_lets_it_stand_still_until_it_is_there(busy: Traveller) -> None:
    steered = Steered("complete", when=lambda told: told["memory_processed"] > NANO.memory_mb << 20)
    busy.leaves(run=steered.run, bandwidth=SLOW)
    busy.came()


@pytest.fixture
def post_copy() -> Iterator[None]:
    """Permit post-copy for a QEMU that is not root (docs/hosts.md)."""
    before = USERFAULTFD.read_text()
    try:
        USERFAULTFD.write_text("1")
    except OSError as problem:
        pytest.skip(f"{USERFAULTFD}: {problem}")
    yield
    USERFAULTFD.write_text(before)


def test_wish_to_complete_lets_its_memory_follow(
    busy: Traveller, post_copy: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, live_migration.__name__)
    busy.leaves(run=Steered("complete").run, bandwidth=SLOW, post_copy=True)
    assert "paused" not in caplog.text, "it stood still instead"
    busy.came()


def test_paused_guest_comes_paused(busy: Traveller) -> None:
    busy.here.driver.ensure_paused(busy.server, busy.arrived, QUIET)
    busy.leaves(run=Steered("complete").run)
    assert busy.there.driver.finish_incoming(busy.spec, QUIET).power_state == PAUSED
    busy.there.driver.ensure_running(busy.server, busy.spec.fence, QUIET)
    busy.came()


def test_host_without_certificates_refuses_what_is_to_be_encrypted(busy: Traveller) -> None:
    with pytest.raises(VerbFailed) as failed:
        busy.leaves(native_tls=True)
    assert "Unable to access credentials" in failed.value.details
    busy.stayed()


def leaves_by_an_agent_that_dies(busy: Traveller, spec: GuestSpec, to: dict[str, Any]) -> None:
    """It moves as ``spec`` says, slowly, without an agent."""
    script = textwrap.dedent("""
        import json, sys
        from common.domain.models import GuestSpec
        from common.domain.wire import from_wire
        from compute_agent.verb_context import VerbContext
        from compute_agent.virt.libvirt.driver import LibvirtDriver
        from compute_agent.virt.libvirt.migration.live_migration import MigrationOptions
        uri, folder, spec, to, bandwidth = json.load(sys.stdin)
        told = lambda numbers: numbers["memory_processed"] and print("moves", flush=True)
        LibvirtDriver(uri, folder, migration=MigrationOptions(bandwidth=bandwidth, plain_text=True)).live_migrate(
            from_wire(GuestSpec, spec), to, False, VerbContext(lambda name: None, lambda: False, report_migration=told))
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        text=True,
        stdout=subprocess.PIPE,
    ) as agent:
        assert agent.stdin and agent.stdout
        json.dump(
            [busy.uris[busy.at], str(busy.folders[busy.at]), to_wire(spec), to, SLOW], agent.stdin
        )
        agent.stdin.close()
        assert agent.stdout.readline() == "moves\n"
        agent.kill()


def test_migration_outlives_its_agent_and_is_joined_by_the_next(busy: Traveller) -> None:
    to = busy.prepared()
    leaves_by_an_agent_that_dies(busy, busy.spec, to)
    steered = Steered("complete", when=lambda told: told["memory_processed"] > NANO.memory_mb << 20)
    first = [state for state in busy.here.driver.domains() if state.server == busy.server]
    assert [state.power_state for state in first] == [RUNNING]
    busy.leaves(to, steered.run)
    assert steered.told[0]["memory_processed"] > 0, "another migration was begun"
    busy.came()


def test_migration_that_was_given_up_is_ended_and_not_joined(busy: Traveller) -> None:
    busy.prepared()
    given_up, to, libvirt = busy.spec, busy.prepared(), Connection(busy.uris[busy.at])
    leaves_by_an_agent_that_dies(busy, given_up, to)
    assert found_moving(libvirt, busy) == given_up.fence
    fences: list[int] = []

    def looked(told: Mapping[str, int]) -> bool:
        fences.append(found_moving(libvirt, busy))
        return told["memory_processed"] > NANO.memory_mb << 20

    busy.leaves(to, Steered("complete", when=looked).run, bandwidth=SLOW)
    assert set(fences) - {0} == {busy.spec.fence}, "the earlier one was joined"
    busy.came()
    libvirt.close()


def found_moving(libvirt: Connection, busy: Traveller) -> int:
    """The fence of the migration that is marked on the guest; 0 when it is gone."""
    found = libvirt.find(busy.server)
    return found.marks.moving if found else 0


def test_answer_that_was_lost_is_given_again(busy: Traveller) -> None:
    to = busy.prepared()
    busy.leaves(to)
    assert busy.leaves(to) == {"bytes": 0, "job_seconds": 0.0}
    busy.came()
    assert busy.here.driver.finish_incoming(busy.spec, QUIET).power_state == RUNNING


@pytest.mark.parametrize("has_arrived", [False, True])
def test_guest_whose_migration_ended_unseen_is_where_the_destination_says(
    busy: Traveller, has_arrived: bool
) -> None:
    """libvirtd died in the last moments, and has left the guest paused."""
    to, libvirt = busy.prepared(), Connection(busy.uris[busy.at])
    if has_arrived:
        left = libvirt.describe(busy.server, stored=True)
        busy.leaves(to)
        libvirt.define(left)
        libvirt.start(busy.server, paused=True)
    else:
        libvirt.pause(busy.server)
    libvirt.mark(busy.server, moving=busy.spec.fence, resumes=1)
    agent = busy.machines.on(
        busy.machines.names[busy.at],
        LibvirtDriver(busy.uris[busy.at], busy.folders[busy.at], libvirt_timeout=1),
    )
    with pytest.raises(errors.NoAnswer, match="It is not known"):
        agent.live_migrate(busy.spec, {**to, "uri": "qemu+tcp://127.0.0.1:1/system"}, False, QUIET)
    found = libvirt.find(busy.server)
    assert found and found.power_state == PAUSED
    if has_arrived:
        agent.live_migrate(busy.spec, to, False, QUIET)
        busy.came()
    else:
        with pytest.raises(VerbFailed, match="ended before its time"):
            agent.live_migrate(busy.spec, to, False, QUIET)
        busy.stayed()
    agent.close()
    libvirt.close()


def test_guest_that_has_not_come_whole_is_nobodys_news(busy: Traveller) -> None:
    seen: list[list[DomainState]] = []

    def moves_memory(told: Mapping[str, int]) -> bool:
        seen.append([found for found in busy.there.driver.domains() if found.server == busy.server])
        return told["memory_processed"] > 0 and len(seen) > 1

    with pytest.raises(MigrationAborted):
        busy.leaves(run=Steered("abort", when=moves_memory).run, bandwidth=SLOW)
    assert len(seen) > 1 and not any(seen)
    busy.stayed()


def test_guest_that_did_not_come_is_not_started(busy: Traveller) -> None:
    busy.prepared()
    with pytest.raises(VerbFailed, match="did not arrive"):
        busy.there.driver.finish_incoming(busy.spec, QUIET)
    busy.stayed()


@pytest.mark.parametrize("which", ["here", "there"])
def test_libvirtd_that_dies_meanwhile_leaves_it_where_it_is(busy: Traveller, which: str) -> None:
    at = busy.at if which == "here" else 1 - busy.at
    home = busy.machines.home(busy.machines.names[at])
    killed: list[int] = []

    def kill(told: Mapping[str, int]) -> bool:
        if told["memory_processed"] and not killed:
            killed.append(1)
            kill_daemon(home)
        return False

    with pytest.raises(VerbFailed):
        busy.leaves(run=Steered(when=kill).run, bandwidth=SLOW)
    assert killed
    await_true(
        lambda: state_if_reachable(busy.there, busy.server) == (None,),
        20,
        lambda: "the other host still waits for it",
    )
    busy.stayed()


def test_interface_that_was_plugged_in_comes_along_once_its_bridge_is_there(
    busy: Traveller,
) -> None:
    bridge = f"kl{uuid.uuid4().hex[:8]}"
    nic = replace(busy.here.interface(bridge), device=f"kl{uuid.uuid4().hex[:8]}")
    add_bridge(busy.machines.names[busy.at], bridge)
    busy.here.driver.attach_interface(busy.server, busy.arrived, nic, QUIET)
    phases = Phases()

    def report(progress: CommandProgress) -> None:
        name = str(progress)
        if name == "waiting for the network" and name not in phases:
            add_bridge(busy.machines.names[1 - busy.at], bridge)
        phases.append(name)

    busy.leaves(busy.prepared(interfaces=[nic]), replace(QUIET, report_progress=report))
    assert "waiting for the network" in phases
    busy.came()
    assert busy.here.nics(busy.server) == [nic.mac]
    busy.here.driver.detach_interface(busy.server, busy.arrived, nic, QUIET)
    busy.leaves(busy.prepared(interfaces=[]))
    busy.came()


def test_screen_is_as_the_host_has_them_wherever_it_goes(
    machines: Machines, bootable: Path
) -> None:
    """SPICE comes along, also while somebody looks; a host without it leaves it away."""
    traveller = Traveller(machines, bootable, options=lambda at: {"spice": True})
    try:
        with traveller.here.driver.console(traveller.server, SPICE) as screen:
            screen.settimeout(BOOT_SECONDS)
            spice.open_main(spice.OverSocket(screen))
            traveller.leaves()
        traveller.came()
        with traveller.here.driver.console(traveller.server, SPICE) as screen:
            screen.settimeout(BOOT_SECONDS)
            spice.open_main(spice.OverSocket(screen))
        traveller.options = lambda at: {"spice": at == 1}
        traveller.there.restart()
        for kinds in ([VNC, SERIAL], [VNC, SPICE, SERIAL]):
            traveller.leaves()
            traveller.came()
            assert traveller.here.driver.console_kinds(traveller.server) == kinds
    finally:
        traveller.clean()


def add_bridge(space: str, name: str) -> None:
    subprocess.run(
        ["ip", "-n", space, "link", "add", "name", name, "up", "type", "bridge"], check=True
    )


def test_guest_with_its_disk_on_shared_storage_cannot_run_on_both_hosts(
    machines: Machines, bootable: Path
) -> None:
    """Whatever everything else believes: QEMU locks the disk; the lock comes along."""
    shared = Traveller(machines, bootable, shared=True)
    try:
        for _ in range(2):
            with pytest.raises(VerbFailed) as failed:
                shared.there.driver.install(
                    replace(shared.spec, fence=shared.spec.fence + 1), True, QUIET
                )
            assert "lock" in failed.value.details
            shared.counts(shared.here)
            shared.leaves()
            shared.came()
    finally:
        shared.clean()


def test_removal_wins_over_a_migration(machines: Machines, bootable: Path) -> None:
    doomed = Traveller(machines, bootable)
    removed: list[int] = []

    def remove(told: Mapping[str, int]) -> bool:
        if told["memory_processed"] and not removed:
            removed.append(1)
            doomed.here.driver.ensure_absent(doomed.server, doomed.spec.fence + 1)
        return bool(removed)

    with contextlib.suppress(Cancelled, VerbFailed):
        doomed.leaves(run=Steered(cancels=True, when=remove).run, bandwidth=SLOW)
    assert removed
    with contextlib.closing(Connection(doomed.uris[1])) as there:
        await_true(lambda: there.find(doomed.server) is None, 20, lambda: "it still arrives")
    assert doomed.here.state(doomed.server) is None
    assert doomed.here.files(doomed.server) == []
    doomed.clean()
