# SPDX-License-Identifier: Apache-2.0
"""Parse the block device mappings of a create request and of its image, in either version.

Mappings of the first version are converted to the second. The functions are pure. ``disks`` chooses
the local disks, and ``volumes`` looks up the volumes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from common.clients.image import Image
from common.domain import errors, local_disks
from common.domain.json_types import JsonMapping, JsonObject
from compute_api.compute.schemas.servers import servers as schemas
from compute_api.http.validation import is_true

#: Properties of an image without data that refers to volume snapshots. The first has the mappings.
IMAGE_MAPPINGS = "block_device_mapping"
OF_IMAGE = frozenset((IMAGE_MAPPINGS, "bdm_v2", "root_device_name"))
FIELD, OLD_FIELD = "block_device_mapping_v2", "block_device_mapping"
VOLUME, LOCAL, IMAGE, SNAPSHOT, BLANK = "volume", "local", "image", "snapshot", "blank"
INVALID = "Block Device Mapping is Invalid"
BOOT_ORDER = (
    f"{INVALID}: Boot sequence for the instance and image/block device mapping combination is not "
    "valid."
)
BUSES = ("virtio", "scsi", "sata", "usb", "ide")
#: Device types of volumes that hosts support.
DEVICE_TYPES = ("disk",)
#: Fields of volumes, which local disks must not have.
VOLUME_FIELDS = ("volume_id", "snapshot_id", "volume_type")
_EPHEMERAL = re.compile("ephemeral[0-9]+")


@dataclass(frozen=True, kw_only=True)
class VolumeMapping:
    """A volume of a new server."""

    source: str
    #: Id of the existing volume, or of the image or snapshot from which the volume is created.
    source_id: str | None
    #: In GiB. 0 means no requested size.
    size_gb: int = 0
    boot_index: int | None = None
    bus: str | None = None
    device_type: str | None = None
    tag: str | None = None
    delete_on_termination: bool = False
    volume_type: str | None = None
    #: Name in the guest. ``disks.choose_disks`` chooses it.
    device_name: str | None = None

    @property
    def is_root(self) -> bool:
        """True if the server boots from the volume."""
        return self.boot_index == 0


@dataclass(frozen=True)
class BlockDevices:
    """The requested disks of a new server, from the request and the image."""

    #: The image of the root disk on the host. Empty if the server boots from a volume.
    image_id: str
    #: Mappings of disks on the host.
    local: Sequence[JsonObject]
    volumes: Sequence[VolumeMapping]


def parse(body: JsonMapping, read_image: Callable[[str], Image]) -> BlockDevices:
    """Parse the mappings of a request, and the mappings of the requested image.

    Args:
        body: The object ``server`` of the request's body.
        read_image: Returns the image with this id. Its errors are passed on.

    Raises:
        BadRequest: A mapping is invalid, or the root disk is missing or ambiguous.
    """
    mappings = _parse_request(body)
    if image_id := str(body.get("imageRef") or ""):
        properties = read_image(image_id).ref.properties
        mappings = _merge(_parse_image(image_id, properties), mappings)
    local = [mapping for mapping in mappings if _choose_destination(mapping) == LOCAL]
    volumes = [
        _parse_volume(mapping) for mapping in mappings if _choose_destination(mapping) == VOLUME
    ]
    _check_root(body, local, volumes)
    return BlockDevices(image_id, local, volumes)


def _parse_request(body: JsonMapping) -> list[JsonObject]:
    """Return the mappings of the body, converted to the second version.

    Raises:
        BadRequest: The body has mappings of both versions, or a mapping of the first version is
            invalid.
    """
    if body.get(OLD_FIELD):
        if body.get(FIELD):
            raise errors.BadRequest(
                "Using different block_device_mapping syntaxes is not allowed in the same request."
            )
        return _convert_all(body[OLD_FIELD], bool(body.get("imageRef")))
    return [dict(mapping) for mapping in body.get(FIELD, ())]


def _convert_all(mappings: Sequence[JsonMapping], has_image: bool) -> list[JsonObject]:
    """Convert mappings of the first version, which has no boot order, to the second.

    Without an image the server boots from the first volume by device name. Volumes without a device
    name come last. Mappings with ``no_device`` are left out.

    Raises:
        BadRequest: A mapping is invalid.
    """
    converted = [_convert(mapping) for mapping in mappings if not mapping.get("no_device")]
    if has_image:
        return converted
    volumes = sorted(
        (mapping for mapping in converted if mapping["destination_type"] == VOLUME),
        key=lambda mapping: str(mapping.get("device_name") or "~"),
    )
    for mapping in volumes[:1]:
        mapping["boot_index"] = 0
    return converted


def _convert(mapping: JsonMapping) -> JsonObject:
    """Convert a mapping of the first version to the second.

    Raises:
        BadRequest: The mapping is neither a volume, a snapshot, a swap disk nor an ephemeral disk.
    """
    converted: JsonObject = {
        name: mapping[name]
        for name in ("device_name", "volume_size", "delete_on_termination")
        if name in mapping
    }
    virtual = str(mapping.get("virtual_name") or "")
    if virtual == local_disks.SWAP or _EPHEMERAL.fullmatch(virtual):
        converted |= {"source_type": BLANK, "destination_type": LOCAL}
        return converted | ({"guest_format": virtual} if virtual == local_disks.SWAP else {})
    for source in (SNAPSHOT, VOLUME):
        if mapping.get(f"{source}_id"):
            return converted | {
                "source_type": source,
                "destination_type": VOLUME,
                "uuid": mapping[f"{source}_id"],
            }
    raise errors.BadRequest(f"{INVALID}: Unrecognized legacy format.")


def _parse_image(image_id: str, properties: Mapping[str, str]) -> list[JsonObject]:
    """Return the mappings in an image's property ``IMAGE_MAPPINGS``, in the second version.

    Without this property the list is empty.

    Raises:
        BadRequest: The property is not a list of valid mappings.
    """
    text = properties.get(IMAGE_MAPPINGS)
    if not text:
        return []
    try:
        mappings = [
            {name: value for name, value in dict(mapping).items() if value is not None}
            for mapping in orjson.loads(text)
        ]
    except (ValueError, TypeError) as problem:
        raise errors.BadRequest(
            f"Image {image_id}: the property {IMAGE_MAPPINGS} is not a list of mappings; use another image."
        ) from problem
    for mapping in mappings:
        try:
            schemas.IMAGE_MAPPING.at(0).check(mapping)
        except errors.BadRequest as problem:
            raise errors.BadRequest(
                f"Image {image_id}: the property {IMAGE_MAPPINGS} is invalid. {problem.text}"
            ) from problem
    return mappings if is_true(properties.get("bdm_v2", "")) else _convert_all(mappings, False)


def _merge(
    image_mappings: Sequence[JsonObject], requested: Sequence[JsonObject]
) -> list[JsonObject]:
    """Return the image's mappings, followed by the requested mappings.

    A requested mapping replaces the image's mapping with the same device name.

    An image with a mapping for a root volume contains no data. In this case a requested mapping of
    an image as boot disk is left out.
    """
    if any(_parse_boot_index(mapping) == 0 for mapping in image_mappings):
        requested = [
            mapping
            for mapping in requested
            if (mapping.get("source_type"), _parse_boot_index(mapping)) != (IMAGE, 0)
        ]
    taken = {_parse_name(mapping) for mapping in requested} - {None}
    return [
        *(mapping for mapping in image_mappings if _parse_name(mapping) not in taken),
        *requested,
    ]


def _parse_name(mapping: JsonMapping) -> str | None:
    name = mapping.get("device_name")
    return str(name).removeprefix("/dev/") if name else None


def _choose_destination(mapping: JsonMapping) -> str:
    """Return ``LOCAL`` or ``VOLUME``. Volumes and snapshots need no destination_type.

    Raises:
        BadRequest: The destination_type of an image or a blank disk is missing, or that of a volume
            or snapshot is ``LOCAL``.
    """
    destination = mapping.get("destination_type")
    if destination is None and mapping.get("source_type") in (VOLUME, SNAPSHOT):
        return VOLUME
    if destination is None:
        raise errors.BadRequest(
            f"{FIELD}.destination_type: a disk of source_type "
            f"{mapping.get('source_type', 'blank')} needs the destination_type local or volume."
        )
    if destination == LOCAL and mapping.get("source_type") in (VOLUME, SNAPSHOT):
        raise errors.BadRequest(
            f"{FIELD}.destination_type: a disk of source_type {mapping['source_type']} must have the "
            "destination_type volume."
        )
    return str(destination)


def _parse_volume(mapping: JsonMapping) -> VolumeMapping:
    source = str(mapping.get("source_type") or BLANK)
    source_id = mapping.get("uuid") or mapping.get(f"{source}_id")
    if source == BLANK and source_id:
        raise errors.BadRequest(f"{INVALID}: Invalid device UUID.")
    if source != BLANK and not source_id:
        raise errors.BadRequest(f"{INVALID}: Missing device UUID.")
    if mapping.get("no_device"):
        raise errors.BadRequest(f"{FIELD}.no_device: not supported for volumes; leave it out.")
    size = int(mapping.get("volume_size") or 0)
    if source == IMAGE and not size:
        raise errors.BadRequest(
            "Images with destination_type 'volume' need to have a non-zero size specified"
        )
    if source == BLANK and not size:
        raise errors.BadRequest(
            "Blank volumes (source: 'blank', dest: 'volume') need to have non-zero size"
        )
    if source == VOLUME and mapping.get("volume_type"):
        raise errors.BadRequest(
            f"{INVALID}: Specifying volume type to existing volume is not supported."
        )
    if mapping.get("guest_format"):
        raise errors.BadRequest(f"{FIELD}.guest_format: volumes are not formatted; leave it out.")
    return VolumeMapping(
        source=source,
        source_id=source_id,
        size_gb=size,
        boot_index=_parse_boot_index(mapping),
        bus=_parse_choice(mapping, "disk_bus", BUSES),
        device_type=_parse_choice(mapping, "device_type", DEVICE_TYPES),
        tag=mapping.get("tag"),
        delete_on_termination=is_true(mapping.get("delete_on_termination", False)),
        volume_type=mapping.get("volume_type") or None,
    )


def _parse_boot_index(mapping: JsonMapping) -> int | None:
    """Return the position in the boot order, or None if the guest does not boot from the disk."""
    index = mapping.get("boot_index")
    return None if index is None or int(index) < 0 else int(index)


def _parse_choice(mapping: JsonMapping, name: str, choices: Sequence[str]) -> str | None:
    value = mapping.get(name) or None
    if value is not None and value not in choices:
        raise errors.BadRequest(
            f"{FIELD}.{name}: {value[:40]!r} is not one of {', '.join(choices)}."
        )
    return value


def _check_root(
    body: JsonMapping, local: Sequence[JsonMapping], volumes: Sequence[VolumeMapping]
) -> None:
    """Check that the server has exactly one root disk, either a volume or the image.

    A local mapping may name the image again, as the boot disk.

    Raises:
        BadRequest: The root disk is missing or ambiguous, a local disk has a tag, or the local
            mapping of the image has a field of volumes.
    """
    image_id = str(body.get("imageRef") or "")
    images = [mapping for mapping in local if mapping.get("source_type") == IMAGE]
    for mapping in images:
        if extra := sorted({*VOLUME_FIELDS} & set(mapping)):
            raise errors.BadRequest(
                f"{FIELD}.{extra[0]}: not allowed for the image as local boot disk; leave it out."
            )
        if (
            str(mapping.get("boot_index", "")) != "0"
            or mapping.get("uuid", mapping.get("image_id")) != image_id
        ):
            raise errors.BadRequest(BOOT_ORDER)
    if any(mapping.get("tag") for mapping in local):
        raise errors.BadRequest(
            f"{FIELD}.tag: local disks cannot have tags in this cloud; leave it out."
        )
    if len(images) > 1:
        raise errors.BadRequest(f"{FIELD}: only one disk can be the boot disk.")
    indexes = [*map(_parse_boot_index, images), *(volume.boot_index for volume in volumes)]
    if indexes.count(0) > 1:
        raise errors.BadRequest(BOOT_ORDER)
    if body.get(FIELD):
        _check_boot_order(indexes)
    elif image_id and not images and 0 not in indexes:
        # The first version has no mapping for the image, which is the root disk.
        _check_boot_order([0, *indexes])
    if not image_id and 0 not in indexes:
        raise errors.BadRequest("Invalid imageRef provided.")


def _check_boot_order(indexes: Sequence[int | None]) -> None:
    """Check that the indexes are 0, 1, 2, … without gaps, in any order. None is skipped.

    Raises:
        BadRequest: There is a gap, or no index.
    """
    order = sorted(index for index in indexes if index is not None)
    if order != list(range(len(order))) or not order:
        raise errors.BadRequest(BOOT_ORDER)
