# SPDX-License-Identifier: Apache-2.0
"""What the lists of the APIs share: parameters of a query, and pages by keyset.

The marker of a page is the last row of the page before; `id` breaks ties. What has no value sorts
first.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import falcon
from sqlalchemy import (
    JSON,
    Boolean,
    ColumnElement,
    FromClause,
    Integer,
    Table,
    TypeCoerce,
    and_,
    func,
    or_,
    select,
    type_coerce,
)

from deploy.one_machine.services.database import DbRow, DbSelect

Query = Mapping[str, str | list[str]]
SortKeys = Sequence[tuple[str, bool]]
"""(column, ascending); ends with id."""
COMPARISONS: Mapping[str, Callable[[ColumnElement[str], str], ColumnElement[bool]]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
    "eq": operator.eq,
    "neq": operator.ne,
}


def values_of(query: Query, name: str) -> list[str]:
    """All values of a parameter."""
    values = query.get(name, [])
    return [values] if isinstance(values, str) else list(values)


def value_of(query: Query, name: str, default: str = "") -> str:
    """The last value of a parameter."""
    return (values_of(query, name) or [default])[-1]


def number_of(name: str, value: str, maximum: int = 2**62) -> int:
    """A number from 0 on. Raises 400."""
    if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= maximum):
        raise falcon.HTTPBadRequest(
            description=f"Invalid input for '{name}': it must be a number from 0 on."
        )
    return int(value)


def sort_words(query: Query) -> list[tuple[str, str]]:
    """Return (name, direction) pairs from `sort=name:direction,...`, or else from `sort_key` and
    `sort_dir`: the newest first if the query names none. A direction may be ""."""
    if "sort" in query:
        words = [word for text in values_of(query, "sort") for word in text.split(",")]
        return [(name.strip(), way) for name, _, way in (word.partition(":") for word in words)]
    names = values_of(query, "sort_key") or ["created_at"]
    ways = values_of(query, "sort_dir") or ["desc"]
    return [(name, ways[min(place, len(ways) - 1)]) for place, name in enumerate(names)]


def compared(column: ColumnElement[str], verb: str, value: str) -> ColumnElement[bool] | None:
    """Compare a column as `gt:value` and the like say; None for another verb."""
    operation = COMPARISONS.get(verb)
    return None if operation is None else operation(column, value)


def contains(column: ColumnElement[Any], value: str, key: str | None = None) -> ColumnElement[bool]:
    """Whether a JSON list, or object under this key, holds a value."""
    each = func.json_each(column).table_valued("key", "value")
    found = select(each.c.key).where(each.c.value == value)
    return (found if key is None else found.where(each.c.key == key)).exists()


def gathered(
    value: ColumnElement[Any], *rules: ColumnElement[bool], within: FromClause | None = None
) -> TypeCoerce[Any]:
    """The JSON list of this value of all rows that meet the rules, as a column; `within`: of what
    joined tables."""
    query = select(func.json_group_array(value)).where(*rules)
    query = query if within is None else query.select_from(within)
    return type_coerce(query.scalar_subquery(), JSON)


def paged(statement: DbSelect, table: Table, keys: SortKeys, marker: DbRow | None) -> DbSelect:
    """`statement` in the order of `keys`, from after `marker`."""

    def nothing(name: str) -> int | str:
        return 0 if isinstance(table.c[name].type, Integer | Boolean) else ""

    columns = [(func.coalesce(table.c[name], nothing(name)), up, name) for name, up in keys]
    statement = statement.order_by(
        *[column.asc() if up else column.desc() for column, up, _ in columns]
    )
    if marker is None:
        return statement
    steps: list[ColumnElement[bool]] = []
    equal: list[ColumnElement[bool]] = []
    for column, up, name in columns:
        last = nothing(name) if marker._mapping[name] is None else marker._mapping[name]
        steps.append(and_(*equal, column > last if up else column < last))
        equal.append(column == last)
    return statement.where(or_(*steps))
