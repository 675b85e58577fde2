# SPDX-License-Identifier: Apache-2.0
"""Tokens: opaque random strings of which the SHA-256 is stored.

Their rights are read from the present rows.

`issue` writes a token, `load` reads it with two SELECTs, `view` shows it as Keystone does. `load`
returns None if the token has expired or is revoked, if its user, project or domain is deleted or
disabled, or if a scoped token has no role left.
"""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, delete, insert, select

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.identity import schema
from deploy.one_machine.services.identity.schema import (
    projects,
    roles,
    system_tokens,
    tokens,
    users,
)
from deploy.one_machine.services.json_types import Body

USER_DOMAIN = schema.domains.alias("user_domain")
PROJECT_DOMAIN = schema.domains.alias("project_domain")
SCOPE_DOMAIN = schema.domains.alias("scope_domain")

Named = dict[str, str]
"""{"id": ..., "name": ...}, as the API shows a role or a domain."""


@dataclass(frozen=True)
class Grant:
    """The properties of a token to issue.

    `parent_audit_id` and `expires_at` are set if the user proved the identity with another token,
    whose end the new token inherits. `system` is True for the scope of the whole cloud. Without
    project, domain and system the token is unscoped.
    """

    user_id: str
    methods: list[str]
    project_id: str | None = None
    domain_id: str | None = None
    parent_audit_id: str | None = None
    expires_at: str | None = None
    system: bool = False


@dataclass(frozen=True)
class Token:
    """A valid token with its roles. The row is joined with user and scope."""

    row: DbRow
    roles: list[Named]

    @property
    def is_admin(self) -> bool:
        return any(role["name"] == "admin" for role in self.roles)

    @property
    def may_validate(self) -> bool:
        """True if the user is an admin or a service, which may see other users' tokens."""
        return any(role["name"] in ("admin", "service") for role in self.roles)

    @property
    def reads_all(self) -> bool:
        """True if the user may read data of others: an admin, or a reader of the whole cloud."""
        return self.is_admin or (
            bool(self.row.system) and any(role["name"] == "reader" for role in self.roles)
        )

    @property
    def user_id(self) -> str:
        return str(self.row.user_id)


def text_of(moment: datetime) -> str:
    """Return a time in the format of the API and the database."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def digest(secret: str) -> str:
    """Return the SHA-256 of a token's secret, which is the key of its row."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def issue(connection: Connection, grant: Grant, now: datetime, lifetime: timedelta) -> str:
    """Store a token for `grant` and return the secret. Delete the expired tokens of all users.

    The token ends at `grant.expires_at` if this is set, and otherwise after `lifetime`. The secret
    is hexadecimal, because commands would read a "-" at the front as an option.
    """
    secret = secrets.token_hex(32)
    connection.execute(delete(tokens).where(tokens.c.expires_at <= text_of(now)))
    grant_columns = {name: value for name, value in vars(grant).items() if name in tokens.c}
    columns = {
        "digest": digest(secret),
        "audit_ids": [secrets.token_urlsafe(16), *filter(None, [grant.parent_audit_id])],
        "issued_at": text_of(now),
        "expires_at": grant.expires_at or text_of(now + lifetime),
    }
    connection.execute(insert(tokens).values(grant_columns | columns))
    if grant.system:
        connection.execute(insert(system_tokens).values(digest=digest(secret)))
    return secret


def load(connection: Connection, secret: str, now: datetime) -> Token | None:
    """Return the token with this secret and its present roles, or None if not valid at `now`.

    A token is invalid if it has expired or is revoked, if the user, the project or a domain of the
    token is deleted or disabled, or if a scoped token has no role left.
    """
    row = connection.execute(_FULL_ROW.where(tokens.c.digest == digest(secret))).first()
    if row is None or row.expires_at <= text_of(now) or not _is_enabled(row):
        return None
    scope, key = scope_of(row)
    token_roles = roles_of(connection, row.user_id, scope, key)
    return Token(row, token_roles) if token_roles or not scope else None


def revoke(connection: Connection, secret: str) -> None:
    """Delete the token with this secret, if it exists."""
    connection.execute(delete(tokens).where(tokens.c.digest == digest(secret)))


def revoke_all(connection: Connection, user_id: str) -> None:
    """Delete all tokens of a user, after a change of password."""
    connection.execute(delete(tokens).where(tokens.c.user_id == user_id))


