# SPDX-License-Identifier: Apache-2.0
"""A server's volumes on a host, for both drivers.

``link`` says how a volume is reached, as the volume service said to the conductor. What the service
says is not trusted further than that: ids are UUIDs, and a protocol is one of a table or refused
by name.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from common.domain.json_types import JsonObject
from common.domain.models import AttachedVolume, GuestSpec, ImageRef
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING

#: Protocols that need nothing but QEMU.
LOCAL, NBD, RBD = "local", "nbd", "rbd"
#: Those that the host's kernel speaks; the first also QEMU.
ISCSI, FIBRE_CHANNEL, NVMEOF, NFS = "iscsi", "fibre_channel", "nvmeof", "nfs"
#: All that the volume service may name.
EVERY_PROTOCOL = frozenset({LOCAL, NBD, RBD, ISCSI, FIBRE_CHANNEL, NVMEOF, NFS})
#: What an operator does for a host that does not know one.
BY_QEMU = "Name it in [agent] qemu_volume_protocols of the host's configuration."
BY_HOST = "Name it in [agent] host_volume_protocols of the host's configuration."
REMEDIES = {
    LOCAL: "Name its folder in [agent] volume_folders of the host's configuration.",
    RBD: BY_QEMU,
    ISCSI: "Name it in [agent] qemu_volume_protocols or host_volume_protocols of the host's configuration.",
    **dict.fromkeys((FIBRE_CHANNEL, NVMEOF, NFS), BY_HOST),
}
#: Where a disk can be, and which of these a running guest can get and give back.
BUSES = ("virtio", "scsi", "sata", "ide", "usb")
HOT_BUSES = ("virtio", "scsi")
DISK = "disk"
#: What of a connection is not the protocol's own.
PROTOCOL_KEYS = ("driver_volume_type", "data")


@dataclass(frozen=True, slots=True)
class VolumeLink:
    """How a host reaches a volume. ``data``: what the protocol needs, which may hold passwords."""

    protocol: str
    data: JsonObject = field(default_factory=dict, repr=False)


def link(volume: AttachedVolume, protocols: Collection[str]) -> VolumeLink:
    """How the volume is reached here. VerbFailed when it is not, or cannot be a disk of a guest."""
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
    # The service's attachments have the data beside the protocol, os-brick's connectors below it.
    rest = {name: value for name, value in volume.connection.items() if name not in PROTOCOL_KEYS}
    data = volume.connection.get("data", rest)
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
    """The failure of a volume whose connection says too little, or what it must not."""
    return VerbFailed(
        f"What the volume service says of volume {volume_id} cannot be used on this host; attach it again, "
        "or see the host's log.",
        details=details,
    )


def links(volumes: Iterable[AttachedVolume], protocols: Collection[str]) -> list[VolumeLink]:
    """Before anything of a guest is made or given up: all of its volumes can be reached here."""
    return [link(volume, protocols) for volume in volumes]


def check_id(volume_id: str) -> None:
    """VerbFailed when the id is no UUID: it becomes part of names and of the guest's XML."""
    try:
        if str(uuid.UUID(volume_id)) == volume_id:
            return
    except ValueError:
        pass
    raise VerbFailed("The volume's id is not a UUID.", details=f"id {volume_id[:80]!r}")


def boots_from_volume(volumes: Iterable[AttachedVolume]) -> bool:
    """Does a volume take the place of the root disk?"""
    return any(volume.boot_index == 0 for volume in volumes)


def image_of(spec: GuestSpec) -> ImageRef | None:
    """What the root disk is made of; None where a volume takes its place."""
    return None if boots_from_volume(spec.volumes) else spec.image


def grown(volume: AttachedVolume, size_gb: int) -> AttachedVolume:
    """The volume, at least so large."""
    return replace(volume, size_gb=max(volume.size_gb, size_gb))


