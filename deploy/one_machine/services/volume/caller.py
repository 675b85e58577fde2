# SPDX-License-Identifier: Apache-2.0
"""The caller of the volume service, and the permissions.

As in Cinder, a user with a role in a project sees the project's volumes, a member changes them, and
an admin does so for all projects. Objects that a caller may not see are reported as missing (404).
"""

from sqlalchemy import ColumnElement, Table, true

from deploy.one_machine.services.guard import Caller
from deploy.one_machine.services.volume.faults import fault

VERSIONS = ("/", "/v3", "/v3/")


def is_open(path: str) -> bool:
    """Return True if the path needs no token."""
    return path in VERSIONS


class VolumeCaller(Caller):
    """A caller of the volume service."""

    def sees(self, table: Table) -> ColumnElement[bool]:
        """Return the condition for the rows of a table with project_id that this caller may see."""
        return true() if self.is_admin else table.c.project_id == self.project_id

    def require_member(self, action: str) -> None:
        """Refuse a caller without a project or without a role that may write.

        Raises:
            Fault: 403, with ``action`` in the message.
        """
        if not self.may_write:
            raise fault("Forbidden", action=action)

    def require_admin(self, action: str) -> None:
        """Refuse callers that are not admins.

        Raises:
            Fault: 403, with ``action`` in the message.
        """
        if not self.is_admin:
            raise fault("Forbidden", action=action)
