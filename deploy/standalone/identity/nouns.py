# SPDX-License-Identifier: Apache-2.0
"""Create, list, show, update and delete for every noun of the identity API: one table of kinds, two
resources.

`KINDS` says for each noun its fields, its filters and who besides an admin may see a row. The few things that
differ (a password, an endpoint's region, a domain that must be disabled first) are `_stored`, `view` and
`Item.on_delete`.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import falcon
from sqlalchemy import Row, Table, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from deploy.standalone.fields import Field, check
from deploy.standalone.identity import passwords, schema, tokens
from deploy.standalone.identity.gate import Gate
from deploy.standalone.identity.tokens import Token
from deploy.standalone.web import answer, read_object

NAME = Field(str, required=True, empty=False)
TEXT = Field(str, null=True, size=4096)
ENABLED = Field(bool)
ID = Field(str, size=64)
NEW_ID = Field(str, size=64, pattern=r"[A-Za-z0-9_.:-]+")


@dataclass(frozen=True)
class Kind:
    """One noun: `fields` a body may hold, `filters` a list takes, `own(token, id)` who may see one row; `read` by
    those who may read the whole cloud, `open` to everybody."""

    plural: str
    table: Table
    fields: Mapping[str, Field]
    filters: tuple[str, ...] = ()
    own: Callable[[Token, str], bool] = lambda token, key: False
    open: bool = False
    read: bool = False

    def shown_to(self, token: Token) -> bool:
        """Whether the bearer may see all rows."""
        return token.is_admin or self.open or self.read and token.reads_all

    @property
    def singular(self) -> str:
        return self.plural[:-1]


KINDS = {
    kind.plural: kind
    for kind in (
        Kind(
            "domains",
            schema.domains,
            {"name": NAME, "description": TEXT, "enabled": ENABLED},
            ("name", "enabled"),
            lambda token, key: key in (token.row.user_domain_id, token.row.project_domain_id),
        ),
        Kind(
            "projects",
            schema.projects,
            {
                "name": NAME,
                "domain_id": ID,
                "parent_id": Field(str, null=True),
                "is_domain": Field(bool),
                "description": TEXT,
                "enabled": ENABLED,
                "tags": Field(list, size=80),
            },
            ("name", "domain_id", "enabled"),
            lambda token, key: key == token.row.project_id,
        ),
        Kind(
            "users",
            schema.users,
            {
                "name": NAME,
                "domain_id": ID,
                "description": TEXT,
                "email": Field(str, null=True),
                "enabled": ENABLED,
                "password": Field(str, null=True, size=4096),
                "default_project_id": Field(str, null=True, size=64),
            },
            ("name", "domain_id", "enabled"),
            lambda token, key: key == token.user_id,
        ),
        Kind(
            "roles",
            schema.roles,
            {"name": NAME, "description": TEXT, "domain_id": Field(str, null=True)},
            ("name",),
        ),
        Kind(
            "services",
            schema.services,
            {"type": NAME, "name": Field(str), "description": TEXT, "enabled": ENABLED},
            ("name", "type"),
            read=True,
        ),
        Kind(
            "regions",
            schema.regions,
            {"id": NEW_ID, "description": Field(str, size=4096), "parent_region_id": Field(str, null=True)},
            ("parent_region_id",),
            open=True,
        ),
        Kind(
            "endpoints",
            schema.endpoints,
            {
                "service_id": Field(str, required=True),
                "region_id": Field(str, null=True),
                "region": Field(str, null=True),
                "enabled": ENABLED,
                "name": TEXT,
                "url": Field(str, required=True, size=1024, empty=False),
                "interface": Field(str, required=True, choices=("public", "internal", "admin")),
            },
            ("service_id", "region_id", "interface"),
            read=True,
        ),
    )
}


def view(req: falcon.Request, kind: Kind, row: Row[Any]) -> dict[str, Any]:
    """A row as the API shows it."""
    body = dict(row._mapping)
    body = (body.pop("extra", None) or {}) | body
    if kind.plural == "users":
        del body["password_hash"]
        body |= {"password_expires_at": None, "options": {}}
    elif kind.plural == "projects":
        body |= {"parent_id": row.domain_id, "is_domain": False, "options": {}}
    elif kind.plural == "roles":
        body |= {"domain_id": None, "options": {}}
    elif kind.plural == "endpoints":
        body["region"] = row.region_id
    return body | {"links": {"self": f"{req.prefix}/v3/{kind.plural}/{row.id}"}}


def listing(req: falcon.Request, kind: Kind, rows: Iterable[Row[Any]]) -> dict[str, Any]:
    """A list as the API shows it: never in pages, as Keystone's."""
    return {kind.plural: [view(req, kind, row) for row in rows],
            "links": {"self": f"{req.prefix}{req.path}", "next": None, "previous": None}}


def missing(kind: Kind, key: str) -> falcon.HTTPNotFound:
    """The 404 for a row of `kind`."""
    return falcon.HTTPNotFound(description=f"Could not find {kind.singular}: {key[:64]}.")


