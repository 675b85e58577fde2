# SPDX-License-Identifier: Apache-2.0
"""Who has which role where: /v3/{projects|domains}/{target}/users/{user}/roles/{role},
/v3/system/users/{user}/roles/{role} and /v3/role_assignments.
"""

from typing import Any

import falcon
from sqlalchemy import Connection, Select, delete, literal, select, union_all
from sqlalchemy.dialects.sqlite import insert

from deploy.standalone.identity import schema
from deploy.standalone.identity.gate import Gate
from deploy.standalone.identity.nouns import KINDS, listing, missing
from deploy.standalone.identity.tokens import implied
from deploy.standalone.web import answer

HELD = {"projects": schema.project_roles, "domains": schema.domain_roles}
SYSTEM = "system"


class Assignments:
    """The roles of users in one kind of target: "projects", "domains", or the "system", which needs no key."""

    def __init__(self, gate: Gate, targets: str) -> None:
        self._gate, self._targets, self._table = gate, targets, {**HELD, SYSTEM: schema.system_roles}[targets]

    def on_put(self, req: falcon.Request, resp: falcon.Response, user: str, role: str, key: str = "") -> None:
        self._gate.admin(req)
        with self._gate.database.write() as connection:
            self._require(connection, key, user, role)
            connection.execute(
                insert(self._table).values(self._names(key, user, role)).on_conflict_do_nothing()
            )
        resp.status = falcon.HTTP_204

    def on_delete(
        self, req: falcon.Request, resp: falcon.Response, user: str, role: str, key: str = ""
    ) -> None:
        self._gate.admin(req)
        query = delete(self._table).filter_by(**self._names(key, user, role))
        with self._gate.database.write() as connection:
            if connection.execute(query).rowcount == 0:
                raise falcon.HTTPNotFound(description="Could not find role assignment.")
        resp.status = falcon.HTTP_204

    def on_head(self, req: falcon.Request, resp: falcon.Response, user: str, role: str, key: str = "") -> None:
        self._gate.admin(req)
        query = select(self._table).filter_by(**self._names(key, user, role))
        with self._gate.database.read() as connection:
            if connection.execute(query).first() is None:
                raise falcon.HTTPNotFound(description="Could not find role assignment.")
        resp.status = falcon.HTTP_204

    def on_get(self, req: falcon.Request, resp: falcon.Response, user: str, role: str, key: str = "") -> None:
        self.on_head(req, resp, user, role, key)

    def on_get_all(self, req: falcon.Request, resp: falcon.Response, user: str, key: str = "") -> None:
        self._gate.admin(req)
        ids = select(self._table.c.role_id).filter_by(user_id=user, **self._target(key))
        with self._gate.database.read() as connection:
            self._require(connection, key, user)
            rows = connection.execute(
                select(schema.roles).where(schema.roles.c.id.in_(ids)).order_by(schema.roles.c.name)).all()
        answer(resp, listing(req, KINDS["roles"], rows))

    def _names(self, key: str, user: str, role: str) -> dict[str, str]:
        return {**self._target(key), "user_id": user, "role_id": role}

    def _target(self, key: str) -> dict[str, str]:
        return {} if self._targets == SYSTEM else {f"{self._targets[:-1]}_id": key}

    def _require(self, connection: Connection, key: str, user: str, role: str | None = None) -> None:
        for plural, wanted in ((self._targets, key), ("users", user), ("roles", role)):
            if plural == SYSTEM:
                continue
            ids = KINDS[plural].table.c.id
            if wanted is not None and connection.execute(select(ids).where(ids == wanted)).first() is None:
                raise missing(KINDS[plural], wanted)


