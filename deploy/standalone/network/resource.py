# SPDX-License-Identifier: Apache-2.0
"""One collection for every noun: list, create (one or many), show, update, delete and tags, each one transaction.

A `Noun` says what is its own: table, attributes, who may see it, and how it is made, changed, removed and shown. It
never begins a transaction; everything of a request happens in one, and the answer is read after its commit.
"""

from collections.abc import Mapping
from typing import Any

import falcon
from sqlalchemy import ColumnElement, Row, Select, Table, select, true

from deploy.standalone.network.attributes import Attribute, Body, checked, listed, text
from deploy.standalone.network.caller import Caller
from deploy.standalone.network.fabric import Change, Fabric
from deploy.standalone.network.faults import fault
from deploy.standalone.network.listing import Filter, Page, conditions, values_of
from deploy.standalone.web import answer, read_json

BULK = 1000
TAG = text(255, r"[^,/]{1,255}")
TAG_LIST = listed(TAG, 50)


class Noun:
    """What the API shows under one plural; the default of each part fits a thing that its project owns."""

    name: str
    plural: str
    table: Table
    attributes: Mapping[str, Attribute]
    missing: str
    filters: Mapping[str, Filter] = {}

    @property
    def key(self) -> str:
        """The name of the noun in a body."""
        return self.name

    def select(self) -> Select[Any]:
        """What `show` needs of each row."""
        return select(self.table)

    def visible(self, caller: Caller) -> ColumnElement[bool]:
        """Which rows this caller may know of."""
        return true() if caller.is_admin else self.table.c.project_id == caller.project_id

    def show(self, row: Mapping[Any, Any], caller: Caller) -> Body:
        """A row as the API shows it."""
        shown = {name: row[attribute.column or name] for name, attribute in self.attributes.items()
                 if (attribute.column or name) in row and (caller.is_admin or not attribute.hidden)}
        return standard(row) | shown

    def before_list(self, fabric: Fabric, caller: Caller) -> None:
        """What must exist before this caller lists."""

    def create(self, change: Change, caller: Caller, body: Body) -> str:
        """Make one and return its id."""
        raise NotImplementedError

    def update(self, change: Change, caller: Caller, row: Row[Any], body: Body) -> None:
        """Change one."""
        raise NotImplementedError

    def delete(self, change: Change, caller: Caller, row: Row[Any]) -> None:
        """Remove one."""
        raise NotImplementedError


def standard(row: Mapping[Any, Any]) -> Body:
    """What is shown of everything."""
    return {"id": row["id"], "project_id": row["project_id"], "tenant_id": row["project_id"],
            "description": row["description"], "tags": row["tags"], "revision_number": row["revision_number"],
            "created_at": row["created_at"], "updated_at": row["updated_at"]}


def find(connection: Any, noun: Noun, caller: Caller, key: str) -> Row[Any]:
    """A thing that the caller may know of. Raises 404 also for one that they may not."""
    row = connection.execute(noun.select().where(noun.table.c.id == key, noun.visible(caller))).first()
    if row is None:
        raise fault(noun.missing, id=key[:64])
    return row  # type: ignore[no-any-return]


def fields(req: falcon.Request, body: Body) -> Body:
    """`body` cut down to the fields that the query asks for."""
    wanted = {name for value in values_of(req.params, "fields") for name in value.split(",")} - {""}
    return {name: value for name, value in body.items() if name in wanted} if wanted else body


class Collection:
    """GET and POST /v2.0/{plural}."""

    def __init__(self, fabric: Fabric, noun: Noun) -> None:
        self._fabric, self._noun = fabric, noun

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        noun, caller = self._noun, req.context.caller
        page = Page(req.params, noun.table, noun.attributes, caller.is_admin)
        rules = conditions(req.params, noun.table, noun.attributes, noun.filters, caller.is_admin)
        noun.before_list(self._fabric, caller)
        with self._fabric.database.read() as connection:
            marker = find(connection, noun, caller, page.marker) if page.marker else None
            found = connection.execute(page.apply(noun.select().where(noun.visible(caller), *rules), marker)).all()
        rows, links = page.cut(list(found), f"{req.prefix}{req.path}")
        plural = noun.plural.replace("-", "_")
        body: Body = {plural: [fields(req, noun.show(row._mapping, caller)) for row in rows]}
        answer(resp, body | ({f"{plural}_links": links} if links else {}))

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        noun, caller = self._noun, req.context.caller
        caller.require_writer(f"(rule:create_{noun.key})")
        plural, body = noun.plural.replace("-", "_"), read_json(req)
        many = isinstance(body, dict) and isinstance(body.get(plural), list)
        if not many and not (isinstance(body, dict) and noun.key in body):
            raise fault("HTTPBadRequest", why=f"Unable to find '{noun.key}' in request body")
        asked = body[plural] if many else [body[noun.key]]
        if not 0 < len(asked) <= BULK:
            raise fault("HTTPBadRequest", why=f"From 1 to {BULK} resources at a time")
        wanted = [self._checked(caller, item) for item in asked]
        with self._fabric.change() as change:
            keys = [noun.create(change, caller, item) for item in wanted]
        self._fabric.settle(change)
        shown = self._shown(caller, keys)
        resp.status = falcon.HTTP_201
        answer(resp, {plural: shown} if many else {noun.key: shown[0]})

    def _checked(self, caller: Caller, body: object) -> Body:
        found = checked(body, self._noun.attributes, self._noun.key, caller, new=True)
        owner = found.setdefault("project_id", caller.project_id)
        if owner != caller.project_id:
            caller.require_admin(f"(rule:create_{self._noun.key}:project_id)")
        return found

    def _shown(self, caller: Caller, keys: list[str]) -> list[Body]:
        with self._fabric.database.read() as connection:
            rows = connection.execute(self._noun.select().where(self._noun.table.c.id.in_(keys))).all()
        by_id = {row.id: self._noun.show(row._mapping, caller) for row in rows}
        if len(by_id) < len(set(keys)):
            raise fault(self._noun.missing, id=next(key for key in keys if key not in by_id))
        return [by_id[key] for key in keys]


