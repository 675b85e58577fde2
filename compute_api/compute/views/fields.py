# SPDX-License-Identifier: Apache-2.0
"""Response bodies as tables: one row per key, with the versions and the policy rule that show it.

For example, ``Field("description", "description", since="2.19")``. The visible fields are selected
once for each version and set of rules. The same functions then render every row of a list.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from common.domain.json_types import JsonObject
from common.service.log import get_logger
from compute_api.http.microversions import Range

log = get_logger(__name__)


class Omitted:
    """Type of ``OMITTED``, with which ``Field.get`` leaves the field out of the response."""


OMITTED = Omitted()
#: Returns the value of a field. The arguments are the row and the additional data of the view,
#: whose types differ between views.
Get = Callable[[Any, Any], object]


# Compared by identity, so that ``visible_fields`` finds its cached result fast.
@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One key of a response body."""

    name: str
    #: Name of the row's attribute, or the function that returns the value.
    get: str | Get | None
    since: str = "2.1"
    #: The last version with the field.
    until: str | None = None
    #: The policy rule that the caller must pass to see the field.
    rule: str | None = None
    #: The first version in which responses to an update contain the field. None means never.
    in_updates_since: str | None = "2.1"
    #: True if ``get`` may return OMITTED.
    optional: bool = False
    #: Returns the value for responses to an update before ``in_updates_since``.
    in_update: Get | None = None


@dataclass(frozen=True, slots=True)
class VisibleFields:
    """The visible fields of a version and set of rules, prepared for rendering."""

    #: Keys of fields that are attributes of the row, in the order of ``values``.
    plain: tuple[str, ...]
    #: Returns the attributes of a row for ``plain``.
    values: Callable[[object], Iterable[object]]
    #: Keys of fields with a function.
    computed: tuple[tuple[str, Get], ...]
    #: Keys of fields with a function that may return OMITTED.
    optional: tuple[tuple[str, Get], ...]


@functools.lru_cache(maxsize=1024)
def visible_fields(
    fields: tuple[Field, ...],
    version: int,
    allowed: frozenset[str] = frozenset(),
    change: bool = False,
) -> VisibleFields:
    """Return the fields that are visible at a version to a caller that passes these rules.

    Args:
        fields: All fields of the body.
        version: The microversion of the request.
        allowed: Policy rules that the caller passes.
        change: Whether the response is that of an update. Before ``Field.in_updates_since`` a field
            then has the value of ``Field.in_update``, or is missing.
    """
    shown = [
        field
        if not change
        or (field.in_updates_since is not None and version in Range(field.in_updates_since))
        else replace(field, get=field.in_update)
        for field in fields
        if version in Range(field.since, field.until)
        and (field.rule is None or field.rule in allowed)
    ]
    shown = [field for field in shown if field.get is not None]
    plain = {field.name: field.get for field in shown if isinstance(field.get, str)}
    computed = [(field.optional, field.name, field.get) for field in shown if callable(field.get)]
    return VisibleFields(
        tuple(plain),
        _make_reader(list(plain.values())),
        tuple((name, get) for optional, name, get in computed if not optional),
        tuple((name, get) for optional, name, get in computed if optional),
    )


def _make_reader(attributes: list[str]) -> Callable[[object], Iterable[object]]:
    if len(attributes) < 2:
        return lambda row: [getattr(row, name) for name in attributes]
    return operator.attrgetter(*attributes)


def rules(fields: tuple[Field, ...]) -> frozenset[str]:
    """Return the policy rules that protect at least one of the fields."""
    return frozenset(field.rule for field in fields if field.rule)


def render(view_in_force: VisibleFields, row: object, view: object = None) -> JsonObject:
    """Return the body of a row, without optional fields whose value is OMITTED.

    Args:
        view_in_force: The visible fields.
        row: The row, whose attributes are the plain fields.
        view: The additional data for fields with a function.
    """
    body = dict(zip(view_in_force.plain, view_in_force.values(row), strict=True))
    for name, get in view_in_force.computed:
        body[name] = get(row, view)
    for name, get in view_in_force.optional:
        value = get(row, view)
        if value is not OMITTED:
            body[name] = value
    return body


def render_readable(view_in_force: VisibleFields, row: object, view: object = None) -> JsonObject:
    """Return the body of a row, with null for a field whose function fails.

    The exception of the first such field is logged. For the arguments see ``render``.
    """
    try:
        return render(view_in_force, row, view)
    except Exception:
        log.exception(
            "a record is shown with null for damaged fields; see its row",
            record=getattr(row, "id", row),
        )
    body = dict(zip(view_in_force.plain, view_in_force.values(row), strict=True))
    for name, get in (*view_in_force.computed, *view_in_force.optional):
        try:
            value = get(row, view)
        except Exception:  # noqa: BLE001 - the error is logged above
            value = None
        if value is not OMITTED:
            body[name] = value
    return body
