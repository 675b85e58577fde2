# SPDX-License-Identifier: Apache-2.0
"""Resources of the APIs with list, create, show, change and delete, each in one transaction.

A subclass of `Resource` defines table, permissions and body schemas, and how rows are created,
changed, removed and shown. A resource never begins a transaction. The response to a write is read
after the commit.
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
#: Types that the resources of each service define.
AnyCaller = Any
AnyChange = Any
AnyService = Any


@dataclass
class Transaction:
    """An open transaction, with shortcuts for queries."""

    connection: Connection

    def one(self, table: Table, key: str) -> DbRow | None:
        """Return the row with this id, or None."""
        return self.first(select(table).where(table.c.id == key))

    def get_existing(self, table: Table, key: str) -> DbRow:
        """Return the row with this id, which exists, because another row refers to it.

        Raises:
            NoResultFound: There is no such row.
        """
        return self.execute(select(table).where(table.c.id == key)).one()

    def remove(self, table: Table, key: str) -> None:
        """Delete the row with this id, if there is one."""
        self.execute(delete(table).where(table.c.id == key))

    def execute(self, statement: Executable) -> CursorResult[Any]:
        """Execute a statement and return the result."""
        return self.connection.execute(statement)

    def rows(self, statement: Executable) -> Sequence[DbRow]:
        """Return all rows of a query."""
        return self.connection.execute(statement).all()

    def first(self, statement: Executable) -> DbRow | None:
        """Return the first row of a query, or None."""
        return self.connection.execute(statement).first()

    def has(self, statement: Executable) -> bool:
        """Return True if a query has a row."""
        return self.first(statement) is not None

    def scalars(self, statement: Executable) -> list[JsonValue]:
        """Return the first column of all rows of a query."""
        return list(self.connection.scalars(statement))

    def scalar(self, statement: Executable) -> JsonValue:
        """Return the first column of the first row of a query, or None without a row."""
        return self.connection.scalar(statement)


def moment() -> str:
    """Return the present time in the format of the image and network APIs (UTC, in seconds)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Handler(Generic[Service]):
    """A falcon resource of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service


class ResourceService(Protocol):
    """The methods of a service object that the falcon resources here call."""

    @property
    def database(self) -> Database:
        """The database, for reading."""

    def change(self) -> AbstractContextManager[AnyChange]:
        """Return a context manager that yields a `Transaction`.

        The transaction is committed if the block succeeds, and otherwise rolled back.
        """

    def settle(self, change: AnyChange) -> None:
        """Wait until other processes have followed a committed change, or until a timeout.

        For example, the hosts of new ports wire the ports. A timeout raises no error.
        """


class Resource:
    """A kind of object that the API shows under a plural."""

    #: The name of one object in a body.
    name: str
    #: The name in a path.
    plural: str
    table: Table
    #: True if a request creates several objects, False if one, None if the client chooses.
    bulk: bool | None = None

    @property
    def collection(self) -> str:
        """The name of a list of objects in a body."""
        return self.plural.replace("-", "_")

    def select(self) -> DbSelect:
        """Return the query for rows with the columns that `show` needs."""
        return select(self.table)

    def visible(self, caller: AnyCaller) -> ColumnElement[bool]:
        """Return the condition for the rows that the caller may see, by default all rows."""
        return true()

    def admit(self, caller: AnyCaller, action: str, key: str = "") -> None:
        """Refuse a caller who may not do this action at all. By default accept all callers.

        `admit_to` later checks the row of an update or delete.

        Args:
            caller: The caller.
            action: list, create, show, update or delete.
            key: The id in the path, or "" for list and create.

        Raises:
            HTTPError: 403, the caller may not do this.
        """

    def admit_to(self, caller: AnyCaller, action: str, row: DbRow) -> None:
        """Refuse a caller who may not do this action with this row. By default accept all callers.

        Args:
            caller: The caller.
            action: update or delete.
            row: The row, which the caller may see.

        Raises:
            HTTPError: 403, the caller may not do this.
        """

    def not_found(self, key: str) -> falcon.HTTPError:
        """Return the 404 error for this id. The caller of the method raises it."""
        raise NotImplementedError

    def conflict(self, action: str, error: IntegrityError) -> falcon.HTTPError:
        """Return the API's error for a violated constraint of the database.

        By default, raise `error`, which gives a 500.

        Args:
            action: create, update or delete.
            error: The database's error.
        """
        raise error

    def validate(self, caller: AnyCaller, body: object, *, new: bool) -> Body:
        """Return the attributes of an object in their canonical form.

        Args:
            caller: The caller.
            body: The object in the request's body.
            new: True for a new object, False for a change.

        Raises:
            HTTPError: 400, the object does not match the schema. 403, the caller may not set an
                attribute.
        """
        raise NotImplementedError

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        """Return the object in a response for a row of `select`."""
        raise NotImplementedError

    def brief(self, req: falcon.Request, row: DbValues) -> Body:
        """Return the object for a row of `select` in the short form of a list without details."""
        raise NotImplementedError

    def page(self, service: AnyService, req: falcon.Request) -> tuple[list[DbRow], Body]:
        """Return the rows of the requested page, and more fields of the body, for example links.

        Raises:
            HTTPError: A parameter of the query is invalid, for example the marker.
        """
        raise NotImplementedError

    def create(self, change: AnyChange, caller: AnyCaller, body: Body) -> str:
        """Create an object from a body of `validate`, and return the id."""
        raise NotImplementedError

    def update(self, change: AnyChange, caller: AnyCaller, row: DbRow, body: Body) -> None:
        """Change an object with a body of `validate`."""
        raise NotImplementedError

    def delete(self, change: AnyChange, caller: AnyCaller, row: DbRow) -> None:
        """Remove an object, by default only by deleting the row."""
        change.remove(self.table, row.id)

    def find(self, connection: Connection, caller: AnyCaller, key: str) -> DbRow:
        """Return the row with this id.

        Raises:
            HTTPError: The error of `not_found`, if there is no such row, or the row is invisible to
                the caller.
        """
        row = connection.execute(
            self.select().where(self.table.c.id == key, self.visible(caller))
        ).first()
        if row is None:
            raise self.not_found(key)
        return row


class Collection:
    """GET and POST of the path of a resource's plural, which list and create objects."""

    def __init__(self, service: ResourceService, resource: Resource) -> None:
        self._service, self._resource = service, resource

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resource = self._resource
        resource.admit(req.context.caller, "list")
        rows, extras = resource.page(self._service, req)
        answer(
            resp, {resource.collection: [resource.show(req, row._mapping) for row in rows]} | extras
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
                description=f"'{resource.collection}' must be a list of 1 to {MAX_BULK} objects."
            )
        bodies = [resource.validate(caller, item, new=True) for item in items]
        try:
            with self._service.change() as change:
                keys = [resource.create(change, caller, item) for item in bodies]
        except IntegrityError as error:
            raise resource.conflict("create", error) from error
        self._service.settle(change)
        shown = self._show_rows(req, keys)
        resp.status = falcon.HTTP_201
        answer(resp, {resource.collection: shown} if is_bulk else {resource.name: shown[0]})

    def _show_rows(self, req: falcon.Request, keys: list[str]) -> list[Body]:
        with self._service.database.read() as connection:
            rows = connection.execute(
                self._resource.select().where(self._resource.table.c.id.in_(keys))
            ).all()
        by_id = {row.id: self._resource.show(req, row._mapping) for row in rows}
        for key in keys:
            # The row may be deleted since the commit.
            if key not in by_id:
                raise self._resource.not_found(key)
        return [by_id[key] for key in keys]


class BriefCollection(Collection):
    """GET and POST of the path of a resource's plural, and GET .../detail.

    The first GET lists short forms of the objects, and .../detail lists whole objects.
    """

    def on_get_detail(self, req: falcon.Request, resp: falcon.Response) -> None:
        super().on_get(req, resp)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resource = self._resource
        resource.admit(req.context.caller, "list")
        rows, extras = resource.page(self._service, req)
        brief = [resource.brief(req, row._mapping) for row in rows]
        answer(resp, {resource.collection: brief} | extras)


class Item:
    """GET and DELETE of one object."""

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
        changes = resource.validate(caller, read_object(req, resource.name), new=False)
        try:
            with self._service.change() as change:
                row = resource.find(change.connection, caller, key)
                resource.admit_to(caller, "update", row)
                resource.update(change, caller, row, changes)
        except IntegrityError as error:
            raise resource.conflict("update", error) from error
        self._service.settle(change)
        self.on_get(req, resp, key)


class PutItem(Item):
    """GET, PUT and DELETE of one object."""

    on_put = Item._update


class PatchItem(Item):
    """GET, PATCH and DELETE of one object."""

    on_patch = Item._update
