# SPDX-License-Identifier: Apache-2.0
"""Role assignments in projects, domains and the system.

The paths are /v3/{projects|domains}/{target}/users/{user}/roles/{role} and
/v3/system/users/{user}/roles/{role}.
"""

import falcon
from sqlalchemy import delete, select
from sqlalchemy.dialects.sqlite import insert

from deploy.one_machine.services.identity import schema
from deploy.one_machine.services.identity.resources import RESOURCES, listing, require_rows
from deploy.one_machine.services.identity.schema import ROLE_ASSIGNMENTS, SYSTEM
from deploy.one_machine.services.identity.service import IdentityService, require
from deploy.one_machine.services.resource import Handler, Transaction
from deploy.one_machine.services.web import answer


class Assignments(Handler[IdentityService]):
    """The roles of users in one kind of target: projects, domains, or the system.

    The methods are PUT, DELETE and GET. The argument `key` is the id of the project or domain, and
    "" for the system. Only admins may call them.
    """

    def __init__(self, service: IdentityService, targets: str) -> None:
        super().__init__(service)
        self._targets, self._table = targets, ROLE_ASSIGNMENTS[targets]

    def on_put(
        self, req: falcon.Request, resp: falcon.Response, user: str, role: str, key: str = ""
    ) -> None:
        require(req.context.caller.is_admin)
        with self._service.change() as change:
            require_rows(change, {**self._target_keys(key), "users": user, "roles": role})
            change.execute(
                insert(self._table)
                .values(self._columns(key, user_id=user, role_id=role))
                .on_conflict_do_nothing()
            )
        resp.status = falcon.HTTP_204

    def on_delete(
        self, req: falcon.Request, resp: falcon.Response, user: str, role: str, key: str = ""
    ) -> None:
        require(req.context.caller.is_admin)
        query = delete(self._table).filter_by(**self._columns(key, user_id=user, role_id=role))
        with self._service.change() as change:
            if change.execute(query).rowcount == 0:
                raise falcon.HTTPNotFound(description="Could not find role assignment.")
        resp.status = falcon.HTTP_204

    def on_get_all(
        self, req: falcon.Request, resp: falcon.Response, user: str, key: str = ""
    ) -> None:
        require(req.context.caller.is_admin)
        ids = select(self._table.c.role_id).filter_by(**self._columns(key, user_id=user))
        with self._service.database.read() as connection:
            require_rows(Transaction(connection), {**self._target_keys(key), "users": user})
            rows = connection.execute(
                select(schema.roles).where(schema.roles.c.id.in_(ids)).order_by(schema.roles.c.name)
            ).all()
        answer(resp, listing(req, RESOURCES["roles"], rows))

    def _columns(self, key: str, **columns: str) -> dict[str, str]:
        return schema.target_columns(self._targets, key) | columns

    def _target_keys(self, key: str) -> dict[str, str]:
        return {} if self._targets == SYSTEM else {self._targets: key}
