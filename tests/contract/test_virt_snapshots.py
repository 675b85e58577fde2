# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a server's disk, and the guest agent.

The guest agent freezes file systems and sets passwords. The hypervisors are those of
test_virt_driver.py. A canary on the guest's disk shows whether a copy is complete.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.domain import errors
from common.domain.models import ImageRef
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.memory.driver import MemoryDriver
from deploy.one_machine.machine import libvirtd
from tests.contract.virt_rigs import (
    AGENT,
    BOOT_SECONDS,
    QUIET,
    Rig,
    holds_canary,
)
from tests.phases import Phases
from tests.waiting import await_true


def take_snapshot(rig: Rig, server: str, run: VerbContext = QUIET) -> bytes:
    chunks: list[bytes] = []
    assert rig.driver.snapshot(server, 9, chunks.extend, run) == sum(map(len, chunks))
    assert max(map(len, chunks)) <= 1 << 20
    assert not [path for path in rig.files(server) if "snapshot" in path.name]
    return b"".join(chunks)


def has_canary_in(rig: Rig, content: bytes, folder: Path) -> bool:
    (folder / "copy").write_bytes(content)
    return b"canary" in content if rig.kind == "memory" else holds_canary(folder / "copy")


def test_snapshot_of_running_paused_suspended_or_off_guest_contains_its_data(
    rig: Rig, tmp_path: Path
) -> None:
    spec = rig.boot_with_canary()
    phases = Phases()
    if rig.kind == "test":
        with pytest.raises(VerbFailed, match="could not copy the guest's disk"):
            take_snapshot(rig, spec.server)
    else:
        content = take_snapshot(rig, spec.server, VerbContext(phases, lambda: False))
        assert phases[0].startswith("copying disk") and phases[-1] == "uploading 100 %"
        assert rig.state(spec.server) == (RUNNING, 1)
        image = ImageRef(
            str(uuid.uuid4()), "qcow2", len(content), "sha512", hashlib.sha512(content).hexdigest()
        )
        copy = replace(rig.spec(), image=image, user_data=spec.user_data)
        rig.driver.ensure_guest(copy, lambda name: iter([content]), QUIET)
        assert rig.has_canary(copy.server, 1)
    check_snapshots_of_idle_guest(rig, spec.server, tmp_path)


def check_snapshots_of_idle_guest(rig: Rig, server: str, folder: Path) -> None:
    rig.driver.ensure_paused(server, 2, QUIET)
    if rig.kind != "test":
        assert has_canary_in(rig, take_snapshot(rig, server), folder)
    assert rig.state(server) == (PAUSED, 2)
    rig.driver.ensure_suspended(server, 3, QUIET)
    assert has_canary_in(rig, take_snapshot(rig, server), folder)
    rig.driver.ensure_stopped(server, 4, 0, QUIET)
    assert has_canary_in(rig, take_snapshot(rig, server), folder)
    assert rig.state(server) == (SHUTDOWN, 4)


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_snapshot_replaces_unfinished_copy_left_by_ended_agent(
    rig: Rig, private_libvirtd: Path
) -> None:
    from compute_agent.virt.libvirt.domains.connection import Connection
    from compute_agent.virt.libvirt.guests.snapshots import backup_xml

    spec = rig.boot()
    order = backup_xml("vda", rig.folder / "instances" / spec.server / "snapshot.part")
    dead = Connection(libvirtd.uri(private_libvirtd))
    dead.on(spec.server, "copy the disk", lambda domain: domain.backupBegin(order, None, 0))
    dead.close()
    assert len(take_snapshot(rig, spec.server)) > len(rig.content) // 2


