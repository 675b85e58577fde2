# SPDX-License-Identifier: Apache-2.0
"""Views as tables: one row for each field, with the versions and the policy rule that show it.

``Field("description", since="2.19", get=…)``. The visible fields are chosen once for each version
and set of rules; then the same short tuple of functions renders every row of a list."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from common.domain.json_types import JsonObject
from compute_api.http.microversions import Range

log = logging.getLogger(__name__)


class Omitted:
    """What ``get`` answers when the field is left out of this answer."""


OMITTED = Omitted()
#: Makes a field's value of a row and of what the view needs besides it; each view has its own types
#: for both.
Get = Callable[[Any, Any], object]


@dataclass(frozen=True, slots=True)
class Field:
    """One key of an answer."""

    name: str
    get: str | Get | None  #: the row's attribute that is shown as it is, or what makes the value
    since: str = "2.1"
    until: str | None = None  #: the last version that has it
    rule: str | None = None  #: the policy rule that shows it
    #: the version since which answers to an update show it too; None: they never do
    in_updates_since: str | None = "2.1"
    optional: bool = False  #: ``get`` may return OMITTED
    #: makes the value in answers to an update before ``in_updates_since``
    in_update: Get | None = None


@dataclass(frozen=True, slots=True)
class VisibleFields:
    """A view in force: names shown as they are with what reads them all at once, the made ones, and
    those that may be left out."""

    plain: tuple[str, ...]
    values: Callable[[object], Iterable[object]]
    made: tuple[tuple[str, Get], ...]
    optional: tuple[tuple[str, Get], ...]


@functools.lru_cache(maxsize=1024)
def visible_fields(
    fields: tuple[Field, ...],
    version: int,
    allowed: frozenset[str] = frozenset(),
    change: bool = False,
) -> VisibleFields:
    """The fields that are shown at a version to who is allowed these rules; ``change``: in the
    answer to one."""
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
    made = [(field.optional, field.name, field.get) for field in shown if callable(field.get)]
    return VisibleFields(
        tuple(plain),
        _reader(list(plain.values())),
        tuple((name, get) for optional, name, get in made if not optional),
        tuple((name, get) for optional, name, get in made if optional),
    )


def _reader(attributes: list[str]) -> Callable[[object], Iterable[object]]:
    if len(attributes) < 2:
        return lambda row: [getattr(row, name) for name in attributes]
    return operator.attrgetter(*attributes)


def rules(fields: tuple[Field, ...]) -> frozenset[str]:
    """The policy rules that the fields ask for."""
    return frozenset(field.rule for field in fields if field.rule)


def render(view_in_force: VisibleFields, row: object, view: object = None) -> JsonObject:
    """One row as a body."""
    body = dict(zip(view_in_force.plain, view_in_force.values(row), strict=True))
    for name, get in view_in_force.made:
        body[name] = get(row, view)
    for name, get in view_in_force.optional:
        value = get(row, view)
        if value is not OMITTED:
            body[name] = value
    return body


def render_readable(view_in_force: VisibleFields, row: object, view: object = None) -> JsonObject:
    """One row of a list as a body. A field whose column is damaged is null, and logged."""
    try:
        return render(view_in_force, row, view)
    except Exception:
        log.exception("a record cannot be shown whole; see its row: %s", getattr(row, "id", row))
    body = dict(zip(view_in_force.plain, view_in_force.values(row), strict=True))
    for name, get in (*view_in_force.made, *view_in_force.optional):
        try:
            value = get(row, view)
        except Exception:  # noqa: BLE001  # it is logged above
            value = None
        if value is not OMITTED:
            body[name] = value
    return body
