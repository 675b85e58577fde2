# SPDX-License-Identifier: Apache-2.0
"""Views as tables: one row a field, with the versions and the policy rule that show it.

``Field("description", since="2.19", get=…)``. A view is cut once for each version and set of rules allowed, and
then every row of a list is rendered by the same short tuple of functions.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from compute_api.microversions import Range


class Omitted:
    """What ``get`` answers when the field is left out of this answer."""


OMITTED = Omitted()


@dataclass(frozen=True, slots=True)
class Field:
    """One key of an answer.

    get: the row's attribute that is shown as it is, or get(row, view) that makes the value; ``view`` is what the
    noun's view needs besides the row. rule: who may see it. updated: in answers to a change only since then
    ("2.1": always; None: never); ``briefly`` makes the value in those before, without it there is none. maybe: ``get``
    may answer OMITTED.
    """

    name: str
    get: str | Callable[[Any, Any], Any] | None
    since: str = "2.1"
    until: str | None = None
    rule: str | None = None
    updated: str | None = "2.1"
    maybe: bool = False
    briefly: Callable[[Any, Any], Any] | None = None


Get = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """A view in force: names shown as they are with what reads them all at once, the made ones, and those that may be
    left out."""

    plain: tuple[str, ...]
    values: Callable[[Any], Iterable[Any]]
    made: tuple[tuple[str, Get], ...]
    maybe: tuple[tuple[str, Get], ...]


@functools.lru_cache(maxsize=1024)
def cut(fields: tuple[Field, ...], version: int, allowed: frozenset[str] = frozenset(), change: bool = False) -> Cut:
    """The fields that are shown at a version to who is allowed these rules; ``change``: in the answer to one."""
    shown = [field if not change or field.updated is not None and version in Range(field.updated) else
             replace(field, get=field.briefly) for field in fields
             if version in Range(field.since, field.until) and (field.rule is None or field.rule in allowed)]
    shown = [field for field in shown if field.get is not None]
    plain = {field.name: field.get for field in shown if isinstance(field.get, str)}
    made = [(field.maybe, field.name, field.get) for field in shown if callable(field.get)]
    return Cut(tuple(plain), _reader(list(plain.values())),
               tuple((name, get) for maybe, name, get in made if not maybe),
               tuple((name, get) for maybe, name, get in made if maybe))


def _reader(attributes: list[str]) -> Callable[[Any], Iterable[Any]]:
    if len(attributes) < 2:
        return lambda row: [getattr(row, name) for name in attributes]
    return operator.attrgetter(*attributes)


def rules(fields: tuple[Field, ...]) -> frozenset[str]:
    """The policy rules that the fields ask for."""
    return frozenset(field.rule for field in fields if field.rule)


def render(view_in_force: Cut, row: Any, view: Any = None) -> dict[str, Any]:
    """One row as a body."""
    body = dict(zip(view_in_force.plain, view_in_force.values(row), strict=True))
    for name, get in view_in_force.made:
        body[name] = get(row, view)
    for name, get in view_in_force.maybe:
        value = get(row, view)
        if value is not OMITTED:
            body[name] = value
    return body
