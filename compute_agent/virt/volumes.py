# SPDX-License-Identifier: Apache-2.0
"""A server's volumes on a host, for both drivers.

``link`` returns how a host reaches a volume, from the connection that the volume service gave to
the conductor. Other data of the service is not trusted: ids must be UUIDs, and an unknown protocol
is refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from common.domain.json_types import JsonObject
from common.domain.models import AttachedVolume, GuestSpec, ImageRef
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING

#: Protocols that QEMU speaks itself.
LOCAL, NBD, RBD = "local", "nbd", "rbd"
#: Protocols that the host's kernel speaks. QEMU speaks iSCSI too.
ISCSI, FIBRE_CHANNEL, NVMEOF, NFS = "iscsi", "fibre_channel", "nvmeof", "nfs"
#: All protocols that this project supports.
EVERY_PROTOCOL = frozenset({LOCAL, NBD, RBD, ISCSI, FIBRE_CHANNEL, NVMEOF, NFS})
#: Remedies for a host that does not support a protocol.
BY_QEMU = "Name it in [agent] qemu_volume_protocols of the host's configuration."
BY_HOST = "Name it in [agent] host_volume_protocols of the host's configuration."
REMEDIES = {
    LOCAL: "Name its folder in [agent] volume_folders of the host's configuration.",
    RBD: BY_QEMU,
    ISCSI: "Name it in [agent] qemu_volume_protocols or host_volume_protocols of the host's configuration.",
    **dict.fromkeys((FIBRE_CHANNEL, NVMEOF, NFS), BY_HOST),
}
#: Buses of a disk, and those on which a running guest can gain and lose a disk.
BUSES = ("virtio", "scsi", "sata", "ide", "usb")
HOT_BUSES = ("virtio", "scsi")
DISK = "disk"
#: Keys of a connection that are not data of the protocol.
PROTOCOL_KEYS = ("driver_volume_type", "data")


@dataclass(frozen=True, slots=True)
class VolumeLink:
    """The way in which a host reaches a volume.

    ``data`` contains the parameters of the protocol, and may contain passwords.
    """

    protocol: str
    data: JsonObject = field(default_factory=dict, repr=False)


def link(volume: AttachedVolume, protocols: Collection[str]) -> VolumeLink:
    """Return how this host reaches the volume.

    Raises:
        VerbFailed: The host cannot reach the volume, or a guest cannot have it as a disk.
    """
    check_id(volume.volume_id)
    check_id(volume.stored_id)
    protocol = volume.connection.get("driver_volume_type")
    if not protocol:
        raise VerbFailed(
            f"Volume {volume.volume_id} is not connected to this host; attach it again.",
            details="the volume service gave no connection",
        )
    if protocol not in protocols:
        raise VerbFailed(
            f"This host cannot connect volume {volume.volume_id}: it is served by {protocol!s:.40}, and the "
            f"host knows {', '.join(sorted(protocols))}. {REMEDIES.get(str(protocol), '')}".rstrip(),
            retryable=True,
        )
    # In the service's attachments the data is beside the protocol. In os-brick's format the data
    # is in a nested object.
    flat_data = {
        name: value for name, value in volume.connection.items() if name not in PROTOCOL_KEYS
    }
    data = volume.connection.get("data", flat_data)
    if not isinstance(data, dict) or not data:
        raise unreadable(volume.volume_id, "the connection has no data")
    if data.get("encrypted"):
        raise VerbFailed(
            f"Volume {volume.stored_id} is encrypted, which no host of this cloud can open; retype it to a "
            "type without encryption while no server has it, or take another one."
        )
    if volume.bus not in BUSES or volume.device_type != DISK:
        raise VerbFailed(
            f"A volume cannot be a {volume.device_type} on {volume.bus} here; it can be a disk on one of "
            f"{', '.join(BUSES)}."
        )
    return VolumeLink(str(protocol), data)


def unreadable(volume_id: str, details: str) -> VerbFailed:
    """Return the failure of a volume with an incomplete or forbidden connection."""
    return VerbFailed(
        f"What the volume service says of volume {volume_id} cannot be used on this host; attach it again, "
        "or see the host's log.",
        details=details,
    )


def links(volumes: Iterable[AttachedVolume], protocols: Collection[str]) -> list[VolumeLink]:
    """Return the links of all volumes. Called before anything of a guest is made or deleted.

    Raises:
        VerbFailed: The host cannot reach one of the volumes.
    """
    return [link(volume, protocols) for volume in volumes]


def check_id(volume_id: str) -> None:
    """Check that the id is a UUID, because it becomes part of names and of the guest's XML.

    Raises:
        VerbFailed: The id is not a UUID.
    """
    try:
        if str(uuid.UUID(volume_id)) == volume_id:
            return
    except ValueError:
        pass
    raise VerbFailed("The volume's id is not a UUID.", details=f"id {volume_id[:80]!r}")


def boots_from_volume(volumes: Iterable[AttachedVolume]) -> bool:
    """Return True if a volume takes the place of the root disk."""
    return any(volume.boot_index == 0 for volume in volumes)


def image_of(spec: GuestSpec) -> ImageRef | None:
    """Return the image of the root disk, or None if a volume replaces this disk."""
    return None if boots_from_volume(spec.volumes) else spec.image


def grown(volume: AttachedVolume, size_gb: int) -> AttachedVolume:
    """Return the volume with a size of at least ``size_gb``."""
    return replace(volume, size_gb=max(volume.size_gb, size_gb))


def refuse_cold_bus(volume: AttachedVolume, power_state: int) -> None:
    """Refuse to change a volume of an active guest if the bus does not support that.

    Raises:
        VerbFailed: The guest is active, and the bus is not in ``HOT_BUSES``.
    """
    if power_state in (RUNNING, PAUSED) and volume.bus not in HOT_BUSES:
        raise VerbFailed(
            f"A volume on {volume.bus} comes and goes only while the server is off; stop it first."
        )


def suspended() -> VerbFailed:
    """Return the failure of a volume change of a suspended guest.

    Why: saved memory requires the disks that the guest had when it was saved.
    """
    return VerbFailed("The server is suspended; resume it before its volumes are changed.")


def held(volume_id: str, power_state: int, details: str = "") -> VerbFailed:
    """Return the failure of a detach that the guest did not complete."""
    why = (
        "it is paused; resume it first"
        if power_state == PAUSED
        else "unmount it there, and try again when it has booted"
    )
    return VerbFailed(
        f"The guest did not let go of volume {volume_id}: {why}. The volume stays.", details=details
    )


def foreign(volume_ids: Iterable[str]) -> VerbFailed:
    """Return the failure of a guest that would resume with volumes detached meanwhile.

    Why: data in the guest's memory must not be written to these volumes.
    """
    named = ", ".join(sorted(volume_ids))
    return VerbFailed(
        f"The guest rests with volume {named}, which is not the server's any more: it does not go on with "
        "it. Reboot the server (hard): its memory is lost, its disks stay.",
        details="it was detached while the host was away",
    )


def copyable(
    volume: AttachedVolume, guest_volumes: Iterable[AttachedVolume], power_state: int
) -> AttachedVolume:
    """Return the guest's present volume, which is to be copied to the location in ``volume``.

    Raises:
        VerbFailed: The guest lacks the volume or is off, or the two sizes differ.
    """
    present_volume = next(
        (
            guest_volume
            for guest_volume in guest_volumes
            if guest_volume.volume_id == volume.volume_id
        ),
        None,
    )
    if present_volume is None:
        raise unknown(volume.volume_id)
    if power_state not in (RUNNING, PAUSED):
        raise VerbFailed(
            f"The server is off, and volume {volume.volume_id} is copied only while it runs; start it, or "
            "detach the volume and migrate it then."
        )
    if volume.size_gb != present_volume.size_gb:
        raise another_size(
            volume.volume_id, f"{present_volume.size_gb} GiB, and {volume.size_gb} there"
        )
    return present_volume


def snapshotted(volume: AttachedVolume, guest_volumes: Iterable[AttachedVolume]) -> AttachedVolume:
    """Return the guest's present volume, of which a snapshot is to be made.

    Raises:
        VerbFailed: The guest lacks the volume, or hosts cannot make snapshots of it.
    """
    present_volume = next(
        (
            guest_volume
            for guest_volume in guest_volumes
            if guest_volume.volume_id == volume.volume_id
        ),
        None,
    )
    if present_volume is None:
        raise unknown(volume.volume_id)
    refuse_no_file(present_volume)
    return present_volume


def refuse_no_file(volume: AttachedVolume) -> None:
    """Refuse a snapshot on the host of a volume that is not a file on NFS.

    Why: the volume service makes snapshots of all other volumes itself.

    Raises:
        VerbFailed: The volume is not a file.
    """
    protocol = volume.connection.get("driver_volume_type")
    if protocol != NFS:
        raise VerbFailed(
            f"Volume {volume.volume_id} is no file: it is served by {protocol!s:.40}. Hosts take snapshots of "
            f"volumes that are files ({NFS}) alone; its own service takes those of the others."
        )


def mergeable(
    volume: AttachedVolume, guest_volumes: Iterable[AttachedVolume], power_state: int
) -> None:
    """Check that files of the guest's volume can be merged now.

    Raises:
        VerbFailed: The guest lacks the volume or is off, or the volume is not a file.
    """
    snapshotted(volume, guest_volumes)
    if power_state not in (RUNNING, PAUSED):
        raise VerbFailed(
            f"The server is off, and files of volume {volume.volume_id} are merged only while it runs; start "
            "it, or detach the volume, and delete the snapshot then."
        )


def another_size(volume_id: str, details: str) -> VerbFailed:
    """Return the failure of a copy to a volume of another size while the guest runs."""
    return VerbFailed(
        f"Volume {volume_id} is copied while its server runs only into one of exactly its size; detach it, and "
        "migrate it then.",
        details=details,
    )


def unknown(volume_id: str) -> VerbFailed:
    """Return the failure of a verb for a volume that the guest does not have."""
    return VerbFailed(f"The server does not have volume {volume_id} on this host.")
