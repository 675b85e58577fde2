# SPDX-License-Identifier: Apache-2.0
"""Volumes of guests in memory.

The guest's record contains the volumes that the host has connected.
"""

from __future__ import annotations

from common.domain.command_progress import CommandPhase
from common.domain.models import AttachedVolume, DomainState
from compute_agent.verb_context import VerbContext
from compute_agent.virt import volumes
from compute_agent.virt.driver import PAUSED, RUNNING
from compute_agent.virt.memory.power import refuse_active
from compute_agent.virt.memory.state.guest import MemoryGuest
from compute_agent.virt.memory.state.host import MemoryHost, state_of
from compute_agent.virt.memory.state.script import wait


def attach(
    host: MemoryHost, server: str, fence: int, volume: AttachedVolume, context: VerbContext
) -> DomainState:
    """Attach a volume, in place of an attached volume with the same id.

    Raises:
        VerbFailed: The volume is refused by ``volumes.link``, the bus of an active guest does not
            support hot plug, or the guest is suspended or does not exist.
        Forbidden: All names for the volume's bus are in use.
    """
    volumes.link(volume, volumes.EVERY_PROTOCOL)
    context.phase(CommandPhase.ATTACHING_VOLUME)
    with host.lock:
        guest = _changeable(host, server)
        if volume.volume_id not in guest.connected:
            volumes.refuse_cold_bus(volume, guest.power_state)
        guest.volumes = [*_others(guest, volume.volume_id), volume]
        guest.name_new_volume(volume)
        guest.connect()
        return _store_change(host, server, guest, fence)


def detach(
    host: MemoryHost, server: str, fence: int, volume: AttachedVolume, context: VerbContext
) -> DomainState | None:
    """Detach a volume. Return the state of the guest, or None without a guest.

    If the guest lacks the volume, only the fence is recorded.

    Raises:
        VerbFailed: The guest is suspended, does not release the volume (also if paused), or is
            active and the bus does not support hot plug. Or the id is not a UUID.
    """
    volumes.check_id(volume.volume_id)
    context.phase(CommandPhase.DETACHING_VOLUME)
    with host.lock:
        if server not in host.guests:
            return None
        guest = _changeable(host, server)
        attached_volumes = [
            attached for attached in guest.volumes if attached.volume_id == volume.volume_id
        ]
        for attached in attached_volumes:
            volumes.refuse_cold_bus(attached, guest.power_state)
            if guest.power_state == PAUSED or (
                guest.power_state == RUNNING and guest.holds_volumes
            ):
                raise volumes.held(attached.volume_id, guest.power_state)
        guest.volumes = _others(guest, volume.volume_id)
        guest.names.pop(volume.volume_id, None)
        guest.connect()
        return _store_change(host, server, guest, fence)


def disconnect(host: MemoryHost, server: str, fence: int) -> None:
    """Detach and disconnect all volumes of a guest that is off. A missing guest is ignored.

    Raises:
        VerbFailed: The guest is active.
    """
    with host.lock:
        if server in host.guests:
            guest = host.guest(server)
            refuse_active(guest, "its volumes are disconnected")
            guest.volumes, guest.connected = [], []
            _store_change(host, server, guest, fence)


def extend(host: MemoryHost, server: str, volume: AttachedVolume) -> None:
    """Record ``volume.size_gb`` as the size of an attached volume, unless that would shrink it.

    Raises:
        VerbFailed: The guest does not exist, is suspended, or does not have the volume.
    """
    with host.lock:
        guest = _changeable(host, server)
        if all(attached.volume_id != volume.volume_id for attached in guest.volumes):
            raise volumes.unknown(volume.volume_id)
        guest.volumes = [
            volumes.grown(attached, volume.size_gb)
            if attached.volume_id == volume.volume_id
            else attached
            for attached in guest.volumes
        ]
        host.write(server, guest)


def copy(
    host: MemoryHost, server: str, fence: int, volume: AttachedVolume, context: VerbContext
) -> DomainState:
    """Record ``volume``, which has the connection of the new location, as the guest's copy.

    No data is copied, because volumes of guests in memory have no data.

    Raises:
        VerbFailed: The guest does not exist, is off or suspended, or lacks the volume. Or the sizes
            differ, or ``volumes.link`` refuses the new location.
    """
    volumes.link(volume, volumes.EVERY_PROTOCOL)
    context.phase(CommandPhase.COPYING_VOLUME, 0)
    with host.lock:
        guest = _changeable(host, server)
        volumes.copyable(volume, guest.volumes, guest.power_state)
    wait(0, context)
    with host.lock:
        guest = _changeable(host, server)
        guest.copied = volume
        return _store_change(host, server, guest, fence)


def switch(host: MemoryHost, server: str, fence: int, volume: AttachedVolume) -> DomainState | None:
    """Switch the guest to the location in ``volume``, and forget the recorded copy.

    Returns:
        The state of the guest, or None if the guest is not on this host.
    """
    with host.lock:
        if server not in host.guests:
            return None
        guest = host.guest(server)
        guest.copied = None
        guest.volumes = [
            volume if attached.volume_id == volume.volume_id else attached
            for attached in guest.volumes
        ]
        return _store_change(host, server, guest, fence)


def keep(host: MemoryHost, server: str, fence: int) -> DomainState | None:
    """Forget the recorded copy of a volume.

    Returns:
        The state of the guest, or None if the guest is not on this host.
    """
    with host.lock:
        if server not in host.guests:
            return None
        guest = host.guest(server)
        guest.copied = None
        return _store_change(host, server, guest, fence)


def snapshot(
    host: MemoryHost, server: str, fence: int, volume: AttachedVolume, context: VerbContext
) -> DomainState:
    """Replace the guest's volume by ``volume``, which has the same id and names the new file.

    Raises:
        VerbFailed: The guest does not exist, lacks the volume or is suspended, or the volume is not
            a file on NFS.
    """
    context.phase(CommandPhase.SNAPSHOTTING_VOLUME)
    with host.lock:
        guest = _changeable(host, server)
        volumes.snapshotted(volume, guest.volumes)
        guest.volumes = [
            volume if attached.volume_id == volume.volume_id else attached
            for attached in guest.volumes
        ]
        return _store_change(host, server, guest, fence)


def merge(
    host: MemoryHost, server: str, fence: int, volume: AttachedVolume, context: VerbContext
) -> DomainState:
    """Check that files of the volume can be merged, and record the fence. No data is merged.

    Raises:
        VerbFailed: The guest does not exist, is off or suspended, or lacks the volume, or the
            volume is not a file on NFS.
    """
    context.phase(CommandPhase.MERGING_VOLUME, 0)
    with host.lock:
        guest = _changeable(host, server)
        volumes.mergeable(volume, guest.volumes, guest.power_state)
    wait(0, context)
    with host.lock:
        return _store_change(host, server, _changeable(host, server), fence)


def _others(guest: MemoryGuest, volume_id: str) -> list[AttachedVolume]:
    return [attached for attached in guest.volumes if attached.volume_id != volume_id]


def _changeable(host: MemoryHost, server: str) -> MemoryGuest:
    guest = host.guest(server)
    if guest.saved:
        raise volumes.suspended()
    return guest


def _store_change(host: MemoryHost, server: str, guest: MemoryGuest, fence: int) -> DomainState:
    guest.fence = fence
    host.write(server, guest)
    return state_of(server, guest)
