# SPDX-License-Identifier: Apache-2.0
"""Live migrations of real guests between two libvirtds, for the faults of libvirt and QEMU.

The guest changes a counter in its memory all the time. A failed migration must leave it counting on
the source. For the requirements of both drivers see test_virt_live_moves.py.
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
from tests.log_lines import rendered_lines
from tests.phases import Phases
from tests.waiting import await_true

pytestmark = [pytest.mark.kvm_or_tcg, pytest.mark.slice("moves")]
REPOSITORY = Path(__file__).resolve().parents[2]
USERFAULTFD = Path("/proc/sys/vm/unprivileged_userfaultfd")


@pytest.fixture(scope="module")
def travellers() -> Iterator[list[Traveller]]:
    guests: list[Traveller] = []
    yield guests
    for traveller in guests:
        traveller.clean()


@pytest.fixture
def traveller(machines: Machines, bootable: Path, travellers: list[Traveller]) -> Traveller:
    """Return a guest with a running counter. Tests share this guest until a test fails."""
    if not travellers or not travellers[-1].is_well:
        travellers.append(Traveller(machines, bootable))
    travellers[-1].is_well = False
    return travellers[-1]


def test_live_migration_there_and_back_keeps_guest_running(traveller: Traveller) -> None:
    for converging in (False, True):
        steered, before = Steered(), time.monotonic()
        totals = traveller.migrate(run=steered.run, auto_converge=converging)
        assert totals["bytes"] > 20 << 20
        assert 0 < totals["job_seconds"] < time.monotonic() - before
        assert steered.progress[-1]["memory_total"] >= NANO.memory_mb << 20
        traveller.check_arrived()
        assert traveller.has_written_data()
        for stored in (False, True):
            domain = ElementTree.fromstring(traveller.here.describe(traveller.server, stored))
            assert len(domain.findall(f"metadata/{{{nova_xml.NAMESPACE}}}instance")) == 1
    with traveller.here.driver.console(traveller.server, SERIAL) as serial:
        serial.settimeout(BOOT_SECONDS)
        assert serial.recv(1)


def test_aborted_live_migration_leaves_guest_on_source(traveller: Traveller) -> None:
    steered = Steered("abort")
    with pytest.raises(VerbFailed) as failure:
        traveller.migrate(run=steered.run, bandwidth=SLOW)
    assert failure.value.reason is FailureReason.ABORTED
    traveller.check_stayed()


@pytest.mark.parametrize(
    "when",
    [lambda stats: True, lambda stats: stats["disk_total"] and not stats["disk_remaining"]],
    ids=["at start", "after disk copy"],
)
def test_live_migration_can_be_aborted_at_start_and_after_disk_copy(
    traveller: Traveller, when: Callable[[Mapping[str, int]], bool]
) -> None:
    """This includes the moment at which QEMU sets up the transfer of the memory."""
    for _ in range(3):
        with pytest.raises(MigrationAborted):
            traveller.migrate(
                run=Steered(
                    "abort", when=lambda stats: when(stats) or stats["memory_processed"] > 0
                ).run,
                bandwidth=SLOW,
            )
        traveller.check_stayed()


@pytest.mark.parametrize(
    ("abortable", "stats"),
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
def test_is_abortable_is_false_while_qemu_sets_up_the_transfer(
    abortable: bool, stats: dict[str, int]
) -> None:
    assert jobs.is_abortable(stats) == abortable


def test_cancelled_live_migration_leaves_guest_on_source(traveller: Traveller) -> None:
    steered = Steered(cancels=True)
    with pytest.raises(Cancelled):
        traveller.migrate(run=steered.run, bandwidth=SLOW)
    since = time.monotonic() - next(
        at
        for at, stats in zip(steered.moments, steered.progress, strict=True)
        if stats["memory_processed"] > 0
    )
    assert since < 5
    # The end of the cancelled migration does not prevent a new preparation.
    traveller.prepare()
    traveller.check_stayed()


@pytest.mark.parametrize("has_died", [False, True], ids=["libvirt error", "no answer"])
def test_cancelled_live_migration_resumes_guest_left_paused_by_libvirt(
    traveller: Traveller, monkeypatch: pytest.MonkeyPatch, has_died: bool
) -> None:
    """QEMU at the destination dies during the handover, after the cancel has ended its wait."""
    has_begun, may_fail, is_paused = (threading.Event() for _ in range(3))

    def pause_and_fail(libvirt: Connection, server: str, *how: object) -> None:
        has_begun.set()
        assert may_fail.wait(20)
        libvirt.pause(server)
        is_paused.set()
        raise (errors.NoAnswer if has_died else VerbFailed)("operation failed: it broke off")

    monkeypatch.setattr(live_migration, "CANCEL_SECONDS", 0)
    monkeypatch.setattr(Connection, "move", pause_and_fail)
    to, agent = traveller.prepare(), traveller.agent(traveller.at)
    with pytest.raises(Cancelled):
        agent.live_migrate(
            traveller.spec, to, False, VerbContext(lambda name: None, has_begun.is_set)
        )
    may_fail.set()
    # The agent resumes the guest after libvirt's late error.
    assert is_paused.wait(20)
    await_true(
        lambda: traveller.here.state(traveller.server) == (RUNNING, traveller.arrived),
        20,
        lambda: traveller.here.state(traveller.server),
    )
    traveller.check_stayed()
    agent.close()


def test_live_migration_timeout_with_abort_leaves_guest_on_source(traveller: Traveller) -> None:
    start = time.monotonic()
    with pytest.raises(VerbFailed, match="within 2 seconds and was aborted"):
        traveller.migrate(bandwidth=SLOW, completion_timeout=1)
    assert time.monotonic() - start > 2
    traveller.check_stayed()


def test_live_migration_timeout_with_force_complete_moves_guest(traveller: Traveller) -> None:
    traveller.migrate(bandwidth=SLOW, completion_timeout=1, timeout_action="force_complete")
    traveller.check_arrived()


def test_force_complete_without_post_copy_moves_guest_to_destination(traveller: Traveller) -> None:
    steered = Steered(
        "complete", when=lambda stats: stats["memory_processed"] > NANO.memory_mb << 20
    )
    traveller.migrate(run=steered.run, bandwidth=SLOW)
    traveller.check_arrived()


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


def test_force_complete_with_post_copy_moves_guest_without_pause(
    traveller: Traveller, post_copy: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, live_migration.__name__)
    traveller.migrate(run=Steered("complete").run, bandwidth=SLOW, post_copy=True)
    assert "paused" not in "\n".join(rendered_lines(caplog)), "it stood still instead"
    traveller.check_arrived()


def test_live_migration_of_paused_guest_keeps_it_paused(traveller: Traveller) -> None:
    traveller.here.driver.ensure_paused(traveller.server, traveller.arrived, QUIET)
    traveller.migrate(run=Steered("complete").run)
    assert traveller.there.driver.finish_incoming(traveller.spec, QUIET).power_state == PAUSED
    traveller.there.driver.ensure_running(traveller.server, traveller.spec.fence, QUIET)
    traveller.check_arrived()


def test_live_migration_with_native_tls_fails_without_certificates(traveller: Traveller) -> None:
    with pytest.raises(VerbFailed) as failure:
        traveller.migrate(native_tls=True)
    assert "Unable to access credentials" in failure.value.details
    traveller.check_stayed()


def start_migration_and_kill_agent(
    traveller: Traveller, spec: GuestSpec, to: dict[str, Any]
) -> None:
    """Start a slow migration of ``spec`` in an agent process, and kill this process."""
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
            [
                traveller.uris[traveller.at],
                str(traveller.folders[traveller.at]),
                to_wire(spec),
                to,
                SLOW,
            ],
            agent.stdin,
        )
        agent.stdin.close()
        assert agent.stdout.readline() == "moves\n"
        agent.kill()


def test_live_migrate_joins_running_migration_after_death_of_agent(traveller: Traveller) -> None:
    to = traveller.prepare()
    start_migration_and_kill_agent(traveller, traveller.spec, to)
    steered = Steered(
        "complete", when=lambda stats: stats["memory_processed"] > NANO.memory_mb << 20
    )
    first = [state for state in traveller.here.driver.domains() if state.server == traveller.server]
    assert [state.power_state for state in first] == [RUNNING]
    traveller.migrate(to, steered.run)
    assert steered.progress[0]["memory_processed"] > 0, "another migration was begun"
    traveller.check_arrived()


def test_live_migrate_ends_abandoned_migration_and_does_not_join_it(traveller: Traveller) -> None:
    traveller.prepare()
    abandoned_spec, to, libvirt = (
        traveller.spec,
        traveller.prepare(),
        Connection(traveller.uris[traveller.at]),
    )
    start_migration_and_kill_agent(traveller, abandoned_spec, to)
    assert read_migration_fence(libvirt, traveller) == abandoned_spec.fence
    fences: list[int] = []

    def record_fence(stats: Mapping[str, int]) -> bool:
        fences.append(read_migration_fence(libvirt, traveller))
        return stats["memory_processed"] > NANO.memory_mb << 20

    traveller.migrate(to, Steered("complete", when=record_fence).run, bandwidth=SLOW)
    assert set(fences) - {0} == {traveller.spec.fence}, "the earlier one was joined"
    traveller.check_arrived()
    libvirt.close()


def read_migration_fence(libvirt: Connection, traveller: Traveller) -> int:
    """Return the fence of the migration in the guest's marks, or 0 if the guest is gone."""
    domain = libvirt.find(traveller.server)
    return domain.marks.moving if domain else 0


