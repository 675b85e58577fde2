# SPDX-License-Identifier: Apache-2.0
"""Create, rebuild and rescue guests in memory."""

from __future__ import annotations

from common.domain.command_progress import CommandPhase
from common.domain.models import DomainState, GuestSpec, ImageRef
from compute_agent.verb_context import ImageReader, VerbContext, before_guest_is_touched
from compute_agent.virt.driver import SHUTDOWN
from compute_agent.virt.interfaces import plugs
from compute_agent.virt.memory import images, power
from compute_agent.virt.memory.state.guest import MemoryGuest, make_guest
from compute_agent.virt.memory.state.host import MemoryHost, state_of
from compute_agent.virt.memory.state.script import wait
from compute_agent.virt.volumes import EVERY_PROTOCOL, image_of, links


def make(
    host: MemoryHost, spec: GuestSpec, read_image: ImageReader, context: VerbContext
) -> DomainState:
    """Make the server's guest and start it. An existing guest keeps its disks.

    An existing guest gets the interfaces and volumes of ``spec``. For ``spec.paused`` see
    ``power.boot``.

    Raises:
        VerbFailed: The image cannot be used, a volume, an interface or the hardware is not
            supported, or a bridge is missing.
        errors.Unavailable: The image service does not answer, or this host may not start guests
            now.
    """
    links(spec.volumes, EVERY_PROTOCOL)
    disk = images.fetch(host, image_of(spec), read_image, context)
    context.phase(CommandPhase.STARTING)
    wait(0, context)
    power.require_start(host, spec.server, spec.interfaces, context)
    with host.lock:
        guest = host.guests.get(spec.server) or make_guest(spec, disk, host.spice)
        host.keep_guest(spec.server, guest)
        guest.interfaces = list(spec.interfaces)
        guest.take_volumes(spec)
        return power.boot(host, spec.server, guest, spec.fence, spec.paused)


def rebuild(
    host: MemoryHost,
    spec: GuestSpec,
    read_image: ImageReader,
    runs: bool,
    context: VerbContext,
    keep_ephemeral: bool,
) -> DomainState:
    """Replace the guest's disks by new disks, once for this fence, and start the guest if ``runs``.

    A missing guest is made. Without ``runs`` a guest that was rebuilt under this fence is not
    changed. With ``keep_ephemeral`` the ephemeral disks are kept.

    Raises:
        VerbFailed: The image cannot be used, a volume, an interface or the hardware is not
            supported, or a bridge is missing.
        errors.Unavailable: The image service does not answer, or this host may not start guests
            now.
    """
    guest = host.guests.get(spec.server)
    if guest is None or guest.made != spec.fence:
        plugs(spec.interfaces)
        links(spec.volumes, EVERY_PROTOCOL)
        disk = images.fetch(host, image_of(spec), read_image, context)
        context.phase(CommandPhase.MAKING_DISKS)
        wait(0, context)
        with host.lock:
            guest = _replace(host, spec, disk, keep_ephemeral)
    if runs:
        power.require_start(host, spec.server, spec.interfaces, context)
    with host.lock:
        return (
            power.boot(host, spec.server, guest, spec.fence)
            if runs
            else state_of(spec.server, guest)
        )


def _replace(
    host: MemoryHost, spec: GuestSpec, disk: dict[str, str], keep_ephemeral: bool
) -> MemoryGuest:
    """Replace the guest by a new guest that is off and has this root disk. Return the new guest.

    Console output and the number of boots continue. With ``keep_ephemeral`` the old ephemeral disks
    that ``spec`` contains are kept.
    """
    old = host.guests.get(spec.server)
    guest = make_guest(spec, disk, host.spice)
    if old is not None and keep_ephemeral:
        guest.local |= {
            name: old_disk for name, old_disk in old.ephemeral.items() if name in guest.local
        }
    host.keep_guest(spec.server, guest)
    guest.made = spec.fence
    if old is not None:
        guest.boots, guest.console, guest.ignores_acpi = old.boots, old.console, old.ignores_acpi
        guest.power_state = old.power_state
    host.set_power(spec.server, guest, SHUTDOWN)
    return guest


def rescue(
    host: MemoryHost,
    spec: GuestSpec,
    image: ImageRef,
    read_image: ImageReader,
    context: VerbContext,
) -> DomainState:
    """Boot the guest from a disk made from ``image``, once for this fence.

    A guest that was rescued under this fence is not stopped, and only started or resumed.

    Raises:
        VerbFailed: The guest does not exist, or the rescue failed. After a failed rescue the reason
            is UNTOUCHED if the guest is unchanged.
        errors.Unavailable: The image service does not answer, or this host may not start guests
            now.
    """
    guest = host.guest(spec.server)
    if guest.rescue != spec.fence:
        with before_guest_is_touched():
            plugs(spec.interfaces)
            links(spec.volumes, EVERY_PROTOCOL)
            images.fetch(host, image, read_image, context)
        context.phase(CommandPhase.MAKING_DISKS)
        wait(0, context)
        with host.lock:
            _set_rescue(guest, spec, spec.fence)
    return power.start(host, spec.server, spec.fence, context)


def unrescue(host: MemoryHost, spec: GuestSpec, context: VerbContext) -> DomainState:
    """Boot the guest from the root disk again.

    A guest that is not rescued is not stopped, and only started or resumed.

    Raises:
        VerbFailed: The guest does not exist, a volume or an interface is not supported, or a bridge
            is missing.
        errors.Unavailable: This host may not start guests now.
    """
    with host.lock:
        guest = host.guest(spec.server)
        if guest.rescue:
            plugs(spec.interfaces)
            links(spec.volumes, EVERY_PROTOCOL)
            _set_rescue(guest, spec, 0)
    return power.start(host, spec.server, spec.fence, context)


def _set_rescue(guest: MemoryGuest, spec: GuestSpec, fence: int) -> None:
    guest.rescue = fence
    guest.interfaces = list(spec.interfaces)
    guest.take_volumes(spec)
    guest.power_state, guest.saved = SHUTDOWN, False


def inject_nmi(host: MemoryHost, server: str) -> None:
    """Count an NMI, and write a line to the guest's console.

    Raises:
        VerbFailed: The guest is off or does not exist.
    """
    with host.lock:
        guest = host.active_guest(server)
        guest.nmis += 1
        guest.console += "NMI received\n"
        host.write(server, guest)
