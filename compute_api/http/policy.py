# SPDX-License-Identifier: Apache-2.0
"""Policy: the rules of a service, which an operator's file may override. Unknown rules deny.

Endpoints check the rule of a route, handlers check parts of an operation, and views check single
fields. The target contains project and user from the database, never from the request. Roles imply
each other: admin implies manager, manager implies member, member implies reader.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from oslo_config import cfg

from common.domain import errors
from common.domain.context import RequestContext
from common.domain.errors import ConfigError
from common.service.log import get_logger
from compute_api.http.policy_rules import RuleSet

logger = get_logger(__name__)

_IMPLIED = {
    "admin": ("manager", "member", "reader"),
    "manager": ("member", "reader"),
    "member": ("reader",),
}


@functools.lru_cache(maxsize=256)
def add_implied(roles: tuple[str, ...]) -> tuple[str, ...]:
    """Return the roles and all roles that they imply, in lower case, sorted, without duplicates."""
    lower_roles = {role.lower() for role in roles}
    return tuple(sorted(lower_roles.union(*(_IMPLIED.get(role, ()) for role in lower_roles))))


@dataclass(frozen=True, slots=True)
class EffectiveRule:
    """A rule in force.

    Attributes:
        check: The check string.
        origin: "default", or file and line.
    """

    check: str
    origin: str


class Policy:
    """The rules in force in this process.

    The first check after a change of the file reads the file again. If the new file is missing or
    invalid, the old rules stay in force, and one error is logged.

    Args:
        rules: The rules of the service.
        policy_file: An oslo.policy file with Nova's rule names, which override the defaults. None
            means defaults only.

    Raises:
        ConfigError: The file is invalid. The text begins with file and line.
    """

    def __init__(self, rules: RuleSet, policy_file: str | None = None) -> None:
        from oslo_policy import opts, policy

        conf = cfg.ConfigOpts()
        conf([], project="kilonova", default_config_files=[], default_config_dirs=[])
        opts.set_defaults(conf, policy_file="")
        conf.set_override("policy_dirs", [], group="oslo_policy")
        self._enforcer = policy.Enforcer(conf, use_conf=False)
        self._rules = rules
        self._enforcer.register_defaults(
            [
                policy.RuleDefault(name, check, scope_types=["project"])
                for name, check in rules.defaults.items()
            ]
        )
        self._refusals = (policy.PolicyNotAuthorized, policy.InvalidScope)
        self._file, self._reading = policy_file, threading.Lock()
        self._stamp = self._read_stamp()
        self._load_rules()

    def _read_stamp(self) -> tuple[int, ...]:
        """Return time of change, size and inode of the policy file, or () without access."""
        try:
            status = os.stat(self._file) if self._file else None
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino) if status else ()

    def _reload_changed_file(self) -> None:
        """Read the policy file again if it has changed, and log the result.

        If the file is missing or invalid, the previous rules stay in force. While one thread reads,
        the other threads use the previous rules.
        """
        if self._read_stamp() == self._stamp or not self._reading.acquire(blocking=False):
            return
        try:
            self._stamp = self._read_stamp()
            self._load_rules()
            logger.info(
                "the policy file has changed, and the new rules are in force", path=self._file
            )
        except ConfigError as problem:
            logger.error(
                "the policy file has changed and is invalid, so the old rules stay in force",
                problem=problem,
            )
        finally:
            self._reading.release()

    def _load_rules(self) -> None:
        from compute_api.http import policy_facts, policy_file

        merged = (
            policy_file.merge(self._file, self._rules)
            if self._file
            else policy_file.MergedRules(self._rules.all_defaults, {}, ())
        )
        for warning in merged.warnings:
            logger.warning("a rule of the policy file needs attention", problem=warning)
        checks = {name: policy_file.parse(name, check) for name, check in merged.checks.items()}
        self._enforcer.set_rules(checks)
        # After set_rules: a thread that has the new decisions evaluates the new rules.
        self._decisions = policy_facts.Decisions(checks)
        self._in_force = {
            name: EffectiveRule(
                str(check),
                f"{self._file}:{merged.lines[name]}" if name in merged.lines else "default",
            )
            for name, check in merged.checks.items()
        }

    @property
    def in_force(self) -> Mapping[str, EffectiveRule]:
        """All rules in force by name: base rules, the service's rules, then rules of the file."""
        return self._in_force

    def allows(
        self, rule: str, context: RequestContext, target: Mapping[str, object] | None = None
    ) -> bool:
        """Return True if the caller may act on the target. Unknown rules deny.

        A changed policy file is read first, unless another thread is reading the file.

        Args:
            rule: Name of the rule.
            context: The caller.
            target: Project and user of the object. None means an object of the caller.
        """
        if self._file:
            self._reload_changed_file()
        decisions = self._decisions
        if rule not in self._in_force:
            return False
        if target is None:
            target = {"project_id": context.project_id, "user_id": context.user_id}
        return decisions.find(rule, context, target, lambda: self.evaluate(rule, context, target))

    def evaluate(self, rule: str, context: RequestContext, target: Mapping[str, object]) -> bool:
        """Return the decision of ``allows``, computed from the rules in force."""
        caller = {
            "user_id": context.user_id,
            "project_id": context.project_id,
            "roles": list(add_implied(context.roles)),
            "user_domain_id": context.user_domain_id,
            "project_domain_id": context.project_domain_id,
            "domain_id": context.domain_id,
            "system_scope": context.system_scope,
            "service_roles": list(context.service_roles),
            "is_admin_project": True,
        }
        try:
            return bool(self._enforcer.enforce(rule, dict(target), caller))
        except self._refusals:
            return False

    def require(
        self, rule: str, context: RequestContext, target: Mapping[str, object] | None = None
    ) -> None:
        """Check that the caller may act on the target. The arguments are those of ``allows``.

        Raises:
            Forbidden: The rule denies, or is unknown.
        """
        if not self.allows(rule, context, target):
            raise errors.Forbidden(f"Policy doesn't allow {rule} to be performed.")


def load_policy(conf: cfg.ConfigOpts, section: str, rules: RuleSet) -> Policy:
    """Return the policy with the file in the option ``policy_file`` of this section.

    Without the option, only the defaults apply. A relative path is searched in the configuration
    folders, and then in the working directory.

    Raises:
        ConfigError: The file is missing or invalid.
    """
    name = conf[section].policy_file
    try:
        return Policy(rules, name and (conf.find_file(name) or name))
    except ConfigError as problem:
        raise ConfigError(f"[{section}] policy_file {problem}") from problem
