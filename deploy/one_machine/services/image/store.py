# SPDX-License-Identifier: Apache-2.0
"""Image rows and their data together: the one place where an image's state changes.

queued --claim--> saving --finish--> active        any of them --remove--> gone
  ^                 |
  +-----release-----+   (a broken or refused upload; `recover` releases after a crash)

Every change names the state that it starts from in its WHERE, so of two that race one finds no row
and is refused.
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
    """Images by id, and what may happen to them."""

    def __init__(self, database: Database, files: ImageFiles) -> None:
        self.database, self.files = database, files

    def find(self, caller: ImageCaller, key: str) -> DbRow:
        """An image that the caller may see. Raises 404 also for one that they may not."""
        row = self.database.first(select(images).where(images.c.id == key, caller.sees()))
        if row is None:
            raise falcon.HTTPNotFound(description=f"No image found with ID {key[:64]}.")
        return row

    def add(self, columns: DbValues) -> None:
        """Store a new image. Raises 409 when its id is taken."""
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
        """Set columns of an image that is in `state` (columns and values); False when it isn't."""
        query = update(images).where(images.c.id == key).filter_by(**state)
        with self.database.write() as connection:
            return connection.execute(query.values(updated_at=moment(), **columns)).rowcount == 1

    def upload(self, image: DbRow, announced: int | None, read: Callable[[int], bytes]) -> None:
        """Give a queued image its data. Raises 409 in another state, 410 when it is deleted
        meanwhile."""
        if not (image.disk_format and image.container_format):
            raise falcon.HTTPBadRequest(
                description="Set disk_format and container_format before uploading."
            )
        name = str(uuid.uuid4())
        if not self.change(image.id, {"status": "saving", "upload": name}, status="queued"):
            raise falcon.HTTPConflict(description="Only an image in the state queued takes data.")
        try:
            received = self.files.receive(name, image.disk_format, announced, read)
            columns = {"status": "active", "os_hash_algo": "sha512"} | vars(received)
            if not self.change(image.id, columns, upload=name):
                raise falcon.HTTPGone(description="The image was deleted while it was uploaded.")
        except BaseException:
            self.files.remove(name)
            self.change(image.id, {"status": "queued", "upload": None}, upload=name)
            raise

    def remove(self, image: DbRow) -> None:
        """Delete an image and its data. Raises 403 for a protected one."""
        if image.protected:
            raise falcon.HTTPForbidden(
                description=f"Image {image.id} is protected and cannot be deleted."
            )
        query = delete(images).where(images.c.id == image.id, images.c.protected.is_(False))
        with self.database.write() as connection:
            gone = connection.execute(query.returning(images.c.upload)).first()
        if gone is None:
            raise falcon.HTTPConflict(description="The image was protected or deleted meanwhile.")
        # After the commit: a crash in between leaves a file too many, never an active image without
        # its file.
        if gone.upload:
            self.files.remove(gone.upload)

    def recover(self) -> None:
        """After a crash, before the first request: no upload is under way, so tidy up what they
        left."""
        with self.database.write() as connection:
            saving = update(images).where(images.c.status == "saving")
            connection.execute(saving.values(status="queued", upload=None))
            known = select(images.c.upload).where(images.c.upload.is_not(None))
            keep = set(connection.scalars(known))
        self.files.sweep(keep)