class RoleAssignments:
    """GET /v3/role_assignments with user.id, role.id, scope.project.id, scope.domain.id, scope.system,
    effective, include_names.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._gate.admin(req)
        with self._gate.database.read() as connection:
            rows = [
                dict(row._mapping)
                for row in connection.execute(union_all(_held("projects"), _held("domains"), _of_system()))
            ]
            roles = {row.name: row.id for row in connection.execute(select(schema.roles))}
        if _flag(req, "effective"):
            rows = _effective(rows, roles)
        for query, column in (
            ("user.id", "user_id"),
            ("role.id", "role_id"),
            ("scope.project.id", "projects"),
            ("scope.domain.id", "domains"),
        ):
            wanted = req.get_param(query)
            if wanted is not None and query.startswith("scope"):
                rows = [row for row in rows if (row["targets"], row["target_id"]) == (column, wanted)]
            elif wanted is not None:
                rows = [row for row in rows if row[column] == wanted]
        if req.has_param("scope.system"):
            rows = [row for row in rows if row["targets"] == SYSTEM]
        if req.has_param("group.id"):
            rows = []  # There are no groups, hence no such assignment.
        names = _flag(req, "include_names")
        answer(resp, {"role_assignments": [_view(req, row, names) for row in rows],
                      "links": {"self": f"{req.prefix}{req.path}", "next": None, "previous": None}})


def _flag(req: falcon.Request, name: str) -> bool:
    return req.has_param(name) and (req.get_param(name) or "").lower() not in ("0", "false")


def _held(targets: str) -> Select[Any]:
    held, target = HELD[targets], KINDS[targets].table
    home, user_home = schema.domains.alias(), schema.domains.alias()
    parent = target.c.domain_id if targets == "projects" else target.c.id
    return select(
        literal(targets).label("targets"),
        target.c.id.label("target_id"),
        target.c.name.label("target_name"),
        home.c.id.label("home_id"),
        home.c.name.label("home_name"),
        schema.users.c.id.label("user_id"),
        schema.users.c.name.label("user_name"),
        user_home.c.id.label("user_home_id"),
        user_home.c.name.label("user_home_name"),
        schema.roles.c.id.label("role_id"),
        schema.roles.c.name.label("role_name"),
    ).select_from(
        held.join(target)
        .join(home, home.c.id == parent)
        .join(schema.users, schema.users.c.id == held.c.user_id)
        .join(user_home, user_home.c.id == schema.users.c.domain_id)
        .join(schema.roles)
    )


def _of_system() -> Select[Any]:
    held, home, nothing = schema.system_roles, schema.domains.alias(), literal("")
    columns: list[Any] = [
        literal(SYSTEM).label("targets"),
        *(nothing.label(name) for name in ("target_id", "target_name", "home_id", "home_name")),
        schema.users.c.id.label("user_id"),
        schema.users.c.name.label("user_name"),
        home.c.id.label("user_home_id"),
        home.c.name.label("user_home_name"),
        schema.roles.c.id.label("role_id"),
        schema.roles.c.name.label("role_name"),
    ]
    return select(*columns).select_from(
        held.join(schema.users).join(home, home.c.id == schema.users.c.domain_id).join(schema.roles)
    )


def _effective(rows: list[dict[str, Any]], roles: dict[str, str]) -> list[dict[str, Any]]:
    found = {}
    for row in rows:
        for name in sorted(implied({row["role_name"]}) & roles.keys()):
            whole = row | {"role_id": roles[name], "role_name": name}
            found[(row["targets"], row["target_id"], row["user_id"], name)] = whole
    return list(found.values())


def _view(req: falcon.Request, row: dict[str, Any], names: bool) -> dict[str, Any]:
    def shown(key: str, name: str, home: str = "") -> dict[str, Any]:
        if not names:
            return {"id": row[key]}
        domain = {"domain": {"id": row[f"{home}_id"], "name": row[f"{home}_name"]}} if home else {}
        return {"id": row[key], "name": row[name]} | domain

    targets = row["targets"]
    path = f"{targets}/{row['target_id']}/users/{row['user_id']}/roles/{row['role_id']}".replace("//", "/")
    scope: dict[str, Any] = {"system": {"all": True}} if targets == SYSTEM else {
        targets[:-1]: shown("target_id", "target_name", "home" if targets == "projects" else "")}
    return {
        "role": shown("role_id", "role_name"),
        "user": shown("user_id", "user_name", "user_home"),
        "scope": scope,
        "links": {"assignment": f"{req.prefix}/v3/{path}"},
    }
