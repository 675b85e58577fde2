# SPDX-License-Identifier: Apache-2.0
"""The caller of a request, built from the validated token and read by policy and resources."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.domain import ids

#: The user id of actions that Kilonova starts itself. Clients expect a user id.
OURSELVES = "kilonova"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The caller of one request."""

    user_id: str
    project_id: str
    roles: tuple[str, ...]
    request_id: str
    #: The caller's own token, for reads from external services. Never printed.
    token: str = field(default="", repr=False)
    global_request_id: str | None = None
    system_scope: str | None = None
    domain_id: str | None = None
    user_domain_id: str | None = None
    project_domain_id: str | None = None
    service_roles: tuple[str, ...] = ()
    project_name: str | None = None
    remote_address: str | None = None
    #: The policy's decision whether the caller is an admin. None: the policy was not evaluated.
    admin: bool | None = None

    @classmethod
    def of_ourselves(cls, project_id: str) -> RequestContext:
        """Return the context of an action that Kilonova starts itself, with the role admin.

        The context has the user id ``OURSELVES``, a new request id and no token.
        """
        return cls(
            user_id=OURSELVES, project_id=project_id, roles=("admin",), request_id=ids.new_request()
        )

    @property
    def is_admin(self) -> bool:
        """True if the caller may see and change the resources of every project.

        Without a decision of the policy, this is True for the role admin.
        """
        return "admin" in self.roles if self.admin is None else self.admin
