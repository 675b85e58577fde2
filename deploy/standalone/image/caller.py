# SPDX-License-Identifier: Apache-2.0
"""The caller, as keystonemiddleware found out, and what they may do with an image.

The middleware validates the token and puts the outcome into headers, after it has removed those
that the client sent. Version documents are open; everything else needs a valid token, and writing
needs a project and the role member.
"""

from dataclasses import dataclass

import falcon
from sqlalchemy import ColumnElement, or_, select, true

from deploy.standalone.database import DbRow
from deploy.standalone.image.schema import images, members

VERSIONS = ("/", "/versions", "/v2", "/v2/")


def is_open(path: str) -> bool:
    """Is it reached without a token?"""
    return path in VERSIONS


@dataclass(frozen=True)
class ImageCaller:
    """The project and roles of a valid token."""

    project_id: str | None
    roles: frozenset[str]

    @property
    def is_admin(self) -> bool:
        return "admin" in self.roles

    def sees(self) -> ColumnElement[bool]:
        """Which images this caller may show: public, community, owned, and shared with the
        project."""
        if self.is_admin:
            return true()
        shared = select(members.c.image_id).where(members.c.member_id == self.project_id)
        return or_(
            images.c.visibility.in_(("public", "community")),
            images.c.owner == self.project_id,
            (images.c.visibility == "shared") & images.c.id.in_(shared),
        )

    def require_writer(self) -> None:
        """Raises 403 for who may only read."""
        if not self.roles & {"admin", "member"} or not self.project_id:
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
