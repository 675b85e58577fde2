# SPDX-License-Identifier: Apache-2.0
"""Image data on disk: one file per finished upload, named by the upload's own UUID, in one folder.

An upload streams into `NAME.part`, hashing as it goes, is synced and then renamed. What must stay
true: a file without ".part" is whole, no name is ever used twice, and none comes from a client. A
file counts only while a row names it, so a crash leaves at most files that nobody names, which
`sweep` removes.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import falcon
from oslo_utils.imageutils import format_inspector

LOG = logging.getLogger("standalone.image")
BLOCK = 1024 * 1024
LARGEST = 2**63 - 1
"""The largest size that the database can hold; a header may claim more."""


@dataclass(frozen=True)
class Upload:
    """What was received."""

    size: int
    checksum: str
    os_hash_value: str
    virtual_size: int | None


class ImageFiles:
    """The folder with the data of all images; `limit` bounds one image, in bytes."""

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
        """Stream a body to disk. Raises 413 above the limit, 400 when it breaks off; nothing is
        left then."""
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
            LOG.error("Cannot store %s: %s", name, error)
            raise falcon.HTTPContentTooLarge(
                description="The image store cannot take this image: is its disk full?"
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
                description=f"The body ended after {size} of {announced} bytes."
            )
        file.flush()
        os.fsync(file.fileno())
        virtual = size if disk_format == "raw" else None
        if inspector and inspector.format_match and inspector.virtual_size <= LARGEST:
            virtual = inspector.virtual_size
        return Upload(size, md5.hexdigest(), sha512.hexdigest(), virtual)

    def open(self, name: str) -> BinaryIO:
        """The data that an upload brought."""
        return (self._folder / name).open("rb")

    def remove(self, name: str) -> None:
        """Forget the data that an upload brought; downloads under way go on."""
        (self._folder / name).unlink(missing_ok=True)

    def sweep(self, keep: set[str]) -> None:
        """Remove what a crash has left: all files but those in `keep`."""
        for path in self._folder.iterdir():
            if path.name not in keep:
                LOG.info("Removing %s, which no image names", path.name)
                path.unlink()

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _too_large(self) -> falcon.HTTPContentTooLarge:
        return falcon.HTTPContentTooLarge(
            description=f"An image may have at most {self._limit} bytes here."
        )
