# SPDX-License-Identifier: Apache-2.0
"""Lists of volumes, snapshots and attachments: filters, order and pages, as Cinder's clients ask.

A filter that nobody knows is refused from 3.31 on and does nothing before, as in Cinder.
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
    """Does an admin want those of all projects?"""
    wanted = value_of(req.params, "all_tenants", "0").lower()
    return bool(req.context.caller.is_admin and TRUTHS.get(wanted, True))


def list_rows(
    service: VolumeService,
    req: falcon.Request,
    table: Table,
    filters: Mapping[str, Filter | None],
    plural: str,
) -> tuple[list[DbRow], Body]:
    """The rows of a page of things with owners, and what stands beside them. `filters`: None is a
    column of this name. Raises 400."""
    return list_matching(service, req, table, filters, plural, _owner(req, table, req.context.caller))


def list_matching(
    service: VolumeService,
    req: falcon.Request,
    table: Table,
    filters: Mapping[str, Filter | None],
    plural: str,
    known: Sequence[ColumnElement[bool]],
) -> tuple[list[DbRow], Body]:
    """The same of things that meet the rules `known`."""
    query = req.params
    limit = min(number_of("limit", value_of(query, "limit", str(MAX_LIMIT))), MAX_LIMIT)
    offset = number_of("offset", value_of(query, "offset", "0"), 2**31)
    statement = select(table).where(*_rules(req, table, filters), *known)
    marker = value_of(query, "marker")
    extras: Body = {}
    with service.database.read() as connection:
        after = None
        if marker:
            after = connection.execute(select(table).where(table.c.id == marker, *known)).first()
            if after is None:
                raise fault("BadRequest", why=f"marker [{marker[:64]}] not found")
        chosen = select_page(statement, table, _sort_keys(query, table), after)
        rows = list(connection.execute(chosen.offset(offset).limit(limit)).all()) if limit else []
        if since(req, 45) and TRUTHS.get(value_of(query, "with_count").lower()):
            total = select(func.count()).select_from(statement.subquery())
            extras["count"] = connection.execute(total).scalar_one()
    if rows and len(rows) == limit:
        kept = {name: value for name, value in query.items() if name not in ("marker", "offset")}
        more = urlencode(kept | {"marker": rows[-1].id}, doseq=True)
        href = f"{req.context.root}{req.path.removeprefix('/v3')}?{more}"
        extras[f"{plural}_links"] = [{"rel": "next", "href": href}]
    return rows, extras


def _owner(req: falcon.Request, table: Table, caller: VolumeCaller) -> list[ColumnElement[bool]]:
    if not all_projects(req):
        return [table.c.project_id == caller.project_id]
    wanted = value_of(req.params, "project_id") or value_of(req.params, "tenant_id")
    return [table.c.project_id == wanted] if wanted else []


def _rules(
    req: falcon.Request, table: Table, filters: Mapping[str, Filter | None]
) -> list[ColumnElement[bool]]:
    rules = []
    for given in req.params:
        value, name = value_of(req.params, given), given.removesuffix("~")
        is_like = given.endswith("~") and since(req, 34)
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
        elif (form := filters[name]) is not None:
            rules.append(form(value))
        else:
            rules.append(_equals(table, name, value))
    return rules


def _equals(table: Table, name: str, value: str) -> ColumnElement[bool]:
    column = table.c[name]
    if isinstance(column.type, Boolean):
        if value.lower() not in TRUTHS:
            raise fault("InvalidInput", why=f"{name}={value[:64]}")
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
    """A filter by pairs of a JSON object: `{'a': 'b'}`, as clients write it."""

    def rule(value: str) -> ColumnElement[bool]:
        pairs = _pairs(value)
        if not isinstance(pairs, dict):
            raise fault("BadRequest", why="Give the pairs to filter by as {'key': 'value'}.")
        return and_(*(contains(column, str(one), str(key)) for key, one in pairs.items()))

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
