# SPDX-License-Identifier: Apache-2.0
"""From the query string of GET /v2/images to one SELECT: filters, sort keys, marker and limit.

An unknown parameter filters by the custom property of that name, as Glance has it. Pages are keyset pages:
the marker is the last image of the page before, and `id` breaks ties.
"""

from collections.abc import Mapping
from typing import Any

import falcon
from sqlalchemy import ColumnElement, Row, Select, and_, func, or_, select

from deploy.standalone.image.caller import Caller
from deploy.standalone.image.schema import images, members

LIMIT, LIMIT_MAX = 25, 1000
SORTABLE = ("name", "status", "container_format", "disk_format", "size", "id", "created_at", "updated_at")
PLAIN = (
    "id",
    "name",
    "status",
    "owner",
    "container_format",
    "disk_format",
    "checksum",
    "os_hash_value",
    "min_disk",
    "min_ram",
    "size",
)
NOT_FILTERS = ("limit", "marker", "sort", "sort_key", "sort_dir", "member_status")
Query = Mapping[str, str | list[str]]


def matching(query: Query, caller: Caller) -> list[ColumnElement[bool]]:
    """The conditions of a list. Raises 400 for a value that no image can have."""
    rules = [_visibility(query, caller)]
    if "os_hidden" not in query:
        rules.append(images.c.os_hidden.is_(False))
    for name, values in query.items():
        for value in [values] if isinstance(values, str) else values:
            if name in ("protected", "os_hidden"):
                rules.append(images.c[name].is_(_truth(name, value)))
            elif name in PLAIN:
                wanted = value[3:].split(",") if value.startswith("in:") else [value]
                rules.append(images.c[name].in_([word.strip('"') for word in wanted]))
            elif name in ("size_min", "size_max"):
                size = _number(name, value, 2**62)
                rules.append(images.c.size >= size if name == "size_min" else images.c.size <= size)
            elif name in ("created_at", "updated_at"):
                rules.append(_moment(name, value))
            elif name == "tag":
                rules.append(_contains(images.c.tags, None, value))
            elif name not in (*NOT_FILTERS, "visibility"):
                rules.append(_contains(images.c.properties, name, value))
    return rules


def page(query: Query, rules: list[ColumnElement[bool]], marker: Row[Any] | None) -> tuple[Select[Any], int]:
    """The SELECT for one page, one row longer than its limit, and the limit. Raises 400."""
    limit = min(_number("limit", _last(query, "limit", str(LIMIT)), 2**31), LIMIT_MAX)
    keys = _sort_keys(query)
    if marker is not None:
        rules = [*rules, _after(keys, marker)]
    order = [_value(name).asc() if up else _value(name).desc() for name, up in keys]
    return select(images).where(*rules).order_by(*order).limit(limit + 1), limit


def _visibility(query: Query, caller: Caller) -> ColumnElement[bool]:
    wanted = _last(query, "visibility", "")
    status = _last(query, "member_status", "accepted")
    if wanted not in ("", "all", "public", "private", "shared", "community"):
        raise falcon.HTTPBadRequest(
            description="'visibility' must be public, private, shared, community or all."
        )
    if status not in ("pending", "accepted", "rejected", "all"):
        raise falcon.HTTPBadRequest(description="'member_status' must be pending, accepted, rejected or all.")
    mine = images.c.owner == caller.project_id
    let_in = select(members.c.image_id).where(members.c.member_id == caller.project_id)
    if status != "all":
        let_in = let_in.where(members.c.status == status)
    shared = (images.c.visibility == "shared") & images.c.id.in_(let_in)
    if wanted == "all":
        return caller.sees()
    if wanted:
        seen = {"private": mine, "shared": or_(mine, shared)}.get(wanted, caller.sees())
        return and_(images.c.visibility == wanted, caller.sees() if caller.is_admin else seen)
    if caller.is_admin:
        return images.c.visibility != "community" if "owner" not in query else caller.sees()
    # Other projects' community images are found by id or by asking for them: they would flood every list.
    return or_(images.c.visibility == "public", mine, shared)


def _contains(column: ColumnElement[Any], key: str | None, value: str) -> ColumnElement[bool]:
    each = func.json_each(column).table_valued("key", "value")
    found = select(each.c.key).where(each.c.value == value)
    return (found if key is None else found.where(each.c.key == key)).exists()


def _moment(name: str, value: str) -> ColumnElement[bool]:
    verb, _, text = value.partition(":")
    column = images.c[name]
    compare = {"gt": column > text, "gte": column >= text, "lt": column < text, "lte": column <= text,
               "eq": column == text, "neq": column != text}
    return compare.get(verb, column == value)


def _sort_keys(query: Query) -> list[tuple[str, bool]]:
    """[(column, ascending)]; ends with id, so that no two images are equal."""
    if "sort" in query:
        words = [word.partition(":")[::2] for word in _last(query, "sort", "").split(",")]
    else:
        names, ways = _all(query, "sort_key") or ["created_at"], _all(query, "sort_dir") or ["desc"]
        words = [(name, ways[min(place, len(ways) - 1)]) for place, name in enumerate(names)]
    keys: dict[str, bool] = {}
    for name, way in words:
        if name not in SORTABLE or way not in ("asc", "desc", ""):
            raise falcon.HTTPBadRequest(description=f"Sort by {', '.join(SORTABLE)}, each asc or desc.")
        keys.setdefault(name, way == "asc")
    keys.setdefault("id", False)
    return list(keys.items())


def _after(keys: list[tuple[str, bool]], marker: Row[Any]) -> ColumnElement[bool]:
    steps: list[ColumnElement[bool]] = []
    equal: list[ColumnElement[bool]] = []
    for name, up in keys:
        last = marker._mapping[name]
        last = (0 if name == "size" else "") if last is None else last
        steps.append(and_(*equal, _value(name) > last if up else _value(name) < last))
        equal.append(_value(name) == last)
    return or_(*steps)


def _value(name: str) -> ColumnElement[Any]:
    return func.coalesce(images.c[name], 0 if name == "size" else "")


def _all(query: Query, name: str) -> list[str]:
    values = query.get(name, [])
    return [values] if isinstance(values, str) else list(values)


def _last(query: Query, name: str, default: str) -> str:
    return (_all(query, name) or [default])[-1]


def _number(name: str, text: str, largest: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= largest):
        raise falcon.HTTPBadRequest(description=f"'{name}' must be a number from 0 on.")
    return int(text)


def _truth(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise falcon.HTTPBadRequest(description=f"'{name}' must be true or false.")
    return text.lower() == "true"
