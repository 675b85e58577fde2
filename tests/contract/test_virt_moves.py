# SPDX-License-Identifier: Apache-2.0
"""What every virt driver must do with a guest that moves to another host while it is off, whatever
happens between.

On pairs of hosts in memory, of libvirt's mock-up and with real QEMU guests. A canary on the disk
tells that it is the guest's own.
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
from tests.contract.virt_pairs import LARGER, SECRET, Pair, cut, disk_gb, stalled, trickling
from tests.contract.virt_rigs import QUIET

#: A secret that is in no file by chance.
ANOTHER = "another-5b1c8e0d"


# --- its files ---
def test_a_guest_that_is_off_moves_with_its_disk_which_grows(pair: Pair) -> None:
    spec = replace(pair.off_with_canary(has_run=True), flavor=LARGER)
    there = pair.destination.driver
    there.prepare(spec, pair.peer(spec.server), pair.destination.read_image, QUIET)
    assert pair.destination.state(spec.server) is None and pair.destination.files(spec.server) == []
    for _ in range(2):
        pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
        pair.received(spec)
        assert pair.destination.state(spec.server) is None
        assert disk_gb(pair.destination, spec.server) == 2
    assert pair.booted_there(spec)
    boots = pair.destination.boots(spec.server)
    assert there.install(spec, True, QUIET) == DomainState(spec.server, RUNNING, 2)
    assert pair.destination.state(spec.server) == (RUNNING, 2)
    assert pair.destination.boots(spec.server) == boots, "what runs is left running"
    assert there.diagnostics(spec.server)["memory_details"]["maximum"] == LARGER.memory_mb
    assert pair.source.state(spec.server) == (SHUTDOWN, 1)


def test_what_travels_is_what_there_is(pair: Pair) -> None:
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
    assert 0 < pair.received(spec) <= offered


def test_a_guest_goes_back_to_where_its_files_still_are(pair: Pair) -> None:
    before = pair.off_with_canary()
    spec = replace(before, flavor=LARGER)
    pair.received(spec)
    assert pair.booted_there(spec)
    pair.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    back = replace(before, fence=4)
    boots = pair.source.boots(spec.server)
    for _ in range(2):
        assert pair.source.driver.install(back, True, QUIET) == DomainState(spec.server, RUNNING, 4)
    assert pair.source.has_canary(spec.server, boots + 1)
    assert (
        pair.source.driver.diagnostics(spec.server)["memory_details"]["maximum"]
        == before.flavor.memory_mb
    )
    pair.destination.driver.ensure_absent(spec.server, 4)
    assert pair.destination.state(spec.server) is None and pair.destination.files(spec.server) == []


def test_files_without_a_domain_are_told(pair: Pair) -> None:
    spec, driver = pair.off_with_canary(), pair.destination.driver
    assert pair.source.driver.files_alone() == driver.files_alone() == []
    pair.received(spec)
    assert driver.files_alone() == [spec.server]
    driver.install(replace(spec, fence=3), False, QUIET)
    assert driver.files_alone() == []
    driver.ensure_absent(spec.server, 4)
    assert driver.files_alone() == []


def test_what_was_off_stays_off_until_it_is_started(pair: Pair) -> None:
    spec = pair.off_with_canary()
    pair.received(spec)
    for _ in range(2):
        assert pair.destination.driver.install(spec, False, QUIET) == DomainState(
            spec.server, SHUTDOWN, 2
        )
    assert pair.destination.state(spec.server) == (SHUTDOWN, 2)
    assert pair.destination.driver.ensure_running(spec.server, 3, QUIET) == DomainState(
        spec.server, RUNNING, 3
    )


def test_installed_with_cpus_that_wait(pair: Pair) -> None:
    spec = replace(pair.off_with_canary(), paused=True)
    pair.received(spec)
    assert pair.destination.driver.install(spec, True, QUIET) == DomainState(spec.server, PAUSED, 2)
    assert pair.destination.driver.ensure_running(spec.server, 2, QUIET) == DomainState(
        spec.server, RUNNING, 2
    )


def test_nothing_is_installed_of_files_that_are_not_here(pair: Pair) -> None:
    spec = pair.off_with_canary()
    with pytest.raises(VerbFailed, match="files"):
        pair.destination.driver.install(spec, True, QUIET)
    with pytest.raises(VerbFailed, match="files"):
        pair.destination.driver.receive(spec, None, pair.destination.read_image, QUIET)
    assert pair.destination.state(spec.server) is None


def test_files_are_given_for_the_right_secret_only_and_only_as_long_as_it_counts(
    pair: Pair,
) -> None:
    spec = pair.off_with_canary()
    driver, server = pair.source.driver, spec.server
    for wrong in ("guess", "", SECRET[:-1]):
        refuses(pair, server, wrong)
        with pytest.raises((errors.Forbidden, VerbFailed)):
            pair.destination.driver.receive(
                spec, pair.peer(server, wrong), pair.destination.read_image, QUIET
            )
    assert pair.destination.state(server) is None
    with pytest.raises(errors.NotFound):
        list(driver.read_part(server, SECRET, "../disk"))
    if pair.source.kind != "test":  # its guests end with the connection
        driver = pair.source.restart()
        assert driver.parts(server, SECRET), "an agent that begins anew still knows"
    driver.offer(server, 2, ANOTHER, QUIET)
    refuses(pair, server, SECRET)
    assert driver.parts(server, ANOTHER)
    files = [path for path in pair.source.files(server) if path.is_file()]
    assert [path for path in files if ANOTHER.encode() in path.read_bytes()] == []
    driver.ensure_running(server, 3, QUIET)
    refuses(pair, server, ANOTHER)
    driver.ensure_absent(server, 4)
    refuses(pair, server, ANOTHER)


def refuses(pair: Pair, server: str, secret: str) -> None:
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
def test_a_copy_that_breaks_off_says_so_and_is_made_again(pair: Pair, problem: Exception) -> None:
    spec = pair.off_with_canary()
    with pytest.raises(type(problem), match=str(problem)):
        pair.received(spec, cut(problem))
    assert pair.destination.state(spec.server) is None
    if isinstance(problem, VerbFailed):
        with pytest.raises(VerbFailed, match="files"):
            pair.destination.driver.install(spec, True, QUIET)
    pair.received(spec)
    assert pair.booted_there(spec)


def test_a_copy_that_broke_off_leaves_nothing_when_it_is_given_up(pair: Pair) -> None:
    spec = pair.off_with_canary()
    with pytest.raises(errors.Unavailable):
        pair.received(spec, cut(errors.Unavailable("The other host is gone.")))
    pair.destination.driver.ensure_absent(spec.server, 3)
    assert pair.destination.files(spec.server) == []
    assert pair.source.state(spec.server) == (SHUTDOWN, 1)


@pytest.mark.parametrize("way", ["stalls", "trickles"])
def test_a_copy_stops_within_five_seconds(pair: Pair, way: str) -> None:
    spec = pair.off_with_canary()
    cancelled, letting_go = threading.Event(), threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        stalling = stalled(letting_go, 0.05 if pair.source.kind == "memory" else 60)
        pair.received(
            spec,
            stalling if way == "stalls" else trickling,
            VerbContext(lambda name: None, cancelled.is_set),
        )
    assert time.monotonic() - began < 5
    letting_go.set()
    assert pair.destination.state(spec.server) is None
    pair.received(spec)
    assert pair.booted_there(spec)


def test_a_running_guest_gives_only_what_it_cannot_change(pair: Pair) -> None:
    spec = pair.source.boot()
    pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
    assert "disk" not in [part.name for part in pair.peer(spec.server).parts()]
    with pytest.raises(VerbFailed, match="no guest on this host"):
        pair.source.driver.offer(str(uuid.uuid4()), 1, SECRET, QUIET)


# --- what keeps it from coming ---
def test_what_cannot_come_is_refused_before_the_guest_is_stopped(pair: Pair) -> None:
    spec = pair.off_with_canary()
    refused = {
        "GiB": replace(spec, flavor=Flavor("9", "huge", 1, 128, 10_000_000)),
        "CPUs, memory or devices of its own": replace(
            spec, flavor=Flavor("8", "own", 1, 128, 1, extra_specs={"hw:cpu_policy": "dedicated"})
        ),
    }
    for reason, asked in refused.items():
        with pytest.raises(VerbFailed, match=reason):
            pair.destination.driver.prepare(
                asked, pair.peer(spec.server), pair.destination.read_image, QUIET
            )
    for _ in range(2):
        pair.destination.driver.prepare(
            spec, pair.peer(spec.server), pair.destination.read_image, QUIET
        )
    assert pair.destination.state(spec.server) is None and pair.destination.files(spec.server) == []


# --- shared storage ---
def test_a_guest_of_shared_storage_is_found_there(sharing: Pair) -> None:
    spec = sharing.off_with_canary(has_run=True)
    for _ in range(2):
        assert sharing.received(spec) == 0
    assert sharing.booted_there(spec)
    for _ in range(2):
        sharing.source.driver.ensure_absent(spec.server, 2, keep_files=True)
    assert sharing.source.state(spec.server) is None
    assert sharing.destination.state(spec.server) == (RUNNING, 2)
    sharing.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert sharing.destination.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING
    sharing.destination.driver.ensure_absent(spec.server, 5)
    assert sharing.destination.files(spec.server) == []


# --- what must not run ---
def test_a_guest_that_is_active_or_has_memory_does_not_move(pair: Pair) -> None:
    driver, spec = pair.source.driver, pair.source.boot()
    again = replace(spec, fence=2)
    for pause in (False, True):
        if pause:
            driver.ensure_paused(spec.server, 1, QUIET)
        before = pair.source.state(spec.server)
        for runs in (True, False):
            with pytest.raises(VerbFailed, match="was started on this host meanwhile"):
                driver.install(again, runs, QUIET)
        assert pair.source.state(spec.server) == before
    driver.ensure_running(spec.server, 1, QUIET)
    driver.ensure_suspended(spec.server, 1, QUIET)
    with pytest.raises(VerbFailed, match="is suspended, and its memory cannot move"):
        driver.offer(spec.server, 2, SECRET, QUIET)


def test_a_plug_is_pulled_whatever_the_guest_does(pair: Pair) -> None:
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
