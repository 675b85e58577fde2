# SPDX-License-Identifier: Apache-2.0
"""A server's volumes on a host, for both drivers.

``link`` returns how a host reaches a volume, from the connection data that the conductor got from
the volume service. This data is not trusted: ids must be UUIDs, and an unknown protocol is refused.
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
BY_QEMU = "Add the protocol to [agent] qemu_volume_protocols in the host's configuration."
BY_HOST = "Add the protocol to [agent] host_volume_protocols in the host's configuration."
REMEDIES = {
    LOCAL: "Add the volume's folder to [agent] volume_folders in the host's configuration.",
    RBD: BY_QEMU,
    ISCSI: "Add the protocol to [agent] qemu_volume_protocols or host_volume_protocols in the host's configuration.",
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
    """The protocol and parameters by which a host reaches a volume.

    Attributes:
        protocol: The volume service's name of the protocol, for example "iscsi".
        data: Parameters of the protocol, which may contain passwords.
    """

    protocol: str
    data: JsonObject = field(default_factory=dict, repr=False)


def link(volume: AttachedVolume, protocols: Collection[str]) -> VolumeLink:
    """Return the protocol and parameters by which this host reaches the volume.

    The volume itself is not accessed.

    Args:
        volume: The volume with the volume service's connection for this host.
        protocols: Protocols that this host supports.

    Raises:
        VerbFailed: An id of the volume is not a UUID, the connection is missing or has no data, the
            protocol is not in ``protocols``, the volume is encrypted, or a guest cannot have the
            volume as a disk on its bus.
    """
    check_id(volume.volume_id)
    check_id(volume.stored_id)
    protocol = volume.connection.get("driver_volume_type")
    if not protocol:
        raise VerbFailed(
            f"Volume {volume.volume_id} is not connected to this host; detach the volume and attach it again.",
            details="the attachment at the volume service has no driver_volume_type",
        )
    if protocol not in protocols:
        raise VerbFailed(
            f"This host cannot connect volume {volume.volume_id}, which is served by {protocol!s:.40}. The host "
            f"supports {', '.join(sorted(protocols))}. {REMEDIES.get(str(protocol), '')}".rstrip(),
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
            f"Volume {volume.stored_id} is encrypted, and hosts cannot open encrypted volumes. Detach the volume and "
            "retype it to a volume type without encryption, or use another volume."
        )
    if volume.bus not in BUSES or volume.device_type != DISK:
        raise VerbFailed(
            f"Volume {volume.volume_id} cannot be a {volume.device_type} on {volume.bus}; volumes can be disks on "
            f"{', '.join(BUSES)}."
        )
    return VolumeLink(str(protocol), data)


def unreadable(volume_id: str, details: str) -> VerbFailed:
    """Return the failure for connection data of a volume that is incomplete or not permitted.

    ``details`` is for the operator.
    """
    return VerbFailed(
        f"The volume service's connection data for volume {volume_id} cannot be used on this host. Attach the "
        "volume again, or see the host's log.",
        details=details,
    )


def links(volumes: Iterable[AttachedVolume], protocols: Collection[str]) -> list[VolumeLink]:
    """Return the result of ``link`` for each volume, in the same order.

    Raises:
        VerbFailed: ``link`` refuses a volume.
    """
    return [link(volume, protocols) for volume in volumes]


def check_id(volume_id: str) -> None:
    """Check that the id is a UUID, because it becomes part of names and of the guest's XML.

    Raises:
        VerbFailed: The id is not a UUID in lower case with hyphens.
    """
    try:
        if str(uuid.UUID(volume_id)) == volume_id:
            return
    except ValueError:
        pass
    raise VerbFailed("A volume's id is not a UUID.", details=f"id {volume_id[:80]!r}")


def boots_from_volume(volumes: Iterable[AttachedVolume]) -> bool:
    """Return True if a volume with boot index 0 takes the place of the guest's root disk."""
    return any(volume.boot_index == 0 for volume in volumes)


def image_of(spec: GuestSpec) -> ImageRef | None:
    """Return the image of the root disk. None without an image, or if a volume is the root disk."""
    return None if boots_from_volume(spec.volumes) else spec.image


def grown(volume: AttachedVolume, size_gb: int) -> AttachedVolume:
    """Return the volume with the larger of its recorded size and ``size_gb``, both in GiB."""
    return replace(volume, size_gb=max(volume.size_gb, size_gb))


