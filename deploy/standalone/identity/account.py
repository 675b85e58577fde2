# SPDX-License-Identifier: Apache-2.0
"""What users do for themselves: /v3/users/{user}/password and /v3/users/{user}/application_credentials.

An application credential delegates some of the roles of the token that made it, in that token's project. One
that is not `unrestricted` cannot make or remove further ones.
"""

import secrets
import uuid
from datetime import UTC, datetime
from typing import Any

import falcon
from sqlalchemy import Connection, Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from deploy.standalone.fields import Field, check
from deploy.standalone.identity import passwords, tokens
from deploy.standalone.identity.authenticate import unauthorized
from deploy.standalone.identity.gate import Gate
from deploy.standalone.identity.schema import application_credential_roles as delegated
from deploy.standalone.identity.schema import application_credentials as table
from deploy.standalone.identity.schema import roles, users
from deploy.standalone.identity.tokens import Named, Token
from deploy.standalone.web import answer, read_object

SECRET = Field(str, required=True, size=4096, empty=False)
FIELDS = {
    "name": Field(str, required=True, empty=False),
    "description": Field(str, null=True, size=4096),
    "secret": Field(str, null=True, size=4096, empty=False),
    "expires_at": Field(str, null=True, size=40),
    "roles": Field(list, null=True, size=100),
    "unrestricted": Field(bool, null=True),
    "access_rules": Field(list, null=True, size=0),
    "project_id": Field(str, null=True),
}
ROLE = {"id": Field(str), "name": Field(str)}


class Password:
    """POST /v3/users/{user}/password: the old password is proof enough, no token is needed."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        body = check(read_object(req, "user"), {"original_password": SECRET, "password": SECRET}, "user")
        with self._gate.database.read() as connection:
            stored = connection.execute(select(users.c.password_hash).where(users.c.id == key)).scalar()
        attempts = self._gate.throttle.attempts(req.remote_addr)
        if not attempts.matches(("user", key), stored, body["original_password"]):
            raise unauthorized()
        new = passwords.digest(body["password"])
        with self._gate.database.write() as connection:
            connection.execute(update(users).where(users.c.id == key).values(password_hash=new))
            tokens.revoke_all(connection, key)
        resp.status = falcon.HTTP_204


class ApplicationCredentials:
    """GET and POST /v3/users/{user}/application_credentials; GET and DELETE one of them."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._gate.self_or_admin(req, key)
        query = select(table).where(table.c.user_id == key).order_by(table.c.name)
        if (name := req.get_param("name")) is not None:
            query = query.where(table.c.name == name)
        with self._gate.database.read() as connection:
            shown = [_view(connection, req, row) for row in connection.execute(query).all()]
        answer(resp, {"application_credentials": shown,
                      "links": {"self": f"{req.prefix}{req.path}", "next": None, "previous": None}})

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller = self._gate.allow(self._gate.caller(req), lambda token: token.user_id == key)
        _refuse_restricted(caller)
        body = check(
            read_object(req, "application_credential"), FIELDS, "application_credential", others=True
        )
        if not caller.row.project_id:
            raise falcon.HTTPBadRequest(description="An application credential needs a token with a project.")
        lent = _lent(caller, body.get("roles"))
        secret = body.get("secret") or secrets.token_hex(32)
        values = {
            "id": uuid.uuid4().hex,
            "name": body["name"],
            "user_id": key,
            "project_id": caller.row.project_id,
            "secret_hash": passwords.digest(secret),
            "description": body.get("description"),
            "expires_at": _moment(body.get("expires_at")),
            "unrestricted": bool(body.get("unrestricted")),
        }
        try:
            with self._gate.database.write() as connection:
                connection.execute(insert(table).values(values))
                connection.execute(insert(delegated), [
                    {"application_credential_id": values["id"], "role_id": role["id"]} for role in lent])
                shown = _view(connection, req, _row(connection, key, values["id"]))
        except IntegrityError as error:
            raise falcon.HTTPConflict(
                description="You have an application credential of this name."
            ) from error
        resp.status = falcon.HTTP_201
        answer(resp, {"application_credential": shown | {"secret": secret}})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str, credential: str) -> None:
        self._gate.self_or_admin(req, key)
        with self._gate.database.read() as connection:
            answer(
                resp, {"application_credential": _view(connection, req, _row(connection, key, credential))}
            )

    def on_delete_one(self, req: falcon.Request, resp: falcon.Response, key: str, credential: str) -> None:
        _refuse_restricted(self._gate.self_or_admin(req, key))
        with self._gate.database.write() as connection:
            connection.execute(delete(table).where(table.c.id == _row(connection, key, credential).id))
        resp.status = falcon.HTTP_204


def _refuse_restricted(caller: Token) -> None:
    if caller.row.application_credential_id and not caller.row.unrestricted:
        raise falcon.HTTPForbidden(description="A restricted application credential cannot manage others.")


def _lent(caller: Token, asked: list[Any] | None) -> list[Named]:
    """The roles to delegate: all of the caller's unless some are asked for. Raises 400 for one that is not
    theirs.
    """
    if not asked:
        return caller.roles
    found = {}
    for role in asked:
        check(role, ROLE, "application_credential.roles", others=True)
        mine = [
            held for held in caller.roles if held["id"] == role.get("id") or held["name"] == role.get("name")
        ]
        if not mine:
            raise falcon.HTTPBadRequest(
                description="'application_credential.roles' names a role that you lack."
            )
        found[mine[0]["id"]] = mine[0]
    return list(found.values())


def _moment(text: str | None) -> str | None:
    try:
        moment = datetime.fromisoformat(text) if text else None
        return tokens.text_of(moment if moment.tzinfo else moment.replace(tzinfo=UTC)) if moment else None
    except (ValueError, OverflowError) as error:
        raise falcon.HTTPBadRequest(
            description="'application_credential.expires_at' must be a time in ISO 8601.") from error


def _row(connection: Connection, user: str, key: str) -> Row[Any]:
    row = connection.execute(select(table).where(table.c.id == key, table.c.user_id == user)).first()
    if row is None:
        raise falcon.HTTPNotFound(description=f"Could not find application credential: {key[:64]}.")
    return row


def _view(connection: Connection, req: falcon.Request, row: Row[Any]) -> dict[str, Any]:
    lent = connection.execute(select(roles.c.id, roles.c.name).join(delegated).where(
        delegated.c.application_credential_id == row.id).order_by(roles.c.name))
    body = {name: value for name, value in row._mapping.items() if name != "secret_hash"}
    link = f"{req.prefix}/v3/users/{row.user_id}/application_credentials/{row.id}"
    return body | {"roles": [dict(role._mapping) for role in lent], "system": None, "links": {"self": link}}
