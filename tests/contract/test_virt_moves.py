# SPDX-License-Identifier: Apache-2.0
"""The requirements of every virt driver for cold migrations, with interrupted and repeated copies.

The tests run on pairs of hosts in memory, of libvirt's mock-up and with real QEMU guests. A canary
on the disk shows that the disk is the guest's own.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import replace

import pytest

from common.domain import errors
from common.domain.models import DomainState, Flavor
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from tests.contract.virt_pairs import LARGER, SECRET, Pair, cut, disk_gb, stall_road, trickle
from tests.contract.virt_rigs import QUIET

#: A secret that no file contains by chance.
OTHER_SECRET = "another-5b1c8e0d"


# --- files ---
def test_cold_migration_moves_disk_and_grows_it_to_new_flavor(pair: Pair) -> None:
    spec = replace(pair.off_with_canary(has_run=True), flavor=LARGER)
    destination = pair.destination.driver
    destination.prepare(spec, pair.peer(spec.server), pair.destination.read_image, QUIET)
    assert pair.destination.state(spec.server) is None and pair.destination.files(spec.server) == []
    for _ in range(2):
        pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
        pair.transfer(spec)
        assert pair.destination.state(spec.server) is None
        assert disk_gb(pair.destination, spec.server) == 2
    assert pair.boot_at_destination(spec)
    boots = pair.destination.boots(spec.server)
    assert destination.install(spec, True, QUIET) == DomainState(spec.server, RUNNING, 2)
    assert pair.destination.state(spec.server) == (RUNNING, 2)
    assert pair.destination.boots(spec.server) == boots, "what runs is left running"
    assert destination.diagnostics(spec.server)["memory_details"]["maximum"] == LARGER.memory_mb
    assert pair.source.state(spec.server) == (SHUTDOWN, 1)


def test_cold_migration_offer_contains_exactly_the_announced_bytes(pair: Pair) -> None:
    spec = pair.off_with_canary()
    offered = pair.source.driver.offer(spec.server, 1, SECRET, QUIET)["bytes"]
    parts = pair.peer(spec.server).parts()
    assert "disk" in [part.name for part in parts]
    assert sum(part.bytes for part in parts) == offered > 0
    for part in parts:
        end, data = 0, 0
        for at, chunk in pair.peer(spec.server).read(part.name):
            assert end <= at and 0 < len(chunk) <= 1 << 20
            end, data = at + len(chunk), data + len(chunk)
        assert end <= part.size and data == part.bytes
    assert 0 < pair.transfer(spec) <= offered


def test_resize_revert_starts_guest_from_files_left_on_source(pair: Pair) -> None:
    before = pair.off_with_canary()
    spec = replace(before, flavor=LARGER)
    pair.transfer(spec)
    assert pair.boot_at_destination(spec)
    pair.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    reverted = replace(before, fence=4)
    boots = pair.source.boots(spec.server)
    for _ in range(2):
        assert pair.source.driver.install(reverted, True, QUIET) == DomainState(
            spec.server, RUNNING, 4
        )
    assert pair.source.has_canary(spec.server, boots + 1)
    assert (
        pair.source.driver.diagnostics(spec.server)["memory_details"]["maximum"]
        == before.flavor.memory_mb
    )
    pair.destination.driver.ensure_absent(spec.server, 4)
    assert pair.destination.state(spec.server) is None and pair.destination.files(spec.server) == []


def test_files_alone_lists_servers_with_files_but_no_domain(pair: Pair) -> None:
    spec, driver = pair.off_with_canary(), pair.destination.driver
    assert pair.source.driver.files_alone() == driver.files_alone() == []
    pair.transfer(spec)
    assert driver.files_alone() == [spec.server]
    driver.install(replace(spec, fence=3), False, QUIET)
    assert driver.files_alone() == []
    driver.ensure_absent(spec.server, 4)
    assert driver.files_alone() == []


def test_install_of_stopped_guest_leaves_it_off_until_start(pair: Pair) -> None:
    spec = pair.off_with_canary()
    pair.transfer(spec)
    for _ in range(2):
        assert pair.destination.driver.install(spec, False, QUIET) == DomainState(
            spec.server, SHUTDOWN, 2
        )
    assert pair.destination.state(spec.server) == (SHUTDOWN, 2)
    assert pair.destination.driver.ensure_running(spec.server, 3, QUIET) == DomainState(
        spec.server, RUNNING, 3
    )


def test_install_without_start_leaves_active_guest_with_same_fence(pair: Pair) -> None:
    spec = pair.off_with_canary()
    pair.transfer(spec)
    running = DomainState(spec.server, RUNNING, 2)
    assert pair.destination.driver.install(spec, True, QUIET) == running
    assert pair.destination.driver.install(spec, False, QUIET) == running
    assert pair.destination.state(spec.server) == (RUNNING, 2)


def test_install_with_paused_spec_leaves_guest_paused_until_ensure_running(pair: Pair) -> None:
    spec = replace(pair.off_with_canary(), paused=True)
    pair.transfer(spec)
    assert pair.destination.driver.install(spec, True, QUIET) == DomainState(spec.server, PAUSED, 2)
    assert pair.destination.driver.ensure_running(spec.server, 2, QUIET) == DomainState(
        spec.server, RUNNING, 2
    )


def test_install_and_receive_without_copied_files_raise_verb_failed(pair: Pair) -> None:
    spec = pair.off_with_canary()
    with pytest.raises(VerbFailed, match="files"):
        pair.destination.driver.install(spec, True, QUIET)
    with pytest.raises(VerbFailed, match="files"):
        pair.destination.driver.receive(spec, None, pair.destination.read_image, QUIET)
    assert pair.destination.state(spec.server) is None


def test_cold_migration_files_are_readable_only_with_secret_of_last_offer(
    pair: Pair,
) -> None:
    spec = pair.off_with_canary()
    driver, server = pair.source.driver, spec.server
    for wrong in ("guess", "", SECRET[:-1]):
        check_secret_is_refused(pair, server, wrong)
        with pytest.raises((errors.Forbidden, VerbFailed)):
            pair.destination.driver.receive(
                spec, pair.peer(server, wrong), pair.destination.read_image, QUIET
            )
    assert pair.destination.state(server) is None
    with pytest.raises(errors.NotFound):
        list(driver.read_part(server, SECRET, "../disk"))
    # The guests of libvirt's mock-up end with the connection.
    if pair.source.kind != "test":
        driver = pair.source.restart()
        assert driver.parts(server, SECRET), "an agent that begins anew still knows"
    driver.offer(server, 2, OTHER_SECRET, QUIET)
    check_secret_is_refused(pair, server, SECRET)
    assert driver.parts(server, OTHER_SECRET)
    files = [path for path in pair.source.files(server) if path.is_file()]
    assert [path for path in files if OTHER_SECRET.encode() in path.read_bytes()] == []
    driver.ensure_running(server, 3, QUIET)
    check_secret_is_refused(pair, server, OTHER_SECRET)
    driver.ensure_absent(server, 4)
    check_secret_is_refused(pair, server, OTHER_SECRET)


def check_secret_is_refused(pair: Pair, server: str, secret: str) -> None:
    with pytest.raises(errors.Forbidden):
        pair.source.driver.parts(server, secret)
    with pytest.raises(errors.Forbidden):
        list(pair.source.driver.read_part(server, secret, "disk"))


@pytest.mark.parametrize(
    "problem",
    [
        errors.Unavailable("The other host is gone."),
        VerbFailed("Not what was sent.", retryable=True),
    ],
    ids=["lost", "altered"],
)
def test_interrupted_cold_migration_copy_raises_error_and_can_be_repeated(
    pair: Pair, problem: Exception
) -> None:
    spec = pair.off_with_canary()
    with pytest.raises(type(problem), match=str(problem)):
        pair.transfer(spec, cut(problem))
    assert pair.destination.state(spec.server) is None
    if isinstance(problem, VerbFailed):
        with pytest.raises(VerbFailed, match="files"):
            pair.destination.driver.install(spec, True, QUIET)
    pair.transfer(spec)
    assert pair.boot_at_destination(spec)


def test_ensure_absent_after_interrupted_copy_removes_files(pair: Pair) -> None:
    spec = pair.off_with_canary()
    with pytest.raises(errors.Unavailable):
        pair.transfer(spec, cut(errors.Unavailable("The other host is gone.")))
    pair.destination.driver.ensure_absent(spec.server, 3)
    assert pair.destination.files(spec.server) == []
    assert pair.source.state(spec.server) == (SHUTDOWN, 1)


@pytest.mark.parametrize("fault", ["stalls", "trickles"])
def test_cancelled_cold_migration_copy_ends_within_five_seconds(pair: Pair, fault: str) -> None:
    spec = pair.off_with_canary()
    cancelled, stall_end = threading.Event(), threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    start = time.monotonic()
    with pytest.raises(Cancelled):
        stalled_copy = stall_road(stall_end, 0.05 if pair.source.kind == "memory" else 60)
        pair.transfer(
            spec,
            stalled_copy if fault == "stalls" else trickle,
            VerbContext(lambda name: None, cancelled.is_set),
        )
    assert time.monotonic() - start < 5
    stall_end.set()
    assert pair.destination.state(spec.server) is None
    pair.transfer(spec)
    assert pair.boot_at_destination(spec)


def test_offer_of_running_guest_omits_its_disk(pair: Pair) -> None:
    spec = pair.source.boot()
    pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
    assert "disk" not in [part.name for part in pair.peer(spec.server).parts()]
    with pytest.raises(VerbFailed, match="no guest on this host"):
        pair.source.driver.offer(str(uuid.uuid4()), 1, SECRET, QUIET)


# --- refused destinations ---
def test_prepare_refuses_too_large_disk_and_unclaimed_dedicated_cpus(pair: Pair) -> None:
    spec = pair.off_with_canary()
    refused_specs = {
        "GiB": replace(spec, flavor=Flavor("9", "huge", 1, 128, 10_000_000)),
        "dedicated CPUs, memory or devices of the host": replace(
            spec, flavor=Flavor("8", "own", 1, 128, 1, extra_specs={"hw:cpu_policy": "dedicated"})
        ),
    }
    for reason, refused_spec in refused_specs.items():
        with pytest.raises(VerbFailed, match=reason):
            pair.destination.driver.prepare(
                refused_spec, pair.peer(spec.server), pair.destination.read_image, QUIET
            )
    for _ in range(2):
        pair.destination.driver.prepare(
            spec, pair.peer(spec.server), pair.destination.read_image, QUIET
        )
    assert pair.destination.state(spec.server) is None and pair.destination.files(spec.server) == []


# --- shared storage ---
def test_cold_migration_on_shared_storage_copies_no_files(sharing: Pair) -> None:
    spec = sharing.off_with_canary(has_run=True)
    for _ in range(2):
        assert sharing.transfer(spec) == 0
    assert sharing.boot_at_destination(spec)
    for _ in range(2):
        sharing.source.driver.ensure_absent(spec.server, 2, keep_files=True)
    assert sharing.source.state(spec.server) is None
    assert sharing.destination.state(spec.server) == (RUNNING, 2)
    sharing.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert sharing.destination.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING
    sharing.destination.driver.ensure_absent(spec.server, 5)
    assert sharing.destination.files(spec.server) == []


# --- running and suspended guests ---
def test_install_fails_on_running_or_paused_and_offer_on_suspended_guest(pair: Pair) -> None:
    driver, spec = pair.source.driver, pair.source.boot()
    new_spec = replace(spec, fence=2)
    for pause in (False, True):
        if pause:
            driver.ensure_paused(spec.server, 1, QUIET)
        before = pair.source.state(spec.server)
        for runs in (True, False):
            with pytest.raises(VerbFailed, match="was started on this host meanwhile"):
                driver.install(new_spec, runs, QUIET)
        assert pair.source.state(spec.server) == before
    driver.ensure_running(spec.server, 1, QUIET)
    driver.ensure_suspended(spec.server, 1, QUIET)
    with pytest.raises(VerbFailed, match="is suspended, and its saved memory cannot move"):
        driver.offer(spec.server, 2, SECRET, QUIET)


def test_pull_plug_stops_running_paused_or_suspended_guest(pair: Pair) -> None:
    rig = pair.source
    rig.driver.pull_plug(str(uuid.uuid4()))
    spec = rig.boot(fence=7)
    for prepare in (
        lambda: None,
        lambda: rig.driver.ensure_paused(spec.server, 7, QUIET),
        lambda: rig.driver.ensure_suspended(spec.server, 7, QUIET),
    ):
        rig.driver.ensure_running(spec.server, 7, QUIET)
        prepare()
        for _ in range(2):
            rig.driver.pull_plug(spec.server)
            assert rig.state(spec.server) == (SHUTDOWN, 7)
    rig.driver.ensure_running(spec.server, 8, QUIET)
    if rig.kind == "memory":
        assert rig.boots(spec.server) == 4, "no memory was kept"
