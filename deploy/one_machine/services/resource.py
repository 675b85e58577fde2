# SPDX-License-Identifier: Apache-2.0
"""Resources of the APIs: list, create, show, change and delete, each in one transaction.

A `Resource` says what is its own: its table, who may do what, how a body is checked, and how a row
is made, changed, removed and shown. It never begins a transaction; the answer to a write is read
after its commit.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, Protocol, TypeVar

import falcon
from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    Executable,
    Table,
    delete,
    select,
    true,
)
from sqlalchemy.exc import IntegrityError

from deploy.one_machine.services.database import Database, DbRow, DbSelect, DbValues
from deploy.one_machine.services.json_types import Body as Body
from deploy.one_machine.services.json_types import JsonValue
from deploy.one_machine.services.web import answer, part_of, read_json, read_object

MAX_BULK = 1000
Service = TypeVar("Service")
#: Of a service's own types, which its resources name.
AnyCaller = Any
AnyChange = Any
AnyService = Any


@dataclass
class Transaction:
    """A transaction under way."""

    connection: Connection

    def one(self, table: Table, key: str) -> DbRow | None:
        """The row with this id."""
        return self.first(select(table).where(table.c.id == key))

    def existing(self, table: Table, key: str) -> DbRow:
        """The row with this id, which another one names."""
        return self.execute(select(table).where(table.c.id == key)).one()

    def remove(self, table: Table, key: str) -> None:
        """Delete the row with this id."""
        self.execute(delete(table).where(table.c.id == key))

    def execute(self, statement: Executable) -> CursorResult[Any]:
        """Whatever it gives."""
        return self.connection.execute(statement)

    def rows(self, statement: Executable) -> Sequence[DbRow]:
        """All rows."""
        return self.connection.execute(statement).all()

    def first(self, statement: Executable) -> DbRow | None:
        """The first row."""
        return self.connection.execute(statement).first()

    def has(self, statement: Executable) -> bool:
        """Whether there is a row."""
        return self.first(statement) is not None

    def scalars(self, statement: Executable) -> list[JsonValue]:
        """The first column of all rows."""
        return list(self.connection.scalars(statement))

    def scalar(self, statement: Executable) -> JsonValue:
        """The first column of the first row, None without one."""
        return self.connection.scalar(statement)


def moment() -> str:
    """The time as the APIs of images and networks write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Handler(Generic[Service]):
    """What answers the requests of a route, with its service."""

    def __init__(self, service: Service) -> None:
        self._service = service


class ResourceService(Protocol):
    """What the resources of a service work on."""

    @property
    def database(self) -> Database:
        """To read from."""

    def change(self) -> AbstractContextManager[AnyChange]:
        """A `Transaction` that commits when the block ends well."""

    def settle(self, change: AnyChange) -> None:
        """Wait for what a committed change has begun elsewhere."""


class Resource:
    """What the API shows under one plural."""

    name: str  #: of one, in a body
    plural: str  #: in a path
    table: Table
    bulk: bool | None = None  #: whether several are made at a time: None if the client wants

    @property
    def collection(self) -> str:
        """The name of several in a body."""
        return self.plural.replace("-", "_")

    def select(self) -> DbSelect:
        """What `show` needs of each row."""
        return select(self.table)

    def visible(self, caller: AnyCaller) -> ColumnElement[bool]:
        """The rows that this caller may know of."""
        return true()

    def admit(self, caller: AnyCaller, action: str, key: str = "") -> None:
        """Raises 403 for a caller who may not list, create, show, update or delete, whatever is
        there."""

    def admit_to(self, caller: AnyCaller, action: str, row: DbRow) -> None:
        """Raises 403 for a caller who may not update or delete this one."""

    def not_found(self, key: str) -> falcon.HTTPError:
        """The 404."""
        raise NotImplementedError

    def conflict(self, action: str, error: IntegrityError) -> falcon.HTTPError:
        """The refusal of what the database's constraints refuse."""
        raise error

    def checked(self, caller: AnyCaller, body: object, *, new: bool) -> Body:
        """A body, checked. Raises 400, 403."""
        raise NotImplementedError

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        """A row as the API shows it."""
        raise NotImplementedError

    def brief(self, req: falcon.Request, row: DbValues) -> Body:
        """A row in a list without details."""
        raise NotImplementedError

    def page(self, service: AnyService, req: falcon.Request) -> tuple[list[DbRow], Body]:
        """The rows of a list, and what stands beside them. Raises 400."""
        raise NotImplementedError

    def create(self, change: AnyChange, caller: AnyCaller, body: Body) -> str:
        """Make one and return its id."""
        raise NotImplementedError

    def update(self, change: AnyChange, caller: AnyCaller, row: DbRow, body: Body) -> None:
        """Change one."""
        raise NotImplementedError

    def delete(self, change: AnyChange, caller: AnyCaller, row: DbRow) -> None:
        """Remove one."""
        change.remove(self.table, row.id)

    def find(self, connection: Connection, caller: AnyCaller, key: str) -> DbRow:
        """One that the caller may know of. Raises 404 also for one that they may not."""
        row = connection.execute(
            self.select().where(self.table.c.id == key, self.visible(caller))
        ).first()
        if row is None:
            raise self.not_found(key)
        return row


