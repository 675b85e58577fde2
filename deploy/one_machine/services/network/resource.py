# SPDX-License-Identifier: Apache-2.0
"""What Neutron's resources have in common: attributes, owners, filters and pages.

A filter that is given several times matches any of its values; one that nobody knows is refused,
for an ignored filter shows, or deletes, too much. What somebody may not know of does not exist for
them.
"""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import falcon
from sqlalchemy import Boolean, Column, ColumnElement, Integer, and_, not_, or_, true

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.faults import Fault
from deploy.one_machine.services.listing import (
    Query,
    contains,
    number_of,
    select_page,
    value_of,
    values_of,
)
from deploy.one_machine.services.network.attributes import Attributes
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Fabric
from deploy.one_machine.services.network.faults import fault, malformed
from deploy.one_machine.services.resource import Body, Resource
from deploy.one_machine.services.schemas import TRUTHS

#: Columns that only admins filter and sort by: whoever may ask whether a port is on a host, knows
#: where it is.
ADMIN_COLUMNS = ("host", "vni", "profile", "vif_type", "bound_at")
NOT_FILTERS = ("fields", "limit", "marker", "page_reverse", "sort_key", "sort_dir")
Filter = Callable[[list[str]], ColumnElement[bool]]


class NetworkResource(Resource):
    """The default of each part fits a thing that its project owns."""

    attributes: Attributes
    missing: str  #: Neutron's type of the 404
    filters: Mapping[str, Filter] = {}
    constant: Mapping[str, object] = {}  #: what is shown of every one

    def visible(self, caller: NetworkCaller) -> ColumnElement[bool]:
        return true() if caller.is_admin else self.visible_to(caller.project_id)

    def visible_to(self, project_id: str) -> ColumnElement[bool]:
        """The rows that a project's members may know of."""
        return self.table.c.project_id == project_id

    def admit(self, caller: NetworkCaller, action: str, key: str = "") -> None:
        if action == "create":
            caller.require_writer(f"(rule:create_{self.name})")

    def admit_to(self, caller: NetworkCaller, action: str, row: DbRow) -> None:
        caller.require_owner(row.project_id, f"(rule:{action}_{self.name})")

    def not_found(self, key: str) -> falcon.HTTPError:
        return fault(self.missing, id=key[:64])

    def validate(self, caller: NetworkCaller, body: object, *, new: bool) -> Body:
        found = self.attributes.validate(body, self.name, caller, new=new)
        if new and found.setdefault("project_id", caller.project_id) != caller.project_id:
            caller.require_admin(f"(rule:create_{self.name}:project_id)")
        return found

    @classmethod
    def columns(cls, body: Body) -> Body:
        """What of `body` is stored in this table, under the names of the columns."""
        named = {cls.attributes[name].column or name: value for name, value in body.items()}
        return {name: value for name, value in named.items() if name in cls.table.c}

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        return fields(req, self.view(row, req.context.caller))

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        """A row as the API shows it to this caller."""
        shown = {
            name: row[attribute.column or name]
            for name, attribute in self.attributes.items()
            if (attribute.column or name) in row and (caller.is_admin or not attribute.hidden)
        }
        return standard(row) | shown | dict(self.constant)

    def page(self, service: Fabric, req: falcon.Request) -> tuple[list[DbRow], Body]:
        query, caller = req.params, req.context.caller
        limit, marker = (
            number_of("limit", value_of(query, "limit", "0"), 2**31),
            value_of(query, "marker"),
        )
        backwards = value_of(query, "page_reverse").lower() in ("true", "1")
        keys, rules = self._sort_keys(query, caller), self._conditions(query, caller)
        self.before_list(service, caller)
        with service.database.read() as connection:
            after = self.find(connection, caller, marker) if marker else None
            statement = select_page(
                self.select().where(self.visible(caller), *rules),
                self.table,
                [(name, up != backwards) for name, up in keys.items()],
                after,
            )
            rows = list(
                connection.execute(statement.limit(limit + 1) if limit else statement).all()
            )
        if not limit:
            return rows[::-1] if backwards else rows, {}
        is_more, rows = len(rows) > limit, rows[:limit]
        rows = rows[::-1] if backwards else rows
        has_next, has_previous = (bool(marker), is_more) if backwards else (is_more, bool(marker))
        ends = (("next", rows[-1:], has_next), ("previous", rows[:1], has_previous))
        links = [
            {"rel": rel, "href": _href(req, row.id, rel == "previous")}
            for rel, end, is_there in ends
            if is_there
            for row in end
        ]
        return rows, {f"{self.collection}_links": links} if links else {}

    def before_list(self, fabric: Fabric, caller: NetworkCaller) -> None:
        """What must exist before this caller lists."""

    def _column(self, name: str, caller: NetworkCaller) -> Column[Any] | None:
        name = "project_id" if name == "tenant_id" else name
        stored = (self.attributes[name].column or name) if name in self.attributes else name
        return self.table.c.get(stored) if caller.is_admin or stored not in ADMIN_COLUMNS else None

    def _conditions(self, query: Query, caller: NetworkCaller) -> list[ColumnElement[bool]]:
        rules = []
        for name, values in (
            (name, values_of(query, name)) for name in query if name not in NOT_FILTERS
        ):
            if name in self.filters:
                rules.append(self.filters[name](values))
            elif name in ("tags", "tags-any", "not-tags", "not-tags-any"):
                tagged = [
                    contains(self.table.c.tags, tag) for value in values for tag in value.split(",")
                ]
                rule = or_(*tagged) if name.endswith("-any") else and_(*tagged)
                rules.append(not_(rule) if name.startswith("not-") else rule)
            elif (column := self._column(name, caller)) is None:
                raise unknown_filter(name)
            else:
                rules.append(_equals(name, column, values))
        return rules

    def _sort_keys(self, query: Query, caller: NetworkCaller) -> dict[str, bool]:
        names, ways = values_of(query, "sort_key"), values_of(query, "sort_dir")
        if ways and len(names) != len(ways):
            raise malformed("The number of sort_keys and sort_dirs must be same")
        keys: dict[str, bool] = {}
        for name, way in zip(names, ways or ["asc"] * len(names), strict=True):
            column = self._column(name, caller)
            if column is None or way not in ("asc", "desc"):
                why = f"['{name[:64]}'] is invalid attribute for sorting, asc or desc"
                raise malformed(why)
            keys.setdefault(column.name, way == "asc")
        return keys | {"id": keys.get("id", True)}


