# SPDX-License-Identifier: Apache-2.0
"""The caller, as keystonemiddleware found out, and what they may do with an image.

The middleware validates the token and puts the outcome into headers, after it has removed those
that the client sent. Version documents are open; everything else needs a valid token, and writing
needs a project and the role member.
"""

import falcon
from sqlalchemy import ColumnElement, or_, true

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.guard import Caller
from deploy.one_machine.services.image.schema import images

VERSIONS = ("/", "/versions", "/v2", "/v2/")


def is_open(path: str) -> bool:
    """Is it reached without a token?"""
    return path in VERSIONS


class ImageCaller(Caller):
    """The caller of the image service."""

    WRITERS = frozenset({"admin", "member"})

    def sees(self) -> ColumnElement[bool]:
        """Which images this caller may show: public ones, community ones and the project's own."""
        if self.is_admin:
            return true()
        return or_(
            images.c.visibility.in_(("public", "community")),
            images.c.owner == self.project_id,
        )

    def require_writer(self) -> None:
        """Raises 403 for who may only read."""
        if not self.may_write:
            raise falcon.HTTPForbidden(
                description="You need the role member in a project to change images."
            )

    def require_owner(self, image: DbRow) -> None:
        """Raises 403 unless the image is the caller's to change."""
        self.require_writer()
        if not self.is_admin and image.owner != self.project_id:
            raise falcon.HTTPForbidden(description="Only its owner may change this image.")

    def require_admin(self, what: str) -> None:
        """Raises 403, naming `what`, unless the caller is an admin."""
        if not self.is_admin:
            raise falcon.HTTPForbidden(description=f"Only an admin may {what}.")
