# SPDX-License-Identifier: Apache-2.0
"""The caller of the network service, and the permissions.

An admin or a service may do everything. A member may change the project's objects and use shared
objects, and a reader only reads. Objects that a caller may not see are reported as missing (404).
Forbidden changes of visible objects are reported as 403.
"""

from deploy.one_machine.services.guard import Caller
from deploy.one_machine.services.network.faults import fault

VERSIONS = ("/",)
#: Hosts have no tokens. They authenticate with their keys (host_api.py).
HOSTS = "/v2.0/kilonova/hosts/"


def is_open(path: str) -> bool:
    """Return True for a path of the versions or of the hosts' own API, which needs no token."""
    return path in VERSIONS or path.startswith(HOSTS)


class NetworkCaller(Caller):
    """A caller of the network service."""

    @property
    def is_admin(self) -> bool:
        """True for an admin, or a service such as the compute service."""
        return bool(self.roles & {"admin", "service"})

    @property
    def is_service(self) -> bool:
        """True for a token with the role service. A service token beside it does not count."""
        return "service" in self.roles

    def owns(self, project_id: str) -> bool:
        """Return True for a token of this project, and for an admin or service."""
        return self.is_admin or project_id == self.project_id

    def require_writer(self, rule: str) -> None:
        """Refuse a caller without a project or without a role that may write.

        Raises:
            Fault: 403, with `rule` in the message.
        """
        if not self.may_write:
            raise fault("PolicyNotAuthorized", rule=rule)

    def require_owner(self, project_id: str, rule: str) -> None:
        """Refuse a caller who may not write, or may not change objects of this project.

        Raises:
            Fault: 403, with `rule` in the message.
        """
        self.require_writer(rule)
        if not self.owns(project_id):
            raise fault("PolicyNotAuthorized", rule=rule)

    def require_admin(self, rule: str) -> None:
        """Refuse callers that are neither admins nor services.

        Raises:
            Fault: 403, with `rule` in the message.
        """
        if not self.is_admin:
            raise fault("PolicyNotAuthorized", rule=rule)
