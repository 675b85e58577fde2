# SPDX-License-Identifier: Apache-2.0
"""The caller, as keystonemiddleware found out, and what they may do here.

As Cinder's own rules: whoever has a role in a project sees what is the project's, a member changes
it, an admin does so for all. What somebody may not know of does not exist for them (404).
"""

from sqlalchemy import ColumnElement, Table, true

from deploy.one_machine.services.guard import Caller
from deploy.one_machine.services.volume.faults import fault

VERSIONS = ("/", "/v3", "/v3/")


def is_open(path: str) -> bool:
    """Is it reached without a token?"""
    return path in VERSIONS


class VolumeCaller(Caller):
    """The caller of the volume service."""

    def sees(self, table: Table) -> ColumnElement[bool]:
        """Which rows of a table with owners this caller may know of."""
        return true() if self.is_admin else table.c.project_id == self.project_id

    def require_member(self, action: str) -> None:
        """Raises 403 for who may only read."""
        if not self.may_write:
            raise fault("Forbidden", action=action)

    def require_admin(self, action: str) -> None:
        """Raises 403 unless the caller is an admin."""
        if not self.is_admin:
            raise fault("Forbidden", action=action)