class Collection:
    """GET and POST /v3/{plural}."""

    def __init__(self, gate: Gate, kind: Kind) -> None:
        self._gate, self._kind = gate, kind

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        table, kind = self._kind.table, self._kind
        self._gate.allow(self._gate.caller(req), kind.shown_to)
        query = select(table).order_by(table.c.name if "name" in table.c else table.c.id)
        for name in kind.filters:
            if (value := req.get_param(name)) is not None:
                wanted = value.lower() not in ("false", "0") if name == "enabled" else value
                query = query.where(table.c[name] == wanted)
        with self._gate.database.read() as connection:
            rows = connection.execute(query).all()
        answer(resp, listing(req, kind, rows))

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller = self._gate.admin(req)
        body = check(
            read_object(req, self._kind.singular), self._kind.fields, self._kind.singular, others=True
        )
        if "domain_id" in self._kind.table.c:
            body.setdefault("domain_id", caller.row.project_domain_id or schema.DEFAULT_DOMAIN)
        values = {"id": uuid.uuid4().hex} | _stored(self._kind, body, {})
        table = self._kind.table
        try:
            with self._gate.database.write() as connection:
                connection.execute(insert(table).values(values))
                row = connection.execute(select(table).where(table.c.id == values["id"])).one()
        except IntegrityError as error:
            raise _conflict(self._kind, error) from error
        resp.status = falcon.HTTP_201
        answer(resp, {self._kind.singular: view(req, self._kind, row)})


class Item:
    """GET, HEAD, PATCH and DELETE /v3/{plural}/{key}."""

    def __init__(self, gate: Gate, kind: Kind) -> None:
        self._gate, self._kind = gate, kind

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        kind = self._kind
        self._gate.allow(self._gate.caller(req),
                         lambda token: kind.shown_to(token) or kind.own(token, key))
        answer(resp, {kind.singular: view(req, kind, self._row(key))})

    def on_head(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self.on_get(req, resp, key)

    def on_patch(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._gate.admin(req)
        kind, table = self._kind, self._kind.table
        body = check(read_object(req, kind.singular), kind.fields, kind.singular, partial=True, others=True)
        row = self._row(key)
        for fixed in ("id", "domain_id"):
            if (
                fixed in kind.fields
                and fixed in table.c
                and body.setdefault(fixed, row._mapping[fixed]) != row._mapping[fixed]
            ):
                raise falcon.HTTPBadRequest(description=f"'{kind.singular}.{fixed}' cannot be changed.")
        values = _stored(kind, body, row._mapping.get("extra") or {})
        try:
            with self._gate.database.write() as connection:
                connection.execute(update(table).where(table.c.id == key).values(values))
                if "password_hash" in values:
                    tokens.revoke_all(connection, key)
        except IntegrityError as error:
            raise _conflict(kind, error) from error
        answer(resp, {kind.singular: view(req, kind, self._row(key))})

    def on_delete(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._gate.admin(req)
        row = self._row(key)
        if self._kind.plural == "domains" and row.enabled:
            raise falcon.HTTPForbidden(description="A domain must be disabled before it is deleted.")
        try:
            with self._gate.database.write() as connection:
                connection.execute(delete(self._kind.table).where(self._kind.table.c.id == key))
        except IntegrityError as error:
            raise falcon.HTTPConflict(description=f"This {self._kind.singular} is in use.") from error
        resp.status = falcon.HTTP_204

    def _row(self, key: str) -> Row[Any]:
        with self._gate.database.read() as connection:
            row = connection.execute(select(self._kind.table).where(self._kind.table.c.id == key)).first()
        if row is None:
            raise missing(self._kind, key)
        return row


def _stored(kind: Kind, body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The columns for a checked body; what `kind` has no field for is kept in `extra`. Raises 400 for
    nesting.
    """
    values = {name: value for name, value in body.items() if name in kind.fields}
    reserved = {*kind.table.c.keys(), "options", "links"}
    kept = {name: value for name, value in body.items() if name not in kind.fields and name not in reserved}
    if kind.plural == "projects":
        _refuse_nesting(values)
    elif kind.plural == "roles" and values.pop("domain_id", None):
        raise falcon.HTTPBadRequest(description="'role.domain_id': roles belong to no domain here.")
    elif kind.plural == "users" and "password" in values:
        password = values.pop("password")
        values["password_hash"] = None if password is None else passwords.digest(password)
    elif kind.plural == "endpoints":
        region, _ = values.pop("region", None), values.pop("name", None)
        if region is not None:
            values.setdefault("region_id", region)
    if values.get("description", "") is None and not kind.table.c.description.nullable:
        values["description"] = ""
    return values | {"extra": {**extra, **kept}}


def _refuse_nesting(values: dict[str, Any]) -> None:
    parent = values.pop("parent_id", None)
    if values.pop("is_domain", False) or parent not in (None, values.get("domain_id")):
        raise falcon.HTTPBadRequest(
            description="'project.parent_id' and 'project.is_domain': projects cannot be nested here.")
    if not all(isinstance(tag, str) and len(tag) <= 255 for tag in values.get("tags", [])):
        raise falcon.HTTPBadRequest(description="'project.tags' must be a list of strings.")


def _conflict(kind: Kind, error: IntegrityError) -> falcon.HTTPError:
    if "FOREIGN KEY" in str(error.orig):
        named = ", ".join(f"'{kind.singular}.{name}'" for name in kind.fields if name.endswith("_id"))
        return falcon.HTTPBadRequest(description=f"One of {named} names something that does not exist.")
    return falcon.HTTPConflict(description=f"A {kind.singular} with this name or id exists already.")