def standard(row: DbValues) -> Body:
    """What is shown of everything."""
    return {"tenant_id": row["project_id"]} | {
        name: row[name]
        for name in (
            "id",
            "project_id",
            "description",
            "tags",
            "revision_number",
            "created_at",
            "updated_at",
        )
    }


def fields(req: falcon.Request, body: Body) -> Body:
    """`body` cut down to the fields that the query asks for."""
    wanted = {name for value in values_of(req.params, "fields") for name in value.split(",")} - {""}
    return {name: value for name, value in body.items() if name in wanted} if wanted else body


def unknown_filter(name: str) -> Fault:
    """The refusal of a filter that nobody knows."""
    return malformed(f"['{name[:64]}'] is invalid attribute for filtering")


def _equals(name: str, column: Column[Any], values: list[str]) -> ColumnElement[bool]:
    wanted: list[Any] = list(values)
    if isinstance(column.type, Boolean):
        wanted = [TRUTHS.get(value.lower()) for value in values]
        if None in wanted:
            why = f"Invalid input for {name}. Reason: it must be true or false."
            raise malformed(why)
    elif isinstance(column.type, Integer):
        wanted = [number_of(name, value) for value in values]
    known: ColumnElement[bool] = column.in_(wanted)
    # An empty value asks for what has none, as in `?device_id=`.
    return or_(known, column.is_(None)) if "" in values or "None" in values else known


def _href(req: falcon.Request, marker: str, backwards: bool) -> str:
    kept = {
        name: value for name, value in req.params.items() if name not in ("marker", "page_reverse")
    }
    more = {"marker": marker} | ({"page_reverse": "True"} if backwards else {})
    return f"{req.prefix}{req.path}?{urlencode(kept | more, doseq=True)}"
