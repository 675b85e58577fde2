# SPDX-License-Identifier: Apache-2.0
"""The caller of the image service, and the permissions for images.

keystonemiddleware validates the token and puts the result into headers, after it has removed those
of the client. Version documents are open. Other paths need a valid token, and writing needs a
project and the role member.
"""

import falcon
from sqlalchemy import ColumnElement, or_, true

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.guard import Caller
from deploy.one_machine.services.image.schema import images

VERSIONS = ("/", "/versions", "/v2", "/v2/")


def is_open(path: str) -> bool:
    """Return True for a path of the version documents, which needs no token."""
    return path in VERSIONS


class ImageCaller(Caller):
    """A caller of the image service."""

    WRITERS = frozenset({"admin", "member"})

    def sees(self) -> ColumnElement[bool]:
        """Return the condition for the images that the caller may see.

        These are public images, community images and the project's own. Admins see all.
        """
        if self.is_admin:
            return true()
        return or_(
            images.c.visibility.in_(("public", "community")),
            images.c.owner == self.project_id,
        )

    def require_writer(self) -> None:
        """Refuse a caller without write access.

        Raises:
            HTTPForbidden: The caller lacks a project or a role that may write.
        """
        if not self.may_write:
            raise falcon.HTTPForbidden(
                description="You need the role member in a project to change images."
            )

    def require_owner(self, image: DbRow) -> None:
        """Refuse a caller without the right to change the image.

        Raises:
            HTTPForbidden: The caller may not write, or is not an admin and the image belongs to
                another project.
        """
        self.require_writer()
        if not self.is_admin and image.owner != self.project_id:
            raise falcon.HTTPForbidden(
                description=f"Only the project that owns image {image.id} may change the image."
            )

    def require_admin(self, what: str) -> None:
        """Refuse callers that are not admins.

        Args:
            what: The operation, for the message, for example "make an image public".

        Raises:
            HTTPForbidden: The caller is not an admin.
        """
        if not self.is_admin:
            raise falcon.HTTPForbidden(description=f"Only an admin may {what}.")
