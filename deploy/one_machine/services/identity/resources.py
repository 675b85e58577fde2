# SPDX-License-Identifier: Apache-2.0
"""Domains, projects, users, roles, services, regions and endpoints, with a class for each.

Only admins write. Other callers read lists if `is_shown_to` is true, and one row also if `is_own`
is true. Attributes that a client adds to a resource are kept in `extra` and shown again.
"""

import uuid
from collections.abc import Iterable, Mapping

import falcon
from sqlalchemy import insert, update
from sqlalchemy.exc import IntegrityError

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.identity import passwords, schema, tokens
from deploy.one_machine.services.identity.service import IdentityService, require
from deploy.one_machine.services.identity.tokens import Token
from deploy.one_machine.services.resource import Body, Resource, Transaction
from deploy.one_machine.services.schemas import (
    BOOLEAN,
    NOT_EMPTY,
    BodySchema,
    Document,
    mapping,
    nullable,
    one_of,
    text,
)

NAME, DESCRIPTION, ID = text(pattern=NOT_EMPTY), nullable(text(4096)), text(64)
NEW_ID = text(64, pattern=r"^[A-Za-z0-9_.:-]+$")


def list_links(req: falcon.Request) -> Body:
    """Return the links of a list. There is only one page, as in Keystone."""
    return {"links": {"self": f"{req.prefix}{req.path}", "next": None, "previous": None}}


class IdentityResource(Resource):
    """The base class of the identity service's resources."""

    fields: Mapping[str, Document] = {}
    required: tuple[str, ...] = ()
    #: The columns by which a list can be filtered.
    filters: tuple[str, ...] = ()
    #: Attributes that cannot be changed.
    fixed: tuple[str, ...] = ()
    #: True if clients may add attributes.
    takes_others: bool = True

    def __init__(self) -> None:
        self._new = BodySchema(mapping(self.fields, *self.required, others=self.takes_others))
        self._changed = BodySchema(mapping(self.fields, others=self.takes_others))

    def is_shown_to(self, token: Token) -> bool:
        """Return True if the token's user may read the list and single rows. By default: admins."""
        return token.is_admin

    def is_own(self, token: Token, key: str) -> bool:
        """Return True if the token's user may see the row with this id without seeing the list.

        By default return False.
        """
        return False

    def admit(self, caller: Token, action: str, key: str = "") -> None:
        match action:
            case "list":
                require(self.is_shown_to(caller))
            case "show":
                require(self.is_shown_to(caller) or self.is_own(caller, key))
            case _:
                require(caller.is_admin)

    def not_found(self, key: str) -> falcon.HTTPError:
        return falcon.HTTPNotFound(
            description=f"Could not find {self.name.replace('_', ' ')}: {key[:64]}."
        )

    def conflict(self, action: str, error: IntegrityError) -> falcon.HTTPError:
        if action == "delete":
            return falcon.HTTPConflict(
                description=f"This {self.name} is in use and cannot be deleted."
            )
        if "FOREIGN KEY" in str(error.orig):
            ids = [name for name in self.fields if name.endswith("_id")]
            names = ", ".join(f"'{self.name}.{name}'" for name in ids)
            return falcon.HTTPBadRequest(
                description=f"One of {names} is the id of an object that does not exist."
            )
        return falcon.HTTPConflict(
            description=f"A {self.name} with this name or id exists already."
        )

    def validate(self, caller: Token, body: object, *, new: bool) -> Body:
        values: Body = (self._new if new else self._changed).validate(body, self.name)
        if new and "domain_id" in self.fixed:
            values.setdefault("domain_id", caller.row.project_domain_id or schema.DEFAULT_DOMAIN)
        return values

    def page(self, service: IdentityService, req: falcon.Request) -> tuple[list[DbRow], Body]:
        query = self.select().where(self.visible(req.context.caller))
        columns = query.selected_columns
        for name in self.filters:
            if (value := req.get_param(name)) is not None:
                is_true = value.lower() not in ("false", "0")
                query = query.where(columns[name] == (is_true if name == "enabled" else value))
        order = next(name for name in ("name", "resource_name", "id") if name in columns)
        rows = service.database.rows(query.order_by(columns[order], columns.id))
        return list(rows), list_links(req)

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        shown = {name: value for name, value in row.items() if name != "extra"}
        links = {"self": f"{req.prefix}/v3/{self.plural}/{row['id']}"}
        return (row.get("extra") or {}) | shown | {"links": links}

    def create(self, change: Transaction, caller: Token, body: Body) -> str:
        values = {"id": uuid.uuid4().hex} | self._columns(body, {})
        change.execute(insert(self.table).values(values))
        return str(values["id"])

    def update(self, change: Transaction, caller: Token, row: DbRow, body: Body) -> None:
        for name in self.fixed:
            if body.setdefault(name, row._mapping[name]) != row._mapping[name]:
                raise falcon.HTTPBadRequest(description=f"'{self.name}.{name}' cannot be changed.")
        columns = self._columns(body, row._mapping.get("extra") or {})
        change.execute(update(self.table).where(self.table.c.id == row.id).values(columns))

    def _columns(self, body: Body, extra: DbValues) -> Body:
        """Return the columns to store for a validated body, including `extra`.

        Attributes that are neither a field nor a column are added to `extra`, the clients'
        attributes so far, except for options and links. A null description becomes "" if the
        column requires a value.
        """
        own_columns = self.fields.keys() & self.table.c.keys()
        values = {name: value for name, value in body.items() if name in own_columns}
        reserved = {*self.fields, *self.table.c.keys(), "options", "links"}
        if values.get("description", "") is None and not self.table.c.description.nullable:
            values["description"] = ""
        extra_values = {name: value for name, value in body.items() if name not in reserved}
        return values | {"extra": {**extra, **extra_values}}