@pytest.mark.parametrize("phase", ["copying disk", "uploading"])
def test_cancelled_snapshot_leaves_no_files_and_can_be_repeated(rig: Rig, phase: str) -> None:
    spec = rig.boot()
    if rig.kind == "test":
        rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    phases = Phases()
    looks = 0

    def is_cancelled() -> bool:
        nonlocal looks
        looks += bool(phases) and phases[-1].startswith(phase)
        return looks > (1 if phase == "copying disk" and rig.real else 0)

    chunks: list[bytes] = []
    start = time.monotonic()
    if rig.kind != "memory" or phase == "copying disk":
        with pytest.raises(Cancelled):
            rig.driver.snapshot(spec.server, 2, chunks.extend, VerbContext(phases, is_cancelled))
    assert time.monotonic() - start < 5
    assert not [path for path in rig.files(spec.server) if "snapshot" in path.name]
    assert take_snapshot(rig, spec.server)


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_snapshot_cancelled_at_end_of_copy_is_not_uploaded(
    rig: Rig, private_libvirtd: Path
) -> None:
    from compute_agent.virt.libvirt.domains import jobs
    from compute_agent.virt.libvirt.domains.connection import Connection

    spec = rig.boot()
    libvirt, phases, chunks = Connection(libvirtd.uri(private_libvirtd)), Phases(), list[bytes]()
    phase_count = 0

    def is_copied() -> bool:
        nonlocal phase_count
        phases_before, phase_count = phase_count, len(phases)
        # A completed job has no stats any more.
        return phases_before == phase_count and not jobs.stats_of(libvirt, spec.server)

    with pytest.raises(Cancelled):
        rig.driver.snapshot(spec.server, 2, chunks.extend, VerbContext(phases, is_copied))
    assert chunks == [] and phases[-1].startswith("copying disk")
    libvirt.close()


def test_snapshot_leaves_no_files_when_image_service_refuses_or_is_down(rig: Rig) -> None:
    spec = rig.boot()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)

    def refuse(chunks: Iterator[bytes]) -> None:
        next(chunks)
        raise errors.Forbidden("The image quota is used up.")

    def raise_unavailable(chunks: Iterator[bytes]) -> None:
        raise errors.Unavailable("The image service does not answer.")

    with pytest.raises(VerbFailed, match="quota"):
        rig.driver.snapshot(spec.server, 3, refuse, QUIET)
    with pytest.raises(errors.Unavailable):
        rig.driver.snapshot(spec.server, 3, raise_unavailable, QUIET)
    assert not [path for path in rig.files(spec.server) if "snapshot" in path.name]


def test_guest_agent_sets_password_and_freezes_file_systems(rig: Rig) -> None:
    spec = rig.boot(ready=True, user_data=AGENT)
    await_true(
        lambda: can_set_password(rig, spec.server),
        BOOT_SECONDS,
        lambda: rig.console(spec.server)[-1000:],
    )
    if isinstance(rig.driver, MemoryDriver):
        assert rig.driver.host.guests[spec.server].knows_password("root", "s3cret")
    if not rig.real:
        return
    await_true(
        lambda: "agent: password is s3cret" in rig.console(spec.server),
        BOOT_SECONDS,
        lambda: rig.console(spec.server)[-1000:],
    )
    await_true(
        lambda: is_unknown_user_refused(rig, spec.server),
        BOOT_SECONDS,
        lambda: rig.console(spec.server)[-1000:],
    )
    take_snapshot(rig, spec.server)

    def was_frozen() -> bool:
        console_text = rig.console(spec.server)
        return -1 < console_text.find("agent: frozen") < console_text.rfind("agent: thawed")

    await_true(was_frozen, 10, lambda: rig.console(spec.server)[-1000:])


def can_set_password(rig: Rig, server: str) -> bool:
    """Return False while the agent of a real guest does not listen yet, or is too slow."""
    try:
        rig.driver.set_password(server, "root", "s3cret")
    except VerbFailed as failure:
        assert "does not answer" in str(failure), failure.details
        return False
    return True


def is_unknown_user_refused(rig: Rig, server: str) -> bool:
    """Return True if the agent refuses a user without showing the password.

    False while the agent is too slow.
    """
    with pytest.raises(VerbFailed) as caught:
        rig.driver.set_password(server, "nobody", "s3cret")
    assert "s3cret" not in f"{caught.value} {caught.value.details} {caught.value.__cause__}"
    if "does not answer" in str(caught.value):
        return False
    assert "did not set the password" in str(caught.value)
    return True


def test_set_password_without_guest_agent_raises_verb_failed(rig: Rig) -> None:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up answers for every agent")
    spec = rig.boot(image=replace(rig.image, properties={"hw_qemu_guest_agent": "no"}))
    with pytest.raises(VerbFailed, match="does not answer"):
        rig.driver.set_password(spec.server, "root", "s3cret")