def scope_of(row: DbRow) -> tuple[str, str]:
    """Return a token's scope and the id of the project or domain.

    The scope is "projects", "domains", "system", or "" if unscoped. The last two have the id "".
    """
    if row.system:
        return schema.SYSTEM, ""
    if row.project_id:
        return "projects", row.project_id
    return ("domains", row.domain_id) if row.domain_id else ("", "")


def roles_of(connection: Connection, user_id: str, scope: str, key: str = "") -> list[Named]:
    """Return the roles of a user in a scope, with implied roles, in the order of their names.

    Args:
        connection: The database connection.
        user_id: The user.
        scope: The scope as in `scope_of`. For "" the list is empty.
        key: The id of the project or domain.
    """
    if not scope:
        return []
    table = schema.ROLE_ASSIGNMENTS[scope]
    where = {"user_id": user_id, **schema.target_columns(scope, key)}
    held_ids = select(table.c.role_id).filter_by(**where)
    rows = connection.execute(
        select(roles.c.id, roles.c.name, roles.c.id.in_(held_ids).label("held")).order_by(
            roles.c.name
        )
    ).all()
    names = add_implied({row.name for row in rows if row.held})
    return [{"id": row.id, "name": row.name} for row in rows if row.name in names]


def add_implied(names: set[str]) -> set[str]:
    """Return `names` with all roles that they imply."""
    all_names, remaining = set(names), list(names)
    while remaining:
        if (name := schema.IMPLIED.get(remaining.pop())) and name not in all_names:
            all_names.add(name)
            remaining.append(name)
    return all_names


def view(token: Token, catalogue: list[Body] | None) -> Body:
    """Return the response body for a token, as in Keystone.

    Args:
        token: The token.
        catalogue: The catalogue, or None to leave it out. A token without roles, which is unscoped,
            gets none.
    """
    row = token.row
    body: Body = {
        name: row._mapping[name] for name in ("methods", "audit_ids", "issued_at", "expires_at")
    }
    home = {"id": row.user_domain_id, "name": row.user_domain_name}
    user = {"id": row.user_id, "name": row.user_name, "domain": home}
    body["user"] = user | {"password_expires_at": None}
    if row.project_id:
        home = {"id": row.project_domain_id, "name": row.project_domain_name}
        body["project"] = {"id": row.project_id, "name": row.project_name, "domain": home}
        body["is_domain"] = False
    if row.domain_id:
        body["domain"] = {"id": row.domain_id, "name": row.scope_domain_name}
    if row.system:
        body["system"] = {"all": True}
    if token.roles:
        body["roles"] = token.roles
        if catalogue is not None:
            body["catalog"] = catalogue
    return {"token": body}


def _is_enabled(row: DbRow) -> bool:
    enabled = [row.user_enabled, row.user_domain_enabled]
    if row.project_id:
        enabled += [row.project_enabled, row.project_domain_enabled]
    if row.domain_id:
        enabled.append(row.scope_domain_enabled)
    return all(enabled)


_FULL_ROW = select(
    tokens,
    users.c.name.label("user_name"),
    users.c.enabled.label("user_enabled"),
    USER_DOMAIN.c.id.label("user_domain_id"),
    USER_DOMAIN.c.name.label("user_domain_name"),
    USER_DOMAIN.c.enabled.label("user_domain_enabled"),
    projects.c.name.label("project_name"),
    projects.c.enabled.label("project_enabled"),
    PROJECT_DOMAIN.c.id.label("project_domain_id"),
    PROJECT_DOMAIN.c.name.label("project_domain_name"),
    PROJECT_DOMAIN.c.enabled.label("project_domain_enabled"),
    SCOPE_DOMAIN.c.name.label("scope_domain_name"),
    SCOPE_DOMAIN.c.enabled.label("scope_domain_enabled"),
    system_tokens.c.digest.label("system"),
).select_from(
    tokens.join(users, users.c.id == tokens.c.user_id)
    .join(USER_DOMAIN, USER_DOMAIN.c.id == users.c.domain_id)
    .outerjoin(projects, projects.c.id == tokens.c.project_id)
    .outerjoin(PROJECT_DOMAIN, PROJECT_DOMAIN.c.id == projects.c.domain_id)
    .outerjoin(SCOPE_DOMAIN, SCOPE_DOMAIN.c.id == tokens.c.domain_id)
    .outerjoin(system_tokens, system_tokens.c.digest == tokens.c.digest)
)