class IdentityDomains(IdentityResource):
    """Domains. A domain must be disabled before its deletion."""

    name, plural, table = "domain", "domains", schema.domains
    fields, required = {"name": NAME, "description": DESCRIPTION, "enabled": BOOLEAN}, ("name",)
    filters = ("name", "enabled")

    def is_own(self, token: Token, key: str) -> bool:
        return key in (token.row.user_domain_id, token.row.project_domain_id)

    def delete(self, change: Transaction, caller: Token, row: DbRow) -> None:
        if row.enabled:
            raise falcon.HTTPForbidden(
                description="A domain must be disabled before it is deleted."
            )
        super().delete(change, caller, row)


class IdentityProjects(IdentityResource):
    """Projects, which cannot be nested."""

    name, plural, table = "project", "projects", schema.projects
    fields = {
        "name": NAME,
        "domain_id": ID,
        "parent_id": nullable(text()),
        "is_domain": BOOLEAN,
        "description": DESCRIPTION,
        "enabled": BOOLEAN,
        "tags": {"type": "array", "maxItems": 80, "items": text()},
    }
    required, filters, fixed = ("name",), ("name", "domain_id", "enabled"), ("domain_id",)

    def is_own(self, token: Token, key: str) -> bool:
        return bool(key == token.row.project_id)

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        constant = {"is_domain": False, "options": {}}
        return super().show(req, row) | constant | {"parent_id": row["domain_id"]}

    def _columns(self, body: Body, extra: DbValues) -> Body:
        if body.get("is_domain") or body.get("parent_id") not in (None, body["domain_id"]):
            raise falcon.HTTPBadRequest(
                description="'project.parent_id' and 'project.is_domain': projects cannot be nested here."
            )
        return super()._columns(body, extra)


