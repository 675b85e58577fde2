# SPDX-License-Identifier: Apache-2.0
"""What users do for themselves: /v3/users/{user}/password and
/v3/users/{user}/application_credentials.

An application credential delegates some of the roles of the token that made it, in that token's
project. One that is not `unrestricted` cannot make or remove further ones.
"""

import secrets
import uuid
from datetime import UTC, datetime
from typing import Any

import falcon
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from deploy.standalone.database import DbRow
from deploy.standalone.identity import passwords, tokens
from deploy.standalone.identity.authenticate import unauthorized
from deploy.standalone.identity.resources import list_links
from deploy.standalone.identity.schema import application_credential_roles as delegated
from deploy.standalone.identity.schema import application_credentials as table
from deploy.standalone.identity.schema import roles, users
from deploy.standalone.identity.service import IdentityService, require
from deploy.standalone.identity.tokens import Named, Token
from deploy.standalone.json_types import Body
from deploy.standalone.resource import Handler
from deploy.standalone.schemas import BOOLEAN, NOT_EMPTY, BodySchema, mapping, nullable, text
from deploy.standalone.web import answer, read_object

SECRET = text(4096, pattern=NOT_EMPTY)
PASSWORDS = BodySchema(
    mapping({"original_password": SECRET, "password": SECRET}, "original_password", "password")
)
CREDENTIAL = BodySchema(
    mapping(
        {
            "name": text(pattern=NOT_EMPTY),
            "description": nullable(text(4096)),
            "secret": nullable(SECRET),
            "expires_at": nullable(text(40)),
            "unrestricted": nullable(BOOLEAN),
            "project_id": nullable(text()),
            "roles": nullable(
                {
                    "type": "array",
                    "maxItems": 100,
                    "items": mapping({"id": text(), "name": text()}, others=True),
                }
            ),
            "access_rules": nullable({"type": "array", "maxItems": 0}),
        },
        "name",
        others=True,
    )
)


class Password(Handler[IdentityService]):
    """POST /v3/users/{user}/password: the old password is proof enough, no token is needed."""

    open_methods = ("POST",)

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        body = PASSWORDS.checked(read_object(req, "user"), "user")
        with self._service.database.read() as connection:
            stored = connection.scalar(select(users.c.password_hash).where(users.c.id == key))
        attempts = self._service.throttle.attempts(req.remote_addr)
        if not attempts.matches(("user", key), stored, body["original_password"]):
            raise unauthorized()
        new = passwords.digest(body["password"])
        with self._service.database.write() as connection:
            connection.execute(update(users).where(users.c.id == key).values(password_hash=new))
            tokens.revoke_all(connection, key)
        resp.status = falcon.HTTP_204


class ApplicationCredentials(Handler[IdentityService]):
    """GET and POST /v3/users/{user}/application_credentials; GET and DELETE one of them."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        _require_self_or_admin(req, key)
        query = select(table).where(table.c.user_id == key).order_by(table.c.name)
        if (name := req.get_param("name")) is not None:
            query = query.where(table.c.name == name)
        with self._service.database.read() as connection:
            shown = [_view(connection, req, row) for row in connection.execute(query).all()]
        answer(resp, {"application_credentials": shown} | list_links(req))

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller: Token = req.context.caller
        require(caller.user_id == key)
        _require_unrestricted(caller)
        body = CREDENTIAL.checked(
            read_object(req, "application_credential"), "application_credential"
        )
        if not caller.row.project_id:
            raise falcon.HTTPBadRequest(
                description="An application credential needs a token with a project."
            )
        lent = _delegated_roles(caller, body.get("roles"))
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
            with self._service.database.write() as connection:
                connection.execute(insert(table).values(values))
                key_of = {"application_credential_id": values["id"]}
                rows = [key_of | {"role_id": role["id"]} for role in lent]
                connection.execute(insert(delegated), rows)
                shown = _view(connection, req, _row(connection, key, values["id"]))
        except IntegrityError as error:
            raise falcon.HTTPConflict(
                description="You have an application credential of this name."
            ) from error
        resp.status = falcon.HTTP_201
        answer(resp, {"application_credential": shown | {"secret": secret}})

    def on_get_one(
        self, req: falcon.Request, resp: falcon.Response, key: str, credential: str
    ) -> None:
        _require_self_or_admin(req, key)
        with self._service.database.read() as connection:
            shown = _view(connection, req, _row(connection, key, credential))
        answer(resp, {"application_credential": shown})

    def on_delete_one(
        self, req: falcon.Request, resp: falcon.Response, key: str, credential: str
    ) -> None:
        _require_self_or_admin(req, key)
        _require_unrestricted(req.context.caller)
        with self._service.database.write() as connection:
            found = _row(connection, key, credential)
            connection.execute(delete(table).where(table.c.id == found.id))
        resp.status = falcon.HTTP_204


def _require_self_or_admin(req: falcon.Request, user_id: str) -> None:
    require(req.context.caller.is_admin or req.context.caller.user_id == user_id)


def _require_unrestricted(caller: Token) -> None:
    if caller.row.application_credential_id and not caller.row.unrestricted:
        raise falcon.HTTPForbidden(
            description="A restricted application credential cannot manage others."
        )


def _delegated_roles(caller: Token, requested: list[Any] | None) -> list[Named]:
    """The roles to delegate: all of the caller's unless some are requested. Raises 400 for one that
    is not theirs.
    """
    if not requested:
        return caller.roles
    found = {}
    for role in requested:
        for held in caller.roles:
            if held["id"] == role.get("id") or held["name"] == role.get("name"):
                found[held["id"]] = held
                break
        else:
            raise falcon.HTTPBadRequest(
                description="'application_credential.roles' names a role that you lack."
            )
    return list(found.values())


def _moment(text: str | None) -> str | None:
    try:
        if not text:
            return None
        moment = datetime.fromisoformat(text)
        return tokens.text_of(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    except (ValueError, OverflowError) as error:
        raise falcon.HTTPBadRequest(
            description="'application_credential.expires_at' must be a time in ISO 8601."
        ) from error


def _row(connection: Connection, user: str, key: str) -> DbRow:
    row = connection.execute(select(table).filter_by(id=key, user_id=user)).first()
    if row is None:
        raise falcon.HTTPNotFound(description=f"Could not find application credential: {key[:64]}.")
    return row


def _view(connection: Connection, req: falcon.Request, row: DbRow) -> Body:
    lent = connection.execute(
        select(roles.c.id, roles.c.name)
        .join(delegated)
        .where(delegated.c.application_credential_id == row.id)
        .order_by(roles.c.name)
    )
    body = {name: value for name, value in row._mapping.items() if name != "secret_hash"}
    link = f"{req.prefix}/v3/users/{row.user_id}/application_credentials/{row.id}"
    return body | {
        "roles": [dict(role._mapping) for role in lent],
        "system": None,
        "links": {"self": link},
    }
