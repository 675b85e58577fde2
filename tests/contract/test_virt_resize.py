# SPDX-License-Identifier: Apache-2.0
"""Resizes on the same host, which can be reverted until they are settled.

The tests run on a host in memory, libvirt's mock-up and real QEMU guests.
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


@pytest.mark.parametrize("reverts", [True, False], ids=["revert", "confirm"])
def test_settle_resize_restores_old_disk_on_revert_and_keeps_new_on_confirm(
    rig: Rig, reverts: bool
) -> None:
    spec = rig.off_with_canary()
    files, boots = list_plain_files(rig, spec.server), rig.boots(spec.server)
    larger = replace(spec, fence=4, flavor=LARGER)
    for _ in range(2):
        assert rig.driver.resize_here(larger, False, QUIET) == DomainState(spec.server, SHUTDOWN, 4)
    assert disk_gb(rig, spec.server) == 2
    for _ in range(2):
        assert rig.driver.resize_here(larger, True, QUIET) == DomainState(spec.server, RUNNING, 4)
    assert rig.has_canary(spec.server, boots + 1)
    assert rig.driver.diagnostics(spec.server)["memory_details"]["maximum"] == LARGER.memory_mb
    if reverts:
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
    assert list_plain_files(rig, spec.server) == files, "nothing is kept aside any more"


def list_plain_files(rig: Rig, server: str) -> list[Path]:
    """Return the server's files without the sockets of a running guest."""
    return [path for path in rig.files(server) if not path.is_socket()]


def test_revert_of_resize_here_discards_later_writes(rig: Rig) -> None:
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


def test_resize_here_and_its_revert_need_stopped_guest(rig: Rig) -> None:
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


def test_settle_resize_never_restores_files_of_older_resize(rig: Rig) -> None:
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
