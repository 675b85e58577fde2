# SPDX-License-Identifier: Apache-2.0
"""Policy: the rules of a service with an operator's file over them; unknown rules deny.

Endpoints ask for the rule of a route, handlers for parts of an operation, views for single fields.
The target is what the database has (project and user), never what a request claims. Roles imply one
another: admin is a manager, a manager a member, a member a reader."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from oslo_config import cfg

from common.domain import errors
from common.domain.context import RequestContext
from common.domain.errors import ConfigError
from compute_api.http.policy_rules import RuleSet

logger = logging.getLogger(__name__)

_IMPLIED = {
    "admin": ("manager", "member", "reader"),
    "manager": ("member", "reader"),
    "member": ("reader",),
}


@functools.lru_cache(maxsize=256)
def implied(roles: tuple[str, ...]) -> tuple[str, ...]:
    """The roles and those that they imply, in lower case."""
    held = {role.lower() for role in roles}
    return tuple(sorted(held.union(*(_IMPLIED.get(role, ()) for role in held))))


@dataclass(frozen=True, slots=True)
class EffectiveRule:
    """A rule as it holds: who may, and who says so: "default", or file and line."""

    check: str
    origin: str


class Policy:
    """The rules in force in this process.

    A file that changes is read again, by the next question; one that is broken then, or gone,
    leaves the rules as they were, and is told of once.

    Args:
        rules: the service's.
        policy_file: an oslo.policy file in Nova's rule names; its rules replace the defaults of the
        same name.
            None: the defaults.

    Raises:
        ConfigError: the file cannot be taken over; the text begins with its name and the line.
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
        self._stamp = self._stamp_now()
        self._take_over()

    def _stamp_now(self) -> tuple[int, ...]:
        """What changes with the file; () when it is not there."""
        try:
            found = os.stat(self._file) if self._file else None
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found else ()

    def _read_again(self) -> None:
        """Take a changed file over; one thread does, the others go on under the rules that they
        have."""
        if self._stamp_now() == self._stamp or not self._reading.acquire(blocking=False):
            return
        try:
            self._stamp = self._stamp_now()
            self._take_over()
            logger.info("%s has changed and is in force", self._file)
        except ConfigError as problem:
            logger.error(
                "the policy file has changed and cannot be used, the rules stay as they were: %s",
                problem,
            )
        finally:
            self._reading.release()

    def _take_over(self) -> None:
        from compute_api.http import policy_file

        taken = (
            policy_file.merged(self._file, self._rules)
            if self._file
            else policy_file.MergedRules(self._rules.all_defaults, {}, ())
        )
        for warning in taken.warnings:
            logger.warning(warning)
        self._enforcer.set_rules(
            {name: policy_file.parsed(name, check) for name, check in taken.checks.items()}
        )
        self._in_force = {
            name: EffectiveRule(
                str(check),
                f"{self._file}:{taken.lines[name]}" if name in taken.lines else "default",
            )
            for name, check in taken.checks.items()
        }

    @property
    def in_force(self) -> Mapping[str, EffectiveRule]:
        """Every rule as it holds now, in the order of the operations; an operator's own ones come
        last."""
        return self._in_force

    def allows(
        self, rule: str, context: RequestContext, target: Mapping[str, object] | None = None
    ) -> bool:
        """May the caller do it to the target (without one: to things of their own)? Unknown rules
        deny."""
        if self._file:
            self._read_again()
        if rule not in self._in_force:
            return False
        caller = {
            "user_id": context.user_id,
            "project_id": context.project_id,
            "roles": list(implied(context.roles)),
            "user_domain_id": context.user_domain_id,
            "project_domain_id": context.project_domain_id,
            "domain_id": context.domain_id,
            "system_scope": context.system_scope,
            "service_roles": list(context.service_roles),
            "is_admin_project": True,
        }
        if target is None:
            target = {"project_id": context.project_id, "user_id": context.user_id}
        try:
            return bool(self._enforcer.enforce(rule, dict(target), caller))
        except self._refusals:
            return False

    def require(
        self, rule: str, context: RequestContext, target: Mapping[str, object] | None = None
    ) -> None:
        """Raises Forbidden when they may not."""
        if not self.allows(rule, context, target):
            raise errors.Forbidden(f"Policy doesn't allow {rule} to be performed.")


def configured(conf: cfg.ConfigOpts, section: str, rules: RuleSet) -> Policy:
    """The policy that the option policy_file of this section names; a relative path begins at the
    configuration file.

    Raises:
        ConfigError: the file cannot be taken over.
    """
    name = conf[section].policy_file
    try:
        return Policy(rules, name and (conf.find_file(name) or name))
    except ConfigError as problem:
        raise ConfigError(f"[{section}] policy_file {problem}") from problem
