# SPDX-License-Identifier: Apache-2.0
"""Who is asking: made from the validated token, read by policy and the resources."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.domain import ids

#: The user who stands at what nobody asked for: clients want one.
OURSELVES = "kilonova"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request's caller. ``token`` is the caller's own, only for reads of the neighbours; it
    never prints. ``admin``: what policy says of it, where that has been asked."""

    user_id: str
    project_id: str
    roles: tuple[str, ...]
    request_id: str
    token: str = field(default="", repr=False)
    global_request_id: str | None = None
    system_scope: str | None = None
    domain_id: str | None = None
    user_domain_id: str | None = None
    project_domain_id: str | None = None
    service_roles: tuple[str, ...] = ()
    project_name: str | None = None
    remote_address: str | None = None
    admin: bool | None = None

    @classmethod
    def of_ourselves(cls, project_id: str) -> RequestContext:
        """For what nobody asked for: Kilonova begins it itself, for a server of this project."""
        return cls(
            user_id=OURSELVES, project_id=project_id, roles=("admin",), request_id=ids.new_request()
        )

    @property
    def is_admin(self) -> bool:
        """Sees and may change every project's things."""
        return "admin" in self.roles if self.admin is None else self.admin
