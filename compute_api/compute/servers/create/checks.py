# SPDX-License-Identifier: Apache-2.0
"""Create, phase 3: check that the image fits the flavor, and that hosts can provide both."""

from __future__ import annotations

from common.clients import image_checks
from common.clients.image import Image
from common.domain import errors
from common.domain.json_types import JsonMapping
from compute_api.compute.request.request import Request
from compute_api.compute.servers.create.lookup import NamedResources


def check(request: Request, named: NamedResources) -> None:
    """Check that the image fits the flavor or root volume, and that hardware is supported.

    Raises:
        BadRequest: The image cannot be used or does not fit, Kilonova does not support the
            requested hardware, or the image is signed and the body has
            trusted_image_certificates.
        Forbidden: The flavor has no disk, the servers do not boot from a volume, and the policy
            does not allow this.
    """
    flavor, image, root = named.flavor, named.image, named.volumes.root
    if root is not None:
        image_checks.check_volume(image, root.size_gb, flavor.memory_mb)
    else:
        image_checks.check_disk(image)
        image_checks.check_flavor(image, flavor)
    image_checks.check_hardware(flavor, image.ref.properties)
    check_signature(request.body["server"], image)
    if flavor.root_gb == 0 and root is None:
        try:
            request.require("os_compute_api:servers:create:zero_disk_flavor")
        except errors.Forbidden as refusal:
            raise errors.Forbidden(
                "Only volume-backed servers are allowed for flavors with zero disk."
            ) from refusal


def check_signature(body: JsonMapping, image: Image) -> None:
    """Refuse a signed image together with certificates, because Kilonova cannot verify signatures.

    Raises:
        BadRequest: The body has trusted_image_certificates, and the image has a signature.
    """
    if body.get("trusted_image_certificates") and any(
        name.startswith("img_signature") for name in image.ref.properties
    ):
        raise errors.BadRequest(
            "trusted_image_certificates: this cloud does not validate image signatures, and "
            f"image {image.ref.id} is signed; leave the certificates out to boot it unvalidated."
        )
