# SPDX-License-Identifier: Apache-2.0
"""Power: what starts, stops, pauses and suspends a domain that exists.

Called by ``virt.libvirt.driver`` and ``guests``. Each function looks first and does what is missing.
Must stay true: no domain starts before its disks were verified; the fence is written before a domain starts and counts
once it runs; saved memory is given up by a stop and by nothing else here.
"""
from __future__ import annotations

import time

from common.models import DomainState
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN, Cancelled, Run, VerbFailed
from compute_agent.virt.interfaces import when_bridged
from compute_agent.virt.libvirt import disks, jobs, layout
from compute_agent.virt.libvirt.connection import Connection, Found

#: Seconds between two looks at a domain that should power off, and between two presses of its button: a guest
#: that has just begun to boot misses the first.
LOOK_EVERY, PRESS_EVERY = 0.1, 5.0


def find(libvirt: Connection, server: str) -> Found:
    """The server's domain. VerbFailed when there is none."""
    found = libvirt.find(server)
    if found is None:
        raise VerbFailed("The server has no guest on this host.", details=f"libvirt knows no domain {server}")
    return found


def find_active(libvirt: Connection, server: str) -> Found:
    """The server's domain, which runs or is paused. VerbFailed when it is off."""
    found = find(libvirt, server)
    if not found.active:
        raise VerbFailed("The server does not run.", details=f"power state {found.power_state}")
    return found


def refuse_active(libvirt: Connection, server: str) -> None:
    """VerbFailed when a QEMU here has the server's disk."""
    found = libvirt.find(server)
    if found and found.active:
        raise VerbFailed("The server runs on this host; stop it first.",
                         details=f"power state {found.power_state}, fence {found.fence}")


def start(libvirt: Connection, server: str, fence: int, run: Run, paused: bool = False) -> DomainState:
    """Make the domain run under this fence; one that is paused or saved goes on where it was. With ``paused`` one that
    is off is started with CPUs that wait, and one that is paused stays so."""
    run.phase("starting")
    found = find(libvirt, server)
    if run.cancelled():
        raise Cancelled
    if not found.active:
        for disk in layout.disks(libvirt.describe(server, stored=True)).values():
            disks.verify(disk, run)
        libvirt.mark(server, fence=fence, started=int(time.time()))

        def begin() -> None:
            run.require_lease()
            libvirt.start(server, paused and not found.saved)
        when_bridged(run, begin)
    elif found.fence != fence:
        libvirt.mark(server, fence=fence)
    if find(libvirt, server).power_state == PAUSED and not paused:
        run.require_lease()
        libvirt.resume(server)
    if found.saved:
        # The marks that it was saved with came back with it.
        libvirt.mark(server, fence=fence, started=int(time.time()))
    return state(find(libvirt, server))


def pause(libvirt: Connection, server: str, fence: int) -> DomainState:
    if find_active(libvirt, server).power_state != PAUSED:
        libvirt.pause(server)
    libvirt.mark(server, fence=fence)
    return state(find_active(libvirt, server))


def suspend(libvirt: Connection, server: str, fence: int, run: Run) -> DomainState:
    if not find(libvirt, server).saved:
        find_active(libvirt, server)
        run.phase("saving memory 0 %")
        if run.cancelled():
            raise Cancelled
        jobs.save(libvirt, server, run)
    libvirt.mark(server, fence=fence)
    return state(find(libvirt, server))


def off(libvirt: Connection, server: str, timeout: float, run: Run) -> None:
    """ACPI for ``timeout`` seconds, then the plug; at once for one whose CPUs do not run. Saved memory is lost."""
    deadline, press_at = time.monotonic() + timeout, 0.0
    while (now := time.monotonic()) < deadline and find(libvirt, server).power_state == RUNNING:
        if run.cancelled():
            raise Cancelled
        if now >= press_at:
            libvirt.press_power_button(server)
            press_at = now + PRESS_EVERY
        time.sleep(LOOK_EVERY)
    if run.cancelled():
        raise Cancelled
    pull_plug(libvirt, server)


def pull_plug(libvirt: Connection, server: str) -> None:
    """Off at once, and nothing to go on from."""
    found = find(libvirt, server)
    if found.power_state != SHUTDOWN:
        libvirt.destroy(server)
    if found.saved:
        libvirt.drop_saved(server)


def state(found: Found) -> DomainState:
    """As it is reported. One whose memory is saved is off: SHUTDOWN, as the Compute API shows it."""
    return DomainState(found.server, found.power_state, found.fence)