def refuse_cold_bus(volume: AttachedVolume, power_state: int) -> None:
    """VerbFailed for a volume on a bus that an active guest cannot change."""
    if power_state in (RUNNING, PAUSED) and volume.bus not in HOT_BUSES:
        raise VerbFailed(
            f"A volume on {volume.bus} comes and goes only while the server is off; stop it first."
        )


def suspended() -> VerbFailed:
    """Saved memory goes on with the disks that it was saved with."""
    return VerbFailed("The server is suspended; resume it before its volumes are changed.")


def held(volume_id: str, power_state: int, details: str = "") -> VerbFailed:
    """The failure of a detach that the guest did not answer."""
    why = (
        "it is paused; resume it first"
        if power_state == PAUSED
        else "unmount it there, and try again when it has booted"
    )
    return VerbFailed(
        f"The guest did not let go of volume {volume_id}: {why}. The volume stays.", details=details
    )


def foreign(volume_ids: Iterable[str]) -> VerbFailed:
    """The failure of a guest that is to go on with volumes that were detached meanwhile: what it
    has of them in its memory must not reach them."""
    named = ", ".join(sorted(volume_ids))
    return VerbFailed(
        f"The guest rests with volume {named}, which is not the server's any more: it does not go on with "
        "it. Reboot the server (hard): its memory is lost, its disks stay.",
        details="it was detached while the host was away",
    )


def copyable(
    volume: AttachedVolume, had: Iterable[AttachedVolume], power_state: int
) -> AttachedVolume:
    """The volume as the guest has it, which is to be copied to where ``volume`` says. VerbFailed
    when it has none, is off, or the other one has another size."""
    known = next((one for one in had if one.volume_id == volume.volume_id), None)
    if known is None:
        raise unknown(volume.volume_id)
    if power_state not in (RUNNING, PAUSED):
        raise VerbFailed(
            f"The server is off, and volume {volume.volume_id} is copied only while it runs; start it, or "
            "detach the volume and migrate it then."
        )
    if volume.size_gb != known.size_gb:
        raise another_size(volume.volume_id, f"{known.size_gb} GiB, and {volume.size_gb} there")
    return known


def snapshotted(volume: AttachedVolume, had: Iterable[AttachedVolume]) -> AttachedVolume:
    """The volume as the guest has it, which is to go on in the file that ``volume`` names.
    VerbFailed when it has none, or its volume is no file whose snapshots hosts take."""
    known = next((one for one in had if one.volume_id == volume.volume_id), None)
    if known is None:
        raise unknown(volume.volume_id)
    refuse_no_file(known)
    return known


def refuse_no_file(volume: AttachedVolume) -> None:
    """VerbFailed for a volume that is no file of an export, which its own service snapshots."""
    protocol = volume.connection.get("driver_volume_type")
    if protocol != NFS:
        raise VerbFailed(
            f"Volume {volume.volume_id} is no file: it is served by {protocol!s:.40}. Hosts take snapshots of "
            f"volumes that are files ({NFS}) alone; its own service takes those of the others."
        )


def mergeable(volume: AttachedVolume, had: Iterable[AttachedVolume], power_state: int) -> None:
    """VerbFailed when the guest has no such volume, it is no file, or the guest is off."""
    snapshotted(volume, had)
    if power_state not in (RUNNING, PAUSED):
        raise VerbFailed(
            f"The server is off, and files of volume {volume.volume_id} are merged only while it runs; start "
            "it, or detach the volume, and delete the snapshot then."
        )


def another_size(volume_id: str, details: str) -> VerbFailed:
    """A running guest's disk does not change its size by being copied."""
    return VerbFailed(
        f"Volume {volume_id} is copied while its server runs only into one of exactly its size; detach it, and "
        "migrate it then.",
        details=details,
    )


def unknown(volume_id: str) -> VerbFailed:
    """The guest does not have this volume."""
    return VerbFailed(f"The server does not have volume {volume_id} on this host.")
