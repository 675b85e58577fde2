# SPDX-License-Identifier: Apache-2.0
"""One request as the handlers see it: who asks, at which version, with which body and query, and what they may.

Made by the dispatcher in ``app``; handlers know nothing of HTTP beyond this. ``Answer`` is for the few that say
more than a body.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from common import errors
from common.clock import SECOND, parse
from common.context import RequestContext
from common.store import actions
from common.store.quotas import Numbers
from compute_api.dependencies import Services
from compute_api.links import Links
from compute_api.policy import Policy

if TYPE_CHECKING:
    from compute_api.routes import Route

T = TypeVar("T")
Query = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A body with another status than the route's, or with headers."""

    body: Any = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """What a handler is given. ``query`` maps each parameter to the values it was given, in order."""

    context: RequestContext
    version: int
    services: Services
    policy: Policy
    route: Route
    links: Links
    query: Query
    headers: Mapping[str, str]
    body: Any = None

    # --- who may what ---
    @property
    def is_admin(self) -> bool:
        """Sees every project's things."""
        return self.context.is_admin

    @property
    def scope(self) -> str | None:
        """The project whose things the caller sees; None: all."""
        return None if self.is_admin else self.context.project_id

    def allows(self, rule: str, target: Mapping[str, Any] | None = None) -> bool:
        """May the caller do this (to that)?"""
        return self.policy.allows(rule, self.context, target)

    def require(self, rule: str, target: Mapping[str, Any] | None = None) -> None:
        """Raises Forbidden when they may not."""
        self.policy.require(rule, self.context, target)

    def allowed(self, rules: frozenset[str]) -> frozenset[str]:
        """Those of the rules that hold for the caller in their own project."""
        return frozenset(rule for rule in rules if self.policy.allows(rule, self.context))

    def limits(self) -> Numbers:
        """Those in force in the caller's project."""
        return self.read(self.services.quota.source(self.context.project_id))

    # --- the store ---
    def read(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """``work(tx, …)`` without locks."""
        return self.services.store.read(lambda tx: work(tx, *arguments, **named))

    def write(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """``work(tx, …)`` in one transaction."""
        return self.services.store.write(lambda tx: work(tx, *arguments, **named))

    def make(self, is_there: Callable[[Any, T], bool], work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """As ``write``, for what is new: whether it ``is_there`` is looked up when COMMIT was not answered."""
        return self.services.store.write(lambda tx: work(tx, *arguments, **named), is_there)

    def begin(self, begin: Callable[..., str], rows: Any, server_id: str, **named: Any) -> str:
        """Let an action take a server, by ``actions.begin`` or one that is called alike; returns its id."""
        is_begun: Callable[[Any, str], bool] = partial(actions.is_begun, server_id=server_id)
        return self.make(is_begun, begin, rows, server_id, context=self.context, project_id=self.scope, **named)

    # --- the query ---
    def first(self, name: str) -> str | None:
        """A parameter's value; of several the last, as the API has it."""
        values = self.query.get(name)
        return values[-1] if values else None

    @property
    def changed(self) -> tuple[int | None, int | None]:
        """From when to when, in microseconds, something must have changed: changes-since and changes-before, as far as
        the version has them. What is shown with the second that changes-before names is in it."""
        known = self.route.query.at(self.version).document["properties"] if self.route.query else {}
        since, before = (parse(text) if name in known and (text := self.first(name)) is not None else None
                         for name in ("changes-since", "changes-before"))
        if since is not None and before is not None and since > before:
            raise errors.BadRequest("The value of changes-since must be less than or equal to changes-before.")
        return since, None if before is None else before // SECOND * SECOND + SECOND - 1

    @property
    def limit(self) -> int:
        """How many items the page may hold."""
        given = self.first("limit")
        most = self.services.settings.max_limit
        if given is None:
            return most
        if not given.isdecimal():
            raise errors.BadRequest("limit param must be an integer")
        return min(int(given[:10]), most)

    def page(self, name: str, path: str, items: list[Any], marker: str | None) -> dict[str, Any]:
        """A list's body, with the link to the next page when this one is full."""
        body: dict[str, Any] = {name: items}
        if items and len(items) == self.limit and marker is not None:
            body[f"{name}_links"] = self.links.next(path, self.query, marker)
        return body
