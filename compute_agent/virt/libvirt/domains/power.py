# SPDX-License-Identifier: Apache-2.0
"""Starts, stops, pauses and suspends an existing domain.

Called by ``virt.libvirt.driver`` and ``guests``. Each function checks the state first and does only
what is missing.

Invariant: a domain starts only after the verification of its disks. The fence is written before the
start and is valid when the domain runs. Saved memory is dropped only by a stop.
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

#: Seconds between two polls of a domain that should power off, and between two ACPI requests. The
#: guest may miss a request at the beginning of the boot.
LOOK_SECONDS, PRESS_SECONDS = 0.1, 5.0


def find(libvirt: Connection, server: str) -> GuestDomain:
    """Return the server's domain, or raise VerbFailed without one."""
    domain = libvirt.find(server)
    if domain is None:
        raise VerbFailed(
            "The server has no guest on this host.", details=f"libvirt has no domain {server}"
        )
    return domain


def find_active(libvirt: Connection, server: str) -> GuestDomain:
    """Return the server's domain if ``GuestDomain.active``, for example paused.

    Raises:
        VerbFailed: The domain is off or does not exist.
    """
    domain = find(libvirt, server)
    if not domain.active:
        raise VerbFailed(
            "The server does not run; start the server first.",
            details=f"power state {domain.power_state}",
        )
    return domain


def refuse_active(libvirt: Connection, server: str) -> None:
    """Raise VerbFailed if the server's domain is active, so that QEMU has the disks open."""
    domain = libvirt.find(server)
    if domain and domain.active:
        raise VerbFailed(
            "The server runs on this host; stop the server first.",
            details=f"power state {domain.power_state}, fence {domain.fence}",
        )


def start(
    libvirt: Connection, server: str, fence: int, context: VerbContext, paused: bool = False
) -> DomainState:
    """Start the domain under this fence, and return the new state.

    A paused domain is resumed, and a domain with saved memory is restored. The disks of a domain
    that is off are verified before the start. A running domain only gets the fence. With
    ``paused`` a domain that is off starts with stopped CPUs, and a paused domain is not resumed.
    The CPUs of a restored domain run, even with ``paused``.

    Before a boot, ``volume_xml.in_order`` closes gaps in the names of the domain's volumes.

    Raises:
        VerbFailed: There is no domain, a disk is damaged, a bridge does not appear in time, or
            libvirt cannot start the domain.
        Unavailable: This host may not start guests now.
        Cancelled: The verb was cancelled before the start.
    """
    context.phase(CommandPhase.STARTING)
    domain = find(libvirt, server)
    if context.cancelled():
        raise Cancelled
    if not domain.active:
        stored_xml = libvirt.describe(server, stored=True)
        if not domain.saved and (ordered_xml := volume_xml.in_order(stored_xml)) != stored_xml:
            libvirt.define(ordered_xml)
        for disk in running_domain.disks(stored_xml).values():
            disks.verify(disk, context)
        libvirt.mark(server, fence=fence, started=int(time.time()))

        def begin() -> None:
            context.require_lease()
            libvirt.start(server, paused and not domain.saved)

        when_bridged(context, begin)
    elif domain.fence != fence:
        libvirt.mark(server, fence=fence)
    if find(libvirt, server).power_state == PAUSED and not paused:
        context.require_lease()
        libvirt.resume(server)
    if domain.saved:
        # The restored domain has the metadata from the time of the save.
        libvirt.mark(server, fence=fence, started=int(time.time()))
    return state(find(libvirt, server))


def pause(libvirt: Connection, server: str, fence: int) -> DomainState:
    """Stop the CPUs of an active domain, record the fence, and return the new state.

    A paused domain stays paused.

    Raises:
        VerbFailed: The domain is off or does not exist.
    """
    if find_active(libvirt, server).power_state != PAUSED:
        libvirt.pause(server)
    libvirt.mark(server, fence=fence)
    return state(find_active(libvirt, server))


def suspend(libvirt: Connection, server: str, fence: int, context: VerbContext) -> DomainState:
    """Save the memory of an active domain, stop the domain, and record the fence.

    A domain with saved memory only gets the fence. The result is the new state.

    Raises:
        VerbFailed: The domain is off without saved memory or does not exist, or the memory could
            not be saved.
        Cancelled: The guest is as before.
    """
    if not find(libvirt, server).saved:
        find_active(libvirt, server)
        context.phase(CommandPhase.SAVING_MEMORY, 0)
        if context.cancelled():
            raise Cancelled
        jobs.save(libvirt, server, context)
    libvirt.mark(server, fence=fence)
    return state(find(libvirt, server))


def off(libvirt: Connection, server: str, timeout: float, context: VerbContext) -> None:
    """Shut the domain down by ACPI, and destroy the domain if it runs after ``timeout`` seconds.

    A domain whose CPUs do not run is destroyed at once. Saved memory is dropped.

    Raises:
        VerbFailed: There is no domain.
        Cancelled: The verb was cancelled. The guest may have received the ACPI request.
    """
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
    """Destroy the domain, and drop the saved memory. Raise VerbFailed without a domain."""
    domain = find(libvirt, server)
    if domain.power_state != SHUTDOWN:
        libvirt.destroy(server)
    if domain.saved:
        libvirt.drop_saved(server)


def state(domain: GuestDomain) -> DomainState:
    """Return the state to report. A domain with saved memory is reported as SHUTDOWN."""
    return DomainState(domain.server, domain.power_state, domain.fence)