def test_live_migrate_repeated_after_lost_answer_returns_zero_bytes(traveller: Traveller) -> None:
    to = traveller.prepare()
    traveller.migrate(to)
    assert traveller.migrate(to) == {"bytes": 0, "job_seconds": 0.0}
    traveller.check_arrived()
    assert traveller.here.driver.finish_incoming(traveller.spec, QUIET).power_state == RUNNING


@pytest.mark.parametrize("has_arrived", [False, True])
def test_live_migrate_after_unknown_end_follows_state_of_destination(
    traveller: Traveller, has_arrived: bool
) -> None:
    """The daemon libvirtd died at the end of the migration and left the guest paused."""
    to, libvirt = traveller.prepare(), Connection(traveller.uris[traveller.at])
    if has_arrived:
        stored_xml = libvirt.describe(traveller.server, stored=True)
        traveller.migrate(to)
        libvirt.define(stored_xml)
        libvirt.start(traveller.server, paused=True)
    else:
        libvirt.pause(traveller.server)
    libvirt.mark(traveller.server, moving=traveller.spec.fence, resumes=1)
    agent = traveller.machines.on(
        traveller.machines.names[traveller.at],
        LibvirtDriver(
            traveller.uris[traveller.at], traveller.folders[traveller.at], libvirt_timeout=1
        ),
    )
    with pytest.raises(errors.NoAnswer, match="does not answer whether"):
        agent.live_migrate(
            traveller.spec, {**to, "uri": "qemu+tcp://127.0.0.1:1/system"}, False, QUIET
        )
    domain = libvirt.find(traveller.server)
    assert domain and domain.power_state == PAUSED
    if has_arrived:
        agent.live_migrate(traveller.spec, to, False, QUIET)
        traveller.check_arrived()
    else:
        with pytest.raises(VerbFailed, match="ended early"):
            agent.live_migrate(traveller.spec, to, False, QUIET)
        traveller.check_stayed()
    agent.close()
    libvirt.close()


