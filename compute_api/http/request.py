# SPDX-License-Identifier: Apache-2.0
"""The request object of handlers: caller, version, query, body, store and policy.

The endpoint of a service creates this object. Handlers use no other part of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from common.domain.context import RequestContext
from common.domain.json_types import JsonValue
from common.store.engine import Connection, Store
from compute_api.http.policy import Policy

T = TypeVar("T")
#: The values of each parameter, in order.
Query = dict[str, list[str]]


@dataclass(slots=True, kw_only=True)
class ApiRequest:
    """A request to any of the services.

    Attributes:
        context: The caller.
        version: Number of the microversion.
        store: The database.
        policy: The policy.
        query: The parameters.
        body: The body, validated by the route's schema.
    """

    context: RequestContext
    version: int
    store: Store
    policy: Policy
    query: Query
    body: JsonValue = field(default=None)

    def query_value(self, name: str) -> str | None:
        """Return the value of a query parameter, or None without the parameter.

        Of several values, the last applies.
        """
        values = self.query.get(name)
        return values[-1] if values else None

    def allows(self, rule: str, target: Mapping[str, object] | None = None) -> bool:
        """Return True if the rule permits the caller to act on the target.

        Args:
            rule: Name of the rule.
            target: Project and user of the object. None means an object of the caller.
        """
        return self.policy.allows(rule, self.context, target)

    def require(self, rule: str, target: Mapping[str, object] | None = None) -> None:
        """Check that the rule permits the caller to act on the target, as ``allows`` does.

        Raises:
            Forbidden: The rule denies.
        """
        self.policy.require(rule, self.context, target)

    def read(self, work: Callable[..., T], *arguments: object, **named: object) -> T:
        """Run ``work(tx, …)``, which only reads, with ``Store.read``, and return the result."""
        return self.store.read(lambda tx: work(tx, *arguments, **named))

    def write(self, work: Callable[..., T], *arguments: object, **named: object) -> T:
        """Run ``work(tx, …)`` with ``Store.write`` in a transaction, commit, and return the result.

        After a deadlock or a lock timeout, ``work`` runs again.
        """
        return self.store.write(lambda tx: work(tx, *arguments, **named))

    def make(
        self,
        is_there: Callable[[Connection, T], bool],
        work: Callable[..., T],
        *arguments: object,
        **named: object,
    ) -> T:
        """Create an object with ``work(tx, …)`` in a transaction, and return it.

        Args:
            is_there: Returns True if the result of ``work`` is stored. The store calls this if the
                database did not answer the COMMIT, and after False runs ``work`` again.
            work: Creates the object and returns it.
            *arguments: Arguments of ``work``.
            **named: Keyword arguments of ``work``.
        """
        return self.store.write(lambda tx: work(tx, *arguments, **named), is_there)
