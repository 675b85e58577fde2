# SPDX-License-Identifier: Apache-2.0
"""Authentication: from the body of POST /v3/auth/tokens to a grant.

`grant_of` first checks the shape (a 400 that names the field), then every method of the body (a 401
without a reason), and then finds the scope. `tokens.load` later checks whether the user may have
that scope. No transaction is open while a password is verified, because that takes long.
"""

from dataclasses import replace
from datetime import datetime

import falcon
from sqlalchemy import Table, select

from deploy.one_machine.services.database import Database, DbRow
from deploy.one_machine.services.identity import schema, tokens
from deploy.one_machine.services.identity.throttle import Attempts
from deploy.one_machine.services.identity.tokens import Grant
from deploy.one_machine.services.json_types import JsonValue
from deploy.one_machine.services.schemas import BodySchema, mapping, one_of, text

METHODS = ("password", "token")
DOMAIN = mapping({"id": text(), "name": text()}, others=True)
OWNED = {"id": text(), "name": text(), "domain": DOMAIN}
AUTH = BodySchema(
    mapping(
        {
            "identity": mapping(
                {
                    "methods": {"type": "array", "minItems": 1, "maxItems": 8},
                    "password": mapping(
                        {"user": mapping({**OWNED, "password": text(4096)}, "password")}, "user"
                    ),
                    "token": mapping({"id": text()}, "id"),
                },
                "methods",
                others=True,
            ),
            "scope": {
                "anyOf": [
                    one_of("unscoped"),
                    mapping(
                        {"project": mapping(OWNED, others=True), "domain": DOMAIN, "system": {}},
                        others=True,
                    ),
                ]
            },
        },
        "identity",
    )
)


def unauthorized(
    message: str = "The request you have made requires authentication.",
) -> falcon.HTTPUnauthorized:
    """Return the 401 for a failed authentication. The default text does not show the reason."""
    return falcon.HTTPUnauthorized(description=message, challenges=["Keystone"])


def grant_of(database: Database, auth: object, now: datetime, attempts: Attempts) -> Grant:
    """Verify the `auth` object of a request and return the grant for `tokens.issue`.

    This does not check whether the user is enabled and has a role in the scope. `tokens.load` does.

    Raises:
        HTTPBadRequest: The shape is wrong.
        HTTPUnauthorized: A method is unknown, the password or token is wrong, the methods are for
            different users, or the scope does not exist.
        HTTPTooManyRequests: There were too many wrong passwords from this address.
    """
    body = AUTH.validate(auth, "auth")
    identity, methods = body["identity"], body["identity"]["methods"]
    proofs: dict[str, Grant] = {}
    for method in methods:
        if method not in METHODS:
            raise unauthorized("Only the methods password and token are supported.")
        if method not in identity:
            raise falcon.HTTPBadRequest(
                description=f"'auth.identity.{method}' is a required property."
            )
        if method not in proofs:
            proofs[method] = _PROVE[method](database, identity[method], now, attempts)
    if len({proof.user_id for proof in proofs.values()}) != 1:
        raise unauthorized()
    return _make_grant(database, list(proofs.values()), methods, body.get("scope"))


def _make_grant(
    database: Database, proofs: list[Grant], methods: list[str], scope: JsonValue
) -> Grant:
    parent = next((proof for proof in proofs if proof.expires_at), proofs[0])
    project_id, domain_id = _find_scope(database, parent.user_id, scope)
    return replace(
        parent,
        methods=sorted(set(methods) | {name for proof in proofs for name in proof.methods}),
        project_id=project_id,
        domain_id=domain_id,
        system=isinstance(scope, dict) and set(scope) == {"system"},
    )


def _find_scope(
    database: Database, user_id: str, scope: JsonValue
) -> tuple[str | None, str | None]:
    """Return (project id, domain id) of the requested scope, of which at least one is None.

    Both are None for an unscoped token and for the system. Without a scope, the project is the
    user's default project if the user has a role there, and otherwise both are None.

    Raises:
        HTTPBadRequest: The shape is wrong.
        HTTPUnauthorized: The project or domain does not exist.
    """
    if scope is None:
        return _default_project(database, user_id), None
    if scope == "unscoped" or set(scope) == {"unscoped"}:
        return None, None
    if set(scope) == {"system"}:
        if scope["system"] != {"all": True}:
            raise falcon.HTTPBadRequest(description="'auth.scope.system' must be {\"all\": true}.")
        return None, None
    if set(scope) not in ({"project"}, {"domain"}):
        raise falcon.HTTPBadRequest(
            description="'auth.scope' must hold exactly one of project, domain, system, unscoped."
        )
    [(kind, reference)] = scope.items()
    table = schema.domains if kind == "domain" else schema.projects
    target_id = _require_row(_find(database, table, reference, f"auth.scope.{kind}")).id
    return (None, target_id) if kind == "domain" else (target_id, None)


def _default_project(database: Database, user_id: str) -> str | None:
    with database.read() as connection:
        project_id = connection.scalar(
            select(schema.users.c.default_project_id).where(schema.users.c.id == user_id)
        )
        # As in Keystone, a default project without a role for the user gives an unscoped token.
        has_role = project_id and tokens.roles_of(connection, user_id, "projects", project_id)
        return project_id if has_role else None


def _prove_password(
    database: Database, body: JsonValue, now: datetime, attempts: Attempts
) -> Grant:
    user = body["user"]
    row = _find(database, schema.users, user, "auth.identity.password.user")
    stored = row.password_hash if row else None
    name = str(user["id"] if "id" in user else user.get("name"))
    if not attempts.matches(("user", name), stored, user["password"]):
        raise unauthorized()
    return Grant(_require_row(row).id, ["password"])


def _prove_token(database: Database, body: JsonValue, now: datetime, attempts: Attempts) -> Grant:
    with database.read() as connection:
        token = tokens.load(connection, body["id"], now)
    if token is None:
        raise unauthorized()
    parent, expires_at = token.row.audit_ids[-1], token.row.expires_at
    return Grant(token.user_id, token.row.methods, parent_audit_id=parent, expires_at=expires_at)


_PROVE = {"password": _prove_password, "token": _prove_token}


def _find(database: Database, table: Table, body: JsonValue, where: str) -> DbRow | None:
    """Return the domain, project or user with the id, or the name and domain, in `body`.

    If there is no such row, return None.

    Args:
        database: The service's database.
        table: The table of domains, projects or users.
        body: The reference in the request.
        where: The path of `body` in the request, for errors.

    Raises:
        HTTPBadRequest: `body` has no id and no name, or its name lacks the domain.
    """
    query = select(table)
    if "id" in body:
        return database.first(query.filter_by(id=body["id"]))
    if "name" not in body:
        raise falcon.HTTPBadRequest(description=f"'{where}' must hold an id or a name.")
    query = query.filter_by(name=body["name"])
    if table is schema.domains:
        return database.first(query)
    if "domain" not in body:
        raise falcon.HTTPBadRequest(description=f"'{where}.domain' is required with a name.")
    domain = _find(database, schema.domains, body["domain"], f"{where}.domain")
    return database.first(query.filter_by(domain_id=domain.id if domain else None))


def _require_row(row: DbRow | None) -> DbRow:
    if row is None:
        raise unauthorized()
    return row
