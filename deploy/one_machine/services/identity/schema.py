# SPDX-License-Identifier: Apache-2.0
"""The tables of the identity service, and the roles that other roles imply.

Foreign keys cascade, so a deleted user leaves no token and no role assignment. Times are ISO 8601
in UTC with microseconds, so that they compare as text. `extra` holds attributes that clients add.
The service does not use them.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    true,
)

METADATA = MetaData()
IMPLIED = {"admin": "manager", "manager": "member", "member": "reader"}
"""Role -> the role that its holders also have."""

DEFAULT_DOMAIN = "default"


def _table(name: str, *columns: Column[Any] | UniqueConstraint | Index) -> Table:
    return Table(name, METADATA, *columns)


def _resource(name: str, *columns: Column[Any] | UniqueConstraint) -> Table:
    """Return the table of a resource: id, `columns`, and `extra` for clients' attributes."""
    extra = Column("extra", JSON, default=dict)
    return _table(name, Column("id", String, primary_key=True), *columns, extra)


def _to(column: str, **options: Any) -> Column[Any]:  # noqa: ANN401 - passed on unchanged
    table, _ = column.split(".")
    return Column(f"{table[:-1]}_id", ForeignKey(column, ondelete="CASCADE"), **options)


domains = _resource(
    "domains",
    Column("name", String, nullable=False, unique=True),
    Column("description", Text, nullable=False, default=""),
    Column("enabled", Boolean, nullable=False, server_default=true()),
)

projects = _resource(
    "projects",
    Column("name", String, nullable=False),
    _to("domains.id", nullable=False),
    Column("description", Text, nullable=False, default=""),
    Column("enabled", Boolean, nullable=False, server_default=true()),
    Column("tags", JSON, nullable=False, default=list),
    UniqueConstraint("domain_id", "name"),
)

users = _resource(
    "users",
    Column("name", String, nullable=False),
    _to("domains.id", nullable=False),
    Column("description", Text),
    Column("email", String),
    Column("enabled", Boolean, nullable=False, server_default=true()),
    Column("password_hash", String),
    Column("default_project_id", String),
    UniqueConstraint("domain_id", "name"),
)

roles = _resource(
    "roles", Column("name", String, nullable=False, unique=True), Column("description", Text)
)

services = _resource(
    "services",
    Column("type", String, nullable=False),
    Column("name", String, nullable=False, default=""),
    Column("description", Text),
    Column("enabled", Boolean, nullable=False, server_default=true()),
)

regions = _resource(
    "regions",
    Column("description", Text, nullable=False, default=""),
    Column("parent_region_id", ForeignKey("regions.id")),
)

endpoints = _resource(
    "endpoints",
    _to("services.id", nullable=False),
    Column("region_id", ForeignKey("regions.id")),
    Column("interface", String, nullable=False),
    Column("url", String, nullable=False),
    Column("enabled", Boolean, nullable=False, server_default=true()),
)

#: Defaults for services' resources, and other values for projects and domains.
registered_limits = _table(
    "registered_limits",
    Column("id", String, primary_key=True),
    _to("services.id", nullable=False),
    _to("regions.id"),
    Column("resource_name", String, nullable=False),
    Column("default_limit", Integer, nullable=False),
    Column("description", Text),
)

limits = _table(
    "limits",
    Column("id", String, primary_key=True),
    _to("registered_limits.id", nullable=False, index=True),
    _to("projects.id", index=True),
    _to("domains.id"),
    Column("resource_limit", Integer, nullable=False),
    Column("description", Text),
)

tokens = _table(
    "tokens",
    Column("digest", String, primary_key=True),
    _to("users.id", nullable=False, index=True),
    _to("projects.id"),
    _to("domains.id"),
    Column("methods", JSON, nullable=False),
    Column("audit_ids", JSON, nullable=False),
    Column("issued_at", String, nullable=False),
    Column("expires_at", String, nullable=False, index=True),
)

#: The tokens with the whole cloud as their scope.
system_tokens = _table(
    "system_tokens",
    Column("digest", ForeignKey("tokens.digest", ondelete="CASCADE"), primary_key=True),
)

SYSTEM = "system"


def _assignments_table(scope: str, *target: Column[Any]) -> Table:
    user, role = _to("users.id", primary_key=True), _to("roles.id", primary_key=True)
    by_user = [Index(f"{scope}_roles_by_user", "user_id")] if target else []
    return _table(f"{scope}_roles", *target, user, role, *by_user)


#: The role assignments of users in projects, in domains, and in the whole cloud.
ROLE_ASSIGNMENTS = {
    "projects": _assignments_table("project", _to("projects.id", primary_key=True)),
    "domains": _assignments_table("domain", _to("domains.id", primary_key=True)),
    SYSTEM: _assignments_table(SYSTEM),
}


def target_columns(scope: str, key: str) -> dict[str, str]:
    """Return column -> value that selects a project or domain in its table of ROLE_ASSIGNMENTS.

    Args:
        scope: "projects", "domains" or ``SYSTEM``, which needs no column.
        key: The id of the project or domain.
    """
    return {} if scope == SYSTEM else {f"{scope[:-1]}_id": key}
