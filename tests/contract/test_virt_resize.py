# SPDX-License-Identifier: Apache-2.0
"""What every virt driver must do with a guest that is resized where it is: it can go back until
that is settled.

On hosts in memory, of libvirt's mock-up and with real QEMU guests.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from common.domain.models import DomainState
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING, SHUTDOWN
from compute_agent.virt.memory.driver import MemoryDriver
from tests.contract.virt_pairs import LARGER, disk_gb
from tests.contract.virt_rigs import QUIET, Rig, holds_canary


@pytest.mark.parametrize("back", [True, False], ids=["back", "kept"])
def test_a_guest_that_is_resized_where_it_is_can_go_back_until_that_is_settled(
    rig: Rig, back: bool
) -> None:
    spec = rig.off_with_canary()
    files, boots = kept(rig, spec.server), rig.boots(spec.server)
    larger = replace(spec, fence=4, flavor=LARGER)
    for _ in range(2):
        assert rig.driver.resize_here(larger, False, QUIET) == DomainState(spec.server, SHUTDOWN, 4)
    assert disk_gb(rig, spec.server) == 2
    for _ in range(2):
        assert rig.driver.resize_here(larger, True, QUIET) == DomainState(spec.server, RUNNING, 4)
    assert rig.has_canary(spec.server, boots + 1)
    assert rig.driver.diagnostics(spec.server)["memory_details"]["maximum"] == LARGER.memory_mb
    if back:
        rig.driver.ensure_stopped(spec.server, 5, 0, QUIET)
        for _ in range(2):
            assert (
                rig.driver.settle_resize(replace(spec, fence=5), True, 4, QUIET).power_state
                == SHUTDOWN
            )
        assert disk_gb(rig, spec.server) == 1
        rig.driver.ensure_running(spec.server, 6, QUIET)
        assert rig.has_canary(spec.server, boots + 2)
        assert (
            rig.driver.diagnostics(spec.server)["memory_details"]["maximum"]
            == spec.flavor.memory_mb
        )
    else:
        for _ in range(2):
            assert (
                rig.driver.settle_resize(replace(larger, fence=5), False, 4, QUIET).power_state
                == RUNNING
            )
        assert disk_gb(rig, spec.server) == 2
    assert kept(rig, spec.server) == files, "nothing is kept aside any more"


def kept(rig: Rig, server: str) -> list[Path]:
    """The server's files, but for the sockets of a guest that runs."""
    return [path for path in rig.files(server) if not path.is_socket()]


def test_what_is_written_after_a_resize_is_given_up_with_it(rig: Rig) -> None:
    spec = rig.boot()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    rig.driver.resize_here(replace(spec, fence=3, flavor=LARGER), False, QUIET)
    rig.write_canary(spec.server)
    assert (
        rig.driver.resize_here(replace(spec, fence=3, flavor=LARGER), False, QUIET).power_state
        == SHUTDOWN
    )
    assert has_canary(rig, spec.server), "what was kept aside is still from before"
    rig.driver.settle_resize(replace(spec, fence=4), True, 3, QUIET)
    assert not has_canary(rig, spec.server)


def has_canary(rig: Rig, server: str) -> bool:
    if isinstance(rig.driver, MemoryDriver):
        return "canary" in rig.driver.host.guests[server].disk
    return holds_canary(rig.folder / "instances" / server / "disk")


def test_a_resize_where_it_is_needs_a_guest_that_is_off(rig: Rig) -> None:
    spec = rig.boot()
    larger = replace(spec, fence=2, flavor=LARGER)
    with pytest.raises(VerbFailed, match="runs"):
        rig.driver.resize_here(larger, True, QUIET)
    assert disk_gb(rig, spec.server) == 1
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    rig.driver.resize_here(larger, True, QUIET)
    with pytest.raises(VerbFailed, match="runs"):
        rig.driver.settle_resize(replace(spec, fence=3), True, 2, QUIET)
    stranger = replace(larger, server=str(uuid.uuid4()))
    with pytest.raises(VerbFailed, match="no guest on this host"):
        rig.driver.resize_here(stranger, True, QUIET)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        rig.driver.settle_resize(stranger, True, 2, QUIET)


def test_what_an_older_resize_kept_is_never_taken_back(rig: Rig) -> None:
    spec = rig.off_with_canary()
    boots = rig.boots(spec.server)
    rig.driver.resize_here(replace(spec, fence=3, flavor=LARGER), False, QUIET)
    rig.driver.settle_resize(replace(spec, fence=5, flavor=LARGER), True, 4, QUIET)
    assert disk_gb(rig, spec.server) == 2
    rig.driver.resize_here(replace(spec, fence=6, flavor=replace(LARGER, root_gb=3)), False, QUIET)
    rig.driver.settle_resize(replace(spec, fence=7, flavor=LARGER), True, 6, QUIET)
    assert disk_gb(rig, spec.server) == 2
    rig.driver.ensure_running(spec.server, 8, QUIET)
    assert rig.has_canary(spec.server, boots + 1)
