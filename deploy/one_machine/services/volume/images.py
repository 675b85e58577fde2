# SPDX-License-Identifier: Apache-2.0
"""Images in the volume service: their check, and the metadata that a volume keeps."""

import json
import re

from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.volume.caller import VolumeCaller
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.files import GIGABYTE
from deploy.one_machine.services.volume.qemu_img import READABLE
from deploy.one_machine.services.volume.service import VolumeService

KEPT = ("checksum", "container_format", "disk_format", "min_disk", "min_ram", "size")
#: Attributes of the image service itself. All others are the owner's properties.
OWN = frozenset(
    (
        *KEPT,
        *("id", "name", "status", "visibility", "owner", "created_at", "updated_at", "tags"),
        *("self", "file", "schema", "protected", "os_hidden", "os_hash_algo", "os_hash_value"),
        *("virtual_size", "locations", "direct_url", "stores"),
    )
)


def find_image(service: VolumeService, caller: VolumeCaller, reference: str) -> Body:
    """Return the image that a user refers to by id or URL.

    Raises:
        Fault: 400, the reference has no id, or the image does not exist for the user, is not
            active, or has a format from which no volume can be created. 503, the image service
            cannot answer now.
    """
    key = reference.rstrip("/").rsplit("/", 1)[-1]
    if not re.fullmatch(r"[0-9a-fA-F-]{36}", key):
        raise fault(
            "BadRequest", why="Invalid image identifier or unable to access requested image."
        )
    image = service.images.show(key, caller.token)
    if image is None:
        raise fault(
            "BadRequest", why="Invalid image identifier or unable to access requested image."
        )
    if image.get("status") != "active":
        raise fault("ImageUnacceptable", id=key, why="the image is not active")
    if image.get("disk_format") not in READABLE:
        why = f"no volume can be created from the disk_format {image.get('disk_format')}"
        raise fault("ImageUnacceptable", id=key, why=why)
    return image


def root_snapshot(image: Body) -> str | None:
    """Return the id of the volume snapshot that contains an image's root disk, or None.

    Images of servers that boot from a volume name such a snapshot in their property
    block_device_mapping. Other images have data of their own.
    """
    mapping = image.get("block_device_mapping") or "[]"
    try:
        devices = json.loads(mapping) if isinstance(mapping, str) else mapping
    except ValueError:
        return None
    for device in devices if isinstance(devices, list) else ():
        if isinstance(device, dict) and device.get("boot_index") == 0:
            key = device.get("snapshot_id")
            return key if device.get("source_type") == "snapshot" and isinstance(key, str) else None
    return None


def check_size(image: Body, gigabytes: int) -> None:
    """Check that a volume of this size in GiB is large enough for the image.

    Raises:
        Fault: 400, the volume is smaller than the image's data or ``min_disk``.
    """
    size = max(image.get("size") or 0, image.get("virtual_size") or 0)
    if size > gigabytes * GIGABYTE:
        needed = -(-size // GIGABYTE)
        why = f"Size of specified image {needed}GB is larger than volume size {gigabytes}GB."
        raise fault("InvalidInput", why=why)
    if (image.get("min_disk") or 0) > gigabytes:
        why = f"Volume size {gigabytes}GB cannot be smaller than the image minDisk size"
        raise fault("InvalidInput", why=f"{why} {image['min_disk']}GB.")


def metadata(image: Body) -> Body:
    """Return the image's metadata that a volume keeps, with all values as strings.

    These are id and name (as image_id and image_name), the attributes ``KEPT``, and the owner's
    properties. Attributes without a value are left out.
    """
    values: Body = {"image_id": image["id"], "image_name": image.get("name")}
    values |= {name: image.get(name) for name in KEPT}
    values |= {name: value for name, value in image.items() if name not in OWN}
    return {name: str(value) for name, value in values.items() if value is not None}
