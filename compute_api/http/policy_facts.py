# SPDX-License-Identifier: Apache-2.0
"""The facts that decide a policy rule, so that a decision can be kept.

For example, ``role:member and project_id:%(project_id)s`` depends on the caller's roles, and on
whether the caller and the target have the same project. Two requests with equal facts get the same
decision, whatever their projects are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from oslo_policy import policy
from oslo_policy._checks import (
    AndCheck,
    BaseCheck,
    FalseCheck,
    GenericCheck,
    NotCheck,
    OrCheck,
    RoleCheck,
    TrueCheck,
)

from common.domain.context import RequestContext
from compute_api.http.policy_file import IsAdmin

#: The attributes of the caller that a check may compare.
_OF_CALLER = ("user_id", "project_id", "user_domain_id", "project_domain_id", "domain_id")
#: The attributes that ``IsAdmin`` compares with themselves.
_OWN = (("user_id", "user_id"), ("project_id", "project_id"))
_TARGET = re.compile(r"%\(([^()]+)\)s")


@dataclass(frozen=True, slots=True)
class CallerFact:
    """An attribute of the caller."""

    name: str

    def __call__(self, caller: RequestContext, target: Mapping[str, object]) -> object:
        return getattr(caller, self.name)


@dataclass(frozen=True, slots=True)
class MatchFact:
    """Whether an attribute of the caller and a field of the target are equal as texts."""

    name: str
    field: str

    def __call__(self, caller: RequestContext, target: Mapping[str, object]) -> object:
        return self.field in target and str(target[self.field]) == str(getattr(caller, self.name))


Fact = CallerFact | MatchFact
#: oslo.policy compares these with the scope of every rule.
_SCOPE = (CallerFact("system_scope"), CallerFact("domain_id"))
_ROLES = CallerFact("roles")


class _OtherFacts(Exception):
    """The decision depends on more than the facts of this module."""


def facts_of(check: BaseCheck, rules: Mapping[str, BaseCheck]) -> tuple[Fact, ...] | None:
    """Return the facts that decide a check, or None if the decision may depend on others.

    Checks of other distributions, and requests to another service, may depend on others.

    Args:
        check: The check.
        rules: All checks by name, which do not refer to each other in a cycle.
    """
    try:
        return tuple(dict.fromkeys((*_SCOPE, *_find(check, rules))))
    except _OtherFacts:
        return None


def _find(check: BaseCheck, rules: Mapping[str, BaseCheck]) -> Iterator[Fact]:
    match check:
        case AndCheck() | OrCheck():
            for part in check.rules:
                yield from _find(part, rules)
        case NotCheck():
            yield from _find(check.rule, rules)
        case policy.RuleCheck():
            if check.match in rules:
                yield from _find(rules[check.match], rules)
        case IsAdmin():
            yield from _find_own(rules)
        case TrueCheck() | FalseCheck():
            pass
        case _:
            yield _read(check)


def _find_own(rules: Mapping[str, BaseCheck]) -> Iterator[Fact]:
    """Yield the facts of context_is_admin with the caller's own project and user as target."""
    for fact in _find(rules["context_is_admin"], rules) if "context_is_admin" in rules else ():
        if isinstance(fact, CallerFact):
            yield fact
        elif (fact.name, fact.field) not in _OWN:
            raise _OtherFacts


def _read(check: BaseCheck) -> Fact:
    """Return the fact of a single check.

    Raises:
        _OtherFacts: The check is of another kind.
    """
    # Other distributions may have subclasses with another meaning.
    if type(check) is RoleCheck and "%" not in check.match:
        return _ROLES
    if type(check) is GenericCheck and check.kind in _OF_CALLER:
        if "%" not in check.match:
            return CallerFact(check.kind)
        if field := _TARGET.fullmatch(check.match):
            return MatchFact(check.kind, field[1])
    raise _OtherFacts


class Decisions:
    """The decisions of one set of rules. Several threads may use it.

    Args:
        rules: All checks by name, which do not refer to each other in a cycle.
    """

    #: With more decisions, all are dropped.
    MOST = 4096

    def __init__(self, rules: Mapping[str, BaseCheck]) -> None:
        self._rules = rules
        self._facts: dict[str, tuple[Fact, ...] | None] = {}
        self._decisions: dict[tuple[object, ...], bool] = {}

    def find(
        self,
        rule: str,
        caller: RequestContext,
        target: Mapping[str, object],
        decide: Callable[[], bool],
    ) -> bool:
        """Return the decision for the rule, which is kept if its facts are known.

        Args:
            rule: Name of the rule, which exists.
            caller: The caller.
            target: The target.
            decide: Evaluates the rule for this caller and target.
        """
        try:
            facts = self._facts[rule]
        except KeyError:
            facts = self._facts[rule] = facts_of(self._rules[rule], self._rules)
        if facts is None:
            return decide()
        key = (rule, *[fact(caller, target) for fact in facts])
        decision = self._decisions.get(key)
        if decision is None:
            decision = decide()
            if len(self._decisions) >= self.MOST:
                self._decisions.clear()
            self._decisions[key] = decision
        return decision
