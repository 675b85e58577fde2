# SPDX-License-Identifier: Apache-2.0
"""One request as handlers see it: caller, version, query, body, store and policy.

Made by a service's endpoint; handlers know nothing else of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from common.domain.context import RequestContext
from common.domain.json_types import JsonValue
from common.store.engine import Connection, Store
from compute_api.http.policy import Policy

T = TypeVar("T")
#: Each parameter with the values that it was given, in order.
Query = dict[str, list[str]]


@dataclass(slots=True, kw_only=True)
class ApiRequest:
    """What every service's handlers are given."""

    context: RequestContext
    version: int  #: the number of the microversion
    store: Store
    policy: Policy
    query: Query
    body: JsonValue = field(default=None)  #: as its schema has it

    def allows(self, rule: str, target: Mapping[str, object] | None = None) -> bool:
        """May the caller do this (to that)?"""
        return self.policy.allows(rule, self.context, target)

    def require(self, rule: str, target: Mapping[str, object] | None = None) -> None:
        """Raises Forbidden when the caller may not do this (to that)."""
        self.policy.require(rule, self.context, target)

    def read(self, work: Callable[..., T], *arguments: object, **named: object) -> T:
        """``work(tx, …)`` without locks."""
        return self.store.read(lambda tx: work(tx, *arguments, **named))

    def write(self, work: Callable[..., T], *arguments: object, **named: object) -> T:
        """``work(tx, …)`` in one transaction."""
        return self.store.write(lambda tx: work(tx, *arguments, **named))

    def make(
        self,
        is_there: Callable[[Connection, T], bool],
        work: Callable[..., T],
        *arguments: object,
        **named: object,
    ) -> T:
        """As ``write``, for what is new: whether it ``is_there`` is looked up when COMMIT was not
        answered."""
        return self.store.write(lambda tx: work(tx, *arguments, **named), is_there)
