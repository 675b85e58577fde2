# SPDX-License-Identifier: Apache-2.0
"""One request as the handlers of the placement service see it, and what they answer.

Made by ``app.Endpoint``; handlers know nothing of HTTP beyond this.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common import errors
from common.context import RequestContext
from common.store.engine import Store
from compute_api.policy import Policy

T = TypeVar("T")
Body = dict[str, Any]
Query = dict[str, list[str]]


class BadQuery(errors.BadRequest):
    """A wrong query, which programs can tell from others by its code."""

    def __init__(self, text: str, code: str = "placement.query.bad_value") -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """What is said besides a body. modified: when what is shown last changed, in microseconds; None: now."""

    body: Any = None
    status: int | None = None
    modified: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """What a handler is given. base: what absolute URLs begin with; prefix: what paths in bodies begin with."""

    context: RequestContext
    version: int
    store: Store
    policy: Policy
    query: Query
    base: str
    prefix: str
    body: Any = None

    def require(self, rule: str, target: Mapping[str, Any] | None = None) -> None:
        """Raises Forbidden when the caller may not do this (to that)."""
        self.policy.require(rule, self.context, target)

    def read(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """``work(tx, …)`` without locks."""
        return self.store.read(lambda tx: work(tx, *arguments, **named))

    def write(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """``work(tx, …)`` in one transaction."""
        return self.store.write(lambda tx: work(tx, *arguments, **named))

    def make(self, is_there: Callable[[Any, T], bool], work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """As ``write``, for what is new: whether it ``is_there`` is looked up when COMMIT was not answered."""
        return self.store.write(lambda tx: work(tx, *arguments, **named), is_there)

    def first(self, name: str) -> str | None:
        """A parameter's value; of several the first."""
        values = self.query.get(name)
        return values[0] if values else None
