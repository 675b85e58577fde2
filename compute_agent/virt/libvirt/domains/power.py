# SPDX-License-Identifier: Apache-2.0
"""Power: starts, stops, pauses and suspends an existing domain.

Called by ``virt.libvirt.driver`` and ``guests``. Each function checks the state first and does what
is missing. Must stay true: no domain starts before its disks were verified; the fence is written
before a domain starts and is valid once it runs; only a stop drops saved memory.
"""

from __future__ import annotations

import time

from common.domain.command_progress import CommandPhase
from common.domain.models import DomainState
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.interfaces import when_bridged
from compute_agent.virt.libvirt.disks import disks
from compute_agent.virt.libvirt.domains import jobs
from compute_agent.virt.libvirt.domains.connection import Connection, GuestDomain
from compute_agent.virt.libvirt.xml import running_domain, volume_xml

#: Between two looks at a domain that should power off, and between two ACPI requests: a guest that
#: has just begun to boot misses the first.
LOOK_SECONDS, PRESS_SECONDS = 0.1, 5.0


def find(libvirt: Connection, server: str) -> GuestDomain:
    """The server's domain. VerbFailed when there is none."""
    found = libvirt.find(server)
    if found is None:
        raise VerbFailed(
            "The server has no guest on this host.", details=f"libvirt knows no domain {server}"
        )
    return found


def find_active(libvirt: Connection, server: str) -> GuestDomain:
    """The server's domain, which runs or is paused. VerbFailed when it is off."""
    found = find(libvirt, server)
    if not found.active:
        raise VerbFailed("The server does not run.", details=f"power state {found.power_state}")
    return found


def refuse_active(libvirt: Connection, server: str) -> None:
    """VerbFailed when the server's domain is active here, so that a QEMU has its disk open."""
    found = libvirt.find(server)
    if found and found.active:
        raise VerbFailed(
            "The server runs on this host; stop it first.",
            details=f"power state {found.power_state}, fence {found.fence}",
        )


def start(
    libvirt: Connection, server: str, fence: int, context: VerbContext, paused: bool = False
) -> DomainState:
    """Start the domain under this fence; a paused one is resumed, a saved one restored. With
    ``paused`` a domain that is off is started with stopped CPUs, and a paused one stays paused."""
    context.phase(CommandPhase.STARTING)
    found = find(libvirt, server)
    if context.cancelled():
        raise Cancelled
    if not found.active:
        stored = libvirt.describe(server, stored=True)
        if not found.saved and (ordered := volume_xml.in_order(stored)) != stored:
            libvirt.define(ordered)
        for disk in running_domain.disks(stored).values():
            disks.verify(disk, context)
        libvirt.mark(server, fence=fence, started=int(time.time()))

        def begin() -> None:
            context.require_lease()
            libvirt.start(server, paused and not found.saved)

        when_bridged(context, begin)
    elif found.fence != fence:
        libvirt.mark(server, fence=fence)
    if find(libvirt, server).power_state == PAUSED and not paused:
        context.require_lease()
        libvirt.resume(server)
    if found.saved:
        # The restored domain has the metadata that it was saved with.
        libvirt.mark(server, fence=fence, started=int(time.time()))
    return state(find(libvirt, server))


def pause(libvirt: Connection, server: str, fence: int) -> DomainState:
    if find_active(libvirt, server).power_state != PAUSED:
        libvirt.pause(server)
    libvirt.mark(server, fence=fence)
    return state(find_active(libvirt, server))


def suspend(libvirt: Connection, server: str, fence: int, context: VerbContext) -> DomainState:
    if not find(libvirt, server).saved:
        find_active(libvirt, server)
        context.phase(CommandPhase.SAVING_MEMORY, 0)
        if context.cancelled():
            raise Cancelled
        jobs.save(libvirt, server, context)
    libvirt.mark(server, fence=fence)
    return state(find(libvirt, server))


def off(libvirt: Connection, server: str, timeout: float, context: VerbContext) -> None:
    """Stop by ACPI within ``timeout`` seconds, else destroy; at once when its CPUs do not run.
    Saved memory is lost."""
    deadline, press_at = time.monotonic() + timeout, 0.0
    while (now := time.monotonic()) < deadline and find(libvirt, server).power_state == RUNNING:
        if context.cancelled():
            raise Cancelled
        if now >= press_at:
            libvirt.press_power_button(server)
            press_at = now + PRESS_SECONDS
        time.sleep(LOOK_SECONDS)
    if context.cancelled():
        raise Cancelled
    pull_plug(libvirt, server)


def pull_plug(libvirt: Connection, server: str) -> None:
    """Destroy the domain, and drop its saved memory."""
    found = find(libvirt, server)
    if found.power_state != SHUTDOWN:
        libvirt.destroy(server)
    if found.saved:
        libvirt.drop_saved(server)


def state(found: GuestDomain) -> DomainState:
    """The state to report. A domain with saved memory is off: SHUTDOWN, as the Compute API shows
    it."""
    return DomainState(found.server, found.power_state, found.fence)
