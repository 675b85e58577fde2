# SPDX-License-Identifier: Apache-2.0
"""Start, stop, pause and suspend guests in memory."""

from __future__ import annotations

import time
from collections.abc import Iterable

from common.domain.command_progress import CommandPhase
from common.domain.models import Belongings, DomainState, GuestSpec, Interface
from compute_agent.privileged import bridges
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.interfaces import no_bridge, plugs, when_bridged
from compute_agent.virt.memory.state.guest import MemoryGuest
from compute_agent.virt.memory.state.host import MemoryHost, state_of
from compute_agent.virt.memory.state.script import wait


def require_start(
    host: MemoryHost, server: str, interfaces: Iterable[Interface], context: VerbContext
) -> None:
    """Check the conditions of a start, and wait for missing bridges.

    A guest that is off, suspended or missing needs the bridges. If the CPUs do not run, the host
    needs a lease.

    Raises:
        NoBridge: A bridge is still missing after the timeout.
        VerbFailed: An interface is not supported, or could not be bound.
        errors.Unavailable: This host may not start guests now.
    """
    guest = host.guests.get(server)
    if guest is None or not guest.is_active:
        await_bridges(host, interfaces, context)
    if guest is None or guest.power_state != RUNNING:
        context.require_lease()


def await_bridges(host: MemoryHost, interfaces: Iterable[Interface], context: VerbContext) -> None:
    """Wait until the host has the bridges of these interfaces.

    A host with ``makes_bridges`` makes the bridges with names that match ``bridges.NAME``.

    Raises:
        NoBridge: A bridge is still missing after ``BRIDGE_TIMEOUT_SECONDS``.
        VerbFailed: An interface is not supported, or could not be bound.
    """
    needed = [plug.bridge for plug in plugs(interfaces)]

    def look() -> None:
        if host.makes_bridges:
            host.missing_bridges -= {name for name in needed if bridges.NAME.fullmatch(name)}
        if missing := host.missing_bridges.intersection(needed):
            raise no_bridge(f"this host has no bridge {', '.join(sorted(missing))}")

    when_bridged(context, look)


def boot(
    host: MemoryHost, server: str, guest: MemoryGuest, fence: int, paused: bool = False
) -> DomainState:
    """Start the guest under this fence. A paused or suspended guest is resumed.

    With ``paused`` a guest that is off and not suspended starts with stopped CPUs, and a paused
    guest stays paused. The caller has checked the conditions with ``require_start``.
    """
    guest.fence = fence
    stays_paused = paused and not guest.saved and guest.power_state != RUNNING
    if not guest.is_active and not guest.saved:
        guest.boots += 1
        guest.name_volumes()
        guest.memory = {}
        guest.console += f"kilonova memory guest: booting\nid: {server}\nboot: {guest.boots}\n"
    if not guest.is_active:
        guest.started = time.time()
    guest.saved, guest.offered = False, ""
    return host.set_power(server, guest, PAUSED if stays_paused else RUNNING)


def start(
    host: MemoryHost,
    server: str,
    fence: int,
    context: VerbContext,
    has: Belongings | None = None,
) -> DomainState:
    """Start the server's guest, after the checks of ``require_start``.

    For ``has`` and the exceptions see ``Driver.ensure_running``.
    """
    require_start(host, server, host.guest(server).interfaces, context)
    with host.lock:
        guest = host.guest(server)
        if has is not None:
            guest.keep_only(has)
        return boot(host, server, guest, fence)


def run_or_stop(
    host: MemoryHost, spec: GuestSpec, guest: MemoryGuest, runs: bool, context: VerbContext
) -> DomainState:
    """Start a guest that was changed to ``spec`` if ``runs``. Otherwise an inactive guest is off.

    Without ``runs`` an active guest, which an earlier call has changed and started, is not stopped.
    For ``spec.paused`` see ``boot``, for the exceptions of a start see ``require_start``.
    """
    if runs:
        require_start(host, spec.server, spec.interfaces, context)
    with host.lock:
        if runs:
            return boot(host, spec.server, guest, spec.fence, spec.paused)
        guest.fence = spec.fence
        if guest.is_active:
            return state_of(spec.server, guest)
        return host.set_power(spec.server, guest, SHUTDOWN)


def await_shutdown(host: MemoryHost, server: str, timeout: float, context: VerbContext) -> None:
    """Wait as long as the guest's shutdown takes. The caller sets the power state.

    A running guest that ignores ACPI takes the whole ``timeout``. Other guests take no time.

    Raises:
        VerbFailed: The guest does not exist.
    """
    guest = host.guest(server)
    if guest.power_state == RUNNING and guest.ignores_acpi:
        wait(timeout, context)


def stop(
    host: MemoryHost, server: str, fence: int, timeout: float, context: VerbContext
) -> DomainState:
    """Power the guest off after ``await_shutdown``, drop the saved memory, and record the fence.

    Raises:
        VerbFailed: The guest does not exist.
    """
    await_shutdown(host, server, timeout, context)
    with host.lock:
        guest = host.guest(server)
        guest.fence, guest.saved = fence, False
        return host.set_power(server, guest, SHUTDOWN)


def pull_plug(host: MemoryHost, server: str) -> None:
    """Power the guest off at once and drop the saved memory. The fence stays.

    Without a guest nothing happens.
    """
    with host.lock:
        if (guest := host.guests.get(server)) is not None:
            guest.saved = False
            host.set_power(server, guest, SHUTDOWN)


def reboot(
    host: MemoryHost,
    server: str,
    fence: int,
    timeout: float,
    context: VerbContext,
    has: Belongings | None = None,
) -> DomainState:
    """Restart the guest once for this fence. A running guest with this fence is not changed.

    A suspended guest loses the saved memory. Without a lease, Unavailable is raised before the
    guest is stopped. For ``has`` and the exceptions see ``Driver.ensure_running``.
    """
    guest = host.guest(server)
    if (guest.power_state, guest.fence) != (RUNNING, fence):
        # A guest that may not be started again must not be stopped.
        context.require_lease()
        await_shutdown(host, server, timeout, context)
        require_start(host, server, guest.interfaces, context)
        with host.lock:
            guest.power_state, guest.saved = SHUTDOWN, False
            if has is not None:
                guest.keep_only(has)
            boot(host, server, guest, fence)
    return state_of(server, guest)


def pause(host: MemoryHost, server: str, fence: int) -> DomainState:
    """Pause an active guest under this fence.

    Raises:
        VerbFailed: The guest is off or does not exist.
    """
    with host.lock:
        guest = host.active_guest(server)
        guest.fence = fence
        return host.set_power(server, guest, PAUSED)


def suspend(host: MemoryHost, server: str, fence: int, context: VerbContext) -> DomainState:
    """Save the memory of an active guest. A guest that is saved already only gets the fence.

    Raises:
        VerbFailed: The guest is off without saved memory, or does not exist.
    """
    context.phase(CommandPhase.SAVING_MEMORY, 0)
    wait(0, context)
    with host.lock:
        guest = host.guest(server)
        guest = guest if guest.saved else host.active_guest(server)
        guest.fence, guest.saved = fence, True
        return host.set_power(server, guest, SHUTDOWN)


def refuse_active(guest: MemoryGuest, before: str) -> None:
    """Refuse a change of an active guest.

    Args:
        guest: The guest.
        before: Clause that completes the message "stop the server before ...".

    Raises:
        VerbFailed: The guest is active.
    """
    if guest.is_active:
        raise VerbFailed(
            f"The server runs; stop the server before {before}.",
            details=f"power state {guest.power_state}",
        )
