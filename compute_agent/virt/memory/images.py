# SPDX-License-Identifier: Apache-2.0
"""Images on a host in memory. An image is downloaded, verified, and read as the files of a disk."""

from __future__ import annotations

import hashlib

from common.domain import errors
from common.domain.command_progress import CommandPhase
from common.domain.models import ImageRef
from compute_agent.verb_context import Cancelled, ImageReader, VerbContext, VerbFailed
from compute_agent.virt.memory.state.guest import read_disk
from compute_agent.virt.memory.state.host import MemoryHost

#: Size of the start of an image in which the files of a disk are searched.
MAX_KEPT_BYTES = 1 << 20


def fetch(
    host: MemoryHost, image: ImageRef | None, read_image: ImageReader, context: VerbContext
) -> dict[str, str]:
    """Download an image and return the files of a disk made from it, as name -> text.

    The result is empty without an image, on a host that reads no images, and for an image that no
    host in memory made. An image without a recorded checksum is not verified.

    Raises:
        VerbFailed: The image does not exist, or the checksum differs.
        Cancelled: The verb was cancelled.
        errors.Unavailable: The image service does not answer.
    """
    if image is None or not host.read_images:
        return {}
    with host.fetches.one(context):
        context.phase(CommandPhase.FETCHING_IMAGE)
        content = _read(image, read_image, context)
    host.images.add(image.id)
    return read_disk(content)


def _read(image: ImageRef, read_image: ImageReader, context: VerbContext) -> bytes:
    digest = hashlib.new(image.hash_algo) if image.hash_algo else None
    content = b""
    try:
        for chunk in read_image(image.id):
            if context.cancelled():
                raise Cancelled
            content += chunk[: MAX_KEPT_BYTES - len(content)]
            if digest:
                digest.update(chunk)
    except errors.NotFound as gone:
        raise VerbFailed(gone.text, details=f"image {image.id}") from gone
    if digest and digest.hexdigest() != image.hash_value:
        raise VerbFailed(
            "The image does not have the checksum that the image service reports; upload the image again."
        )
    return content
