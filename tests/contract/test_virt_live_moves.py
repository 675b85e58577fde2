# SPDX-License-Identifier: Apache-2.0
"""What every virt driver must do with a guest that moves to another host while it runs, whatever
happens between.

On pairs of hosts in memory and with real QEMU guests, with storage of their own and with shared
storage. A counter in the guest's memory tells that it never stopped.
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


def prepared(pair: Pair, spec: GuestSpec) -> dict[str, object]:
    """What the destination says of itself."""
    told: dict[str, object] = {}
    for _ in range(2):
        told = pair.destination.driver.prepare_incoming(
            spec, pair.peer(spec.server), pair.shared, {}, pair.destination.read_image, QUIET
        )
    assert pair.destination.state(spec.server) is None
    return told


def test_a_running_guest_goes_on_where_it_was(live: Pair) -> None:
    spec = live.counting()
    to = prepared(live, spec)
    told: list[dict[str, int]] = []
    run = VerbContext(
        lambda name: None,
        lambda: False,
        report_migration=lambda numbers: told.append(dict(numbers)),
    )
    ticked = ticks(live.source, spec.server)
    moved = live.source.driver.live_migrate(spec, to, live.shared, run)
    assert moved["bytes"] > 0 and 0 <= moved["job_seconds"] < 60
    assert live.source.state(spec.server) is None
    for _ in range(2):
        again = live.source.driver.live_migrate(spec, to, live.shared, QUIET)
        assert set(again) == {"bytes", "job_seconds"}
        assert live.destination.driver.finish_incoming(spec, QUIET) == DomainState(
            spec.server, RUNNING, 2
        )
    assert live.destination.state(spec.server) == (RUNNING, 2)
    assert live.destination.driver.server_facts(spec.server) == facts_of(spec)
    live.goes_on(spec, ticked)
    assert told and set(told[-1]) <= {
        f"{what}_{part}"
        for what in ("memory", "disk")
        for part in ("total", "processed", "remaining")
    }
    live.source.driver.ensure_absent(spec.server, 2, keep_files=live.shared)
    assert live.source.state(spec.server) is None
    live.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert live.destination.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING


def test_a_paused_guest_stays_paused(live: Pair) -> None:
    spec = live.counting()
    live.source.driver.ensure_paused(spec.server, 1, QUIET)
    ticked = ticks(live.source, spec.server)
    to = prepared(live, spec)
    live.source.driver.live_migrate(spec, to, live.shared, QUIET)
    assert live.source.state(spec.server) is None
    assert live.destination.driver.finish_incoming(spec, QUIET) == DomainState(
        spec.server, PAUSED, 2
    )
    assert live.destination.driver.ensure_running(spec.server, 3, QUIET).power_state == RUNNING
    live.goes_on(spec, ticked)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_aborted_migration_leaves_the_guest_as_it_was(live: Pair, when: str) -> None:
    spec = live.counting()
    to = prepared(live, spec)
    begun: list[object] = [] if when == "meanwhile" else [True]
    live.dawdle()
    run = VerbContext(
        begun.append, lambda: False, lambda: Control.ABORT if begun else None, begun.append
    )
    began = time.monotonic()
    with pytest.raises(MigrationAborted):
        live.source.driver.live_migrate(spec, to, live.shared, run)
    assert time.monotonic() - began < 20
    assert live.source.state(spec.server) == (RUNNING, 1)
    nothing_came(live, spec)
    live.source.restart()
    ticked = ticks(live.source, spec.server)
    live.source.driver.live_migrate(spec, prepared(live, spec), live.shared, QUIET)
    live.destination.driver.finish_incoming(spec, QUIET)
    live.goes_on(spec, ticked)


def nothing_came(pair: Pair, spec: GuestSpec) -> None:
    for _ in range(2):
        with pytest.raises(VerbFailed, match="did not arrive"):
            pair.destination.driver.finish_incoming(spec, QUIET)
    assert pair.destination.state(spec.server) is None


def test_what_never_came_did_not_arrive_and_is_cleaned_up(live: Pair) -> None:
    spec = live.counting()
    nothing_came(live, spec)
    prepared(live, spec)
    nothing_came(live, spec)
    live.destination.driver.ensure_absent(spec.server, 2, keep_files=live.shared)
    assert live.source.state(spec.server) == (RUNNING, 1)
    ticked = ticks(live.source, spec.server)
    live.source.driver.ensure_running(spec.server, 1, QUIET)
    assert ticks(live.source, spec.server) >= ticked


def test_a_cancelled_migration_is_aborted_or_has_happened(live: Pair) -> None:
    spec = live.counting()
    to = prepared(live, spec)
    begun: list[object] = []
    asked: list[float] = []
    if isinstance(live.source.driver, MemoryDriver):
        live.source.driver.host.script["live_migrate"] = [Slow(60)]

    def cancelled() -> bool:
        asked.extend([time.monotonic()] if begun else [])
        return bool(begun)

    try:
        live.source.driver.live_migrate(
            spec,
            to,
            live.shared,
            VerbContext(begun.append, cancelled, report_migration=begun.append),
        )
    except Cancelled:
        assert time.monotonic() - asked[0] < 5
    # The destination says which: a busy hypervisor may hear of the cancel too late, and the source
    # shows the guest until it is told that the destination has it.
    try:
        arrived = live.destination.driver.finish_incoming(spec, QUIET)
    except VerbFailed as refused:
        assert "did not arrive" in str(refused)
        nothing_came(live, spec)
        remains: tuple[str, int] | None = (RUNNING, 1)
    else:
        assert arrived == DomainState(spec.server, RUNNING, 2)
        remains = None
    await_true(
        lambda: live.source.state(spec.server) == remains,
        20,
        lambda: f"it is {live.source.state(spec.server)}, and not {remains}",
    )


def test_a_guest_that_was_handed_over_before_anybody_was_told_is_not_moved_twice(
    live: Pair,
) -> None:
    """The agent dies between the effect and its answer."""
    spec = live.counting()
    to = prepared(live, spec)
    ticked = ticks(live.source, spec.server)
    if isinstance(live.source.driver, MemoryDriver):
        live.source.driver.host.script["live_migrate"] = [Slow(60, after=True)]
        gone = VerbContext(lambda name: None, lambda: live.source.state(spec.server) is None)
        with pytest.raises(Cancelled):
            live.source.driver.live_migrate(spec, to, live.shared, gone)
    else:
        live.source.driver.live_migrate(spec, to, live.shared, QUIET)
    live.source.restart()
    assert set(live.source.driver.live_migrate(spec, to, live.shared, QUIET)) == {
        "bytes",
        "job_seconds",
    }
    live.destination.driver.finish_incoming(spec, QUIET)
    live.goes_on(spec, ticked)


def test_what_cannot_come_while_it_runs_is_refused_with_its_reason(live: Pair) -> None:
    spec = live.counting()
    driver, read = live.destination.driver, live.destination.read_image
    with pytest.raises(VerbFailed, match="lacks the architecture s390x"):
        driver.prepare_incoming(
            spec, live.peer(spec.server), live.shared, {"arch": "s390x"}, read, QUIET
        )
    stranger = replace(spec, server=str(uuid.uuid4()))
    with pytest.raises((VerbFailed, errors.Forbidden)):
        driver.prepare_incoming(stranger, live.peer(stranger.server), live.shared, {}, read, QUIET)
    live.source.servers.append(stranger.server)
    to = prepared(live, spec)
    live.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    with pytest.raises(VerbFailed, match="does not run"):
        live.source.driver.live_migrate(spec, to, live.shared, QUIET)
    assert live.source.state(spec.server) == (SHUTDOWN, 1)


def test_a_destination_that_cannot_be_reached_leaves_the_guest_as_it_was(live: Pair) -> None:
    spec = live.counting()
    to = prepared(live, spec)
    nowhere = {**to, "uri": "qemu+tcp://127.0.0.1:9/system", "address": "127.0.0.1"}
    with pytest.raises(VerbFailed):
        live.source.driver.live_migrate(spec, nowhere, live.shared, QUIET)
    assert live.source.state(spec.server) == (RUNNING, 1)
    nothing_came(live, spec)
