# SPDX-License-Identifier: Apache-2.0
"""Image rows and their data. All changes of an image's status are in this module.

queued --claim--> saving --finish--> active        any of them --remove--> gone
  ^                 |
  +-----release-----+   (a broken or refused upload, or a crash: see `recover`)

Every change has the expected status in its WHERE, so of two concurrent changes one finds no row and
is refused.
"""

import uuid
from collections.abc import Callable

import falcon
from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from deploy.one_machine.services.database import Database, DbRow, DbValues
from deploy.one_machine.services.image.caller import ImageCaller
from deploy.one_machine.services.image.files import ImageFiles
from deploy.one_machine.services.image.schema import images
from deploy.one_machine.services.resource import moment


class ImageStore:
    """Images by id, and their changes."""

    def __init__(self, database: Database, files: ImageFiles) -> None:
        self.database, self.files = database, files

    def find(self, caller: ImageCaller, key: str) -> DbRow:
        """Return an image that the caller may see.

        Raises:
            HTTPNotFound: There is no such image, or the caller may not see it.
        """
        row = self.database.first(select(images).where(images.c.id == key, caller.sees()))
        if row is None:
            raise falcon.HTTPNotFound(description=f"No image found with ID {key[:64]}.")
        return row

    def add(self, columns: DbValues) -> None:
        """Store a new image.

        Raises:
            HTTPConflict: The id exists.
        """
        now = moment()
        try:
            with self.database.write() as connection:
                row = {"created_at": now, "updated_at": now, **columns}
                connection.execute(insert(images).values(row))
        except IntegrityError as error:
            raise falcon.HTTPConflict(
                description=f"Image ID {columns['id']} already exists."
            ) from error

    def change(self, key: str, columns: DbValues, **state: object) -> bool:
        """Set columns of an image, and the time of the update.

        Args:
            key: The image's id.
            columns: The new values.
            state: The expected present values of columns.

        Returns:
            False if the image does not exist or does not have the expected values. Then the row is
            unchanged.
        """
        query = update(images).where(images.c.id == key).filter_by(**state)
        with self.database.write() as connection:
            return connection.execute(query.values(updated_at=moment(), **columns)).rowcount == 1

    def upload(self, image: DbRow, announced: int | None, read: Callable[[int], bytes]) -> None:
        """Receive the data of a queued image, which is active afterwards.

        If the reception fails, the image is queued again.

        Args:
            image: The image's row.
            announced: The size in the request's header, or None.
            read: Reads up to this many bytes of the body.

        Raises:
            HTTPBadRequest: A format of the image is missing, or the body does not have the
                announced size.
            HTTPConflict: The image is not queued, or does not exist any more.
            HTTPContentTooLarge: The data are too large, or cannot be written.
            HTTPGone: The image was deleted during the upload.
        """
        if not (image.disk_format and image.container_format):
            raise falcon.HTTPBadRequest(
                description=f"Set disk_format and container_format of image {image.id} before the upload."
            )
        name = str(uuid.uuid4())
        if not self.change(image.id, {"status": "saving", "upload": name}, status="queued"):
            raise falcon.HTTPConflict(
                description=f"Image {image.id} is not queued; data can only be uploaded to a queued image."
            )
        try:
            received = self.files.receive(name, image.disk_format, announced, read)
            columns = {"status": "active", "os_hash_algo": "sha512"} | vars(received)
            if not self.change(image.id, columns, upload=name):
                raise falcon.HTTPGone(
                    description=f"Image {image.id} was deleted during the upload."
                )
        except BaseException:
            self.files.remove(name)
            self.change(image.id, {"status": "queued", "upload": None}, upload=name)
            raise

    def remove(self, image: DbRow) -> None:
        """Delete an image and its data.

        Raises:
            HTTPForbidden: The image is protected.
            HTTPConflict: The image was protected or deleted in between.
        """
        if image.protected:
            raise falcon.HTTPForbidden(
                description=f"Image {image.id} is protected and cannot be deleted."
            )
        query = delete(images).where(images.c.id == image.id, images.c.protected.is_(False))
        with self.database.write() as connection:
            deleted_row = connection.execute(query.returning(images.c.upload)).first()
        if deleted_row is None:
            raise falcon.HTTPConflict(
                description=f"Image {image.id} was protected or deleted meanwhile."
            )
        # After the commit. A crash in between leaves an unused file, and never an active image
        # without a file.
        if deleted_row.upload:
            self.files.remove(deleted_row.upload)

    def recover(self) -> None:
        """Clean up after a crash: release unfinished uploads and remove unused files.

        The service calls this before the first request, because an unfinished upload looks like a
        running upload.
        """
        with self.database.write() as connection:
            saving = update(images).where(images.c.status == "saving")
            connection.execute(saving.values(status="queued", upload=None))
            used_names = select(images.c.upload).where(images.c.upload.is_not(None))
            keep = set(connection.scalars(used_names))
        self.files.sweep(keep)