def test_domains_omit_arriving_guest_until_migration_completes(traveller: Traveller) -> None:
    seen_states: list[list[DomainState]] = []

    def moves_memory(stats: Mapping[str, int]) -> bool:
        seen_states.append(
            [
                state
                for state in traveller.there.driver.domains()
                if state.server == traveller.server
            ]
        )
        return stats["memory_processed"] > 0 and len(seen_states) > 1

    with pytest.raises(MigrationAborted):
        traveller.migrate(run=Steered("abort", when=moves_memory).run, bandwidth=SLOW)
    assert len(seen_states) > 1 and not any(seen_states)
    traveller.check_stayed()


def test_finish_incoming_fails_when_guest_did_not_arrive(traveller: Traveller) -> None:
    traveller.prepare()
    with pytest.raises(VerbFailed, match="did not arrive"):
        traveller.there.driver.finish_incoming(traveller.spec, QUIET)
    traveller.check_stayed()


@pytest.mark.parametrize("host", ["source", "destination"])
def test_live_migration_leaves_guest_on_source_when_libvirtd_is_killed(
    traveller: Traveller, host: str
) -> None:
    at = traveller.at if host == "source" else 1 - traveller.at
    home = traveller.machines.home(traveller.machines.names[at])
    kills: list[int] = []

    def kill(stats: Mapping[str, int]) -> bool:
        if stats["memory_processed"] and not kills:
            kills.append(1)
            kill_daemon(home)
        return False

    with pytest.raises(VerbFailed):
        traveller.migrate(run=Steered(when=kill).run, bandwidth=SLOW)
    assert kills
    await_true(
        lambda: state_if_reachable(traveller.there, traveller.server) == (None,),
        20,
        lambda: "the other host still waits for it",
    )
    traveller.check_stayed()


