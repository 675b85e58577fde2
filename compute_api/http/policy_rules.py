# SPDX-License-Identifier: Apache-2.0
"""The building blocks of policy rules: Nova's base rules, and the rule set of a service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ADMIN = "rule:context_is_admin"
MANAGER = "rule:project_manager_or_admin"
MEMBER = "rule:project_member_or_admin"
READER = "rule:project_reader_or_admin"
SELF = "(rule:context_is_admin) or user_id:%(user_id)s"
ANYBODY = "@"

#: Base rules that other rules refer to. Operators' files use the same names.
BASES: dict[str, str] = {
    "context_is_admin": "role:admin",
    "admin_or_owner": "is_admin:True or project_id:%(project_id)s",
    "admin_api": "is_admin:True",
    "project_manager_api": "role:manager and project_id:%(project_id)s",
    "project_member_api": "role:member and project_id:%(project_id)s",
    "project_reader_api": "role:reader and project_id:%(project_id)s",
    "project_manager_or_admin": "rule:project_manager_api or rule:context_is_admin",
    "project_member_or_admin": "rule:project_member_api or rule:context_is_admin",
    "project_reader_or_admin": "rule:project_reader_api or rule:context_is_admin",
    "service_api": "role:service",
    "service_or_admin": "rule:service_api or rule:context_is_admin",
}


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of a service, without the base rules.

    Attributes:
        defaults: Check string of each rule.
        former_names: For each former name, its former default and its current names.
        unsupported: Rules of operations that Kilonova does not have.
    """

    defaults: Mapping[str, str]
    former_names: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    unsupported: frozenset[str] = frozenset()

    @property
    def all_defaults(self) -> dict[str, str]:
        """The check string of each rule, including the base rules."""
        return {**BASES, **self.defaults}

    def former(self, name: str) -> Iterator[tuple[str, str]]:
        """Return each former name of a rule with the former default check."""
        return (
            (old, default) for old, (default, names) in self.former_names.items() if name in names
        )
