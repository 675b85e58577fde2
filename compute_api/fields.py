# SPDX-License-Identifier: Apache-2.0
"""Views as tables: one row a field, with the versions and the policy rule that show it.

``Field("description", since="2.19", get=…)``. A view is cut once for each version and set of rules allowed, and
then every row of a list is rendered by the same short tuple of functions.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compute_api.microversions import Range


class Omitted:
    """What ``get`` answers when the field is left out of this answer."""


OMITTED = Omitted()


@dataclass(frozen=True, slots=True)
class Field:
    """One key of an answer.

    get(row, view) makes its value; ``view`` is what the noun's view needs besides the row. rule: who may see
    it. updated: in answers to a change only since then ("2.1": always; None: never). maybe: ``get`` may
    answer OMITTED.
    """

    name: str
    get: Callable[[Any, Any], Any]
    since: str = "2.1"
    until: str | None = None
    rule: str | None = None
    updated: str | None = "2.1"
    maybe: bool = False


Getters = tuple[tuple[tuple[str, Callable[[Any, Any], Any]], ...], tuple[tuple[str, Callable[[Any, Any], Any]], ...]]


@functools.lru_cache(maxsize=1024)
def cut(fields: tuple[Field, ...], version: int, allowed: frozenset[str] = frozenset(), change: bool = False
        ) -> Getters:
    """The (name, get) pairs in force: those always there, and those that may be left out."""
    shown = [field for field in fields
             if version in Range(field.since, field.until) and (field.rule is None or field.rule in allowed)
             and (not change or field.updated is not None and version in Range(field.updated))]
    return (tuple((field.name, field.get) for field in shown if not field.maybe),
            tuple((field.name, field.get) for field in shown if field.maybe))


def rules(fields: tuple[Field, ...]) -> frozenset[str]:
    """The policy rules that the fields ask for."""
    return frozenset(field.rule for field in fields if field.rule)


def render(getters: Getters, row: Any, view: Any = None) -> dict[str, Any]:
    """One row as a body."""
    always, maybe = getters
    body = {name: get(row, view) for name, get in always}
    for name, get in maybe:
        value = get(row, view)
        if value is not OMITTED:
            body[name] = value
    return body
