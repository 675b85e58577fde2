# SPDX-License-Identifier: Apache-2.0
"""Checks whether hosts can create a server's disk from an image. Pure functions.

The API checks before the acceptance of a request, and the conductor again before the claim.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.clients.image import Image
from common.domain import errors, hardware, models

GIB = 1024**3
#: Image formats from which hosts create disks.
FORMATS = ("qcow2", "raw")
#: Property of an image with the data of an encrypted volume.
ENCRYPTED_BY = "cinder_encryption_key_id"


def check_disk(image: Image) -> None:
    """Check that hosts can create a disk from an image.

    Raises:
        BadRequest: The image is not active, is encrypted, or has a format other than ``FORMATS``.
    """
    check_active(image)
    if image.ref.disk_format not in FORMATS:
        raise errors.BadRequest(
            f"Image {image.ref.id} is unacceptable: its format is {image.ref.disk_format[:40]!r}, "
            f"and hosts of this cloud use {' and '.join(FORMATS)} only; convert it, for example "
            "with qemu-img convert -O qcow2."
        )


def check_active(image: Image) -> None:
    """Check that an image is active and does not contain the data of an encrypted volume.

    Raises:
        BadRequest: The image is not active, or is encrypted.
    """
    if not image.is_active:
        raise errors.BadRequest(f"Image {image.ref.id} is not active.")
    if image.ref.properties.get(ENCRYPTED_BY):
        raise errors.BadRequest(
            f"Image {image.ref.id} is unacceptable: it was uploaded from an encrypted volume, and "
            "hosts of this cloud cannot open it; upload the image from a volume of a type without "
            "encryption."
        )


def check_flavor(image: Image, flavor: models.Flavor) -> None:
    """Check that the flavor has enough memory and disk for the image.

    The disk is not checked if the flavor's root disk is 0 GiB.

    Raises:
        BadRequest: The flavor is too small.
    """
    _check_memory(image, flavor.memory_mb)
    if flavor.root_gb == 0:
        return
    if flavor.root_gb < image.min_disk:
        raise errors.BadRequest(
            f"Flavor's disk is too small for requested image. Flavor disk is "
            f"{flavor.root_gb * GIB} bytes, image needs at least {image.min_disk * GIB} bytes."
        )
    size = max(image.ref.size, image.virtual_size)
    if size > flavor.root_gb * GIB:
        raise errors.BadRequest(
            f"Flavor's disk is too small for requested image. Flavor disk is "
            f"{flavor.root_gb * GIB} bytes, image is {size} bytes."
        )


def _check_memory(image: Image, memory_mb: int) -> None:
    if memory_mb < image.min_ram:
        raise errors.BadRequest("Flavor's memory is too small for requested image.")


def check_volume(image: Image, volume_gb: int, memory_mb: int | None = None) -> None:
    """Check that a server can boot from a volume that is created from an image.

    The size of the image's data is not checked.

    Args:
        image: The image.
        volume_gb: Size of the volume in GiB.
        memory_mb: Memory of the server in MiB. None: memory is not checked.

    Raises:
        BadRequest: The image is not active or is encrypted, or memory or volume are smaller than
            the image's min_ram or min_disk.
    """
    check_active(image)
    if memory_mb is not None:
        _check_memory(image, memory_mb)
    if volume_gb < image.min_disk:
        raise errors.BadRequest(
            "Volume is smaller than the minimum size specified in image metadata. Volume size is "
            f"{volume_gb * GIB} bytes, minimum size is {image.min_disk * GIB} bytes."
        )


def check_hardware(flavor: models.Flavor, properties: Mapping[str, str]) -> None:
    """Check that Kilonova supports the hardware that extra specs and image properties require.

    Which hosts have the hardware is not checked.

    Raises:
        BadRequest: The hardware is not supported, a value is not valid, or the server would hold no
            resource of its host. The text names the extra spec or the image property.
    """
    for read in (hardware.hardware, hardware.resources, hardware.traits):
        read(flavor, properties)