def refuse_cold_bus(volume: AttachedVolume, power_state: int) -> None:
    """Refuse to change a volume of an active guest if the bus does not support that.

    Raises:
        VerbFailed: The guest is active, and the bus is not in ``HOT_BUSES``.
    """
    if power_state in (RUNNING, PAUSED) and volume.bus not in HOT_BUSES:
        raise VerbFailed(
            f"Volume {volume.volume_id} is on {volume.bus}, which does not support hot plug. Stop the server before "
            "you attach or detach the volume."
        )


def suspended() -> VerbFailed:
    """Return the failure of a verb that changes the volumes of a suspended guest.

    Why: saved memory requires the disks that the guest had when it was saved.
    """
    return VerbFailed("The server is suspended; resume the server before you change its volumes.")


def held(volume_id: str, power_state: int, details: str = "") -> VerbFailed:
    """Return the failure of a detach because the guest still holds the volume.

    ``power_state`` is that of the guest and chooses the advice. ``details`` is for the operator.
    """
    why = (
        "The guest is paused; resume the server and try again"
        if power_state == PAUSED
        else "Unmount the volume in the guest, and try again when the guest has booted"
    )
    return VerbFailed(
        f"The guest did not release volume {volume_id}, which stays attached. {why}.",
        details=details,
    )


def foreign(volume_ids: Iterable[str]) -> VerbFailed:
    """Return the failure of resuming a paused or suspended guest whose volumes were detached.

    Why: data in the guest's memory must not be written to these volumes.
    """
    named = ", ".join(sorted(volume_ids))
    return VerbFailed(
        f"The paused or suspended guest still has volume {named}, which was detached from the server, and is not "
        "resumed. Hard reboot the server. The guest's memory is lost, and its disks are kept.",
        details="the volume was detached while the host did not answer",
    )


def copyable(
    volume: AttachedVolume, guest_volumes: Iterable[AttachedVolume], power_state: int
) -> AttachedVolume:
    """Return the guest's present volume, after checks that it can be copied.

    Args:
        volume: The id of the present volume, with the connection and size of the new location.
        guest_volumes: The volumes of the guest.
        power_state: Power state of the guest.

    Raises:
        VerbFailed: The guest lacks the volume or is not active, or the two sizes differ.
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
            f"The server is off, and its host can copy volume {volume.volume_id} only while the server runs. Start "
            "the server and try again, or detach the volume and migrate the detached volume."
        )
    if volume.size_gb != present_volume.size_gb:
        raise another_size(
            volume.volume_id,
            f"the volume has {present_volume.size_gb} GiB, and the new volume {volume.size_gb} GiB",
        )
    return present_volume


def snapshotted(volume: AttachedVolume, guest_volumes: Iterable[AttachedVolume]) -> AttachedVolume:
    """Return the guest's present volume with this id, after a check that it is a file on NFS.

    Hosts take snapshots only of such volumes.

    Raises:
        VerbFailed: The guest lacks the volume, or the volume is not a file on NFS.
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
    """Refuse a volume that is not a file on NFS.

    Hosts take snapshots of files only. The volume service takes the snapshots of all other volumes.

    Raises:
        VerbFailed: The volume is not a file on NFS.
    """
    protocol = volume.connection.get("driver_volume_type")
    if protocol != NFS:
        raise VerbFailed(
            f"Volume {volume.volume_id} is connected over {protocol!s:.40}. Hosts take snapshots only of volumes that "
            f"are files ({NFS}). The volume service takes the snapshots of other volumes."
        )


def mergeable(
    volume: AttachedVolume, guest_volumes: Iterable[AttachedVolume], power_state: int
) -> None:
    """Check that the host can merge files of the guest's volume now.

    Raises:
        VerbFailed: The guest lacks the volume or is not active, or the volume is not a file on NFS.
    """
    snapshotted(volume, guest_volumes)
    if power_state not in (RUNNING, PAUSED):
        raise VerbFailed(
            f"The server is off, and its host can merge files of volume {volume.volume_id} only while the server "
            "runs. Start the server or detach the volume, and delete the snapshot again."
        )


def another_size(volume_id: str, details: str) -> VerbFailed:
    """Return the failure of a copy to a volume of another size while the guest is active.

    ``details`` is for the operator.
    """
    return VerbFailed(
        f"The target of volume {volume_id} has another size. While the server runs, its host can copy a volume only "
        "to a target of the same size. Detach the volume, and migrate the detached volume.",
        details=details,
    )


def unknown(volume_id: str) -> VerbFailed:
    """Return the failure of a verb whose volume the guest on this host does not have."""
    return VerbFailed(f"The server does not have volume {volume_id} on this host.")
