# SPDX-License-Identifier: Apache-2.0
"""The caller, as keystonemiddleware found out, and what they may do here.

As Cinder's own rules: whoever has a role in a project sees what is the project's, a member changes
it, an admin does so for all. What somebody may not know of does not exist for them (404).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import falcon
from sqlalchemy import ColumnElement, Table, true

from deploy.standalone.guard import HeaderAuthentication
from deploy.standalone.volume.faults import fault

VERSIONS = ("/", "/v3", "/v3/")


def is_open(path: str) -> bool:
    """Is it reached without a token?"""
    return path in VERSIONS


@dataclass(frozen=True)
class VolumeCaller:
    """The project, user and roles of a valid token, and whether a service asks."""

    project_id: str
    roles: frozenset[str]
    user_id: str = ""
    #: A service token stands beside the user's.
    has_service_token: bool = False
    #: The user's own token, for what is asked of other services in their name.
    token: str = ""

    def __repr__(self) -> str:
        return f"VolumeCaller({self.project_id!r}, {sorted(self.roles)!r})"

    @property
    def is_admin(self) -> bool:
        return "admin" in self.roles

    @property
    def is_service(self) -> bool:
        """A service, which knows what its servers have attached."""
        return self.has_service_token or "service" in self.roles

    def sees(self, table: Table) -> ColumnElement[bool]:
        """Which rows of a table with owners this caller may know of."""
        return true() if self.is_admin else table.c.project_id == self.project_id

    def require_member(self, action: str) -> None:
        """Raises 403 for who may only read."""
        if not self.roles & {"admin", "member", "manager", "service"} or not self.project_id:
            raise fault("Forbidden", action=action)

    def require_admin(self, action: str) -> None:
        """Raises 403 unless the caller is an admin."""
        if not self.is_admin:
            raise fault("Forbidden", action=action)


class VolumeAuthentication(HeaderAuthentication):
    """Falcon middleware: it also notes the user and a service token."""

    def __init__(self, opened: Callable[[str], bool]) -> None:
        super().__init__(opened, lambda project, roles: VolumeCaller(project or "", roles))

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        super().process_request(req, resp)
        caller = getattr(req.context, "caller", None)
        if caller is None:
            return
        services = (req.get_header("X-Service-Roles") or "").split(",")
        is_service = req.get_header("X-Service-Identity-Status") == "Confirmed"
        req.context.caller = replace(
            caller,
            user_id=req.get_header("X-User-Id") or "",
            has_service_token=is_service and "service" in services,
            token=req.get_header("X-Auth-Token") or "",
        )
