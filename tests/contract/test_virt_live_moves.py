# SPDX-License-Identifier: Apache-2.0
"""The requirements of every virt driver for live migrations.

The tests include aborts, cancellations and repetitions. The tests run on pairs of hosts in memory
and with real QEMU guests, with local and with shared storage. A counter in the guest's memory shows
that the guest never stopped.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

import pytest

from common.domain import errors
from common.domain.models import Control, DomainState, GuestSpec
from common.domain.server_facts import facts_of
from compute_agent.verb_context import Cancelled, MigrationAborted, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.script import Slow
from tests.contract.virt_pairs import (
    Pair,
    ticks,
)
from tests.contract.virt_rigs import QUIET
from tests.waiting import await_true


def prepare_twice(pair: Pair, spec: GuestSpec) -> dict[str, object]:
    """Prepare the destination twice, and return the second answer."""
    answer: dict[str, object] = {}
    for _ in range(2):
        answer = pair.destination.driver.prepare_incoming(
            spec, pair.peer(spec.server), pair.shared, {}, pair.destination.read_image, QUIET
        )
    assert pair.destination.state(spec.server) is None
    return answer


def test_live_migration_moves_running_guest_without_restart(live: Pair) -> None:
    spec = live.start_counting_guest()
    to = prepare_twice(live, spec)
    reports: list[dict[str, int]] = []
    run = VerbContext(
        lambda name: None,
        lambda: False,
        report_migration=lambda numbers: reports.append(dict(numbers)),
    )
    ticks_before = ticks(live.source, spec.server)
    totals = live.source.driver.live_migrate(spec, to, live.shared, run)
    assert totals["bytes"] > 0 and 0 <= totals["job_seconds"] < 60
    assert live.source.state(spec.server) is None
    for _ in range(2):
        repeated_totals = live.source.driver.live_migrate(spec, to, live.shared, QUIET)
        assert set(repeated_totals) == {"bytes", "job_seconds"}
        assert live.destination.driver.finish_incoming(spec, QUIET) == DomainState(
            spec.server, RUNNING, 2
        )
    assert live.destination.state(spec.server) == (RUNNING, 2)
    assert live.destination.driver.server_facts(spec.server) == facts_of(spec)
    live.check_continues(spec, ticks_before)
    assert reports and set(reports[-1]) <= {
        f"{kind}_{part}"
        for kind in ("memory", "disk")
        for part in ("total", "processed", "remaining")
    }
    live.source.driver.ensure_absent(spec.server, 2, keep_files=live.shared)
    assert live.source.state(spec.server) is None
    live.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert live.destination.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING


def test_live_migration_of_paused_guest_keeps_it_paused(live: Pair) -> None:
    spec = live.start_counting_guest()
    live.source.driver.ensure_paused(spec.server, 1, QUIET)
    ticks_before = ticks(live.source, spec.server)
    to = prepare_twice(live, spec)
    live.source.driver.live_migrate(spec, to, live.shared, QUIET)
    assert live.source.state(spec.server) is None
    assert live.destination.driver.finish_incoming(spec, QUIET) == DomainState(
        spec.server, PAUSED, 2
    )
    assert live.destination.driver.ensure_running(spec.server, 3, QUIET).power_state == RUNNING
    live.check_continues(spec, ticks_before)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_aborted_live_migration_leaves_guest_running_on_source(live: Pair, when: str) -> None:
    spec = live.start_counting_guest()
    to = prepare_twice(live, spec)
    progress: list[object] = [] if when == "meanwhile" else [True]
    live.slow_migrations_down()
    run = VerbContext(
        progress.append, lambda: False, lambda: Control.ABORT if progress else None, progress.append
    )
    start = time.monotonic()
    with pytest.raises(MigrationAborted):
        live.source.driver.live_migrate(spec, to, live.shared, run)
    assert time.monotonic() - start < 20
    assert live.source.state(spec.server) == (RUNNING, 1)
    check_nothing_arrived(live, spec)
    live.source.restart()
    ticks_before = ticks(live.source, spec.server)
    live.source.driver.live_migrate(spec, prepare_twice(live, spec), live.shared, QUIET)
    live.destination.driver.finish_incoming(spec, QUIET)
    live.check_continues(spec, ticks_before)


def check_nothing_arrived(pair: Pair, spec: GuestSpec) -> None:
    for _ in range(2):
        with pytest.raises(VerbFailed, match="did not arrive"):
            pair.destination.driver.finish_incoming(spec, QUIET)
    assert pair.destination.state(spec.server) is None


def test_finish_incoming_without_migration_fails_and_source_keeps_guest(live: Pair) -> None:
    spec = live.start_counting_guest()
    check_nothing_arrived(live, spec)
    prepare_twice(live, spec)
    check_nothing_arrived(live, spec)
    live.destination.driver.ensure_absent(spec.server, 2, keep_files=live.shared)
    assert live.source.state(spec.server) == (RUNNING, 1)
    ticks_before = ticks(live.source, spec.server)
    live.source.driver.ensure_running(spec.server, 1, QUIET)
    assert ticks(live.source, spec.server) >= ticks_before


def test_cancelled_live_migration_leaves_guest_on_exactly_one_host(live: Pair) -> None:
    spec = live.start_counting_guest()
    to = prepare_twice(live, spec)
    progress: list[object] = []
    cancel_times: list[float] = []
    if isinstance(live.source.driver, MemoryDriver):
        live.source.driver.host.script["live_migrate"] = [Slow(60)]

    def is_cancelled() -> bool:
        cancel_times.extend([time.monotonic()] if progress else [])
        return bool(progress)

    try:
        live.source.driver.live_migrate(
            spec,
            to,
            live.shared,
            VerbContext(progress.append, is_cancelled, report_migration=progress.append),
        )
    except Cancelled:
        assert time.monotonic() - cancel_times[0] < 5
    # The destination decides. A busy hypervisor may receive the cancellation too late. The source
    # shows the guest until the destination reports success.
    try:
        state = live.destination.driver.finish_incoming(spec, QUIET)
    except VerbFailed as failure:
        assert "did not arrive" in str(failure)
        check_nothing_arrived(live, spec)
        expected: tuple[str, int] | None = (RUNNING, 1)
    else:
        assert state == DomainState(spec.server, RUNNING, 2)
        expected = None
    await_true(
        lambda: live.source.state(spec.server) == expected,
        20,
        lambda: f"it is {live.source.state(spec.server)}, and not {expected}",
    )


def test_live_migrate_repeated_after_lost_answer_does_not_move_again(
    live: Pair,
) -> None:
    """The agent dies after the move and before the answer."""
    spec = live.start_counting_guest()
    to = prepare_twice(live, spec)
    ticks_before = ticks(live.source, spec.server)
    if isinstance(live.source.driver, MemoryDriver):
        live.source.driver.host.script["live_migrate"] = [Slow(60, after=True)]
        cancel_after_move = VerbContext(
            lambda name: None, lambda: live.source.state(spec.server) is None
        )
        with pytest.raises(Cancelled):
            live.source.driver.live_migrate(spec, to, live.shared, cancel_after_move)
    else:
        live.source.driver.live_migrate(spec, to, live.shared, QUIET)
    live.source.restart()
    assert set(live.source.driver.live_migrate(spec, to, live.shared, QUIET)) == {
        "bytes",
        "job_seconds",
    }
    live.destination.driver.finish_incoming(spec, QUIET)
    live.check_continues(spec, ticks_before)


def test_live_migration_of_wrong_architecture_or_stopped_guest_is_refused(live: Pair) -> None:
    spec = live.start_counting_guest()
    driver, read = live.destination.driver, live.destination.read_image
    with pytest.raises(VerbFailed, match="lacks the architecture s390x"):
        driver.prepare_incoming(
            spec, live.peer(spec.server), live.shared, {"arch": "s390x"}, read, QUIET
        )
    stranger = replace(spec, server=str(uuid.uuid4()))
    with pytest.raises((VerbFailed, errors.Forbidden)):
        driver.prepare_incoming(stranger, live.peer(stranger.server), live.shared, {}, read, QUIET)
    live.source.servers.append(stranger.server)
    to = prepare_twice(live, spec)
    live.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    with pytest.raises(VerbFailed, match="does not run"):
        live.source.driver.live_migrate(spec, to, live.shared, QUIET)
    assert live.source.state(spec.server) == (SHUTDOWN, 1)


def test_live_migration_to_unreachable_host_leaves_guest_running(live: Pair) -> None:
    spec = live.start_counting_guest()
    to = prepare_twice(live, spec)
    nowhere = {**to, "uri": "qemu+tcp://127.0.0.1:9/system", "address": "127.0.0.1"}
    with pytest.raises(VerbFailed):
        live.source.driver.live_migrate(spec, nowhere, live.shared, QUIET)
    assert live.source.state(spec.server) == (RUNNING, 1)
    check_nothing_arrived(live, spec)
