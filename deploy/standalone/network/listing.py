# SPDX-License-Identifier: Apache-2.0
"""From the query string of a list to one SELECT: filters, sort keys, marker and limit, and the links to other pages.

A filter that is given several times matches any of its values; one that nobody knows is refused, for an ignored filter
shows, or deletes, too much. Pages are keyset pages; `id` breaks ties.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import Boolean, ColumnElement, Integer, Row, Select, Table, and_, func, not_, or_, select

from deploy.standalone.network.attributes import TRUTHS, Attribute
from deploy.standalone.network.faults import fault

#: Columns that only admins filter and sort by: whoever may ask whether a port is on a host, knows where it is.
PLACES = ("host", "vni", "profile", "vif_type", "bound_at")
NOT_FILTERS = ("fields", "limit", "marker", "page_reverse", "sort_key", "sort_dir")
Query = Mapping[str, str | list[str]]
Filter = Callable[[list[str]], ColumnElement[bool]]


def values_of(query: Query, name: str) -> list[str]:
    """All values of a parameter."""
    values = query.get(name, [])
    return [values] if isinstance(values, str) else list(values)


def conditions(query: Query, table: Table, attributes: Mapping[str, Attribute],
               special: Mapping[str, Filter], is_admin: bool) -> list[ColumnElement[bool]]:
    """The filters of a list. Raises 400 for an unknown one and for a value of the wrong kind."""
    rules = []
    for name in query:
        values = values_of(query, name)
        if name in NOT_FILTERS:
            continue
        if name in special:
            rules.append(special[name](values))
        elif name in TAGS:
            rules.append(TAGS[name](table, [word for value in values for word in value.split(",")]))
        else:
            column = _column(name, table, attributes, is_admin)
            if column is None:
                raise fault("HTTPBadRequest", why=f"['{name[:64]}'] is invalid attribute for filtering")
            rules.append(_equals(name, column, values))
    return rules


def _column(name: str, table: Table, attributes: Mapping[str, Attribute], is_admin: bool) -> Any:
    name = "project_id" if name == "tenant_id" else name
    stored = (attributes[name].column or name) if name in attributes else name
    return table.c.get(stored) if is_admin or stored not in PLACES else None


def _equals(name: str, column: Any, values: list[str]) -> ColumnElement[bool]:
    if isinstance(column.type, Boolean):
        found = [TRUTHS.get(value.lower()) for value in values]
        if None in found:
            raise fault("HTTPBadRequest", why=f"Invalid input for {name}. Reason: it must be true or false.")
        return _among(column, found)
    if isinstance(column.type, Integer):
        if not all(value.isascii() and value.isdigit() and len(value) < 18 for value in values):
            raise fault("HTTPBadRequest", why=f"Invalid input for {name}. Reason: it must be a number.")
        return _among(column, [int(value) for value in values])
    known = _among(column, values)
    # An empty value asks for what has none, as in `?device_id=`.
    return or_(known, column.is_(None)) if "" in values or "None" in values else known


def _among(column: ColumnElement[Any], values: Sequence[Any]) -> ColumnElement[bool]:
    return column.in_(values)


def _has(table: Table, tag: str) -> ColumnElement[bool]:
    each = func.json_each(table.c.tags).table_valued("value")
    return select(each.c.value).where(each.c.value == tag).exists()


TAGS: Mapping[str, Callable[[Table, list[str]], ColumnElement[bool]]] = {
    "tags": lambda table, tags: and_(*[_has(table, tag) for tag in tags]),
    "tags-any": lambda table, tags: or_(*[_has(table, tag) for tag in tags]),
    "not-tags": lambda table, tags: not_(and_(*[_has(table, tag) for tag in tags])),
    "not-tags-any": lambda table, tags: not_(or_(*[_has(table, tag) for tag in tags])),
}


class Page:
    """One page of a list as the query asks for it. Raises 400."""

    def __init__(self, query: Query, table: Table, attributes: Mapping[str, Attribute], is_admin: bool) -> None:
        self.limit = _number((values_of(query, "limit") or ["0"])[-1])
        self.marker = (values_of(query, "marker") or [""])[-1]
        self.backwards = (values_of(query, "page_reverse") or ["false"])[-1].lower() in ("true", "1")
        self._query = query
        names, ways = values_of(query, "sort_key"), values_of(query, "sort_dir")
        if ways and len(names) != len(ways):
            raise fault("HTTPBadRequest", why="The number of sort_keys and sort_dirs must be same")
        self._keys: dict[str, bool] = {}
        for place, name in enumerate(names):
            column = _column(name, table, attributes, is_admin)
            way = ways[place] if ways else "asc"
            if column is None or way not in ("asc", "desc"):
                raise fault("HTTPBadRequest", why=f"['{name[:64]}'] is invalid attribute for sorting, asc or desc")
            self._keys.setdefault(column.name, way == "asc")
        self._keys.setdefault("id", True)
        self._table = table

    def apply(self, statement: Select[Any], marker: Row[Any] | None) -> Select[Any]:
        """`statement` in order, from after `marker`, one row longer than the limit."""
        keys = [(self._value(name), up != self.backwards, name) for name, up in self._keys.items()]
        statement = statement.order_by(*[column.asc() if up else column.desc() for column, up, _ in keys])
        if marker is not None:
            steps: list[ColumnElement[bool]] = []
            equal: list[ColumnElement[bool]] = []
            for column, up, name in keys:
                last = marker._mapping[name]
                last = self._nothing(name) if last is None else last
                steps.append(and_(*equal, column > last if up else column < last))
                equal.append(column == last)
            statement = statement.where(or_(*steps))
        return statement.limit(self.limit + 1) if self.limit else statement

    def cut(self, rows: list[Row[Any]], url: str) -> tuple[list[Row[Any]], list[dict[str, str]]]:
        """The rows of this page in the list's own order, and the links to its neighbours."""
        more = bool(self.limit) and len(rows) > self.limit
        rows = rows[:self.limit] if self.limit else rows
        rows = rows[::-1] if self.backwards else rows
        if not self.limit or not rows:
            return rows, []
        ahead, behind = (bool(self.marker), more) if self.backwards else (more, bool(self.marker))
        links = []
        if ahead:
            links.append({"rel": "next", "href": self._href(url, rows[-1].id, False)})
        if behind:
            links.append({"rel": "previous", "href": self._href(url, rows[0].id, True)})
        return rows, links

    def _href(self, url: str, marker: str, backwards: bool) -> str:
        kept: dict[str, Any] = {name: value for name, value in self._query.items()
                                if name not in ("marker", "page_reverse")}
        kept["marker"] = marker
        return f"{url}?{urlencode(kept | ({'page_reverse': 'True'} if backwards else {}), doseq=True)}"

    def _value(self, name: str) -> ColumnElement[Any]:
        return func.coalesce(self._table.c[name], self._nothing(name))

    def _nothing(self, name: str) -> Any:
        return 0 if isinstance(self._table.c[name].type, Integer | Boolean) else ""


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise fault("HTTPBadRequest", why=f"Bad limit request: Limit must be an integer 0 or greater and not '{text}'.")
    return int(text)
