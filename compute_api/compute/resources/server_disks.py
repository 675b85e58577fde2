# SPDX-License-Identifier: Apache-2.0
"""The disks of a create request: the image to boot from, ephemeral disks, swap.

Pure; raises BadRequest that names the field. ``common.local_disks`` reads what the server's row
keeps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common import device_names, errors, local_disks
from common.json_types import JsonMapping, JsonObject
from common.models import Flavor
from compute_api.compute.resources import block_devices
from compute_api.compute.resources.block_devices import (
    BLANK,
    BOOT_ORDER,
    FIELD,
    IMAGE,
    VolumeMapping,
)

_VOLUME = ("volume_id", "snapshot_id", "volume_type")


def boot_image(
    body: JsonMapping, local: Sequence[JsonMapping], volumes: Sequence[VolumeMapping]
) -> str:
    """The image to boot from, which one mapping may repeat as the local boot disk; empty: the
    server boots from a volume."""
    image_id = str(body.get("imageRef") or "")
    images = [mapping for mapping in local if mapping.get("source_type") == IMAGE]
    for mapping in images:
        if given := sorted({*_VOLUME} & set(mapping)):
            raise errors.BadRequest(
                f"{FIELD}.{given[0]}: not for the image as local boot disk; leave it out."
            )
        if (
            str(mapping.get("boot_index", "")) != "0"
            or mapping.get("uuid", mapping.get("image_id")) != image_id
        ):
            raise errors.BadRequest(BOOT_ORDER)
    if any(mapping.get("tag") for mapping in local):
        raise errors.BadRequest(f"{FIELD}.tag: disks of hosts cannot be tagged in this cloud.")
    if len(images) > 1:
        raise errors.BadRequest(f"{FIELD}: only one disk can be the boot disk.")
    indexes = [block_devices.boot_index(one) for one in images] + [
        one.boot_index for one in volumes
    ]
    if body.get(FIELD):
        block_devices.check_boot_order(indexes)
    elif image_id and not images and 0 not in indexes:  # which nothing of the first version says
        block_devices.check_boot_order([0, *indexes])
    if not image_id and 0 not in indexes:
        raise errors.BadRequest("Invalid imageRef provided.")
    return image_id


def check_boot_disk(
    local: Sequence[JsonMapping], flavor: Flavor, properties: Mapping[str, str]
) -> None:
    """Refuse a mapping of the image as local boot disk that asks for another disk than the server
    gets. The disk may be larger than its mapping asks."""
    bus = properties.get("hw_disk_bus") or device_names.VIRTIO
    for mapping in local:
        if mapping.get("source_type") != IMAGE:
            continue
        size = _size(mapping)
        if size > flavor.root_gb:
            raise errors.BadRequest(
                f"{FIELD}.volume_size: flavor {flavor.name} has {flavor.root_gb} GiB for the root "
                f"disk, and {size} are asked for."
            )
        if mapping.get("disk_bus") not in (None, "", bus):
            raise errors.BadRequest(
                f"{FIELD}.disk_bus: the image's hw_disk_bus decides the bus of its disk, {bus} "
                "here; leave it out."
            )
        if mapping.get("device_type") not in (None, "", "disk"):
            raise errors.BadRequest(
                f"{FIELD}.device_type: the local boot disk is a disk; leave it out."
            )
        if mapping.get("guest_format"):
            raise errors.BadRequest(
                f"{FIELD}.guest_format: not for the image as local boot disk; leave it out."
            )


def requested_disks(local: Sequence[JsonMapping], flavor: Flavor, most: int) -> JsonObject | None:
    """What is asked for in place of the flavor's ephemeral and swap disks; None: nothing. ``most``:
    local disks that a server may have, its root disk among them."""
    blanks = [mapping for mapping in local if mapping.get("source_type", BLANK) == BLANK]
    for mapping in blanks:
        _check(mapping)
    swaps = [mapping for mapping in blanks if _format(mapping) == local_disks.SWAP]
    ephemeral = [mapping for mapping in blanks if _format(mapping) != local_disks.SWAP]
    found: JsonObject = {}
    if ephemeral:
        found["ephemeral"] = [
            {"gb": _size(mapping), "format": _format(mapping)} for mapping in ephemeral
        ]
        _check_ephemeral(found, flavor)
    if swaps:
        found["swap_mb"] = _swap(swaps, flavor)
    if _count(flavor, found) > most:
        raise errors.BadRequest(
            f"{FIELD}: with what the flavor has the server {_too_many(flavor, found, most)}"
        )
    return found or None


def check_resize(old: Flavor, disks: JsonObject | None, new: Flavor, most: int) -> None:
    """A resize keeps the ephemeral disks, so that another flavor must have room for them. It gives
    no more local disks than are allowed; a server that has more since before that may keep them."""
    refused = "flavorRef: Server disk was unable to be resized because:"
    held = local_disks.ephemeral_gb(old, disks)
    if new.ephemeral_gb < held:
        raise errors.BadRequest(
            f"{refused} its ephemeral disks have {held} GiB, and flavor {new.name} has "
            f"{new.ephemeral_gb}; take one that has as much."
        )
    if _count(new, disks) > max(most, _count(old, disks)):
        raise errors.BadRequest(
            f"{refused} with flavor {new.name} the server {_too_many(new, disks, most)}"
        )


def _count(flavor: Flavor, disks: JsonObject | None) -> int:
    """Local disks of a server, its root disk among them."""
    return 1 + len(local_disks.of(flavor, disks))


def _too_many(flavor: Flavor, disks: JsonObject | None, most: int) -> str:
    return f"would have {_count(flavor, disks)} local disks, the root disk among them; at most {most} are allowed."


def _check(mapping: JsonMapping) -> None:
    """Of a new disk its size and its file system can be chosen, and nothing else."""
    if mapping.get("uuid") or mapping.get("image_id"):
        raise errors.BadRequest(
            f"{FIELD}.uuid: a disk of source_type blank has no source; leave it out."
        )
    if given := sorted(
        {*_VOLUME, "no_device", "disk_bus"} & {name for name, value in mapping.items() if value}
    ):
        raise errors.BadRequest(
            f"{FIELD}.{given[0]}: not for disks of source_type blank; leave it out."
        )
    if mapping.get("device_type") not in (None, "", "disk"):
        raise errors.BadRequest(
            f"{FIELD}.device_type: disks of source_type blank are disks; leave it out."
        )
    if int(-1 if mapping.get("boot_index") is None else mapping["boot_index"]) >= 0:
        raise errors.BadRequest(
            BOOT_ORDER + f" {FIELD}.boot_index: nothing can be booted from a disk of source_type "
            "blank; give -1."
        )
    if _format(mapping) not in ("", local_disks.SWAP, *local_disks.FORMATS):
        raise errors.BadRequest(
            f"{FIELD}.guest_format: {_format(mapping)[:40]!r} is not one of {local_disks.SWAP}, "
            f"{', '.join(local_disks.FORMATS)}."
        )


def _check_ephemeral(found: JsonObject, flavor: Flavor) -> None:
    wanted = local_disks.ephemeral_gb(flavor, found)
    if not flavor.ephemeral_gb or wanted > flavor.ephemeral_gb:
        raise errors.BadRequest(
            f"{FIELD}.volume_size: flavor {flavor.name} has {flavor.ephemeral_gb} GiB for "
            f"ephemeral disks, and {wanted or 'some'} are asked for; one without a size has all."
        )


def _swap(swaps: Sequence[JsonMapping], flavor: Flavor) -> int:
    """The MiB of swap."""
    if len(swaps) > 1:
        raise errors.BadRequest(f"{FIELD}.guest_format: a server can have one swap disk only.")
    size = _size(swaps[0]) or flavor.swap_mb
    if not 0 < size <= flavor.swap_mb:
        raise errors.BadRequest(
            f"{FIELD}.volume_size: flavor {flavor.name} has {flavor.swap_mb} MiB of swap, and "
            f"{size or 'some'} are asked for."
        )
    return size


def _format(mapping: JsonMapping) -> str:
    return str(mapping.get("guest_format") or "")


def _size(mapping: JsonMapping) -> int:
    """As it was given; 0: it was not."""
    return int(mapping.get("volume_size") or 0)
