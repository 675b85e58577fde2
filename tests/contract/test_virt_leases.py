# SPDX-License-Identifier: Apache-2.0
"""No driver starts a guest on a host after the lease expired during the verb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.domain import errors
from common.domain.models import GuestSpec
from compute_agent.verb_context import VerbContext
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from tests.contract.virt_pairs import Pair
from tests.contract.virt_rigs import QUIET, Rig

EXPIRED = replace(QUIET, may_start=lambda: False)

#: The verbs that start a stopped guest.
STARTS: dict[str, Callable[[Rig, GuestSpec, VerbContext], object]] = {
    "ensure_guest": lambda rig, spec, run: rig.driver.ensure_guest(spec, rig.read_image, run),
    "ensure_running": lambda rig, spec, run: rig.driver.ensure_running(
        spec.server, spec.fence, run
    ),
    "reboot": lambda rig, spec, run: rig.driver.reboot(spec.server, spec.fence, 0, run),
    "install": lambda rig, spec, run: rig.driver.install(spec, True, run),
    "resize_here": lambda rig, spec, run: rig.driver.resize_here(spec, True, run),
    "rebuild": lambda rig, spec, run: rig.driver.rebuild(spec, rig.read_image, True, run),
    "rescue": lambda rig, spec, run: rig.driver.rescue(spec, rig.image, rig.read_image, run),
    "unrescue": lambda rig, spec, run: rig.driver.unrescue(spec, run),
}


@pytest.mark.parametrize("verb", STARTS)
def test_start_verb_without_lease_leaves_guest_off(rig: Rig, verb: str) -> None:
    spec = rig.off_with_canary()
    spec = replace(spec, fence=2)
    with pytest.raises(errors.Unavailable, match="has no valid lease"):
        STARTS[verb](rig, spec, EXPIRED)
    assert rig.state(spec.server) is not None and (rig.state(spec.server) or ())[0] == SHUTDOWN
    STARTS[verb](rig, spec, QUIET)
    assert rig.state(spec.server) == (RUNNING, 2), "done again under a lease it starts"


def test_ensure_guest_without_lease_does_not_start_new_guest(rig: Rig) -> None:
    spec = rig.spec()
    with pytest.raises(errors.Unavailable):
        rig.driver.ensure_guest(spec, rig.read_image, EXPIRED)
    assert (rig.state(spec.server) or (SHUTDOWN,))[0] == SHUTDOWN
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert rig.state(spec.server) == (RUNNING, 1)


def test_reboot_without_lease_does_not_stop_running_guest(rig: Rig) -> None:
    spec = rig.ready()
    with pytest.raises(errors.Unavailable, match="has no valid lease"):
        rig.driver.reboot(spec.server, 2, 0, EXPIRED)
    assert rig.state(spec.server) == (RUNNING, 1)


@pytest.mark.parametrize("resting_state", ["paused", "suspended"])
def test_ensure_running_without_lease_leaves_guest_paused_or_suspended(
    rig: Rig, resting_state: str
) -> None:
    spec = rig.ready()
    (rig.driver.ensure_paused if resting_state == "paused" else rig.driver.ensure_suspended)(
        spec.server, 1, QUIET
    )
    before = rig.state(spec.server)
    with pytest.raises(errors.Unavailable):
        rig.driver.ensure_running(spec.server, 2, EXPIRED)
    assert before is not None and (rig.state(spec.server) or ())[0] == before[0] in (
        PAUSED,
        SHUTDOWN,
    )
    assert rig.driver.ensure_running(spec.server, 3, QUIET).power_state == RUNNING


def test_live_migration_without_lease_is_refused_on_both_hosts(live: Pair) -> None:
    spec = live.start_counting_guest()
    cpu = live.source.driver.inventory().cpu_info

    def prepare(run: VerbContext) -> dict[str, object]:
        return live.destination.driver.prepare_incoming(
            spec, live.peer(spec.server), live.shared, cpu, live.destination.read_image, run
        )

    with pytest.raises(errors.Unavailable):
        prepare(EXPIRED)
    to = prepare(QUIET)
    with pytest.raises(errors.Unavailable):
        live.source.driver.live_migrate(spec, to, live.shared, EXPIRED)
    assert (
        live.source.state(spec.server) == (RUNNING, 1)
        and live.destination.state(spec.server) is None
    )
    live.source.driver.live_migrate(spec, prepare(QUIET), live.shared, QUIET)
    live.destination.driver.finish_incoming(spec, QUIET)
    assert live.destination.state(spec.server) == (RUNNING, 2)
