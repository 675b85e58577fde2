# SPDX-License-Identifier: Apache-2.0
"""The query of GET /v2/images as one SELECT: filters, sort keys, marker and limit.

As in Glance, an unknown parameter filters by the custom property of that name.
"""

import falcon
from sqlalchemy import ColumnElement, and_, or_, select

from deploy.one_machine.services.database import DbRow, DbSelect
from deploy.one_machine.services.image.caller import ImageCaller
from deploy.one_machine.services.image.schema import images
from deploy.one_machine.services.listing import (
    Query,
    compare,
    contains,
    number_of,
    select_page,
    sort_words,
    value_of,
    values_of,
)

DEFAULT_LIMIT, MAX_LIMIT = 25, 1000
SORTABLE = (
    "name",
    "status",
    "container_format",
    "disk_format",
    "size",
    "id",
    "created_at",
    "updated_at",
)
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
NOT_FILTERS = ("limit", "marker", "sort", "sort_key", "sort_dir", "member_status", "visibility")


def matching(query: Query, caller: ImageCaller) -> list[ColumnElement[bool]]:
    """Return the conditions on the rows of a list: the caller's rights and the query's filters.

    Without a filter for os_hidden, hidden images are left out. Without a filter for visibility, a
    user gets public images and the project's own. An admin then gets all images, but community
    images only if the query filters by the owner.

    Raises:
        HTTPBadRequest: A value of the query is invalid.
    """
    rules = [_visibility(query, caller)]
    if "os_hidden" not in query:
        rules.append(images.c.os_hidden.is_(False))
    for name in query:
        if name not in NOT_FILTERS:
            rules += [_filter(name, value) for value in values_of(query, name)]
    return rules


def page(
    query: Query, rules: list[ColumnElement[bool]], marker: DbRow | None
) -> tuple[DbSelect, int]:
    """Return the SELECT for one page, and the page's limit, at most ``MAX_LIMIT``.

    The SELECT returns up to one row more than the limit, which shows whether there is a next page.

    Raises:
        HTTPBadRequest: A value of the query is invalid.
    """
    limit = min(number_of("limit", value_of(query, "limit", str(DEFAULT_LIMIT)), 2**31), MAX_LIMIT)
    statement = select_page(select(images).where(*rules), images, _sort_keys(query), marker)
    return statement.limit(limit + 1), limit


def _filter(name: str, value: str) -> ColumnElement[bool]:
    if name in ("protected", "os_hidden"):
        if value.lower() not in ("true", "false"):
            raise falcon.HTTPBadRequest(description=f"'{name}' must be true or false.")
        return images.c[name].is_(value.lower() == "true")
    if name in PLAIN:
        values = value[3:].split(",") if value.startswith("in:") else [value]
        return images.c[name].in_([word.strip('"') for word in values])
    if name in ("size_min", "size_max"):
        size = number_of(name, value)
        return images.c.size >= size if name == "size_min" else images.c.size <= size
    if name in ("created_at", "updated_at"):
        verb, _, text = value.partition(":")
        rule = compare(images.c[name], verb, text)
        return images.c[name].in_([value]) if rule is None else rule
    if name == "tag":
        return contains(images.c.tags, value)
    return contains(images.c.properties, value, name)


def _visibility(query: Query, caller: ImageCaller) -> ColumnElement[bool]:
    visibility, status = value_of(query, "visibility"), value_of(query, "member_status", "accepted")
    if visibility not in ("", "all", "public", "private", "shared", "community"):
        raise falcon.HTTPBadRequest(
            description="'visibility' must be public, private, shared, community or all."
        )
    if status not in ("pending", "accepted", "rejected", "all"):
        raise falcon.HTTPBadRequest(
            description="'member_status' must be pending, accepted, rejected or all."
        )
    own = images.c.owner == caller.project_id
    if visibility == "all":
        return caller.sees()
    if visibility:
        readable = own if visibility in ("private", "shared") else caller.sees()
        return and_(
            images.c.visibility == visibility, caller.sees() if caller.is_admin else readable
        )
    if caller.is_admin:
        return images.c.visibility != "community" if "owner" not in query else caller.sees()
    # Other projects' community images would flood every list. A client finds them by id or with
    # visibility=community.
    return or_(images.c.visibility == "public", own)


def _sort_keys(query: Query) -> list[tuple[str, bool]]:
    """Return pairs of column and direction (True for ascending).

    The column id is always among them, as a tie-breaker. Without a direction the order is
    descending.

    Raises:
        HTTPBadRequest: A column cannot be a sort key, or a direction is unknown.
    """
    keys: dict[str, bool] = {}
    for name, way in sort_words(query):
        if name not in SORTABLE or way not in ("asc", "desc", ""):
            raise falcon.HTTPBadRequest(
                description=f"'sort' must use {', '.join(SORTABLE)}, each with asc or desc."
            )
        keys.setdefault(name, way == "asc")
    keys.setdefault("id", False)
    return list(keys.items())