class Collection:
    """GET and POST of a plural."""

    def __init__(self, service: ResourceService, resource: Resource) -> None:
        self._service, self._resource = service, resource

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resource = self._resource
        resource.admit(req.context.caller, "list")
        rows, beside = resource.page(self._service, req)
        answer(
            resp, {resource.collection: [resource.show(req, row._mapping) for row in rows]} | beside
        )

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        resource, caller = self._resource, req.context.caller
        resource.admit(caller, "create")
        body = read_json(req)
        is_bulk = resource.bulk
        if is_bulk is None:
            is_bulk = isinstance(body, dict) and isinstance(body.get(resource.collection), list)
        items = part_of(body, resource.collection) if is_bulk else [part_of(body, resource.name)]
        if not isinstance(items, list) or not 0 < len(items) <= MAX_BULK:
            raise falcon.HTTPBadRequest(
                description=f"'{resource.collection}' must be a list of 1 to {MAX_BULK}."
            )
        wanted = [resource.checked(caller, item, new=True) for item in items]
        try:
            with self._service.change() as change:
                keys = [resource.create(change, caller, item) for item in wanted]
        except IntegrityError as error:
            raise resource.conflict("create", error) from error
        self._service.settle(change)
        shown = self._shown(req, keys)
        resp.status = falcon.HTTP_201
        answer(resp, {resource.collection: shown} if is_bulk else {resource.name: shown[0]})

    def _shown(self, req: falcon.Request, keys: list[str]) -> list[Body]:
        with self._service.database.read() as connection:
            rows = connection.execute(
                self._resource.select().where(self._resource.table.c.id.in_(keys))
            ).all()
        by_id = {row.id: self._resource.show(req, row._mapping) for row in rows}
        for key in keys:
            if key not in by_id:  # deleted meanwhile
                raise self._resource.not_found(key)
        return [by_id[key] for key in keys]


class BriefCollection(Collection):
    """GET (brief) and POST of a plural; GET .../detail."""

    def on_get_detail(self, req: falcon.Request, resp: falcon.Response) -> None:
        super().on_get(req, resp)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resource = self._resource
        resource.admit(req.context.caller, "list")
        rows, beside = resource.page(self._service, req)
        brief = [resource.brief(req, row._mapping) for row in rows]
        answer(resp, {resource.collection: brief} | beside)


class Item:
    """GET and DELETE of one."""

    def __init__(self, service: ResourceService, resource: Resource) -> None:
        self._service, self._resource = service, resource

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        resource = self._resource
        resource.admit(req.context.caller, "show", key)
        with self._service.database.read() as connection:
            row = resource.find(connection, req.context.caller, key)
        answer(resp, {resource.name: resource.show(req, row._mapping)})

    def on_delete(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        resource, caller = self._resource, req.context.caller
        resource.admit(caller, "delete", key)
        try:
            with self._service.change() as change:
                row = resource.find(change.connection, caller, key)
                resource.admit_to(caller, "delete", row)
                resource.delete(change, caller, row)
        except IntegrityError as error:
            raise resource.conflict("delete", error) from error
        resp.status = falcon.HTTP_204

    def _update(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        resource, caller = self._resource, req.context.caller
        resource.admit(caller, "update", key)
        wanted = resource.checked(caller, read_object(req, resource.name), new=False)
        try:
            with self._service.change() as change:
                row = resource.find(change.connection, caller, key)
                resource.admit_to(caller, "update", row)
                resource.update(change, caller, row, wanted)
        except IntegrityError as error:
            raise resource.conflict("update", error) from error
        self._service.settle(change)
        self.on_get(req, resp, key)


class PutItem(Item):
    """GET, PUT and DELETE of one."""

    on_put = Item._update


class PatchItem(Item):
    """GET, PATCH and DELETE of one."""

    on_patch = Item._update
