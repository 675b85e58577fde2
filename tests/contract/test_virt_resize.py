# SPDX-License-Identifier: Apache-2.0
"""What every virt driver must do with a guest that is resized where it is: it can go back until that is settled.

On hosts in memory, of libvirt's mock-up and with real QEMU guests.
"""
from __future__ import annotations

import subprocess
import uuid
from dataclasses import replace

import pytest

from common.models import DomainState
from compute_agent.virt.driver import RUNNING, SHUTDOWN, VerbFailed
from compute_agent.virt.memory import MemoryDriver
from tests.contract.virt_pairs import LARGER, disk_gb
from tests.contract.virt_rigs import CANARY_AT, QUIET, SECTOR, Rig, holds_canary


@pytest.mark.parametrize("back", [True, False], ids=["back", "kept"])
def test_a_guest_that_is_resized_where_it_is_can_go_back_until_that_is_settled(rig: Rig, back: bool) -> None:
    spec = rig.boot_with_canary()
    files, boots = rig.files(spec.server), rig.boots(spec.server)
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
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
            assert rig.driver.settle_resize(replace(spec, fence=5), True, 4, QUIET).power_state == SHUTDOWN
        assert disk_gb(rig, spec.server) == 1
        rig.driver.ensure_running(spec.server, 6, QUIET)
        assert rig.has_canary(spec.server, boots + 2)
        assert rig.driver.diagnostics(spec.server)["memory_details"]["maximum"] == spec.flavor.memory_mb
    else:
        for _ in range(2):
            assert rig.driver.settle_resize(replace(larger, fence=5), False, 4, QUIET).power_state == RUNNING
        assert disk_gb(rig, spec.server) == 2
    assert rig.files(spec.server) == files, "nothing is kept aside any more"


def test_what_is_written_after_a_resize_is_given_up_with_it(rig: Rig) -> None:
    spec = rig.boot()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    rig.driver.resize_here(replace(spec, fence=3, flavor=LARGER), False, QUIET)
    write_canary(rig, spec.server)
    assert rig.driver.resize_here(replace(spec, fence=3, flavor=LARGER), False, QUIET).power_state == SHUTDOWN
    assert has_canary(rig, spec.server), "what was kept aside is still from before"
    rig.driver.settle_resize(replace(spec, fence=4), True, 3, QUIET)
    assert not has_canary(rig, spec.server)


def write_canary(rig: Rig, server: str) -> None:
    """Onto the disk of a guest that is off."""
    if isinstance(rig.driver, MemoryDriver):
        rig.driver.write_file(server, "canary", "canary")
    else:
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", f"write -P 99 {CANARY_AT} {SECTOR}",
                        rig.folder / "instances" / server / "disk"], check=True, capture_output=True)


def has_canary(rig: Rig, server: str) -> bool:
    if isinstance(rig.driver, MemoryDriver):
        return "canary" in rig.driver.guests[server].disk
    return holds_canary(rig.folder / "instances" / server / "disk", "99")


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
    spec = rig.boot_with_canary()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    boots = rig.boots(spec.server)
    rig.driver.resize_here(replace(spec, fence=3, flavor=LARGER), False, QUIET)
    rig.driver.settle_resize(replace(spec, fence=5, flavor=LARGER), True, 4, QUIET)
    assert disk_gb(rig, spec.server) == 2
    rig.driver.resize_here(replace(spec, fence=6, flavor=replace(LARGER, root_gb=3)), False, QUIET)
    rig.driver.settle_resize(replace(spec, fence=7, flavor=LARGER), True, 6, QUIET)
    assert disk_gb(rig, spec.server) == 2
    rig.driver.ensure_running(spec.server, 8, QUIET)
    assert rig.has_canary(spec.server, boots + 1)
