# SPDX-License-Identifier: Apache-2.0
"""Image data on disk: one file per finished upload, in one folder, named by the upload's own UUID.

An upload is written to `NAME.part` and hashed, then synced and renamed. Invariant: a file without
".part" is complete, no name is used twice, and no name comes from a client. A file is used only
while a row refers to it. A crash can leave files without a row, which `sweep` removes.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import falcon
from oslo_utils.imageutils import format_inspector

from common.service.log import get_logger

LOG = get_logger("standalone.image")
BLOCK = 1024 * 1024
LARGEST = 2**63 - 1
"""The largest size that the database can hold. A qcow2 header may contain a larger number."""


@dataclass(frozen=True)
class Upload:
    """The sizes in bytes and the digests of received data.

    Attributes:
        size: The number of received bytes.
        checksum: The MD5 digest.
        os_hash_value: The SHA-512 digest.
        virtual_size: The size of the disk, or None if it is unknown.
    """

    size: int
    checksum: str
    os_hash_value: str
    virtual_size: int | None


class ImageFiles:
    """The folder with the data of all images.

    Args:
        folder: The folder, which is created if it is missing.
        limit: The maximum size of an image in bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._limit = folder, limit

    def receive(
        self,
        name: str,
        disk_format: str | None,
        announced: int | None,
        read: Callable[[int], bytes],
    ) -> Upload:
        """Write the body of a request to a new file, and return the sizes and digests.

        After an error no unfinished file is left.

        Args:
            name: The upload's UUID, which names the file.
            disk_format: The image's format. The virtual size is known for raw, and for qcow2 with a
                valid header.
            announced: The size in the request's header, or None.
            read: Reads up to this many bytes of the body.

        Raises:
            HTTPContentTooLarge: The image is above the limit, or cannot be written.
            HTTPBadRequest: The body does not have the announced size.
        """
        if announced is not None and announced > self._limit:
            raise self._too_large()
        part = self._folder / f"{name}.part"
        try:
            with part.open("xb") as file:
                upload = self._stream(file, disk_format, announced, read)
            os.rename(part, self._folder / name)
            self._sync_folder()
            return upload
        except OSError as error:
            LOG.error("the file of an image cannot be stored", file=name, problem=error)
            raise falcon.HTTPContentTooLarge(
                description="The image service could not write the image; its disk may be full."
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def _stream(
        self,
        file: BinaryIO,
        disk_format: str | None,
        announced: int | None,
        read: Callable[[int], bytes],
    ) -> Upload:
        md5, sha512, size = hashlib.md5(usedforsecurity=False), hashlib.sha512(), 0
        inspector = format_inspector.QcowInspector() if disk_format == "qcow2" else None
        while block := read(BLOCK):
            size += len(block)
            if size > self._limit:
                raise self._too_large()
            file.write(block)
            md5.update(block)
            sha512.update(block)
            if inspector and not inspector.complete:
                inspector.eat_chunk(block)
        if announced is not None and size != announced:
            raise falcon.HTTPBadRequest(
                description=f"The request body has {size} bytes instead of the announced {announced}."
            )
        file.flush()
        os.fsync(file.fileno())
        virtual = size if disk_format == "raw" else None
        if inspector and inspector.format_match and inspector.virtual_size <= LARGEST:
            virtual = inspector.virtual_size
        return Upload(size, md5.hexdigest(), sha512.hexdigest(), virtual)

    def open(self, name: str) -> BinaryIO:
        """Open the file of a finished upload for reading."""
        return (self._folder / name).open("rb")

    def remove(self, name: str) -> None:
        """Remove the file of an upload, if it exists. Running downloads continue."""
        (self._folder / name).unlink(missing_ok=True)

    def sweep(self, keep: set[str]) -> None:
        """Remove all files whose names are not in `keep`. A crash may have left them."""
        for path in self._folder.iterdir():
            if path.name not in keep:
                LOG.info("a file that belongs to no image is removed", file=path.name)
                path.unlink()

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _too_large(self) -> falcon.HTTPContentTooLarge:
        return falcon.HTTPContentTooLarge(
            description=f"An image may have at most {self._limit} bytes in this image service."
        )