class IdentityUsers(IdentityResource):
    """Users. A new password revokes all tokens of a user."""

    name, plural, table = "user", "users", schema.users
    fields = {
        "name": NAME,
        "domain_id": ID,
        "description": DESCRIPTION,
        "email": nullable(text()),
        "enabled": BOOLEAN,
        "password": nullable(text(4096)),
        "default_project_id": nullable(ID),
    }
    required, filters, fixed = ("name",), ("name", "domain_id", "enabled"), ("domain_id",)

    def is_own(self, token: Token, key: str) -> bool:
        return key == token.user_id

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        shown = super().show(req, row) | {"password_expires_at": None, "options": {}}
        del shown["password_hash"]
        return shown

    def validate(self, caller: Token, body: object, *, new: bool) -> Body:
        values = super().validate(caller, body, new=new)
        values.pop("password_hash", None)
        # Hashing takes long, so it happens before a transaction is open.
        if "password" in values:
            password = values.pop("password")
            values["password_hash"] = None if password is None else passwords.digest(password)
        return values

    def update(self, change: Transaction, caller: Token, row: DbRow, body: Body) -> None:
        super().update(change, caller, row, body)
        if "password_hash" in body:
            tokens.revoke_all(change.connection, row.id)

    def _columns(self, body: Body, extra: DbValues) -> Body:
        secret = {name: body[name] for name in ("password_hash",) if name in body}
        return super()._columns(body, extra) | secret


class IdentityRoles(IdentityResource):
    """Roles, which belong to no domain."""

    name, plural, table = "role", "roles", schema.roles
    fields = {"name": NAME, "description": DESCRIPTION, "domain_id": {"type": "null"}}
    required, filters = ("name",), ("name",)

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        return super().show(req, row) | {"domain_id": None, "options": {}}


class CatalogueServices(IdentityResource):
    """Services of the catalogue."""

    name, plural, table = "service", "services", schema.services
    fields = {"type": NAME, "name": text(), "description": DESCRIPTION, "enabled": BOOLEAN}
    required, filters = ("type",), ("name", "type")

    def is_shown_to(self, token: Token) -> bool:
        return token.reads_all


class CatalogueRegions(IdentityResource):
    """Regions. Clients choose their ids."""

    name, plural, table = "region", "regions", schema.regions
    fields = {"id": NEW_ID, "description": text(4096), "parent_region_id": nullable(text())}
    filters, fixed = ("parent_region_id",), ("id",)

    def is_shown_to(self, token: Token) -> bool:
        return True


class CatalogueEndpoints(IdentityResource):
    """Endpoints of services. `region` is the old name of `region_id`."""

    name, plural, table = "endpoint", "endpoints", schema.endpoints
    fields = {
        "service_id": text(),
        "region_id": nullable(text()),
        "region": nullable(text()),
        "enabled": BOOLEAN,
        "name": DESCRIPTION,
        "url": text(1024, pattern=NOT_EMPTY),
        "interface": one_of("public", "internal", "admin"),
    }
    required, filters = ("service_id", "url", "interface"), ("service_id", "region_id", "interface")

    def is_shown_to(self, token: Token) -> bool:
        return token.reads_all

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        return super().show(req, row) | {"region": row["region_id"]}

    def validate(self, caller: Token, body: object, *, new: bool) -> Body:
        values = super().validate(caller, body, new=new)
        if values.get("region") is not None:
            values.setdefault("region_id", values["region"])
        return values


RESOURCES: dict[str, IdentityResource] = {
    "domains": IdentityDomains(),
    "projects": IdentityProjects(),
    "users": IdentityUsers(),
    "roles": IdentityRoles(),
    "services": CatalogueServices(),
    "regions": CatalogueRegions(),
    "endpoints": CatalogueEndpoints(),
}


def listing(req: falcon.Request, resource: IdentityResource, rows: Iterable[DbRow]) -> Body:
    """Return the response body for a list with these rows."""
    return {resource.plural: [resource.show(req, row._mapping) for row in rows]} | list_links(req)


def require_rows(change: Transaction, keys: Mapping[str, str | None]) -> None:
    """Check that rows exist.

    Args:
        change: The transaction.
        keys: Plural of the resource -> id of the row, or None for no check.

    Raises:
        HTTPNotFound: A row does not exist.
    """
    for plural, key in keys.items():
        if key is not None and change.one(RESOURCES[plural].table, key) is None:
            raise RESOURCES[plural].not_found(key)
