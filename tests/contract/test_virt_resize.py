# SPDX-License-Identifier: Apache-2.0
"""What every virt driver must do with a guest that is resized where it is: it can go back until that is settled.

On hosts in memory, of libvirt's mock-up and with real QEMU guests.
"""
from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from common.models import DomainState
from compute_agent.virt.driver import RUNNING, SHUTDOWN, VerbFailed
from compute_agent.virt.memory import MemoryDriver
from tests.contract.virt_pairs import LARGER, disk_gb
from tests.contract.virt_rigs import BOOT_SECONDS, QUIET, Rig


@pytest.mark.parametrize("back", [True, False], ids=["back", "kept"])
def test_a_guest_that_is_resized_where_it_is_can_go_back_until_that_is_settled(rig: Rig, back: bool) -> None:
    spec = rig.boot_with_canary()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    files, boots = rig.files(spec.server), rig.boots(spec.server)
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


def test_what_was_before_a_resize_is_what_it_goes_back_to(rig: Rig) -> None:
    if rig.kind == "test":
        pytest.skip("no program runs in a guest of libvirt's mock-up")
    spec = rig.boot(ready=True)
    rig.driver.ensure_stopped(spec.server, 2, BOOT_SECONDS, QUIET)
    rig.driver.resize_here(replace(spec, fence=3, flavor=LARGER, user_data=None), True, QUIET)
    if isinstance(rig.driver, MemoryDriver):
        rig.driver.write_file(spec.server, "later", "forgotten")
    rig.driver.ensure_stopped(spec.server, 4, BOOT_SECONDS, QUIET)
    rig.driver.settle_resize(replace(spec, fence=4), True, 3, QUIET)
    if isinstance(rig.driver, MemoryDriver):
        assert rig.driver.guests[spec.server].disk == {}
    rig.driver.ensure_running(spec.server, 5, QUIET)
    rig.await_boots(spec.server, 3)


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
