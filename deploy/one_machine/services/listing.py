# SPDX-License-Identifier: Apache-2.0
"""Parameters of queries, filters and pages, for the lists of all services.

Pages use a keyset: the marker is the last row of the page before, and `id` breaks ties. Rows
without a value sort first.
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
"""Pairs of column and direction (True for ascending). One of the columns is id."""
COMPARISONS: Mapping[str, Callable[[ColumnElement[str], str], ColumnElement[bool]]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
    "eq": operator.eq,
    "neq": operator.ne,
}


def values_of(query: Query, name: str) -> list[str]:
    """Return all values of a query parameter. The list is empty if the parameter is missing."""
    values = query.get(name, [])
    return [values] if isinstance(values, str) else list(values)


def value_of(query: Query, name: str, default: str = "") -> str:
    """Return the last value of a query parameter, or ``default`` if the parameter is missing."""
    return (values_of(query, name) or [default])[-1]


def number_of(name: str, value: str, maximum: int = 2**62) -> int:
    """Return a parameter's value as a number from 0 to ``maximum``.

    Raises:
        HTTPBadRequest: The value is not such a number.
    """
    if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= maximum):
        raise falcon.HTTPBadRequest(
            description=f"Invalid input for '{name}': the value must be a number from 0 to {maximum}."
        )
    return int(value)


def sort_words(query: Query) -> list[tuple[str, str]]:
    """Return pairs of name and direction for the order of a list.

    They come from `sort=name:direction,...`, or else from `sort_key` and `sort_dir`. Without
    `sort_key`, the name is created_at. If there are fewer directions than names, the last direction
    applies to the other names. The default is desc. In `sort` a direction may be missing, and is
    then "". Names and directions are not checked.
    """
    if "sort" in query:
        words = [word for text in values_of(query, "sort") for word in text.split(",")]
        return [(name.strip(), way) for name, _, way in (word.partition(":") for word in words)]
    names = values_of(query, "sort_key") or ["created_at"]
    ways = values_of(query, "sort_dir") or ["desc"]
    return [(name, ways[min(place, len(ways) - 1)]) for place, name in enumerate(names)]


def compare(column: ColumnElement[str], verb: str, value: str) -> ColumnElement[bool] | None:
    """Return the condition for a filter such as `gt:value`, or None if the verb is unknown.

    Args:
        column: The column to compare.
        verb: A key of ``COMPARISONS``, for example "gt".
        value: The value to compare with.
    """
    operation = COMPARISONS.get(verb)
    return None if operation is None else operation(column, value)


def contains(column: ColumnElement[Any], value: str, key: str | None = None) -> ColumnElement[bool]:
    """Return the condition that a JSON column contains this value.

    Args:
        column: A JSON list or object.
        value: The value.
        key: The key of the object that must have the value, or None for any item or key.
    """
    each = func.json_each(column).table_valued("key", "value")
    keys = select(each.c.key).where(each.c.value == value)
    return (keys if key is None else keys.where(each.c.key == key)).exists()


def collect(
    value: ColumnElement[Any], *rules: ColumnElement[bool], within: FromClause | None = None
) -> TypeCoerce[Any]:
    """Return a column with the JSON list of this value, from all rows that meet the rules.

    Args:
        value: The value to collect.
        rules: Conditions on the rows, which may refer to the outer query.
        within: The joined tables of the rows, or None if the columns imply them.
    """
    query = select(func.json_group_array(value)).where(*rules)
    query = query if within is None else query.select_from(within)
    return type_coerce(query.scalar_subquery(), JSON)


def select_page(
    statement: DbSelect, table: Table, keys: SortKeys, marker: DbRow | None
) -> DbSelect:
    """Return the statement in the order of `keys`, with only the rows after `marker`.

    The caller adds the limit.

    Args:
        statement: The query for all rows of the list.
        table: The table of the rows.
        keys: Pairs of column and direction (True for ascending). The column id must be among them.
        marker: The last row of the page before, or None for the first page.
    """

    def nothing(name: str) -> int | str:
        return 0 if isinstance(table.c[name].type, Integer | Boolean) else ""

    columns = [
        (func.coalesce(table.c[name], nothing(name)), ascending, name) for name, ascending in keys
    ]
    statement = statement.order_by(
        *[column.asc() if ascending else column.desc() for column, ascending, _ in columns]
    )
    if marker is None:
        return statement
    steps: list[ColumnElement[bool]] = []
    equal: list[ColumnElement[bool]] = []
    for column, ascending, name in columns:
        marker_value = nothing(name) if marker._mapping[name] is None else marker._mapping[name]
        steps.append(and_(*equal, column > marker_value if ascending else column < marker_value))
        equal.append(column == marker_value)
    return statement.where(or_(*steps))
