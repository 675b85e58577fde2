# SPDX-License-Identifier: Apache-2.0
"""The base class of Neutron's resources: attributes, owners, filters and pages.

A filter that is given several times matches any of its values. An unknown filter is refused,
because without it a client would show or delete too much. Objects that a caller may not see are
reported as missing.
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

#: Columns by which only admins may filter and sort. A filter for the host of a port would reveal
#: the host.
ADMIN_COLUMNS = ("host", "vni", "profile", "vif_type", "bound_at")
NOT_FILTERS = ("fields", "limit", "marker", "page_reverse", "sort_key", "sort_dir")
Filter = Callable[[list[str]], ColumnElement[bool]]


class NetworkResource(Resource):
    """A resource that its project owns."""

    attributes: Attributes
    #: Neutron's type of the 404 error.
    missing: str
    filters: Mapping[str, Filter] = {}
    #: Fields with the same value for all objects.
    constant: Mapping[str, object] = {}

    def visible(self, caller: NetworkCaller) -> ColumnElement[bool]:
        return true() if caller.is_admin else self.visible_to(caller.project_id)

    def visible_to(self, project_id: str) -> ColumnElement[bool]:
        """Return the condition for the rows that members of a project may see."""
        return self.table.c.project_id == project_id

    def admit(self, caller: NetworkCaller, action: str, key: str = "") -> None:
        if action == "create":
            caller.require_writer(f"(rule:create_{self.name})")

    def admit_to(self, caller: NetworkCaller, action: str, row: DbRow) -> None:
        caller.require_owner(row.project_id, f"(rule:{action}_{self.name})")

    def not_found(self, key: str) -> falcon.HTTPError:
        return fault(self.missing, id=key[:64])

    def validate(self, caller: NetworkCaller, body: object, *, new: bool) -> Body:
        values = self.attributes.validate(body, self.name, caller, new=new)
        if new and values.setdefault("project_id", caller.project_id) != caller.project_id:
            caller.require_admin(f"(rule:create_{self.name}:project_id)")
        return values

    @classmethod
    def columns(cls, body: Body) -> Body:
        """Return column -> value for the attributes in a body that are columns of this table."""
        values = {cls.attributes[name].column or name: value for name, value in body.items()}
        return {name: value for name, value in values.items() if name in cls.table.c}

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        return select_fields(req, self.view(row, req.context.caller))

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        """Return the object as this caller may see it. Only admins and services see all fields."""
        fields = {
            name: row[attribute.column or name]
            for name, attribute in self.attributes.items()
            if (attribute.column or name) in row and (caller.is_admin or not attribute.hidden)
        }
        return standard(row) | fields | dict(self.constant)

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
            marker_row = self.find(connection, caller, marker) if marker else None
            statement = select_page(
                self.select().where(self.visible(caller), *rules),
                self.table,
                [(name, ascending != backwards) for name, ascending in keys.items()],
                marker_row,
            )
            rows = list(
                connection.execute(statement.limit(limit + 1) if limit else statement).all()
            )
        if not limit:
            return rows[::-1] if backwards else rows, {}
        is_more, rows = len(rows) > limit, rows[:limit]
        rows = rows[::-1] if backwards else rows
        has_next, has_previous = (bool(marker), is_more) if backwards else (is_more, bool(marker))
        page_links = (("next", rows[-1:], has_next), ("previous", rows[:1], has_previous))
        links = [
            {"rel": rel, "href": _href(req, row.id, rel == "previous")}
            for rel, end, is_present in page_links
            if is_present
            for row in end
        ]
        return rows, {f"{self.collection}_links": links} if links else {}

    def before_list(self, fabric: Fabric, caller: NetworkCaller) -> None:
        """Create rows that a list for this caller must contain. By default do nothing."""

    def _column(self, name: str, caller: NetworkCaller) -> Column[Any] | None:
        name = "project_id" if name == "tenant_id" else name
        column_name = (self.attributes[name].column or name) if name in self.attributes else name
        return (
            self.table.c.get(column_name)
            if caller.is_admin or column_name not in ADMIN_COLUMNS
            else None
        )

    def _conditions(self, query: Query, caller: NetworkCaller) -> list[ColumnElement[bool]]:
        rules = []
        for name, values in (
            (name, values_of(query, name)) for name in query if name not in NOT_FILTERS
        ):
            if name in self.filters:
                rules.append(self.filters[name](values))
            elif name in ("tags", "tags-any", "not-tags", "not-tags-any"):
                tag_rules = [
                    contains(self.table.c.tags, tag) for value in values for tag in value.split(",")
                ]
                rule = or_(*tag_rules) if name.endswith("-any") else and_(*tag_rules)
                rules.append(not_(rule) if name.startswith("not-") else rule)
            elif (column := self._column(name, caller)) is None:
                raise unknown_filter(name)
            else:
                rules.append(_equals(name, column, values))
        return rules

    def _sort_keys(self, query: Query, caller: NetworkCaller) -> dict[str, bool]:
        names, directions = values_of(query, "sort_key"), values_of(query, "sort_dir")
        if directions and len(names) != len(directions):
            raise malformed("The number of sort_keys and sort_dirs must be same")
        keys: dict[str, bool] = {}
        for name, direction in zip(names, directions or ["asc"] * len(names), strict=True):
            column = self._column(name, caller)
            if column is None or direction not in ("asc", "desc"):
                why = f"['{name[:64]}'] is invalid attribute for sorting, or its direction is not asc or desc"
                raise malformed(why)
            keys.setdefault(column.name, direction == "asc")
        return keys | {"id": keys.get("id", True)}


def standard(row: DbValues) -> Body:
    """Return the fields that the objects of all resources have in responses."""
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


def select_fields(req: falcon.Request, body: Body) -> Body:
    """Return the fields of `body` that the query parameter `fields` names, or all without it."""
    names = {name for value in values_of(req.params, "fields") for name in value.split(",")} - {""}
    return {name: value for name, value in body.items() if name in names} if names else body


def unknown_filter(name: str) -> Fault:
    """Return the 400 error for an unknown filter."""
    return malformed(f"['{name[:64]}'] is invalid attribute for filtering")


def _equals(name: str, column: Column[Any], values: list[str]) -> ColumnElement[bool]:
    column_values: list[Any] = list(values)
    if isinstance(column.type, Boolean):
        column_values = [TRUTHS.get(value.lower()) for value in values]
        if None in column_values:
            why = f"Invalid input for {name}. Reason: the value must be true or false."
            raise malformed(why)
    elif isinstance(column.type, Integer):
        column_values = [number_of(name, value) for value in values]
    rule: ColumnElement[bool] = column.in_(column_values)
    # An empty value matches rows without a value, as in `?device_id=`.
    return or_(rule, column.is_(None)) if "" in values or "None" in values else rule


def _href(req: falcon.Request, marker: str, backwards: bool) -> str:
    parameters = {
        name: value for name, value in req.params.items() if name not in ("marker", "page_reverse")
    }
    marker_parameters = {"marker": marker} | ({"page_reverse": "True"} if backwards else {})
    return f"{req.prefix}{req.path}?{urlencode(parameters | marker_parameters, doseq=True)}"
