# SPDX-License-Identifier: Apache-2.0
"""Who has which role where: /v3/{projects|domains}/{target}/users/{user}/roles/{role},
/v3/system/users/{user}/roles/{role} and /v3/role_assignments.
"""

from collections.abc import Mapping
from typing import Any

import falcon
from sqlalchemy import FromClause, Table, delete, literal, select, union_all
from sqlalchemy.dialects.sqlite import insert

from deploy.standalone.database import DbSelect
from deploy.standalone.identity import schema
from deploy.standalone.identity.resources import RESOURCES, list_links, listing, require_rows
from deploy.standalone.identity.schema import HELD, SYSTEM
from deploy.standalone.identity.service import IdentityService, require
from deploy.standalone.identity.tokens import implied
from deploy.standalone.json_types import Body
from deploy.standalone.resource import Handler, Transaction
from deploy.standalone.web import answer

#: parameter -> the columns that an assignment must have; "" is what the parameter says. There are
#: no groups, hence nothing is theirs.
FILTERS: Mapping[str, Mapping[str, str]] = {
    "user.id": {"user_id": ""},
    "role.id": {"role_id": ""},
    "scope.project.id": {"targets": "projects", "target_id": ""},
    "scope.domain.id": {"targets": "domains", "target_id": ""},
    "scope.system": {"targets": SYSTEM},
    "group.id": {"targets": "groups"},
}


class Assignments(Handler[IdentityService]):
    """The roles of users in one kind of target: "projects", "domains", or the "system", which needs
    no key."""

    def __init__(self, service: IdentityService, targets: str) -> None:
        super().__init__(service)
        self._targets, self._table = targets, HELD[targets]

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

    def on_head(
        self, req: falcon.Request, resp: falcon.Response, user: str, role: str, key: str = ""
    ) -> None:
        require(req.context.caller.is_admin)
        query = select(self._table).filter_by(**self._columns(key, user_id=user, role_id=role))
        if self._service.database.first(query) is None:
            raise falcon.HTTPNotFound(description="Could not find role assignment.")
        resp.status = falcon.HTTP_204

    on_get = on_head

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


class RoleAssignments(Handler[IdentityService]):
    """GET /v3/role_assignments with user.id, role.id, scope.project.id, scope.domain.id,
    scope.system, effective, include_names.
    """

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        require(req.context.caller.is_admin)
        with self._service.database.read() as connection:
            held = connection.execute(union_all(_held("projects"), _held("domains"), _of_system()))
            rows = [dict(row._mapping) for row in held]
            roles = {row.name: row.id for row in connection.execute(select(schema.roles))}
        if _flag(req, "effective"):
            rows = _effective(rows, roles)
        for parameter, columns in FILTERS.items():
            wanted = req.get_param(parameter)
            if wanted is not None:
                given = [value or wanted for value in columns.values()]
                rows = [row for row in rows if [row[name] for name in columns] == given]
        names = _flag(req, "include_names")
        answer(
            resp, {"role_assignments": [_view(req, row, names) for row in rows]} | list_links(req)
        )


def _flag(req: falcon.Request, name: str) -> bool:
    return req.has_param(name) and (req.get_param(name) or "").lower() not in ("0", "false")


def _held(targets: str) -> DbSelect:
    held, target, home = HELD[targets], RESOURCES[targets].table, schema.domains.alias()
    parent = target.c.domain_id if targets == "projects" else target.c.id
    columns = [
        literal(targets).label("targets"),
        target.c.id.label("target_id"),
        target.c.name.label("target_name"),
        home.c.id.label("home_id"),
        home.c.name.label("home_name"),
    ]
    return _with_user_and_role(columns, held.join(target).join(home, home.c.id == parent), held)


def _of_system() -> DbSelect:
    columns = [
        literal(SYSTEM).label("targets"),
        *(literal("").label(name) for name in ("target_id", "target_name", "home_id", "home_name")),
    ]
    return _with_user_and_role(columns, HELD[SYSTEM], HELD[SYSTEM])


def _with_user_and_role(columns: list[Any], held_in: FromClause, held: Table) -> DbSelect:
    users, roles, home = schema.users, schema.roles, schema.domains.alias()
    return select(
        *columns,
        users.c.id.label("user_id"),
        users.c.name.label("user_name"),
        home.c.id.label("user_home_id"),
        home.c.name.label("user_home_name"),
        roles.c.id.label("role_id"),
        roles.c.name.label("role_name"),
    ).select_from(
        held_in.join(users, users.c.id == held.c.user_id)
        .join(home, home.c.id == users.c.domain_id)
        .join(roles, roles.c.id == held.c.role_id)
    )


def _effective(rows: list[Body], roles: dict[str, str]) -> list[Body]:
    found = {}
    for row in rows:
        for name in sorted(implied({row["role_name"]}) & roles.keys()):
            whole = row | {"role_id": roles[name], "role_name": name}
            found[(row["targets"], row["target_id"], row["user_id"], name)] = whole
    return list(found.values())


def _view(req: falcon.Request, row: Body, names: bool) -> Body:
    def shown(key: str, name: str, home: str = "") -> Body:
        if not names:
            return {"id": row[key]}
        domain = {"domain": {"id": row[f"{home}_id"], "name": row[f"{home}_name"]}} if home else {}
        return {"id": row[key], "name": row[name]} | domain

    path = f"users/{row['user_id']}/roles/{row['role_id']}"
    scope: Body = {"system": {"all": True}}
    if (targets := row["targets"]) == SYSTEM:
        path = f"{SYSTEM}/{path}"
    else:
        path = f"{targets}/{row['target_id']}/{path}"
        home = "home" if targets == "projects" else ""
        scope = {targets[:-1]: shown("target_id", "target_name", home)}
    return {
        "role": shown("role_id", "role_name"),
        "user": shown("user_id", "user_name", "user_home"),
        "scope": scope,
        "links": {"assignment": f"{req.prefix}/v3/{path}"},
    }