class Item:
    """GET, PUT and DELETE /v2.0/{plural}/{key}."""

    def __init__(self, fabric: Fabric, noun: Noun) -> None:
        self._fabric, self._noun = fabric, noun

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        noun, caller = self._noun, req.context.caller
        with self._fabric.database.read() as connection:
            row = find(connection, noun, caller, key)
        answer(resp, {noun.key: fields(req, noun.show(row._mapping, caller))})

    def on_put(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        noun, caller, body = self._noun, req.context.caller, read_json(req)
        if not isinstance(body, dict) or noun.key not in body:
            raise fault("HTTPBadRequest", why=f"Unable to find '{noun.key}' in request body")
        wanted = checked(body[noun.key], noun.attributes, noun.key, caller, new=False)
        with self._fabric.change() as change:
            row = find(change.connection, noun, caller, key)
            caller.require_owner(row.project_id, f"(rule:update_{noun.key})")
            noun.update(change, caller, row, wanted)
        self._fabric.settle(change)
        self.on_get(req, resp, key)

    def on_delete(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        noun, caller = self._noun, req.context.caller
        with self._fabric.change() as change:
            row = find(change.connection, noun, caller, key)
            caller.require_owner(row.project_id, f"(rule:delete_{noun.key})")
            noun.delete(change, caller, row)
        resp.status = falcon.HTTP_204


class Tags:
    """GET, PUT and DELETE /v2.0/{plural}/{key}/tags; GET, PUT and DELETE .../tags/{tag}."""

    def __init__(self, fabric: Fabric, noun: Noun) -> None:
        self._fabric, self._noun = fabric, noun

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        answer(resp, {"tags": self._tags(req, key)})

    def on_put(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        body = read_json(req)
        attributes = {"tags": Attribute(TAG_LIST)}
        tags = checked(body, attributes, "tags", req.context.caller, new=False).get("tags")
        if tags is None:
            raise fault("HTTPBadRequest", why="Invalid tags body")
        self._set(req, key, lambda _: tags)
        self.on_get(req, resp, key)

    def on_delete(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._set(req, key, lambda _: [])
        resp.status = falcon.HTTP_204

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str, tag: str) -> None:
        if tag not in self._tags(req, key):
            raise fault("TagNotFound", id=tag)
        resp.status = falcon.HTTP_204

    def on_put_one(self, req: falcon.Request, resp: falcon.Response, key: str, tag: str) -> None:
        self._set(req, key, lambda tags: sorted({*tags, *TAG_LIST([tag])}))
        resp.status = falcon.HTTP_201

    def on_delete_one(self, req: falcon.Request, resp: falcon.Response, key: str, tag: str) -> None:
        if tag not in self._tags(req, key):
            raise fault("TagNotFound", id=tag)
        self._set(req, key, lambda tags: [other for other in tags if other != tag])
        resp.status = falcon.HTTP_204

    def _tags(self, req: falcon.Request, key: str) -> list[str]:
        with self._fabric.database.read() as connection:
            return list(find(connection, self._noun, req.context.caller, key).tags)

    def _set(self, req: falcon.Request, key: str, turn: Any) -> None:
        with self._fabric.change() as change:
            row = find(change.connection, self._noun, req.context.caller, key)
            req.context.caller.require_owner(row.project_id, f"(rule:update_{self._noun.key}_tags)")
            try:
                change.set(self._noun.table, key, {"tags": TAG_LIST(turn(row.tags))})
            except ValueError as error:
                raise fault("HTTPBadRequest", why=f"Invalid input for tags. Reason: {error}.") from error
