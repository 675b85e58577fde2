# SPDX-License-Identifier: Apache-2.0
"""Choose the disks of a new server: root, ephemeral disks, swap, and the names of volumes.

The functions are pure, and their errors name the field. ``common.domain.local_disks`` interprets
the disks in a server's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from common.domain import device_names, errors, local_disks
from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import Flavor
from compute_api.compute.servers.disks.block_devices import (
    BLANK,
    BOOT_ORDER,
    FIELD,
    IMAGE,
    VOLUME_FIELDS,
    VolumeMapping,
)


@dataclass(frozen=True)
class ChosenDisks:
    """The disks of a new server."""

    #: Disks instead of the flavor's ephemeral and swap disks, or None for the flavor's disks.
    local: JsonObject | None
    #: With device names, in the order in which the guest sees the volumes.
    volumes: list[VolumeMapping]
    root_name: str


def choose_disks(
    mappings: Sequence[JsonMapping],
    volumes: Sequence[VolumeMapping],
    flavor: Flavor,
    properties: Mapping[str, str],
    max_disks: int,
) -> ChosenDisks:
    """Choose the local disks of a new server, and name its volumes.

    The guest sees the root disk first, then the local disks, then the other volumes. A device_name
    of the request is ignored as in Nova, because the guest would not use it.

    Args:
        mappings: Mappings of local disks.
        volumes: Mappings of volumes, still without device names.
        flavor: The flavor, which limits the local disks.
        properties: Properties of the image. ``hw_disk_bus`` is the bus of volumes without a bus.
        max_disks: Local disks that a server may have, including its root disk.

    Raises:
        BadRequest: A local disk is invalid, or the flavor or the image does not allow it.
        Forbidden: The guest has more disks than there are names.
    """
    _check_boot_disk(mappings, flavor, properties)
    local = _choose_local(mappings, flavor, max_disks)
    bus = properties.get("hw_disk_bus")
    volumes = [replace(volume, bus=volume.bus or bus) for volume in volumes]
    others = [volume for volume in volumes if not volume.is_root]
    root = next((volume for volume in volumes if volume.is_root), None)
    root_name = device_names.root_name(root.bus if root else bus)
    used = [root_name, *local_disks.devices(local_disks.of(flavor, local), root_name, bus).values()]
    names = device_names.assign_names(used, [volume.bus for volume in others])
    named = [replace(volume, device_name=name) for volume, name in zip(others, names, strict=True)]
    if root is not None:
        named.insert(0, replace(root, device_name=root_name))
    return ChosenDisks(local, named, root_name)


def _check_boot_disk(
    local: Sequence[JsonMapping], flavor: Flavor, properties: Mapping[str, str]
) -> None:
    """Refuse a mapping of the image as local boot disk that differs from the disk of the flavor.

    The disk may be larger than the mapping requests.

    Raises:
        BadRequest: The mapping requests a larger disk, another bus or type, or any format.
    """
    bus = properties.get("hw_disk_bus") or device_names.VIRTIO
    for mapping in local:
        if mapping.get("source_type") != IMAGE:
            continue
        size = _parse_size(mapping)
        if size > flavor.root_gb:
            raise errors.BadRequest(
                f"{FIELD}.volume_size: flavor {flavor.name} has {flavor.root_gb} GiB for the root "
                f"disk, and {size} GiB are requested."
            )
        if mapping.get("disk_bus") not in (None, "", bus):
            raise errors.BadRequest(
                f"{FIELD}.disk_bus: the local boot disk has the bus {bus}, which the image property "
                "hw_disk_bus determines; leave it out."
            )
        if mapping.get("device_type") not in (None, "", "disk"):
            raise errors.BadRequest(
                f"{FIELD}.device_type: the local boot disk always has the type disk; leave it out."
            )
        if mapping.get("guest_format"):
            raise errors.BadRequest(
                f"{FIELD}.guest_format: not allowed for the image as local boot disk; leave it out."
            )


def _choose_local(
    local: Sequence[JsonMapping], flavor: Flavor, max_disks: int
) -> JsonObject | None:
    """Return the disks that replace the flavor's ephemeral and swap disks, or None to keep these.

    Args:
        local: The requested mappings of local disks.
        flavor: The flavor, which limits the sizes.
        max_disks: Local disks that a server may have, including its root disk.

    Raises:
        BadRequest: A mapping is invalid, or the server would have too many or too large disks.
    """
    blanks = [mapping for mapping in local if mapping.get("source_type", BLANK) == BLANK]
    for mapping in blanks:
        _check_blank(mapping)
    swaps = [mapping for mapping in blanks if _parse_format(mapping) == local_disks.SWAP]
    ephemeral = [mapping for mapping in blanks if _parse_format(mapping) != local_disks.SWAP]
    disks: JsonObject = {}
    if ephemeral:
        disks["ephemeral"] = [
            {"gb": _parse_size(mapping), "format": _parse_format(mapping)} for mapping in ephemeral
        ]
        _check_ephemeral(disks, flavor)
    if swaps:
        disks["swap_mb"] = _choose_swap(swaps, flavor)
    if _count(flavor, disks) > max_disks:
        raise errors.BadRequest(
            f"{FIELD}: with the disks of the flavor, the server {_describe_excess(flavor, disks, max_disks)}"
        )
    return disks or None


def check_resize(old: Flavor, disks: JsonObject | None, new: Flavor, most: int) -> None:
    """Check that the new flavor has room for the ephemeral disks, which a resize keeps.

    The number of local disks is checked too.

    Args:
        old: The present flavor.
        disks: The requested disks in the server's row, or None for the flavor's disks.
        new: The new flavor.
        most: Local disks that a server may have. A server that already has more may keep that
            number.

    Raises:
        BadRequest: The disks need more space than the flavor has, or there are too many disks.
    """
    refused = "flavorRef: Server disk was unable to be resized because:"
    held_gb = local_disks.ephemeral_gb(old, disks)
    if new.ephemeral_gb < held_gb:
        raise errors.BadRequest(
            f"{refused} the ephemeral disks have {held_gb} GiB, and flavor {new.name} has "
            f"{new.ephemeral_gb} GiB; choose a flavor with at least {held_gb} GiB."
        )
    if _count(new, disks) > max(most, _count(old, disks)):
        raise errors.BadRequest(
            f"{refused} with flavor {new.name} the server {_describe_excess(new, disks, most)}"
        )


def _count(flavor: Flavor, disks: JsonObject | None) -> int:
    """Return the number of local disks of a server. The root disk counts, even if on a volume."""
    return 1 + len(local_disks.of(flavor, disks))


def _describe_excess(flavor: Flavor, disks: JsonObject | None, most: int) -> str:
    return f"would have {_count(flavor, disks)} local disks including the root disk; at most {most} are allowed."


def _check_blank(mapping: JsonMapping) -> None:
    """Refuse fields that a new empty local disk (source_type blank) cannot have.

    Raises:
        BadRequest: The mapping has a source, a field of volumes, no_device, a bus, a type other
            than disk, a place in the boot order, or an unknown file system.
    """
    if mapping.get("uuid") or mapping.get("image_id"):
        raise errors.BadRequest(
            f"{FIELD}.uuid: a disk of source_type blank has no source; leave it out."
        )
    if extra := sorted(
        {*VOLUME_FIELDS, "no_device", "disk_bus"}
        & {name for name, value in mapping.items() if value}
    ):
        raise errors.BadRequest(
            f"{FIELD}.{extra[0]}: not allowed for a disk of source_type blank; leave it out."
        )
    if mapping.get("device_type") not in (None, "", "disk"):
        raise errors.BadRequest(
            f"{FIELD}.device_type: a disk of source_type blank always has the type disk; leave it out."
        )
    if int(-1 if mapping.get("boot_index") is None else mapping["boot_index"]) >= 0:
        raise errors.BadRequest(
            BOOT_ORDER
            + f" {FIELD}.boot_index: servers cannot boot from a disk of source_type blank; "
            "give -1."
        )
    if _parse_format(mapping) not in ("", local_disks.SWAP, *local_disks.FORMATS):
        raise errors.BadRequest(
            f"{FIELD}.guest_format: {_parse_format(mapping)[:40]!r} is not one of {local_disks.SWAP}, "
            f"{', '.join(local_disks.FORMATS)}."
        )


def _check_ephemeral(disks: JsonObject, flavor: Flavor) -> None:
    requested_gb = local_disks.ephemeral_gb(flavor, disks)
    if not flavor.ephemeral_gb or requested_gb > flavor.ephemeral_gb:
        raise errors.BadRequest(
            f"{FIELD}.volume_size: flavor {flavor.name} has {flavor.ephemeral_gb} GiB for "
            f"ephemeral disks, and {requested_gb or 'some'} GiB are requested. A disk without a size "
            "gets all GiB of the flavor."
        )


def _choose_swap(swaps: Sequence[JsonMapping], flavor: Flavor) -> int:
    """Return the size of the swap disk in MiB. Without a size this is the swap size of the flavor.

    Raises:
        BadRequest: There are several swap disks, or the flavor has less swap or no swap.
    """
    if len(swaps) > 1:
        raise errors.BadRequest(f"{FIELD}.guest_format: a server can have one swap disk only.")
    size = _parse_size(swaps[0]) or flavor.swap_mb
    if not 0 < size <= flavor.swap_mb:
        raise errors.BadRequest(
            f"{FIELD}.volume_size: flavor {flavor.name} has {flavor.swap_mb} MiB of swap, and "
            f"{size or 'some'} MiB are requested."
        )
    return size


def _parse_format(mapping: JsonMapping) -> str:
    return str(mapping.get("guest_format") or "")


def _parse_size(mapping: JsonMapping) -> int:
    """Return the requested size, or 0 if the mapping has no size.

    The unit is GiB, or MiB for swap.
    """
    return int(mapping.get("volume_size") or 0)