def test_live_migration_moves_hotplugged_nic_and_waits_for_its_bridge(
    traveller: Traveller,
) -> None:
    bridge = f"kl{uuid.uuid4().hex[:8]}"
    nic = replace(traveller.here.interface(bridge), device=f"kl{uuid.uuid4().hex[:8]}")
    add_bridge(traveller.machines.names[traveller.at], bridge)
    traveller.here.driver.attach_interface(traveller.server, traveller.arrived, nic, QUIET)
    phases = Phases()

    def report(progress: CommandProgress) -> None:
        name = str(progress)
        if name == "waiting for the network" and name not in phases:
            add_bridge(traveller.machines.names[1 - traveller.at], bridge)
        phases.append(name)

    traveller.migrate(traveller.prepare(interfaces=[nic]), replace(QUIET, report_progress=report))
    assert "waiting for the network" in phases
    traveller.check_arrived()
    assert traveller.here.nics(traveller.server) == [nic.mac]
    traveller.here.driver.detach_interface(traveller.server, traveller.arrived, nic, QUIET)
    traveller.migrate(traveller.prepare(interfaces=[]))
    traveller.check_arrived()


def test_live_migration_adapts_spice_console_to_destination(
    machines: Machines, bootable: Path
) -> None:
    """An open SPICE session does not prevent the move.

    A destination without SPICE removes the SPICE screen.
    """
    traveller = Traveller(machines, bootable, options=lambda at: {"spice": True})
    try:
        with traveller.here.driver.console(traveller.server, SPICE) as screen:
            screen.settimeout(BOOT_SECONDS)
            spice.open_main(spice.OverSocket(screen))
            traveller.migrate()
        traveller.check_arrived()
        with traveller.here.driver.console(traveller.server, SPICE) as screen:
            screen.settimeout(BOOT_SECONDS)
            spice.open_main(spice.OverSocket(screen))
        traveller.options = lambda at: {"spice": at == 1}
        traveller.there.restart()
        for kinds in ([VNC, SERIAL], [VNC, SPICE, SERIAL]):
            traveller.migrate()
            traveller.check_arrived()
            assert traveller.here.driver.console_kinds(traveller.server) == kinds
    finally:
        traveller.clean()


def add_bridge(space: str, name: str) -> None:
    subprocess.run(
        ["ip", "-n", space, "link", "add", "name", name, "up", "type", "bridge"], check=True
    )


def test_guest_on_shared_storage_cannot_run_on_two_hosts(
    machines: Machines, bootable: Path
) -> None:
    """QEMU locks the disk, and the lock moves with the guest."""
    traveller = Traveller(machines, bootable, shared=True)
    try:
        for _ in range(2):
            with pytest.raises(VerbFailed) as failure:
                traveller.there.driver.install(
                    replace(traveller.spec, fence=traveller.spec.fence + 1), True, QUIET
                )
            assert "lock" in failure.value.details
            traveller.check_counts(traveller.here)
            traveller.migrate()
            traveller.check_arrived()
    finally:
        traveller.clean()


def test_ensure_absent_removes_guest_during_live_migration(
    machines: Machines, bootable: Path
) -> None:
    traveller = Traveller(machines, bootable)
    removals: list[int] = []

    def remove(stats: Mapping[str, int]) -> bool:
        if stats["memory_processed"] and not removals:
            removals.append(1)
            traveller.here.driver.ensure_absent(traveller.server, traveller.spec.fence + 1)
        return bool(removals)

    with contextlib.suppress(Cancelled, VerbFailed):
        traveller.migrate(run=Steered(cancels=True, when=remove).run, bandwidth=SLOW)
    assert removals
    with contextlib.closing(Connection(traveller.uris[1])) as destination:
        await_true(
            lambda: destination.find(traveller.server) is None, 20, lambda: "it still arrives"
        )
    assert traveller.here.state(traveller.server) is None
    assert traveller.here.files(traveller.server) == []
    traveller.clean()
