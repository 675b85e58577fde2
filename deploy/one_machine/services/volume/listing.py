# SPDX-License-Identifier: Apache-2.0
"""Lists of volumes, snapshots and attachments: filters, order and pages, as in Cinder.

An unknown filter is ignored before 3.31 and refused from then on.
"""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import falcon
from sqlalchemy import Boolean, ColumnElement, Integer, Table, and_, func, select

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.listing import (
    Query,
    compare,
    contains,
    number_of,
    select_page,
    sort_words,
    value_of,
)
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import TRUTHS
from deploy.one_machine.services.volume.caller import VolumeCaller
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.service import VolumeService
from deploy.one_machine.services.volume.versions import since

MAX_LIMIT = 1000
NOT_FILTERS = (
    "limit",
    "marker",
    "offset",
    "sort",
    "sort_key",
    "sort_dir",
    "all_tenants",
    "with_count",
    "all_projects",
)
COMPARED = ("created_at", "updated_at")
Filter = Callable[[str], ColumnElement[bool]]


def all_projects(req: falcon.Request) -> bool:
    """Return True if an admin requests the objects of all projects.

    The query then has all_tenants with another value than "0" or "false".
    """
    word = value_of(req.params, "all_tenants", "0").lower()
    return bool(req.context.caller.is_admin and TRUTHS.get(word, True))


def list_rows(
    service: VolumeService,
    req: falcon.Request,
    table: Table,
    filters: Mapping[str, Filter | None],
    plural: str,
) -> tuple[list[DbRow], Body]:
    """Return the rows of a page of objects that belong to projects, and more fields of the body.

    The rows are of the caller's project. An admin may request the rows of all projects, or of
    another project. The further fields are a link to the next page if this page is full, and the
    total ``count`` if the query requests the count (from 3.45 on).

    Args:
        service: The service.
        req: The request.
        table: The table of the objects.
        filters: Name of a filter -> function that returns the condition for a value. None means
            that the column of this name is compared with the value.
        plural: The name of the list in the body, for the name of the field with the link.

    Raises:
        HTTPError: 400, a parameter of the query is invalid.
    """
    return list_matching(
        service, req, table, filters, plural, _owner(req, table, req.context.caller)
    )


def list_matching(
    service: VolumeService,
    req: falcon.Request,
    table: Table,
    filters: Mapping[str, Filter | None],
    plural: str,
    rules: Sequence[ColumnElement[bool]],
) -> tuple[list[DbRow], Body]:
    """Return the same as `list_rows`, but for the rows of all projects that meet `rules`.

    Raises:
        HTTPError: 400, a parameter of the query is invalid.
    """
    query = req.params
    limit = min(number_of("limit", value_of(query, "limit", str(MAX_LIMIT))), MAX_LIMIT)
    offset = number_of("offset", value_of(query, "offset", "0"), 2**31)
    statement = select(table).where(*_rules(req, table, filters), *rules)
    marker = value_of(query, "marker")
    extras: Body = {}
    with service.database.read() as connection:
        marker_row = None
        if marker:
            marker_row = connection.execute(
                select(table).where(table.c.id == marker, *rules)
            ).first()
            if marker_row is None:
                raise fault("BadRequest", why=f"marker [{marker[:64]}] not found")
        page = select_page(statement, table, _sort_keys(query, table), marker_row)
        rows = list(connection.execute(page.offset(offset).limit(limit)).all()) if limit else []
        if since(req, 45) and TRUTHS.get(value_of(query, "with_count").lower()):
            total = select(func.count()).select_from(statement.subquery())
            extras["count"] = connection.execute(total).scalar_one()
    if rows and len(rows) == limit:
        parameters = {
            name: value for name, value in query.items() if name not in ("marker", "offset")
        }
        encoded_query = urlencode(parameters | {"marker": rows[-1].id}, doseq=True)
        href = f"{req.context.root}{req.path.removeprefix('/v3')}?{encoded_query}"
        extras[f"{plural}_links"] = [{"rel": "next", "href": href}]
    return rows, extras


def _owner(req: falcon.Request, table: Table, caller: VolumeCaller) -> list[ColumnElement[bool]]:
    if not all_projects(req):
        return [table.c.project_id == caller.project_id]
    project_id = value_of(req.params, "project_id") or value_of(req.params, "tenant_id")
    return [table.c.project_id == project_id] if project_id else []


def _rules(
    req: falcon.Request, table: Table, filters: Mapping[str, Filter | None]
) -> list[ColumnElement[bool]]:
    rules = []
    for parameter in req.params:
        value, name = value_of(req.params, parameter), parameter.removesuffix("~")
        is_like = parameter.endswith("~") and since(req, 34)
        if name in NOT_FILTERS or name in ("project_id", "tenant_id"):
            continue
        if name in COMPARED and since(req, 60) and name in table.c:
            rules.append(_compare(table, name, value))
        elif name not in filters:
            if since(req, 31):
                why = f"Invalid filters {name[:64]} are found in query options."
                raise fault("BadRequest", why=why)
        elif is_like:
            escaped = value.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
            rules.append(table.c[name].like(f"%{escaped}%", escape="\\"))
        elif (condition := filters[name]) is not None:
            rules.append(condition(value))
        else:
            rules.append(_equals(table, name, value))
    return rules


def _equals(table: Table, name: str, value: str) -> ColumnElement[bool]:
    column = table.c[name]
    if isinstance(column.type, Boolean):
        if value.lower() not in TRUTHS:
            raise fault("InvalidInput", why=f"{name} must be true or false, not {value[:64]}")
        return column.is_(TRUTHS[value.lower()])
    if isinstance(column.type, Integer):
        return column == number_of(name, value)
    return column.is_(None) if value in ("None", "null") else column == value


def _compare(table: Table, name: str, text: str) -> ColumnElement[bool]:
    column, rules = table.c[name], []
    for word in text.split(","):
        verb, _, moment = word.partition(":")
        moment = moment.rstrip("Z").partition("+")[0]
        rule = compare(column, verb, moment)
        if rule is None:
            raise fault("BadRequest", why=f"Invalid {verb[:20]} operator")
        rules.append(rule)
    return and_(*rules)


def of_pairs(column: ColumnElement[Any]) -> Filter:
    """Return a filter for a column with a JSON object, by pairs that the object must contain.

    The value of the filter is JSON or a Python literal, for example `{'a': 'b'}`, because clients
    send both. The filter raises a Fault (400) if the value is not an object.
    """

    def rule(value: str) -> ColumnElement[bool]:
        pairs = _pairs(value)
        if not isinstance(pairs, dict):
            raise fault("BadRequest", why="The value of the filter must be like {'key': 'value'}.")
        return and_(*(contains(column, str(item), str(key)) for key, item in pairs.items()))

    return rule


def _pairs(value: str) -> object:
    if len(value) > 4096:
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def _sort_keys(query: Query, table: Table) -> list[tuple[str, bool]]:
    keys: dict[str, bool] = {}
    for word, way in sort_words(query):
        name = word.strip().removeprefix("display_")
        if name not in table.c or name in (
            "metadata",
            "image_metadata",
            "connection_info",
            "extra_specs",
        ):
            raise fault("InvalidInput", why=f"Invalid sort key: {name[:64]}")
        if way not in ("", "asc", "desc"):
            raise fault("InvalidInput", why="Unknown sort direction, must be 'desc' or 'asc'")
        keys.setdefault(name, way == "asc")
    keys.setdefault("id", next(iter(keys.values())))
    return list(keys.items())
