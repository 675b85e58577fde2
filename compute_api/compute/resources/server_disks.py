# SPDX-License-Identifier: Apache-2.0
"""The disks of a create request: the image to boot from, ephemeral disks, swap.

Pure; raises BadRequest that names the field. ``common.local_disks`` reads what the server's row
keeps of it."""

from __future__ import annotations

from collections.abc import Sequence

from common import errors, local_disks
from common.json_types import JsonMapping, JsonObject
from common.models import Flavor

FIELD = "block_device_mapping_v2"
_VOLUME = ("volume_id", "snapshot_id", "volume_type")
_BOOT_ORDER = (
    "Block Device Mapping is Invalid: Boot sequence for the instance and image/block device mapping "
    "combination is not valid."
)


def boot_image(body: JsonMapping) -> str:
    """The image to boot from, which one mapping may repeat as the local boot disk. Mappings of
    volumes are refused."""
    image_id, mappings = str(body.get("imageRef") or ""), body.get(FIELD, ())
    images = [mapping for mapping in mappings if not _is_blank(mapping)]
    for mapping in images:
        if (
            mapping.get("source_type") != "image"
            or mapping.get("destination_type") != "local"
            or {*_VOLUME, "volume_size"} & set(mapping)
        ):
            raise errors.BadRequest(
                f"{FIELD}: this cloud has no volume service; a disk is the image as local boot "
                "disk (source_type image, destination_type local), or a new one (source_type "
                "blank, destination_type local)."
            )
        if (
            str(mapping.get("boot_index", "")) != "0"
            or mapping.get("uuid", mapping.get("image_id")) != image_id
        ):
            raise errors.BadRequest(_BOOT_ORDER)
    if any(mapping.get("tag") for mapping in mappings):
        raise errors.BadRequest(f"{FIELD}.tag: disks cannot be tagged in this cloud.")
    if len(images) > 1:
        raise errors.BadRequest(f"{FIELD}: only one disk can be the boot disk.")
    if mappings and not images:
        raise errors.BadRequest(_BOOT_ORDER)
    if not image_id:
        raise errors.BadRequest("Invalid imageRef provided.")
    return image_id


def requested_disks(body: JsonMapping, flavor: Flavor, most: int) -> JsonObject | None:
    """What is asked for in place of the flavor's ephemeral and swap disks; None: nothing. ``most``:
    local disks that a server may have, its root disk among them."""
    blanks = [mapping for mapping in body.get(FIELD, ()) if _is_blank(mapping)]
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


def _is_blank(mapping: JsonMapping) -> bool:
    return (mapping.get("source_type"), mapping.get("destination_type")) == ("blank", "local")


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
            _BOOT_ORDER + f" {FIELD}.boot_index: nothing can be booted from a disk of source_type "
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
