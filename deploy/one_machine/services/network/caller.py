# SPDX-License-Identifier: Apache-2.0
"""The caller, as keystonemiddleware found out, and what they may do here.

An admin or a service may do everything; a member what belongs to the project and what is shared
with all; a reader only reads. What somebody may not know of does not exist for them (404); what
they see but may not do is 403.
"""

from deploy.one_machine.services.guard import Caller
from deploy.one_machine.services.network.faults import fault

VERSIONS = ("/",)
#: HostRegistry have no tokens: each proves itself by its key (host_api.py).
HOSTS = "/v2.0/kilonova/hosts/"


def is_open(path: str) -> bool:
    """Is it reached without a token?"""
    return path in VERSIONS or path.startswith(HOSTS)


class NetworkCaller(Caller):
    """The caller of the network service."""

    @property
    def is_admin(self) -> bool:
        """An admin, or a service such as the compute service."""
        return bool(self.roles & {"admin", "service"})

    @property
    def is_service(self) -> bool:
        """A service, which knows what it changes and gets no event of it."""
        return "service" in self.roles

    def owns(self, project_id: str) -> bool:
        """May they do with things of this project what its members may?"""
        return self.is_admin or project_id == self.project_id

    def require_writer(self, rule: str) -> None:
        """Raises 403, naming `rule`, for who may only read."""
        if not self.may_write:
            raise fault("PolicyNotAuthorized", rule=rule)

    def require_owner(self, project_id: str, rule: str) -> None:
        """Raises 403, naming `rule`, unless they may change things of this project."""
        self.require_writer(rule)
        if not self.owns(project_id):
            raise fault("PolicyNotAuthorized", rule=rule)

    def require_admin(self, rule: str) -> None:
        """Raises 403, naming `rule`, for all but admins and services."""
        if not self.is_admin:
            raise fault("PolicyNotAuthorized", rule=rule)
