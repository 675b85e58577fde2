# SPDX-License-Identifier: Apache-2.0
"""The block device mappings of a create request, of either version, in the words of the second.

Pure; raises BadRequest as the API has it, or by the field's name. Which are disks of the host says
``server_disks``; what becomes of volumes, ``server_volumes``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from common import device_names, errors, local_disks
from common.json_types import JsonMapping, JsonObject
from compute_api.compute.schemas import servers as schemas
from compute_api.edge.validation import is_true

#: The properties of an image that are true of its own snapshots only; the first has mappings.
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
DEVICE_TYPES = ("disk",)  #: of volumes: what the hosts can give a guest
_EPHEMERAL = re.compile("ephemeral[0-9]+")


@dataclass(frozen=True, kw_only=True)
class VolumeMapping:
    """A volume that a new server is to have. source_id: of the volume itself, or of the image or
    snapshot that it is made of; size_gb: 0, it was not given."""

    source: str
    source_id: str | None
    size_gb: int = 0
    boot_index: int | None = None
    bus: str | None = None
    device_type: str | None = None
    tag: str | None = None
    delete_on_termination: bool = False
    volume_type: str | None = None

    @property
    def is_root(self) -> bool:
        """Does the server boot from it?"""
        return self.boot_index == 0


def read(body: JsonMapping) -> list[JsonObject]:
    """The mappings, as of the second version."""
    if body.get(OLD_FIELD):
        if body.get(FIELD):
            raise errors.BadRequest(
                "Using different block_device_mapping syntaxes is not allowed in the same request."
            )
        return _of_old(body[OLD_FIELD], bool(body.get("imageRef")))
    return [dict(one) for one in body.get(FIELD, ())]


def _of_old(mappings: Sequence[JsonMapping], has_image: bool) -> list[JsonObject]:
    """Those of the first version, which names no boot order: without an image it is the device
    /dev/vda, or the first by name."""
    found = [_from_old(one) for one in mappings if not one.get("no_device")]
    volumes = sorted(
        (one for one in found if one["destination_type"] == VOLUME),
        key=lambda one: str(one.get("device_name") or "~"),
    )
    if has_image:
        return found
    for one in volumes[:1]:
        one["boot_index"] = 0
    return found


def _from_old(one: JsonMapping) -> JsonObject:
    made: JsonObject = {
        name: one[name]
        for name in ("device_name", "volume_size", "delete_on_termination")
        if name in one
    }
    virtual = str(one.get("virtual_name") or "")
    if virtual == local_disks.SWAP or _EPHEMERAL.fullmatch(virtual):
        made |= {"source_type": BLANK, "destination_type": LOCAL}
        return made | ({"guest_format": virtual} if virtual == local_disks.SWAP else {})
    for source in (SNAPSHOT, VOLUME):
        if one.get(f"{source}_id"):
            return made | {
                "source_type": source,
                "destination_type": VOLUME,
                "uuid": one[f"{source}_id"],
            }
    raise errors.BadRequest(f"{INVALID}: Unrecognized legacy format.")


def of_image(image_id: str, properties: Mapping[str, str]) -> list[JsonObject]:
    """The mappings that an image names in place of bytes, as of the second version."""
    text = properties.get(IMAGE_MAPPINGS)
    if not text:
        return []
    try:
        found = [
            {name: value for name, value in dict(one).items() if value is not None}
            for one in orjson.loads(text)
        ]
    except (ValueError, TypeError) as problem:
        raise errors.BadRequest(
            f"Image {image_id}: its property {IMAGE_MAPPINGS} is no list of mappings; use another image."
        ) from problem
    for one in found:
        try:
            schemas.IMAGE_MAPPING.at(0).check(one)
        except errors.BadRequest as problem:
            raise errors.BadRequest(
                f"Image {image_id}: its property {IMAGE_MAPPINGS} cannot be used. {problem.text}"
            ) from problem
    return found if is_true(properties.get("bdm_v2", "")) else _of_old(found, False)


def merged(of_image: Sequence[JsonObject], asked: Sequence[JsonObject]) -> list[JsonObject]:
    """What a request asks for takes the place of the image's of the same device name. An image that
    names what to boot from is no disk itself."""
    if any(boot_index(one) == 0 for one in of_image):
        asked = [one for one in asked if (one.get("source_type"), boot_index(one)) != (IMAGE, 0)]
    taken = {_name(one) for one in asked} - {None}
    return [*(one for one in of_image if _name(one) not in taken), *asked]


def _name(one: JsonMapping) -> str | None:
    return str(one["device_name"]).removeprefix("/dev/") if one.get("device_name") else None


def split(mappings: Sequence[JsonObject]) -> tuple[list[JsonObject], list[VolumeMapping]]:
    """The disks of the host, and the volumes."""
    local = [one for one in mappings if _destination(one) == LOCAL]
    return local, [_volume(one) for one in mappings if _destination(one) == VOLUME]


def _destination(one: JsonMapping) -> str:
    given = one.get("destination_type")
    if given is None and one.get("source_type") in (VOLUME, SNAPSHOT):
        return VOLUME
    if given is None:
        raise errors.BadRequest(
            f"{FIELD}.destination_type: say whether a disk of source_type "
            f"{one.get('source_type', 'blank')} is local or a volume."
        )
    if given == LOCAL and one.get("source_type") in (VOLUME, SNAPSHOT):
        raise errors.BadRequest(
            f"{FIELD}.destination_type: what is of source_type {one['source_type']} is a volume."
        )
    return str(given)


def _volume(one: JsonMapping) -> VolumeMapping:
    source = str(one.get("source_type") or BLANK)
    source_id = one.get("uuid") or one.get(f"{source}_id")
    if source == BLANK and source_id:
        raise errors.BadRequest(f"{INVALID}: Invalid device UUID.")
    if source != BLANK and not source_id:
        raise errors.BadRequest(f"{INVALID}: Missing device UUID.")
    if one.get("no_device"):
        raise errors.BadRequest(f"{FIELD}.no_device: images name no disks here; leave it out.")
    size = int(one.get("volume_size") or 0)
    if source == IMAGE and not size:
        raise errors.BadRequest(
            "Images with destination_type 'volume' need to have a non-zero size specified"
        )
    if source == BLANK and not size:
        raise errors.BadRequest(
            "Blank volumes (source: 'blank', dest: 'volume') need to have non-zero size"
        )
    if source == VOLUME and one.get("volume_type"):
        raise errors.BadRequest(
            f"{INVALID}: Specifying volume type to existing volume is not supported."
        )
    if one.get("guest_format"):
        raise errors.BadRequest(
            f"{FIELD}.guest_format: a volume keeps what it holds; leave it out."
        )
    return VolumeMapping(
        source=source,
        source_id=source_id,
        size_gb=size,
        boot_index=boot_index(one),
        bus=_one_of(one, "disk_bus", BUSES),
        device_type=_one_of(one, "device_type", DEVICE_TYPES),
        tag=one.get("tag"),
        delete_on_termination=is_true(one.get("delete_on_termination", False)),
        volume_type=one.get("volume_type") or None,
    )


def boot_index(one: JsonMapping) -> int | None:
    """The place in the boot order; None: nothing is booted from it."""
    given = one.get("boot_index")
    return None if given is None or int(given) < 0 else int(given)


def _one_of(one: JsonMapping, name: str, known: Sequence[str]) -> str | None:
    given = one.get(name) or None
    if given is not None and given not in known:
        raise errors.BadRequest(f"{FIELD}.{name}: {given[:40]!r} is not one of {', '.join(known)}.")
    return given


def check_boot_order(indexes: Sequence[int | None]) -> None:
    """One disk is the first, and each has a place of its own, without gaps. Raises BadRequest."""
    found = sorted(index for index in indexes if index is not None)
    if found != list(range(len(found))) or not found:
        raise errors.BadRequest(BOOT_ORDER)


def named(volumes: Sequence[VolumeMapping], local: Sequence[str], bus: str | None) -> list[str]:
    """Return the device name of each volume, as the guest counts its disks.

    A device_name of the request is passed over, as in Nova: the guest would not use it.

    Args:
        volumes: In the order in which the guest finds them.
        local: Names of the disks on the host.
        bus: Bus of the volumes that name none.
    """
    return device_names.count(local, [one.bus or bus for one in volumes])
